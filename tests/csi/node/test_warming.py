"""Volumes that are warmed before their pods start, over the driver's socket, with real mounts."""

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from csi.errors import InvalidArgumentError
from csi.node.pod_records import POD_NAME
from csi.volume.options import WarmOption, read_options
from fusefs.daemon.jobs.selection import Shard
from fusefs.launch import control, registry
from tests.support.csi.node import Node, code_of, until_final
from tests.support.packaging.manifests import PROJECT, read
from tests.support.servers.buckets import Bucket
from tests.support.servers.faulty_s3 import FaultyS3
from tests.support.sharing import stamped
from tests.support.waiting import until

Code = grpc.StatusCode
FILES = {f"set/d{number % 2}/f{number}": stamped(number, 100_000) for number in range(10)}


@pytest.fixture
def node(running: Node, faulty: FaultyS3) -> Iterator[Node]:
    """The module's node; each test has to leave nothing on it."""
    faulty.clear()
    yield running
    faulty.clear()
    until(lambda: not running.leftovers(), "nothing is left")
    assert list((running.state / "warming").iterdir()) == []


@pytest.fixture
def volume(bucket: Bucket) -> dict[str, str]:
    """A volume's attributes."""
    for key, data in FILES.items():
        bucket.put(key, data)
    return {"store": "faulty", "bucket": bucket.name}


def publish_until(sentence: str, node: Node, volume: str, target: Path, **attributes: str) -> None:
    """Publish as kubelet does, with more time each time, until a call is aborted with these words.

    On a busy machine the mount takes its time.
    """
    for timeout_s in (5, 10, 20, 40):
        with pytest.raises(grpc.RpcError) as error:
            node.publish(volume, target, timeout_s=timeout_s, **attributes)
        failure: Any = error.value
        assert code_of(error) is Code.ABORTED, failure.details()
        if sentence in failure.details():
            return
    raise AssertionError(failure.details())


def record(node: Node) -> dict[str, Any]:
    """What is on record about the only warming."""
    for path in (node.state / "warming").glob("*.json"):
        record: dict[str, Any] = json.loads(path.read_text())
        return record
    return {}


def job(node: Node) -> dict[str, Any]:
    """What the daemon of the only mount says of its only job."""
    [root] = node.roots()
    directory = node.state / "fusefs" / registry.keeper_socket(root.mountpoint).stem
    [found] = control.request(directory / "status.sock", "warming", 5)["jobs"]
    return dict(found)


def read_cold(node: Node, faulty: FaultyS3, target: Any) -> None:
    """Read everything while the bucket gives no bytes."""
    rule = faulty.add("GET", code="AccessDenied")
    for key, data in FILES.items():
        assert (target / key).read_bytes() == data
    faulty.remove(rule)


@pytest.mark.parametrize(
    ("text", "paths"),
    [
        (".", ("",)),
        ("/", ("",)),
        ("train, val/,train", ("train", "val")),
        ("a/b c/ü", ("a/b c/ü",)),
    ],
)
def test_paths_are_relative_to_the_volume(text: str, paths: tuple[str, ...]) -> None:
    assert read_options({"warm": text}, (), is_inline=True).warm == WarmOption(paths)


@pytest.mark.parametrize(
    "attributes",
    [
        {"warm": "../other"},
        {"warm": "a/../b"},
        {"warm": "/etc"},
        {"warm": ""},
        {"warm": "a,,b"},
        {"warm": "a//b"},
        {"warm": "./a"},
        {"warm": "a\nb"},
        {"warm": "x" * 1025},
        {"warm": ",".join(map(str, range(101)))},
        {"warm": "a", "warmBeforePublish": "maybe"},
        {"warm": "a", "warmTimeout": "soon"},
        {"warmBeforePublish": "true"},
        {"warmTimeout": "5m"},
        {"warmShards": "4"},
    ],
)
def test_what_cannot_be_warmed_is_refused_by_name(attributes: dict[str, str]) -> None:
    with pytest.raises(InvalidArgumentError, match=f"^{list(attributes)[-1]}: "):
        read_options(attributes, (), is_inline=False)


