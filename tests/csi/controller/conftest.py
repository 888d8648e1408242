"""The controller's server, for all tests of a module."""

from collections.abc import Iterator

import pytest

from csi.controller.service import ControllerService
from csi.volume.stores import Stores, StoreSettings
from fusefs.settings.types import Addressing
from tests.support.csi.calls import Driver, serving
from tests.support.csi.volumes import CLUSTER
from tests.support.servers.buckets import Bucket, keys
from tests.support.servers.faulty_s3 import FaultyS3
from tests.support.servers.s3_server import REGION, S3Server


@pytest.fixture(scope="module")
def stores(s3: S3Server, faulty: FaultyS3) -> Stores:
    """The server, directly and through one that fails on demand, and an address without any."""
    urls = {"minio": s3.endpoint_url, "faulty": faulty.endpoint_url, "gone": "http://127.0.0.1:9"}
    made = [StoreSettings(name, url, REGION, Addressing.PATH) for name, url in urls.items()]
    return Stores({"aws": StoreSettings("aws"), **{store.name: store for store in made}})


@pytest.fixture(scope="module")
def driver(stores: Stores) -> Iterator[Driver]:
    with serving([ControllerService(stores, CLUSTER)]) as driver:
        yield driver


@pytest.fixture(scope="module")
def other_cluster(stores: Stores) -> Iterator[Driver]:
    with serving([ControllerService(stores, "another-cluster")]) as driver:
        yield driver


@pytest.fixture
def bucket(shared: Bucket) -> Bucket:
    """The module's bucket without anything in it: a new one takes the server longer."""
    for key in set(keys(shared)):
        shared.delete(key)
    return shared


@pytest.fixture(autouse=True)
def _no_faults(faulty: FaultyS3) -> Iterator[None]:
    yield
    faulty.clear()
