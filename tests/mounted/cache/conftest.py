"""A mount that the tests of a module share, each of which finds it as new."""

from collections.abc import Iterator

import pytest

from tests.support.mounting import Mount, Mounter, fusefs
from tests.support.servers.buckets import Bucket
from tests.support.servers.faulty_s3 import FaultyS3
from tests.support.waiting import until


@pytest.fixture(scope="module")
def mounted(
    request: pytest.FixtureRequest, tree: Bucket, faulty: FaultyS3, module_mounter: Mounter
) -> Mount:
    """A mount of the module's tree behind the faulty server, with the module's OPTIONS."""
    options = getattr(request.module, "OPTIONS", ())
    return module_mounter(*options, bucket=tree, endpoint_url=faulty.endpoint_url)


@pytest.fixture
def here(mounted: Mount, faulty: FaultyS3) -> Iterator[Mount]:
    """That mount, without faults, plans, pins and local copies."""
    faulty.clear()
    yield mounted
    faulty.clear()
    for plan in mounted.status()["plans"]:
        fusefs("plan", mounted.path, "--end", "--reader", plan["reader"])
    fusefs("unpin", mounted.path, check=False)
    until(lambda: not mounted.status()["requests"]["downloads"], "nothing is fetched")
    until(lambda: not fusefs("drop", mounted.path, check=False).returncode, "nothing is in use")