def test_a_publish_that_ends_before_says_how_far_it_is_and_the_next_goes_on(
    node: Node, volume: dict[str, str], faulty: FaultyS3
) -> None:
    target = node.target("pod")
    attributes = {"warm": ".", "warmBeforePublish": "true", **volume}
    stalled = faulty.add("GET", key="set/d1/*", stall=True)
    publish_until("warming 50%, 488 of 977 KiB", node, "long", target, **attributes)
    assert not target.exists()
    faulty.remove(stalled)
    before = len(faulty.requests("GET", "set/d0/*"))
    node.publish("long", target, **attributes)
    assert len(faulty.requests("GET", "set/d0/*")) == before == 5
    read_cold(node, faulty, target)
    node.unpublish("long", target)


def test_after_its_time_the_pod_starts_and_the_warming_goes_on(
    node: Node, volume: dict[str, str], faulty: FaultyS3
) -> None:
    target = node.target("pod")
    attributes = {"warm": "set", "warmBeforePublish": "true", "warmTimeout": "1s", **volume}
    stalled = faulty.add("GET", stall=True)
    node.publish("slow", target, **attributes)
    until(lambda: job(node)["state"] == "under way", "it is under way")
    node.publish("slow", target, timeout_s=10, **attributes)  # again
    faulty.remove(stalled)
    until(lambda: job(node)["state"] == "ended", "its end")
    read_cold(node, faulty, target)
    node.unpublish("slow", target)


def test_a_restarted_driver_goes_on_counting_and_keeps_the_mount(
    node: Node, volume: dict[str, str], faulty: FaultyS3
) -> None:
    target = node.target("pod")
    attributes = {"warm": "set", "warmBeforePublish": "true", "warmTimeout": "5s", **volume}
    stalled = faulty.add("GET", stall=True)
    with ThreadPoolExecutor() as pool:
        call = pool.submit(node.publish, "restarted", target, **attributes)
        began = until(lambda: record(node), "the first call")["began"]
        [daemon] = node.daemons()
        node.kill()
        assert call.exception() is not None
    node.start()
    until_final(node.publish, "restarted", target, **attributes)
    assert node.daemons() == [daemon]
    assert record(node)["began"] == began
    faulty.remove(stalled)
    node.unpublish("restarted", target)


def test_pods_of_a_volume_wait_side_by_side(
    node: Node, volume: dict[str, str], faulty: FaultyS3
) -> None:
    targets = [node.target(f"pod-{number}") for number in range(3)]
    attributes = {"warm": "set", "warmBeforePublish": "true", **volume}
    stalled = faulty.add("GET", stall=True)
    with ThreadPoolExecutor() as pool:
        calls = [pool.submit(node.publish, "shared", target, **attributes) for target in targets]
        until(lambda: faulty.requests("GET"), "the first request")
        until(lambda: len(record(node).get("waiting", ())) == 3, "all of them")
        # Whoever gives up does not take the mount away from the others.
        node.unpublish("shared", node.target("pod-9"))
        assert len(node.roots()) == 1
        faulty.remove(stalled)
        for call in calls:
            call.result()
    assert len(node.roots()) == len(node.daemons()) == 1
    for target in targets:
        node.unpublish("shared", target)


def test_what_is_not_there_does_not_keep_a_pod_from_starting(
    node: Node, volume: dict[str, str]
) -> None:
    target = node.target("pod")
    node.publish("missing", target, warm="no-such", warmBeforePublish="true", **volume)
    assert "no such file or directory" in job(node)["why"]
    node.unpublish("missing", target)


def parts_of(count: int) -> list[set[str]]:
    """The keys of each of so many parts, as `fusefs warm --shard` has them."""
    return [{key for key in FILES if Shard(part, count).has(key)} for part in range(count)]


def of_example() -> dict[str, str]:
    """What the volume of warm-shards.yaml says about its warming."""
    objects = read((PROJECT / "examples/kubernetes/warm-shards.yaml").read_text())
    [volume] = [each for each in objects if each["kind"] == "PersistentVolume"]
    attributes = volume["spec"]["csi"]["volumeAttributes"]
    return {name: text for name, text in attributes.items() if name.startswith("warm")}


