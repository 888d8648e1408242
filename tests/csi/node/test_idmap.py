"""A pod in a user namespace: its volume is bound with mapped ids, as its runtime does it."""

import ctypes
import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from timeit import timeit

import pytest

from csi.node import bind_mount
from csi.node.drain import LINGER_S
from fusefs.linux import libc
from tests.support.csi.node import Mode, Node, capability, running_node
from tests.support.csi.pod import Pod, pod_reading
from tests.support.servers.buckets import Bucket
from tests.support.servers.s3_server import S3Server
from tests.support.sharing import drop_copies
from tests.support.waiting import until

FIRST_ID = 100_000
MOUNT_ATTR_IDMAP = 0x100000


@contextmanager
def user_namespace() -> Iterator[int]:
    """A user namespace whose root is FIRST_ID outside, as a descriptor."""
    with subprocess.Popen(["unshare", "--user", "sleep", "60"]) as process:
        own = os.readlink("/proc/self/ns/user")
        while os.readlink(f"/proc/{process.pid}/ns/user") == own:
            assert process.poll() is None
        for name in ("uid_map", "gid_map"):
            Path(f"/proc/{process.pid}/{name}").write_text(f"0 {FIRST_ID} 65536")
        fd = os.open(f"/proc/{process.pid}/ns/user", os.O_RDONLY)
        try:
            yield fd
        finally:
            os.close(fd)
            process.kill()


def bind_mapped(source: Path, target: Path, namespace: int) -> None:
    """Bind a mount with its ids mapped into a user namespace."""
    attributes = bind_mount._MountAttributes(MOUNT_ATTR_IDMAP, 0, 0, namespace)
    tree = libc.system_call(428, -100, os.fsencode(source), 1 | os.O_CLOEXEC)
    try:
        size = ctypes.sizeof(attributes)
        libc.system_call(442, tree, b"", 0x1000, ctypes.byref(attributes), size)
        libc.system_call(429, tree, b"", -100, os.fsencode(target), 4)
    finally:
        os.close(tree)


def test_a_volume_is_bound_with_mapped_ids(s3: S3Server, bucket: Bucket, tmp_path: Path) -> None:
    bucket.put("hello", b"hello")
    with running_node(main=s3.endpoint_url) as node, user_namespace() as namespace:
        target = node.target("pod")
        node.publish("volume", target, bucket=bucket.name)
        bind_mapped(target, tmp_path, namespace)
        try:
            assert (tmp_path / "hello").read_bytes() == b"hello"
            assert (tmp_path / "hello").stat().st_uid == FIRST_ID
            assert (target / "hello").stat().st_uid == 0
        finally:
            libc.umount(str(tmp_path), libc.MNT_DETACH | libc.UMOUNT_NOFOLLOW)
        node.unpublish("volume", target)
        until(lambda: not node.leftovers(), "nothing is left")


# For each line of its input it reads the file anew, and makes another beside it.
WRITER = """
import sys
print("ready", flush=True)
for line in sys.stdin:
    try:
        found = open(sys.argv[1]).read()
        open(sys.argv[1] + "-too", "w").close()
        print(found, "written", flush=True)
    except OSError as error:
        print(found, error.strerror, flush=True)
"""


@pytest.mark.parametrize("propagation", ["private", "slave"])
def test_a_mount_that_is_made_anew_is_each_pods_own(
    node: Node, data: Bucket, propagation: str
) -> None:
    volume = {"bucket": data.name, "prefix": "a", "dirMode": "777"}
    writer, reader, other = targets = [node.target(f"pod-{number}") for number in range(3)]
    can = {writer: "hello written", reader: "hello Read-only file system", other: "hello written"}

    def publish_all() -> None:
        for target in targets:
            node.publish("volume", target, readonly=target == reader, **volume)

    def stacked() -> list[int]:
        at = [one.mountpoint for one in node.mounted()]
        return [at.count(target) for target in targets]

    def begin(stack: ExitStack, target: Path) -> Pod:
        path = target / "hello"
        return stack.enter_context(pod_reading(node, path, code=WRITER, propagation=propagation))

    with ExitStack() as stack:
        publish_all()
        pods = {target: begin(stack, target) for target in targets}
        assert {target: pods[target].read() for target in targets} == can
        node.kill_all()
        publish_all()
        publish_all()
        assert stacked() == [2, 2, 2]
        seen = {target: pods[target].read() for target in targets}
        assert (seen == can) == (propagation == "slave"), seen  # what is stacked arrives there
        pods = {target: begin(stack, target) for target in targets}
        assert {target: pods[target].read() for target in targets} == can
        node.unpublish("volume", writer)
        assert stacked() == [0, 2, 2]
        for target in (reader, other):
            assert pods[target].read() == can[target]
    for target in (reader, other):
        node.unpublish("volume", target)
    data.delete("a/hello-too")


@pytest.mark.parametrize("mode", [Mode.MULTI_NODE_MULTI_WRITER, Mode.MULTI_NODE_READER_ONLY])
def test_a_pod_ends_though_an_agent_has_a_private_copy_of_its_volume(
    node: Node, data: Bucket, mode: int
) -> None:
    target, other = node.target("pod"), node.target("other-pod")
    volume = {"bucket": data.name, "prefix": "a", "cap": capability(mode), "drainTimeout": "60s"}
    node.publish("volume", target, **volume)
    script = f"{drop_copies(node.directory)}echo; exec cat"
    copy = ["unshare", "--mount", "--propagation", "private", "sh", "-c", script]
    with subprocess.Popen(copy, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as agent:
        agent.stdout.readline()
        # Long before the drain timeout: it uploads nothing.
        assert timeit(lambda: node.unpublish("volume", target), number=1) < 40
        assert not target.exists()
        assert len(node.daemons()) == 1  # for the agent

        def ended_s() -> float:
            node.publish("volume", other, **volume, fileMode="640")
            return timeit(lambda: node.unpublish("volume", other), number=1)

        assert any(ended_s() < LINGER_S for _ in range(3))  # it does not wait for the other mount
        node.publish("volume", target, **volume)
        assert (target / "hello").read_bytes() == b"hello"
        assert len(node.daemons()) == 1
        node.unpublish("volume", target)
        until(lambda: not node.leftovers(), "the agent's copy has ended")
