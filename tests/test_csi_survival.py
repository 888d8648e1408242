"""What pods see, and what becomes of objects, when parts of a node die or lose their memory."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from fusefs import control
from fusefs.kernel import libc
from tests.support.buckets import Bucket
from tests.support.csi_node import Node, running_node
from tests.support.csi_pod import pod_reading
from tests.support.csi_rights import reboot
from tests.support.s3_server import S3Server
from tests.support.sharing import PATIENCE_S
from tests.support.waiting import until

VOLUMES = int(os.environ.get("CSI_VOLUMES", "8"))
ROUNDS = int(os.environ.get("CSI_ROUNDS", "1"))


@pytest.fixture(scope="module")
def running(s3: S3Server) -> Iterator[Node]:
    with running_node(main=s3.endpoint_url) as node:
        yield node


@pytest.fixture
def node(running: Node) -> Iterator[Node]:
    yield running
    assert running.leftovers() == []


@pytest.fixture(scope="module")
def data(shared: Bucket) -> Bucket:
    shared.put("a/hello", b"hello")
    return shared


def objects(bucket: Bucket) -> dict[str, str]:
    told = bucket.client.list_objects_v2(Bucket=bucket.name).get("Contents", [])
    return {one["Key"]: one["ETag"] for one in told}


@contextmanager
def holding(node: Node) -> Iterator[subprocess.Popen[bytes]]:
    """`fusefs-csi daemons`, in another pod than the driver."""
    ready = node.directory / "ready"
    ready.unlink(missing_ok=True)
    process = subprocess.Popen(
        [*node.command, "daemons", "--state-dir", node.state, "--ready-file", ready],
        env={**os.environ, **node.environment}, start_new_session=True,
    )  # fmt: skip
    try:
        until(lambda: ready.exists() and control.peer(node.state / "holder.sock"), "it listens")
        yield process
    finally:
        process.kill()
        process.wait()


def test_many_volumes_come_and_go_at_once(node: Node, data: Bucket) -> None:
    volumes = {f"volume-{number}": node.target(f"pod-{number}") for number in range(VOLUMES)}

    def live(name: str) -> bytes:
        node.publish(name, volumes[name], bucket=data.name, prefix="a")
        content = (volumes[name] / "hello").read_bytes()
        node.unpublish(name, volumes[name])
        return content

    for _ in range(ROUNDS):
        with ThreadPoolExecutor(VOLUMES) as threads:
            assert list(threads.map(live, volumes)) == [b"hello"] * VOLUMES
        assert node.leftovers() == []


def test_a_pod_reads_on_when_daemons_die(node: Node, data: Bucket) -> None:
    target = node.target("pod")
    node.publish("volume", target, bucket=data.name, prefix="a")
    with pod_reading(node, target / "hello") as pod:
        for pid in node.daemons():
            os.kill(pid, 9)
        assert pod.read() == "hello hello"
    node.unpublish("volume", target)


def test_a_pod_reads_on_when_all_but_the_holder_die_and_when_that_is_replaced(
    node: Node, data: Bucket
) -> None:
    target = node.target("pod")
    with holding(node) as first:
        node.publish("volume", target, bucket=data.name, prefix="a")
        with pod_reading(node, target / "hello") as pod:
            node.kill()
            node.kill_all()
            pod.ask()
            node.start()
            assert pod.answer() == "hello hello"
            first.kill()
            with holding(node):
                until(lambda: held(node), "the new holder has it")
                node.kill_all()
                node.publish("volume", target, bucket=data.name, prefix="a")
                assert pod.read() == "hello hello"
    assert len(node.mounted()) == 2
    node.unpublish("volume", target)


def held(node: Node) -> list[str]:
    told = control.exchange(node.state / "holder.sock", {"do": "list"}, PATIENCE_S)
    return list(told["names"])


def test_a_pod_sees_the_mount_that_is_stacked_on_a_dead_one(node: Node, data: Bucket) -> None:
    target = node.target("pod")
    node.publish("volume", target, bucket=data.name, prefix="a")
    with pod_reading(node, target / "hello") as pod:
        node.kill_all()
        until(lambda: not node.processes(), "they are dead")
        assert pod.read() != "hello hello"
        node.publish("volume", target, bucket=data.name, prefix="a")
    with pod_reading(node, target / "hello") as pod:
        assert pod.read() == "hello hello"
    node.unpublish("volume", target)


def test_no_object_is_lost_with_the_drivers_memory(node: Node, data: Bucket) -> None:
    target, other = node.target("pod"), node.target("other-pod")
    before = objects(data)
    node.publish("volume", target, bucket=data.name)
    node.publish("unused", other, bucket=data.name)
    node.kill()
    for name in ("mounts", "credentials"):
        shutil.rmtree(node.state / name)
    libc.umount(str(other), libc.UMOUNT_NOFOLLOW)
    node.start()
    until(lambda: len(node.roots()) == 1, "what nobody uses has gone")
    node.unpublish("volume", target)
    node.unpublish("unused", other)
    until(lambda: not node.roots(), "the other one, too")
    until(lambda: not node.leftovers(), "nothing is left")
    assert objects(data) == before


def test_a_reboot_leaves_nothing_that_is_in_the_way(node: Node, data: Bucket) -> None:
    target = node.target("pod")
    before = objects(data)
    node.publish("volume", target, bucket=data.name)
    reboot(node)
    node.start()
    node.publish("volume", target, bucket=data.name)
    assert (target / "a" / "hello").read_bytes() == b"hello"
    node.unpublish("volume", target)
    assert objects(data) == before
