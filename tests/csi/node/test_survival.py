"""What pods see, and what becomes of objects, when parts of a node die or lose their memory."""

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import grpc
import pytest

import csi
from fusefs.linux import libc
from fusefs.store.capabilities import PROBE_NAME
from tests.support.csi.node import Node, capability, until_final
from tests.support.csi.publishing import refused
from tests.support.csi.rights import reboot
from tests.support.servers.buckets import Bucket
from tests.support.sharing import PATIENCE_S, in_storms
from tests.support.waiting import until


@pytest.fixture
def node(running: Node, data: Bucket) -> Iterator[Node]:
    """The module's node; whatever a test repairs, nothing is left, and no object is lost."""
    before = objects(data)
    yield running
    until(lambda: not running.leftovers(), "nothing is left")
    assert objects(data) == before


@pytest.fixture(scope="module")
def data(shared: Bucket) -> Bucket:
    for key in ("a/hello", "a/deep/er/file", "b/other"):
        shared.put(key, b"hello")
    return shared


def objects(bucket: Bucket) -> dict[str, str]:
    found = bucket.client.list_objects_v2(Bucket=bucket.name).get("Contents", [])
    # A daemon that was killed while it tried what the store honours has left objects.
    return {one["Key"]: one["ETag"] for one in found if f"{PROBE_NAME}/" not in one["Key"]}


@in_storms("rounds", 1, 10)
def test_many_volumes_come_and_go_at_once(node: Node, data: Bucket, rounds: int) -> None:
    volumes = {f"volume-{number}": node.target(f"pod-{number}") for number in range(8)}

    def live(name: str) -> bytes:
        node.publish(name, volumes[name], bucket=data.name, prefix="a")
        content = (volumes[name] / "hello").read_bytes()
        node.unpublish(name, volumes[name])
        return content

    for _ in range(rounds):
        with ThreadPoolExecutor(len(volumes)) as threads:
            assert list(threads.map(live, volumes)) == [b"hello"] * len(volumes)
        until(lambda: not node.leftovers(), "nothing is left")


def test_pods_of_one_volume_come_and_go_at_once(node: Node, data: Bucket) -> None:
    targets = [node.target(f"pod-{number}") for number in range(6)]

    def publish(target: Path) -> None:
        until_final(node.publish, "volume", target, bucket=data.name, prefix="a")

    def unpublish(target: Path) -> None:
        until_final(node.unpublish, "volume", target)

    with ThreadPoolExecutor(len(targets)) as threads:
        list(threads.map(publish, targets))
        assert len(node.roots()) == len(node.daemons()) == 1
        assert [(target / "hello").read_bytes() for target in targets] == [b"hello"] * 6
        # Some go while others come.
        list(
            threads.map(
                lambda work: work(),
                [
                    *(partial(unpublish, target) for target in targets[:4]),
                    *(partial(publish, target) for target in targets[4:]),
                ],
            )
        )
        assert len(node.roots()) == 1
        list(threads.map(unpublish, targets))


def test_nothing_of_the_driver_looks_into_a_mount(node: Node, data: Bucket) -> None:
    """Its daemon stands still, so whoever does waits for ever."""
    target, other = node.target("pod"), node.target("other-pod")
    volume = {"bucket": data.name, "prefix": "a", "metadataTtl": "0s"}
    node.publish("volume", target, **volume)
    [daemon] = node.daemons()
    os.kill(daemon, signal.SIGSTOP)
    try:
        with subprocess.Popen(["stat", target], stdout=subprocess.DEVNULL) as looking:
            node.publish("volume", target, **volume)
            node.publish("volume", other, **volume)
            node.kill()
            node.start()
            node.publish("volume", target, **volume)
            node.unpublish("volume", other)
            with pytest.raises(grpc.RpcError, match="does not report"):
                node.unpublish("volume", target, timeout_s=5)
            assert looking.poll() is None
            os.kill(daemon, signal.SIGCONT)
            assert looking.wait(PATIENCE_S) == 0
    finally:
        os.kill(daemon, signal.SIGCONT)
    node.unpublish("volume", target)


def test_what_is_not_ours_below_a_volume_stays(node: Node, data: Bucket) -> None:
    """Directories go by rmdir, whatever lies under a mount."""
    target = node.target("pod")
    target.mkdir()
    (target / "somebody's").touch()
    node.publish("volume", target, bucket=data.name)
    assert (target / "a" / "hello").read_bytes() == b"hello"
    with refused(grpc.StatusCode.UNAVAILABLE, str(target), "on node node-1", "Move them away"):
        node.unpublish("volume", target)
    (target / "somebody's").unlink()
    node.unpublish("volume", target)


def test_the_driver_has_nothing_that_deletes_a_tree() -> None:
    """A mount that was left in it would be emptied."""
    deleting = re.compile(r"rmtree|removedirs|os\.walk|rglob|iterdir.*(unlink|rmdir)")
    sources = sorted(Path(csi.__file__).parent.rglob("*.py"))
    assert sources
    assert [path.name for path in sources if deleting.search(path.read_text())] == []


def test_no_object_is_lost_with_the_drivers_memory(node: Node, data: Bucket) -> None:
    target, other = node.target("pod"), node.target("other-pod")
    node.publish("volume", target, bucket=data.name)
    node.publish("unused", other, bucket=data.name)
    node.kill()
    for name in ("mounts", "credentials"):
        shutil.rmtree(node.state / name)
    libc.umount(str(other), libc.UMOUNT_NOFOLLOW)
    node.start()
    until(lambda: len(node.roots()) == 1, "what no pod uses has gone")
    node.publish("volume", other, bucket=data.name, cap=capability(flags=("uid=5",)))
    assert (other / "a/hello").stat().st_uid == 5, "no mount whose settings nobody knows"
    node.unpublish("volume", other)
    node.unpublish("volume", target)
    node.unpublish("unused", other)


def test_a_reboot_leaves_nothing_that_is_in_the_way(node: Node, data: Bucket) -> None:
    target = node.target("pod")
    node.publish("volume", target, bucket=data.name)
    reboot(node)
    node.start()
    node.publish("volume", target, bucket=data.name)
    assert (target / "a" / "hello").read_bytes() == b"hello"
    node.unpublish("volume", target)
