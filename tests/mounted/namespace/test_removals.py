"""Removing many files on a mount: they stay removed, whatever dies meanwhile."""

import os
from pathlib import Path

import pytest

from tests.support.mounting import WRITABLE, Mount, Mounter, fusefs
from tests.support.semantics import states
from tests.support.servers.buckets import Bucket, keys
from tests.support.survival.surviving import kill_serving

NAMES = [f"{number:02}" for number in range(40)]
root = pytest.mark.root


def filled(mounter: Mounter, bucket: Bucket) -> tuple[Mount, Path]:
    for name in range(100):
        bucket.put(f"a/b/{name}", b"content")
    mount = mounter(WRITABLE)
    return mount, mount.path / "a" / "b"


@root
@states(
    "`fsync` of a directory waits for what was removed below it; a new name is durable when its "
    "object is."
)
def test_files_that_were_removed_stay_so_when_the_daemon_is_killed(
    mounter: Mounter, bucket: Bucket
) -> None:
    mount, below = filled(mounter, bucket)
    names = os.listdir(below)
    for name in names[:80]:
        os.unlink(below / name)
    kill_serving(mount)
    assert sorted(os.listdir(below)) == sorted(names[80:])
    fd = os.open(below, os.O_RDONLY | os.O_DIRECTORY)
    os.fsync(fd)
    os.close(fd)
    assert sorted(os.listdir(below)) == sorted(names[80:])
    found = {key for key in keys(bucket) if not key.endswith("/")}
    assert found == {f"a/b/{name}" for name in names[80:]}


@root
def test_directories_are_made_where_files_were_removed(mounter: Mounter, bucket: Bucket) -> None:
    """Which some servers refuse while there is an object of that name."""
    mount = mounter(WRITABLE)
    for name in NAMES:
        (mount.path / name).write_bytes(b"x" * 5000)
    for name in NAMES:
        (mount.path / name).unlink()
    for name in reversed(NAMES):
        (mount.path / name).mkdir()
        (mount.path / name / "file").write_bytes(b"content")
    assert sorted(os.listdir(mount.path)) == NAMES
    mount.end()
    assert sorted(keys(bucket)) == sorted(f"{name}/{end}" for name in NAMES for end in ("", "file"))


@root
def test_commands_wait_for_removals(mounter: Mounter, bucket: Bucket) -> None:
    mount, below = filled(mounter, bucket)
    for command, left in (("sync", 50), ("umount", 0)):
        for name in os.listdir(below)[left:]:
            os.unlink(below / name)
        fusefs(command, mount.path)
        assert sum(key[-1].isdecimal() for key in keys(bucket)) == left
