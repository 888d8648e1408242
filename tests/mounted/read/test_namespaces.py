"""Programs, mounts and daemons in PID namespaces that do not show each other's processes."""

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from fusefs.linux import callers, libc, mountinfo, unmount
from tests.support.csi.container import container_reading
from tests.support.csi.daemons import daemons_of
from tests.support.csi.node import Node, capability, running_node
from tests.support.mounting import FUSEFS, Mounter
from tests.support.semantics import states
from tests.support.servers.buckets import Bucket
from tests.support.servers.faulty_s3 import FaultyS3
from tests.support.sharing import PATIENCE_S, content, skip_without_fuse
from tests.support.waiting import until

pytestmark = pytest.mark.root

# A process tree with numbers of its own, which ends with its first process.
APART = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
MS_BIND, MS_SHARED = 1 << 12, 1 << 20
DATA = content("slow", 3 << 20)
# Far longer than a test waits.
RETRY = "10m"

READER = """
import os, sys
print("ready", flush=True)
sys.stdin.readline()
open(os.path.dirname(sys.argv[1]) + "/slow", "rb").read()
"""


@pytest.fixture
def slow(bucket: Bucket, faulty: FaultyS3) -> Iterator[FaultyS3]:
    """A server that holds a small and a large object."""
    bucket.put("slow", DATA)
    bucket.put("hello", b"hello")
    yield faulty
    faulty.clear()


def ends_when_killed(path: Path, slow: FaultyS3, *before: str) -> None:
    """A reader that waits for the silent server is killed, and ends."""
    rule = slow.add("GET", "slow", stall=True)
    reader = subprocess.Popen([*before, "cat", path], stdout=subprocess.DEVNULL)
    until(lambda: rule.used > 0, "the request that hangs")
    reader.kill()
    assert reader.wait(PATIENCE_S) == -signal.SIGKILL
    # No process hangs in the mount, whose daemon goes on.
    slow.clear()
    assert path.read_bytes() == DATA


@contextmanager
def mounted_apart(bucket: Bucket, slow: FaultyS3, directory: Path) -> Iterator[Path]:
    """A mount that is made and served in a PID namespace of its own, and used in this one."""
    skip_without_fuse()
    path = directory / "mnt"
    directory.mkdir()
    libc.mount(str(directory), str(directory), "", MS_BIND, "")
    libc.mount("", str(directory), "", MS_SHARED, "")
    path.mkdir()
    command = (
        f"{FUSEFS} mount s3://{bucket.name}/ {path} --endpoint-url {slow.endpoint_url}"
        f" --cache-dir {directory}/cache --log-file {directory}/log --retry-time {RETRY}"
        " && echo ready; read end"
    )
    first = subprocess.Popen(
        [*APART, "--propagation", "unchanged", "sh", "-c", command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **bucket.server.environment},
    )
    try:
        assert first.stdout.readline() == "ready\n"
        yield path
    finally:
        found = mountinfo.find_mount(path)
        if found is not None:
            unmount.abort_connection(found.connection)
            unmount.umount_path(path, is_lazy=True)
        first.kill()
        first.communicate(timeout=PATIENCE_S)
        libc.umount(str(directory), libc.MNT_DETACH)


@states(
    "Where the mount cannot see whose a call is (its PID namespace has no number for the"
    " process), a signal ends the call after another second, a close or an fsync after 30 s."
)
def test_a_reader_that_the_mount_cannot_see_does_not_wait_when_it_is_killed(
    bucket: Bucket, slow: FaultyS3, public_path: Path
) -> None:
    with mounted_apart(bucket, slow, public_path / "apart") as path:
        assert (path / "hello").read_bytes() == b"hello"
        ends_when_killed(path / "slow", slow)


def test_a_reader_in_a_namespace_does_not_wait_when_it_is_killed(
    mounter: Mounter, slow: FaultyS3
) -> None:
    mount = mounter("--retry-time", RETRY, endpoint_url=slow.endpoint_url)
    rule = slow.add("GET", "slow", stall=True)
    reader = subprocess.Popen(
        [*APART, "cat", mount.path / "slow"], stdout=subprocess.DEVNULL, start_new_session=True
    )
    until(lambda: rule.used > 0, "the request that hangs")
    os.killpg(reader.pid, signal.SIGKILL)
    assert reader.wait(PATIENCE_S) == -signal.SIGKILL
    until(lambda: not processes_of(str(mount.path / "slow")), "it is gone")


def processes_of(argument: str) -> list[str]:
    """Who has the argument on its command line, but for the daemon, which has none of them."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            arguments = entry.read_bytes().split(b"\0")
        except OSError:
            continue
        if os.fsencode(argument) in arguments:
            found.append(entry.parent.name)
    return found


@pytest.fixture
def node(slow: FaultyS3) -> Iterator[Node]:
    if shutil.which("runc") is None:
        pytest.skip("there is no runc")
    with running_node("--daemons=there", main=slow.endpoint_url) as node:
        yield node


def test_a_container_ends_when_it_is_killed_though_its_daemon_cannot_see_it(
    node: Node, bucket: Bucket, slow: FaultyS3
) -> None:
    """The keeper can: it is in the namespace from which the volume was mounted."""
    target = node.target("pod")
    with daemons_of(node, "daemons", APART), ExitStack() as stack:
        cap = capability(flags=(f"retry-time={RETRY}",))
        node.publish("volume", target, cap=cap, bucket=bucket.name)
        [daemon] = node.daemons()
        assert os.readlink(f"/proc/{daemon}/ns/pid") != f"pid:[{callers.namespace()}]"
        pod = stack.enter_context(container_reading(node, target, "hello", code=READER))
        rule = slow.add("GET", "slow", stall=True)
        pod.ask()
        until(lambda: rule.used > 0, "the request that hangs")
        # This kills it, and fails if it does not end.
        stack.close()
        assert rule.used > 0
        slow.clear()
        assert (target / "slow").read_bytes() == DATA
        node.unpublish("volume", target)
