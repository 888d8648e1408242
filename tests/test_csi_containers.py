"""What a real container sees of a volume, through the deaths of what serves it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from tests.support.buckets import Bucket
from tests.support.csi_container import container_reading
from tests.support.csi_node import Node, capability, running_node
from tests.support.csi_pod import USER
from tests.support.s3_server import S3Server
from tests.support.waiting import until

pytestmark = pytest.mark.skipif(shutil.which("runc") is None, reason="there is no runc")

WRITER = """
import sys
path = sys.argv[1]
print("ready", flush=True)
for _ in sys.stdin:
    try:
        with open(path, "w") as file:
            file.write("from the container")
        print(open(path).read(), flush=True)
    except OSError as error:
        print(error, flush=True)
"""


@pytest.fixture(scope="module")
def node(s3: S3Server) -> Iterator[Node]:
    with running_node(main=s3.endpoint_url) as node:
        yield node
        assert node.leftovers() == []


@pytest.fixture(scope="module")
def data(shared: Bucket) -> Bucket:
    shared.put("a/hello", b"hello")
    return shared


def test_a_container_reads_on_through_deaths_and_sees_what_is_stacked(
    node: Node, data: Bucket
) -> None:
    target = node.target("pod")
    node.publish("volume", target, bucket=data.name, prefix="a")
    with container_reading(node, target, "hello") as pod:
        node.kill()
        node.start()
        node.kill_all("fusefs.daemon")
        assert pod.read() == "hello hello"
        node.kill_all("keeper")
        assert pod.read() == "hello hello"
        node.kill_all()
        until(lambda: not node.processes(), "they are dead")
        node.publish("volume", target, bucket=data.name, prefix="a")
    with container_reading(node, target, "hello", read_only=True) as pod:
        assert pod.read() == "hello hello"
    node.unpublish("volume", target)


@pytest.mark.parametrize("is_read_only", [False, True])
def test_a_container_of_an_ordinary_user_writes_where_it_may(
    node: Node, data: Bucket, is_read_only: bool
) -> None:
    target = node.target("pod")
    node.publish(
        "volume", target, cap=capability(flags=(f"uid={USER}",)), bucket=data.name, prefix="a"
    )
    with container_reading(node, target, "new", read_only=is_read_only, code=WRITER) as pod:
        told = pod.read()
        assert told == "from the container" if not is_read_only else "Read-only" in told
    node.unpublish("volume", target)
