"""A mount was detached while it renames a directory, and the next one is at its place."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import trio

from fusefs.store.errors import StoreError
from tests.support.memory_store import MemoryStore
from tests.support.survival.mortal_mount import MortalMount, Process
from tests.unit.posix.renaming.test_renaming_meanwhile import Stop, finished


@pytest.fixture
def mount(tmp_path: Path) -> MortalMount:
    mount = MortalMount(tmp_path / "older")
    for name in "xyz":
        mount.store.put(f"a/{name}", name.encode())
    return mount


def next_mount(mount: MortalMount) -> MortalMount:
    """Another mount at the same place."""
    other = MortalMount(mount.directory.with_name("younger"))
    other.store = mount.store
    other.reboot()
    (other.directory / "staging").mkdir(parents=True)
    for name in ("renames", "staging/1"):
        (other.directory / name).symlink_to(mount.directory / name)
    return other


async def fail_to_rename(process: Process, failed: trio.Event) -> None:
    with pytest.raises(StoreError, match="archived"):
        await process.rename("a", "b")
    failed.set()


async def test_the_next_mount_leaves_a_rename_to_the_one_that_has_begun_it(
    mount: MortalMount,
) -> None:
    """Else both would remove what they hold for the other name's."""
    stop = Stop(mount.store, "COPY", "b/z")
    async with mount.serving() as process, trio.open_nursery() as nursery:
        failed = trio.Event()
        nursery.start_soon(fail_to_rename, process, failed)
        await stop.reached.wait()
        stop.error = StoreError("archived")
        mount.store.pause = MemoryStore().pause
        async with next_mount(mount).serving() as younger:
            await finished(younger)
            stop.go_on.set()
            await failed.wait()
    assert mount.store.contents() == {"a/x": b"x", "a/y": b"y", "a/z": b"z"}


async def test_the_next_mount_finishes_it_once_the_other_has_ended(mount: MortalMount) -> None:
    stop = Stop(mount.store, "COPY", "b/z")
    async with mount.serving() as process, trio.open_nursery() as nursery:
        nursery.start_soon(process.rename, "a", "b")
        await stop.reached.wait()
        mount.store.pause = MemoryStore().pause
        async with next_mount(mount).serving() as younger:
            os.close(process.writer.staging._lock)  # as at its end
            younger.changes._renames.look_at_others()
            await finished(younger)
        nursery.cancel_scope.cancel()
    assert mount.store.contents() == {"b/x": b"x", "b/y": b"y", "b/z": b"z"}
