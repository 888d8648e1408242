"""A node for tests that publish volumes, and the bucket that they publish.

The fixtures are imported by name.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from tests.support.csi.node import Node, code_of, running_node
from tests.support.servers.buckets import Bucket, keys
from tests.support.servers.faulty_s3 import FaultyS3
from tests.support.servers.s3_server import S3Server
from tests.support.waiting import until


@pytest.fixture(scope="module")
def running(s3: S3Server, faulty: FaultyS3) -> Iterator[Node]:
    with running_node(main=s3.endpoint_url, faulty=faulty.endpoint_url) as node:
        yield node


@pytest.fixture
def node(running: Node, data: Bucket, faulty: FaultyS3) -> Iterator[Node]:
    """The module's node; each test has to leave nothing on it, and every object in the bucket."""
    before = keys(data)
    yield running
    faulty.clear()
    until(lambda: not running.leftovers(), "nothing is left")
    assert keys(data) == before


@contextlib.contextmanager
def refused(code: grpc.StatusCode, *words: str) -> Iterator[Any]:
    """The call inside ends with this code, and says each of the words."""
    with pytest.raises(grpc.RpcError) as error:
        yield error
    failure: Any = error.value
    assert code_of(error) == code, failure.details()
    for word in words:
        assert word in failure.details()


@pytest.fixture(scope="module")
def data(shared: Bucket) -> Bucket:
    shared.put("a/hello", b"hello")
    return shared
