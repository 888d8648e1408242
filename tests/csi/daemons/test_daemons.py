"""Daemons in the container of `fusefs-csi daemons`, and the deaths and roll-outs on both sides."""

import os
import re
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import grpc
import pytest

from fusefs.launch import control, registry
from fusefs.linux import mountinfo
from tests.support.csi.daemons import daemons_of
from tests.support.csi.node import Node
from tests.support.csi.node import node as node
from tests.support.csi.pod import Pod, pod_reading
from tests.support.csi.publishing import refused
from tests.support.servers.buckets import Bucket
from tests.support.sharing import PATIENCE_S
from tests.support.waiting import until

BOTH = "hello hello"


FLAGS = ("--daemons=there",)


@pytest.fixture
def target(node: Node, shared: Bucket) -> Path:
    shared.put("a/hello", b"hello")
    return node.target("pod")


def status_of(root: mountinfo.KernelMount) -> dict[str, object]:
    """What the mount's keeper says, once there is one."""

    def ask() -> dict[str, object] | None:
        try:
            return control.exchange(registry.keeper_socket(root.mountpoint), {"do": "status"}, 5)
        except control.ControlError:
            return None

    answer = until(ask, "a keeper answers")
    assert isinstance(answer, dict)
    return answer


@pytest.fixture(autouse=True)
def _runtime(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(registry.RUNTIME_VARIABLE, str(node.state / "fusefs"))


def publish(node: Node, target: Path, shared: Bucket) -> None:
    node.publish("volume", target, bucket=shared.name, prefix="a")


@contextmanager
def reading(node: Node, target: Path, shared: Bucket) -> Iterator[Pod]:
    """A pod with a file of a volume, which is unpublished if nothing fails."""
    publish(node, target, shared)
    with pod_reading(node, target / "hello") as pod:
        yield pod
    node.unpublish("volume", target)


def test_a_daemon_is_in_the_other_container_as_long_as_its_mount(
    node: Node, target: Path, shared: Bucket
) -> None:
    with daemons_of(node, "first") as first:
        publish(node, target, shared)
        [pid] = node.daemons()
        assert pid in first.children()
        assert Path(f"/proc/{pid}/oom_score_adj").read_text() == "500\n"
        node.unpublish("volume", target)
        until(lambda: not node.daemons(), "it has ended")


def test_the_daemons_have_all_descriptors_that_they_may(node: Node) -> None:
    with daemons_of(node, "first", ("prlimit", "--nofile=64:4096")) as first:
        limits = Path(f"/proc/{first.process.pid}/limits").read_text()
    assert re.search(r"Max open files +4096 +4096", limits)


def test_a_daemon_is_ended_through_a_supervisor_that_may_not_signal_it_as_root(
    node: Node, target: Path, shared: Bucket
) -> None:
    with daemons_of(node, "first"):
        publish(node, target, shared)
        [root], [before] = node.roots(), node.daemons()
        until(lambda: status_of(root)["is_serving"], "its keeper knows that it serves")
        control.exchange(registry.keeper_socket(root.mountpoint), {"do": "replace"}, PATIENCE_S)
        until(lambda: status_of(root)["daemon"] not in (None, before), "another is there")
        assert (target / "hello").read_bytes() == b"hello"
        node.unpublish("volume", target)


def test_a_pod_reads_on_when_the_next_ends_instead_of_the_first(
    node: Node, target: Path, shared: Bucket
) -> None:
    with daemons_of(node, "first") as first, reading(node, target, shared) as pod:
        with daemons_of(node, "second") as second:
            second.kill()
            assert pod.read() == BOTH
        [pid] = node.daemons()
        assert pid in first.children()


def test_a_daemon_goes_on_without_the_node_container_and_with_the_next_one(
    node: Node, target: Path, shared: Bucket
) -> None:
    with daemons_of(node, "first"), reading(node, target, shared) as pod:
        [root] = node.roots()
        assert pod.read() == BOTH  # so that all of its files are registered
        before, registered = node.daemons(), status_of(root)["backing_ids"]
        node.kill()
        node.kill_all("keeper")
        assert pod.read() == BOTH  # though no keeper holds it
        node.start("--daemons=there")
        until(lambda: status_of(root)["is_serving"], "it has a keeper")
        assert node.daemons() == before
        until(lambda: status_of(root)["backing_ids"] == registered, "it knows the files")
        os.kill(before[0], signal.SIGKILL)
        assert pod.read() == BOTH


def test_a_pod_reads_on_when_the_next_starts_after_the_end_of_the_first(
    node: Node, target: Path, shared: Bucket
) -> None:
    with ExitStack() as stack:
        first = stack.enter_context(daemons_of(node, "first", (), "--successor=after"))
        with reading(node, target, shared) as pod:
            first.process.terminate()
            assert first.process.wait(PATIENCE_S) == 0
            pod.ask()
            stack.enter_context(daemons_of(node, "second", (), "--successor=after"))
            assert pod.answer() == BOTH


def test_the_daemons_do_not_end_while_the_node_container_is_gone(
    node: Node, target: Path, shared: Bucket
) -> None:
    with ExitStack() as stack:
        first = stack.enter_context(daemons_of(node, "first", (), "--successor=after"))
        with reading(node, target, shared) as pod:
            node.kill()
            node.kill_all("keeper")
            first.process.terminate()
            until(lambda: "1 of the daemons wait" in first.log.read_text(), "it waits")
            assert pod.read() == BOTH
            node.start("--daemons=there")
            assert first.process.wait(PATIENCE_S) == 0
            stack.enter_context(daemons_of(node, "second", (), "--successor=after"))
            assert pod.read() == BOTH


def test_the_node_container_does_not_end_while_the_daemons_are_gone(
    node: Node, target: Path, shared: Bucket
) -> None:
    with ExitStack() as stack:
        first = stack.enter_context(daemons_of(node, "first"))
        publish(node, target, shared)
        first.kill()
        node.process.terminate()
        until(lambda: "waiting until all mounts are held" in node.log.read_text(), "it waits")
        assert node.process.poll() is None
        stack.enter_context(daemons_of(node, "second"))
        assert node.process.wait(PATIENCE_S) == 0
        node.kill_all("keeper")  # as the end of the container does
        node.start("--daemons=there")
        until(lambda: (target / "hello").read_bytes() == b"hello", "it is read")
        node.unpublish("volume", target)


def test_a_publish_without_daemons_names_the_pod_that_is_missing_and_leaves_nothing(
    node: Node, target: Path, shared: Bucket
) -> None:
    with refused(
        grpc.StatusCode.UNAVAILABLE, "pod of node node-1 does not run", "kubectl get pods -A -l"
    ):
        publish(node, target, shared)
    until(lambda: not node.leftovers(), "nothing is left")
    with daemons_of(node, "first"):
        publish(node, target, shared)
        assert (target / "hello").read_bytes() == b"hello"
        node.unpublish("volume", target)
