"""A node for tests that publish volumes, and the bucket that they publish."""

from collections.abc import Iterator

import pytest

from tests.support.csi.node import Node, running_node
from tests.support.servers.buckets import Bucket, keys
from tests.support.servers.faulty_s3 import FaultyS3
from tests.support.servers.s3_server import S3Server
from tests.support.waiting import until


@pytest.fixture(scope="module")
def running(request: pytest.FixtureRequest, s3: S3Server, faulty: FaultyS3) -> Iterator[Node]:
    """A node for the module's tests, whose driver has the module's FLAGS."""
    flags = getattr(request.module, "FLAGS", ())
    with running_node(*flags, main=s3.endpoint_url, faulty=faulty.endpoint_url) as node:
        yield node


@pytest.fixture
def node(running: Node, data: Bucket, faulty: FaultyS3) -> Iterator[Node]:
    """The module's node; each test has to leave nothing on it, and every object in the bucket."""
    before = keys(data)
    yield running
    faulty.clear()
    until(lambda: not running.leftovers(), "nothing is left")
    assert keys(data) == before


@pytest.fixture(scope="module")
def data(shared: Bucket) -> Bucket:
    shared.put("a/hello", b"hello")
    return shared
