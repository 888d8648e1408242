"""The objects of the base."""

import pytest

from tests.support.packaging.manifests import MANIFESTS, Object, render, template


@pytest.fixture
def base() -> list[Object]:
    return render(MANIFESTS)


@pytest.fixture
def node_pod(base: list[Object]) -> Object:
    return template(base, "fusefs-csi-node")


@pytest.fixture
def daemons_pod(base: list[Object]) -> Object:
    return template(base, "fusefs-csi-daemons")


@pytest.fixture
def controller_pod(base: list[Object]) -> Object:
    return template(base, "fusefs-csi-controller")
