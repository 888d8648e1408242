"""When a directory's time moves: as on a disk, with each change of this mount to its names."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.mounting import Mounter
from tests.support.semantics import states
from tests.support.servers.buckets import Bucket
from tests.support.survival.mortal_mount import MortalMount, Process
from tests.support.survival.surviving import serving_pid
from tests.support.waiting import until
from tests.support.writing import WRITABLE

OLD_NS = 10**18


def moves(call: Callable[[], object], *directories: Path) -> bool:
    """Whether a call gives all these directories the time of now."""
    for directory in directories:
        os.utime(directory, ns=(OLD_NS, OLD_NS))
        assert directory.stat().st_mtime_ns == OLD_NS
    before = time.time_ns()
    call()
    after = time.time_ns()
    found = [directory.stat() for directory in directories]
    assert all(one.st_mtime_ns == one.st_ctime_ns for one in found)
    moved = {before <= one.st_mtime_ns <= after for one in found}
    assert len(moved) == 1
    if moved == {False}:
        assert {one.st_mtime_ns for one in found} == {OLD_NS}
    return moved.pop()


def test_a_directorys_time_is_that_of_the_last_change_to_its_entries(
    mounter: Mounter, bucket: Bucket
) -> None:
    bucket.put("d/file", b"x")
    bucket.put("e/other", b"x")
    root = mounter(WRITABLE).path
    d, e = root / "d", root / "e"
    assert moves(lambda: (d / "new").write_bytes(b"x"), d)
    assert not moves(lambda: (d / "new").write_bytes(b"content"), d)
    assert not moves(lambda: (d / "new").chmod(0o600), d)
    assert not moves(lambda: (d / "new").read_bytes(), d)
    assert moves(lambda: (d / "sub").mkdir(), d)
    assert not moves(lambda: (d / "sub" / "below").write_bytes(b"x"), d)
    assert moves(lambda: os.symlink("new", d / "link"), d)
    assert moves(lambda: (d / "new").rename(d / "newer"), d)
    assert moves(lambda: (d / "newer").rename(e / "newer"), d, e)
    assert moves(lambda: (d / "sub").rename(e / "sub"), d, e)
    assert moves(lambda: (d / "link").unlink(), d)
    assert not moves(lambda: (e / "sub" / "below").unlink(), e)
    assert moves(lambda: (e / "sub").rmdir(), e)
    (root / "top").mkdir()
    assert root.stat().st_mtime_ns > OLD_NS


def test_a_directorys_time_outlives_the_daemon(bucket: Bucket, mounter: Mounter) -> None:
    bucket.put("d/file", b"x")
    mount = mounter("--session", "kernel", WRITABLE)
    survives = mount.status()["survival"]
    if not survives["on"]:
        pytest.skip(survives["why"])
    # Another test may have the kernel drop what it remembers, but for what is open.
    held = os.open(mount.path / "d", os.O_RDONLY)
    try:
        (mount.path / "d" / "new").write_bytes(b"x")
        (mount.path / "top").write_bytes(b"x")
        directories = (mount.path / "d", mount.path)
        before = [path.stat().st_mtime_ns for path in directories]
        pid = serving_pid(mount)
        os.kill(pid, signal.SIGKILL)
        until(lambda: serving_pid(mount) != pid, "another daemon")
        (mount.path / "d" / "new").chmod(0o600)
        assert [path.stat().st_mtime_ns for path in directories] == before
    finally:
        os.close(held)


async def shown_ns(process: Process, path: str) -> int:
    return process.operations.attributes(await process.node(path)).mtime_ns


@states(
    "The time of such a change lasts until the kernel forgets the directory, or the mount ends;"
    " then the directory has the earlier time again."
)
async def test_a_directory_that_was_forgotten_has_its_earlier_time(tmp_path: Path) -> None:
    mount = MortalMount(tmp_path)
    mount.store.put("d/file", b"x")
    async with mount.serving() as process:
        mounted_ns = process.operations.mounted_ns
        assert await shown_ns(process, "d") == mounted_ns
        await process.unlink("d/file")
        assert await shown_ns(process, "d") > mounted_ns
        directory = await process.node("d")
        process.operations.forget(directory.nodeid, directory.nlookup)
        assert process.operations.inodes.find(directory.nodeid) is None
        assert await shown_ns(process, "d") == mounted_ns
        await process.mkdir("d/new")
        assert await shown_ns(process, "d") > mounted_ns
    mount.reboot()
    async with mount.serving() as process:
        assert await shown_ns(process, "d") == process.operations.mounted_ns
