"""How a driver that starts goes on with the mounts of the one before it."""

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import grpc
import pytest

from csi.generated import csi_pb2
from csi.node import bind_mount
from fusefs.launch import control
from tests.support.csi.daemons import daemons_of, held
from tests.support.csi.node import START, Node, capability, code_of, until_final
from tests.support.csi.pod import pod_reading
from tests.support.csi.rights import allow
from tests.support.servers.buckets import Bucket, stored
from tests.support.servers.faulty_s3 import FaultyS3
from tests.support.servers.s3_server import S3Server
from tests.support.sharing import PATIENCE_S
from tests.support.waiting import until

FLAGS = ("--daemons=there",)


def test_a_pod_reads_on_without_its_keeper_though_the_next_daemons_process_has_died_before(
    node: Node, data: Bucket
) -> None:
    target = node.target("pod")
    with daemons_of(node, "first"):
        node.publish("volume", target, bucket=data.name, prefix="a")
        with pod_reading(node, target / "hello") as pod:
            until(lambda: held(node), "it is held")
            node.kill()  # who would bring the keeper's copy
            with daemons_of(node, "second") as second:
                assert held(node)
                second.kill()
            until(lambda: held(node), "the first has come back with it")
            node.kill_all("keeper")
            stuck = node.directory / "stuck"
            with resuming_by(node, f"(open({str(stuck)!r}, 'w'), time.sleep(600))"):
                until(stuck.exists, "it is about to go on with the mount, for ever")
                node.node.NodeGetInfo(csi_pb2.NodeGetInfoRequest(), timeout=PATIENCE_S)
            node.start("--daemons=there")
            until(lambda: is_kept(node), "there is a keeper")
            assert pod.read() == "hello hello"
        node.unpublish("volume", target)


def test_a_pod_reads_on_though_a_publish_could_not_resume_its_mount(
    node: Node, data: Bucket
) -> None:
    target = node.target("pod")
    with daemons_of(node, "only"):
        node.publish("volume", target, bucket=data.name, prefix="a")
        with pod_reading(node, target / "hello") as pod:
            until(lambda: held(node), "it is held")
            [root] = node.roots()
            node.kill()
            node.kill_all()
            with resuming_by(node, "None"), pytest.raises(grpc.RpcError) as refused:
                node.publish("volume", target, bucket=data.name, prefix="a")
            assert code_of(refused) is grpc.StatusCode.UNAVAILABLE
            assert [one.connection for one in node.roots()] == [root.connection]
            node.start("--daemons=there")
            assert pod.read() == "hello hello"
        node.unpublish("volume", target)


@pytest.mark.parametrize("what", ["keys", "options"])
def test_a_mount_that_can_be_resumed_gets_none_on_top_though_its_volume_has_changed(
    node: Node, data: Bucket, s3: S3Server, what: str
) -> None:
    target = node.target("pod")
    changed: dict[str, Any] = {"cap": capability(flags=("metadata-ttl=5m",))}
    if what == "keys":
        changed = {"secrets": allow(s3, "rotated", data.name, "a/")}
    with daemons_of(node, "only"):
        node.publish("volume", target, bucket=data.name, prefix="a")
        with pod_reading(node, target / "hello") as pod:
            until(lambda: held(node), "it is held")
            [root] = node.roots()
            node.kill()
            node.kill_all("keeper")
            with without_reconciler(node):  # kubelet's call comes first
                node.publish("volume", target, bucket=data.name, prefix="a", **changed)
                assert [one.connection for one in node.mounted()] == [root.connection] * 2
                assert is_kept(node)
            assert pod.read() == "hello hello"
        node.start("--daemons=there")
        node.unpublish("volume", target)


@pytest.mark.parametrize("killed", ["keeper", ""])
def test_the_uploads_of_a_mount_that_can_be_resumed_are_waited_for(
    node: Node, data: Bucket, faulty: FaultyS3, killed: str
) -> None:
    target = node.target("pod")
    with daemons_of(node, "only"):
        node.publish("volume", target, bucket=data.name, store="faulty", retryTime="1s")
        fault = faulty.add("PUT", code="InternalError")
        with pytest.raises(OSError), (target / "late").open("wb") as file:  # noqa: PT011
            file.write(b"late")
        until(lambda: held(node), "it is held")
        node.kill()
        node.kill_all(killed)
        with without_reconciler(node), pytest.raises(grpc.RpcError, match="late") as refused:
            node.unpublish("volume", target, timeout_s=5.0)
        assert code_of(refused) is grpc.StatusCode.ABORTED
        bind_mount.pop_all(target)  # kubelet may not call again
        faulty.remove(fault)
        node.start("--daemons=there")
        until_final(node.unpublish, "volume", target)
    assert stored(data, "late") == b"late"
    data.delete("late")


def without_reconciler(node: Node) -> AbstractContextManager[None]:
    """A driver that goes on with mounts in calls alone, ended afterwards."""
    return _changed_by(
        node,
        "from csi.node.reconciler import Reconciler; Reconciler.reconcile_all = lambda _: None",
    )


def resuming_by(node: Node, expression: str) -> AbstractContextManager[None]:
    """A driver that evaluates this in place of resuming a mount, ended afterwards."""
    resuming = f"mounts.resume = lambda *_, **__: {expression}"
    return _changed_by(node, f"import time; from csi.node import mounts; {resuming}")


@contextmanager
def _changed_by(node: Node, statements: str) -> Iterator[None]:
    command = list(node.command)
    node.command[-1] = f"{statements}; {START}"
    try:
        node.start("--daemons=there")
        yield
    finally:
        node.kill()
        node.command[:] = command


def test_a_driver_resumes_a_mount_whose_record_is_a_newer_drivers(node: Node, data: Bucket) -> None:
    target = node.target("pod")
    with daemons_of(node, "only"):
        node.publish("volume", target, bucket=data.name, prefix="a")
        until(lambda: held(node), "it is held")
        node.kill()
        node.kill_all("keeper")
        [path] = (node.state / "mounts").glob("*.json")
        record = json.loads(path.read_text())
        settings = record["settings"] | {"of_a_newer_driver": "auto"}
        path.write_text(json.dumps(record | {"newer": 1, "settings": settings}))
        [root] = node.roots()
        node.start("--daemons=there")
        until(lambda: is_kept(node), "there is a keeper")
        assert [one.connection for one in node.roots()] == [root.connection]
        assert (target / "hello").read_bytes() == b"hello"
        node.unpublish("volume", target)


def is_kept(node: Node) -> bool:
    [root] = node.roots()
    [keeper] = (node.state / "fusefs").glob("*.keeper")
    return bool(root) and control.peer(keeper) is not None
