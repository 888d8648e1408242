"""Renamed directories at a kill, and beside a mount that is detached."""

import errno
import os
from pathlib import Path
from unittest.mock import Mock

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from fusefs.linux import files
from fusefs.posix.namespace.rename_job import RenameJob, RenameJobs
from fusefs.store.errors import StoreError, UnreachableError
from tests.support.memory_store import MemoryStore, Stop, failing
from tests.support.semantics import states
from tests.support.survival.fate import Fate, fate_of_records
from tests.support.survival.mortal_mount import DiedError, MortalMount, Process
from tests.support.waiting import eventually
from tests.unit.posix.renaming.test_renaming_meanwhile import chmod, finished, killed


@pytest.fixture
def fate(monkeypatch: pytest.MonkeyPatch) -> Fate:
    """From the begin of that step on."""
    fate = fate_of_records(monkeypatch)
    note = RenameJobs._note

    def note_or_die(self: RenameJobs, renaming: RenameJob, *, is_switching: bool = False) -> None:
        fate.step()
        note(self, renaming, is_switching=is_switching)
        if is_switching:
            fate.count()

    monkeypatch.setattr(RenameJobs, "_note", note_or_die)
    return fate


async def die(mount: MortalMount, fate: Fate) -> tuple[int, int]:
    """Rename a directory; returns handles of a/x and of a new file in it."""
    with fate.process():
        async with mount.serving() as process:
            await process.listing("a")
            handle = await process.open("a/x", os.O_RDWR)
            await process.load("a/s/w")
            new = await process.create("a/new", b"new")
            await process.rename("a", "b")
            raise DiedError
    return handle, new


async def test_what_is_changed_after_a_kill_has_its_new_name_alone(
    tmp_path: Path, fate: Fate
) -> None:
    for mount in fate.mounts(tmp_path):
        for key in ("a/", "a/s/w", "a/x", "a/y", "a/z"):
            mount.store.put(key, key[-1].encode() if key[-1] != "/" else b"")
        handle, new = await die(mount, fate)
        async with mount.serving() as process:
            with trio.fail_after(10):
                await process.write(handle, 0, b"2")
                await process.close(handle)
                await process.close(new)
                await process.overwrite("b/y", b"3")
                await chmod(process, "b/z", 0o600)
                await process.unlink("b/s/w")
            await finished(process)
            assert sorted(await process.listing("b")) == ["new", "s", "x", "y", "z"]
        expected = {"b/new": b"new", "b/x": b"2", "b/y": b"3", "b/z": b"z"}
        assert mount.store.contents() == expected
        assert mount.store.metadata("b/z")["mode"] == str(0o100600)


async def test_what_is_made_under_the_old_name_since_stays_there(
    mount: MortalMount, fate: Fate
) -> None:
    """The process that has finished that step is killed as well."""
    mount.store.put("a/s/w", b"w")
    await die(mount, fate)
    async with killed(mount) as (process, _):
        await process.node("b/x")
    mount.store.put("a/other", b"of another node")
    async with mount.serving() as process:
        await finished(process)
        assert await process.listing("a") == ["other"]
    contents = mount.store.contents()
    assert contents.pop("a/other") == b"of another node"
    assert all(key.startswith("b/") for key in contents)


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
    """And once it has finished one of its own that overlaps."""
    mount.store.put("d/w", b"w")
    stop = Stop(mount.store, "COPY", "b/z")
    async with mount.serving() as process, trio.open_nursery() as nursery:
        nursery.start_soon(process.rename, "a", "b")
        await stop.reached.wait()
        mount.store.pause = MemoryStore().pause
        mount.store.before = failing(UnreachableError("d/w"), ("DELETED", "d/w"))
        async with next_mount(mount).serving() as younger:
            await younger.rename("d", "a/d")
            os.close(process.writer.staging._lock)  # as at its end
            younger.changes.renames.pending("", hurry=True)
            await wait_all_tasks_blocked(0.01)
            mount.store.heal()
            younger.changes.renames.pending("", hurry=True)
            with trio.fail_after(4):
                await finished(younger)
        nursery.cancel_scope.cancel()
    assert mount.store.contents() == {"b/d/w": b"w", "b/x": b"x", "b/y": b"y", "b/z": b"z"}


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC])
@states(
    "A failed rename of a directory is not carried out later, unless the cache disk refuses for a"
    " minute to record the failure; until it is recorded, changes below both names fail."
)
async def test_a_rename_that_has_failed_is_not_on_record(
    mount: MortalMount,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    number: int,
) -> None:
    """Else the next process would carry it out. A full disk lets the record be removed."""
    monkeypatch.setattr("fusefs.posix.namespace.rename_job.GIVE_UP_S", 1.0)
    stop = Stop(mount.store, "COPY", "b/z")
    stop.error = StoreError("archived")
    refuse = Mock(side_effect=OSError(number, "refused"))
    async with mount.serving() as process, trio.open_nursery() as nursery:
        failed = trio.Event()
        nursery.start_soon(fail_to_rename, process, failed)
        await stop.reached.wait()
        with monkeypatch.context() as patch:
            patch.setattr(files, "replace", refuse)
            if number == errno.EROFS:
                patch.setattr(Path, "unlink", refuse)
            stop.go_on.set()
            undone = {"a/x": b"x", "a/y": b"y", "a/z": b"z"}
            await eventually(lambda: mount.store.contents() == undone)
            await eventually(lambda: failed.is_set() == (number == errno.ENOSPC))
            process.changes.prefix_lock.wanted.set()
            await trio.sleep(0.1)
            assert caplog.text.count("next mount") == (number == errno.EROFS)
            if number == errno.EROFS:
                with pytest.raises(OSError, match="refused"), trio.fail_after(3):
                    await process.mkdir("a/made")
            await failed.wait()
        process.changes.renames.pending("", hurry=True)
        await finished(process)
    assert not list((mount.directory / "renames").iterdir())