def fetched(faulty: FaultyS3) -> set[str]:
    """The keys that were requested, each once at most."""
    keys = [request.key for request in faulty.requests("GET", "set/*")]
    assert len(keys) == len(set(keys))
    return set(keys)


def test_each_pod_of_a_job_has_its_part_fetched_before_it_starts(
    node: Node, volume: dict[str, str], faulty: FaultyS3
) -> None:
    attributes = {**of_example(), **volume}
    parts = parts_of(int(attributes["warmShards"]))
    assert all(parts[1:])  # a part may be empty, of so few files
    targets = []
    expected: set[str] = set()
    for number, part in enumerate(parts):
        target = node.target(f"pod-{number}")
        pod = {POD_NAME: f"train-shards-{number}-x7k2p"}
        node.publish("parts", target, **attributes, **pod)
        expected |= part
        assert fetched(faulty) == expected
        targets.append(target)
    assert len(node.roots()) == 1  # the pods of a node share the mount
    read_cold(node, faulty, targets[0])
    # The pod that replaces one that failed finds its part there.
    again = node.target("pod-again")
    node.publish("parts", again, **attributes, **{POD_NAME: "train-shards-1-bcdfg"})
    assert fetched(faulty) == expected
    for target in [*targets, again]:
        node.unpublish("parts", target)


def test_a_pod_that_waits_for_its_part_keeps_no_other_from_starting(
    node: Node, volume: dict[str, str], faulty: FaultyS3
) -> None:
    first, second = parts_of(2)
    attributes = {"warm": "set", "warmShards": "2", "warmBeforePublish": "true", **volume}
    for key in second:
        faulty.add("GET", key=key, stall=True)
    waiting, other = node.target("pod-1"), node.target("pod-0")
    publish_until("warming", node, "two", waiting, **attributes, **{POD_NAME: "train-1-x7k2p"})
    node.publish("two", other, **attributes, **{POD_NAME: "train-0-x7k2p"})
    for key in first:
        assert (other / key).read_bytes() == FILES[key]
    # The end of the pod that started does not take the mount from the one that waits.
    node.unpublish("two", other)
    assert len(node.roots()) == 1
    until_final(node.unpublish, "two", waiting)


def test_a_pod_without_a_number_starts_and_has_nothing_fetched(
    node: Node, volume: dict[str, str], faulty: FaultyS3
) -> None:
    attributes = {"warm": "set", "warmShards": "2", "warmBeforePublish": "true", **volume}
    names = ("notebook", "", "train-3\nforged", "x" * 100_000)
    targets = [node.target(f"pod-{number}") for number in range(len(names))]
    for count, (target, name) in enumerate(zip(targets, names, strict=True), 1):
        node.publish("whole", target, **attributes, **{POD_NAME: name})
        assert fetched(faulty) == set()
        assert node.log.read_text().count("no part is fetched") == count
    assert "\nforged" not in node.log.read_text()
    for target in targets:
        node.unpublish("whole", target)


def test_without_waiting_a_pod_starts_at_once_and_its_volume_is_warmed(
    node: Node, volume: dict[str, str], faulty: FaultyS3
) -> None:
    target = node.target("pod")
    stalled = faulty.add("GET", stall=True)
    node.publish("beside", target, warm="set", **volume)
    assert job(node)["state"] != "ended"
    faulty.remove(stalled)
    until(lambda: job(node)["state"] == "ended", "its end")
    read_cold(node, faulty, target)
    node.unpublish("beside", target)


def test_a_daemon_that_is_silent_keeps_no_pod_from_starting(
    node: Node, volume: dict[str, str], faulty: FaultyS3
) -> None:
    target = node.target("pod")
    faulty.add("GET", stall=True)
    attributes = {"warm": "set", "warmBeforePublish": "true", "warmTimeout": "3s", **volume}
    with ThreadPoolExecutor() as pool:
        call = pool.submit(node.publish, "silent", target, **attributes)
        until(lambda: record(node), "the call's waiting")
        [daemon] = node.daemons()
        os.kill(daemon, signal.SIGSTOP)
        try:
            call.result()
        finally:
            os.kill(daemon, signal.SIGCONT)
    # Its end waits for the request that stalls, and kubelet calls again.
    until_final(node.unpublish, "silent", target)
