"""Closed files that earlier mounts have left: each is taken up once, the last of a name."""

import errno
import os
import socket
from pathlib import Path

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from fusefs.keeper import protocol
from fusefs.keeper.client import KeeperClient
from fusefs.posix.journal.line_log import LineLog
from fusefs.posix.nodes.inode import StagedFile
from fusefs.posix.write.exclusive import OPEN_S
from fusefs.posix.write.staging import Staging
from fusefs.store.errors import StoreError
from tests.support.survival.mortal_mount import LOCAL, DiedError, MortalMount, Process, die
from tests.support.waiting import eventually


def let_upload(mount: MortalMount | Process, *, may: bool) -> None:
    def before(what: str, _key: str) -> None:
        if what == "PUT" and not may:
            raise StoreError("not now")

    mount.store.before = before


async def leave(process: Process, path: str, data: bytes) -> None:
    """A file that is closed, and not in the bucket."""
    fh = await process.create(path, data)
    with pytest.raises(OSError, match="not now"):
        await process.close(fh)


async def left_by_a_mount(mount: MortalMount, **files: bytes) -> None:
    let_upload(mount, may=False)
    async with mount.serving() as process:
        for name, data in files.items():
            await leave(process, name, data)
    let_upload(mount, may=True)
    mount.reboot()


async def upload_all(process: Process) -> None:
    for staged in process.writer.staging:
        await process.writer.uploads.wait(staged)


async def test_a_mount_that_ends_before_a_release_leaves_nothing_that_is_uploaded(
    mount: MortalMount,
) -> None:
    """The kernel drops RELEASE requests that it has not sent; what is not closed stays."""
    async with mount.serving() as process:
        await process.writer.flusher.flush(await process.create("sent", b"content"))
        await process.create("open", b"never closed")
        await process.writer.backlog.drain(1)
        assert [staged.key for staged in process.writer.staging] == ["open"]
    assert mount.store.contents() == {"sent": b"content"}


@pytest.mark.parametrize("size", [10, 3000])
@pytest.mark.parametrize(
    ("owner", "step"), [(Staging, "take_up"), (Staging, "record"), (Path, "unlink")]
)
async def test_a_mount_that_is_killed_while_it_takes_up_a_file_leaves_it_once(
    mount: MortalMount, monkeypatch: pytest.MonkeyPatch, owner: type, step: str, size: int
) -> None:
    """Also where its record is too long for an attribute."""
    monkeypatch.setattr("fusefs.posix.write.staging_record.LONGEST", 2048 if size == 10 else 0)
    await left_by_a_mount(mount, file=bytes(size))
    with monkeypatch.context() as patch:
        patch.setattr(owner, step, die)
        try:
            async with mount.serving():
                pass
        except* DiedError:
            pass
    mount.reboot()
    async with mount.serving() as process:
        assert process.adopted == 1
        await upload_all(process)
        assert mount.store.contents() == {"file": bytes(size)}
        await process.unlink("file")
    mount.reboot()
    async with mount.serving() as process:
        assert process.adopted == 0
        assert await process.listing() == []
    own = mount.directory / "staging" / "4"
    assert [path.name for path in own.parent.rglob("*")] == ["4", "source"]


async def test_the_keeper_hears_of_a_process_that_takes_up_files(mount: MortalMount) -> None:
    """Before any other task has run, of a new mount as of the next daemon."""
    await left_by_a_mount(mount, one=b"1", other=b"2")
    let_upload(mount, may=False)
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    there.setblocking(False)
    with here, there:
        for _ in range(2):
            mount.alive = KeeperClient(here).alive
            async with mount.serving():
                assert there.recv(100) == protocol.pack(protocol.TICK)
                with pytest.raises(BlockingIOError):
                    there.recv(100)


async def test_what_was_written_last_under_a_name_is_taken_up(mount: MortalMount) -> None:
    let_upload(mount, may=False)
    async with mount.serving() as process:
        await leave(process, "file", b"old")
        mount.reboot()
        await left_by_a_mount(mount, file=b"new")
    for _ in range(2):
        async with mount.serving() as process:
            await upload_all(process)
        mount.reboot()
        assert mount.store.contents() == {"file": b"new"}
    (kept,) = mount.directory.glob("staging/*/replaced-*")
    assert kept.read_bytes() == b"old"


