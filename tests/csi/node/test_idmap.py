"""A pod in a user namespace: its volume is bound with mapped ids, as its runtime does it."""

import ctypes
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from csi.node import bind_mount
from fusefs.linux import libc
from tests.support.csi.node import running_node
from tests.support.servers.buckets import Bucket
from tests.support.servers.s3_server import S3Server
from tests.support.sharing import skip_without_fuse
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
    tree = bind_mount._syscall(428, -100, os.fsencode(source), 1 | os.O_CLOEXEC)
    try:
        size = ctypes.sizeof(attributes)
        bind_mount._syscall(442, tree, b"", 0x1000, ctypes.byref(attributes), size)
        bind_mount._syscall(429, tree, b"", -100, os.fsencode(target), 4)
    finally:
        os.close(tree)


def test_a_volume_is_bound_with_mapped_ids(s3: S3Server, bucket: Bucket, tmp_path: Path) -> None:
    skip_without_fuse()
    if os.geteuid() != 0:
        pytest.skip("the node service is root's")
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