async def test_what_the_bucket_had_before_it_was_written_anew_is_not_kept(
    mount: MortalMount, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fusefs.posix.write.staging_record.TICK_NS", 0)
    async with mount.serving() as process:
        fh = await process.create("file", b"old")
        await process.open("file")
        await process.close(fh)
        await process.set_attributes("file", mode=0o600)
        assert (await process.node("file")).staged.is_closed
        mount.store.objects.clear()
        mount.reboot()
        await left_by_a_mount(mount, file=b"new")
    async with mount.serving() as process:
        assert process.adopted == 1
        await upload_all(process)
    assert mount.store.contents() == {"file": b"new"}
    assert not list(mount.directory.glob("staging/*/replaced-*"))


async def test_a_mount_of_another_prefix_leaves_them_to_one_of_theirs(
    mount: MortalMount, caplog: pytest.LogCaptureFixture
) -> None:
    mount.store.put("a/")
    await left_by_a_mount(mount, **{"a/file": b"a", "file": b"b"})
    mount.prefix = "a/"
    async with mount.serving() as process:
        assert process.adopted == 1
        await upload_all(process)
    assert mount.store.contents() == {"a/file": b"a"}
    assert "file waits in" in caplog.text
    mount.prefix = ""
    mount.reboot()
    async with mount.serving() as process:
        assert process.adopted == 1
        await upload_all(process)
    assert mount.store.contents() == {"a/file": b"a", "file": b"b"}


@pytest.mark.parametrize("is_mounted_anew", [True, False])
@pytest.mark.parametrize("step", [0, 1, 2])
async def test_a_file_that_is_renamed_over_another_leaves_one_of_both(
    mount: MortalMount, monkeypatch: pytest.MonkeyPatch, step: int, *, is_mounted_anew: bool
) -> None:
    """Neither is in the bucket, and the process is killed before one of them is on record."""
    record, steps = Staging.record, iter(range(step))

    def die(staging: Staging, staged: StagedFile) -> None:
        if next(steps, None) is None:
            raise DiedError
        record(staging, staged)

    let_upload(mount, may=False)
    async with mount.killed() as process:
        await leave(process, "new", b"new")
        await leave(process, "file", b"old")
        monkeypatch.setattr(Staging, "record", die)
        await process.rename("new", "file")
    monkeypatch.undo()
    let_upload(mount, may=True)
    if is_mounted_anew:
        mount.reboot()
    async with mount.serving() as process:
        listed = await process.listing()
        await upload_all(process)
        assert await process.listing() == listed
    contents = mount.store.contents()
    is_renamed = contents == {"file": b"new"}
    assert is_renamed or contents == {"file": b"old", "new": b"new"}
    assert is_renamed or step < 2
    assert listed == sorted(contents)


@pytest.mark.parametrize("is_staged", [True, False])
async def test_a_full_disk_keeps_no_file_from_being_replaced(
    mount: MortalMount, monkeypatch: pytest.MonkeyPatch, *, is_staged: bool
) -> None:
    record = Staging.record

    def fail(staging: Staging, staged: StagedFile) -> None:
        if staged.is_unlinked:
            raise OSError(errno.ENOSPC, "full")
        record(staging, staged)

    mount.store.put("other", b"other")
    let_upload(mount, may=False)
    async with mount.serving() as process:
        if is_staged:
            await leave(process, "new", b"other")
        await leave(process, "file", b"old")
        for staged in process.writer.staging:
            staged.begun_ns = 1  # their uploads in parts are to be aborted
        with monkeypatch.context() as patch:
            patch.setattr(Staging, "record", fail)
            await process.rename("new" if is_staged else "other", "file")
    let_upload(mount, may=True)
    mount.reboot()
    async with mount.serving() as process:
        await upload_all(process)
        assert await process.load("file") == b"other"
    assert mount.store.contents()["file"] == b"other"


def is_full(*_: object) -> None:
    raise OSError(errno.ENOSPC, "full")


@pytest.mark.parametrize("how", ["held", "written", "mapped", "described"])
async def test_the_last_close_takes_place_on_a_full_disk(
    process: Process, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Also of a mapping's stores, which no close has kept, and where the disk removes nothing."""
    fh = await process.create("file", b"1")
    (staged,) = process.writer.staging
    await process.writer.uploads.wait(staged)
    if how == "described":
        await process.set_attributes("file", mode=0o600)
    with monkeypatch.context() as context:
        context.setattr(Staging, "record", is_full)
        context.setattr(LineLog, "append", is_full)
        context.setattr("fusefs.cache.file_cache.FileCache.adopt_uploaded", lambda *_: False)
        context.setattr(os, "unlink", is_full)
        if how == "held":
            async with process.writer.uploads.locked(staged):
                process.operations.release(fh)
                staged.touch()
        elif how == "mapped":
            process.writer.sharing.recall(staged)
            process.operations.release(fh)
            os.pwrite(staged.fd, b"2", 0)
            os.utime(staged.fd, ns=(1, 1))
            staged.note_stores()
        else:
            if how == "written":
                await process.write(fh, 0, b"2")
            process.operations.release(fh)
        await eventually(lambda: not len(process.writer.staging))
    assert staged.error is None
    assert process.store.contents() == {"file": b"2" if how in ("written", "mapped") else b"1"}


async def test_stores_through_a_mapping_after_a_failed_upload_are_sent(process: Process) -> None:
    let_upload(process, may=False)
    await leave(process, "file", b"content")
    (staged,) = process.writer.staging
    process.writer.sharing.recall(staged)
    process.writer.sharing.backing_id = lambda _: 1  # type: ignore[method-assign]
    process.writer.open_staged(staged.inode, os.O_RDWR, process.caller())
    with pytest.raises(StoreError):
        await process.writer.uploads.wait(staged)
    os.pwrite(staged.fd, b"stored!", 0)
    let_upload(process, may=True)
    await process.writer.uploads.wait(staged)
    assert process.store.contents() == {"file": b"stored!"}


async def test_a_file_is_reserved_on_a_full_disk(
    process: Process, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    await process.mkdir("made")
    parent, caller = await process.node("made"), process.caller()
    await process.listing("made")
    made = process.writer.create(parent, "file", 0o644, os.O_RDWR | os.O_EXCL, caller)
    assert isinstance(made, tuple)
    monkeypatch.setattr(Staging, "record", is_full)
    await trio.sleep(2 * OPEN_S)
    assert process.store.contents() == {"made/file": b""}


async def test_a_full_disk_keeps_no_process_from_going_on_after_a_rename(
    mount: MortalMount, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one before was killed when it had put the first of two records down."""
    async with mount.killed(durability=LOCAL) as process:
        await process.create("old", b"1")
        await process.create("new", b"2")
        monkeypatch.setattr(Staging, "unlink", die)
        await process.rename("old", "new")
    monkeypatch.undo()
    monkeypatch.setattr(Staging, "record", is_full)
    async with mount.serving(durability=LOCAL) as process:
        assert await process.listing() == ["new"]
