"""Files that somebody still has open when another program closes them, without a kernel."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import trio
import trio.testing

from fusefs.posix.types import NewAttributes
from fusefs.posix.write import appends, backlog
from fusefs.store.errors import StoreError
from tests.support.semantics import states
from tests.support.survival.mortal_mount import LOCAL, MortalMount
from tests.support.waiting import eventually

LIMIT_S = 20.0


def landing(mount: MortalMount, path: str, content: bytes) -> trio.Event:
    """Set once the bucket has some content under a name."""
    landed = trio.Event()

    def look(_what: str, _key: str) -> None:
        if mount.store.contents().get(path) == content:
            landed.set()

    mount.store.after = look
    return landed


async def test_what_could_not_be_uploaded_is_tried_again_while_a_reader_has_it_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backlog, "RETRY_S", 0.05)
    mount = MortalMount(tmp_path)

    def refuse(what: str, key: str) -> None:
        if what == "PUT":
            raise StoreError(key)

    async with mount.serving() as process, trio.open_nursery() as nursery:
        fh = await process.create("log", b"line")
        await process.open("log")  # and never closed
        nursery.start_soon(process.writer.backlog.run)
        mount.store.before = refuse
        with pytest.raises(OSError, match="log"):
            await process.close(fh)
        process.operations.release(fh)
        await trio.testing.wait_all_tasks_blocked()
        landed = landing(mount, "log", b"line")
        mount.store.before = lambda _what, _key: None
        await eventually(landed.is_set)
        nursery.cancel_scope.cancel()


@states(
    "Where the mount cannot see whose a close is, an empty file is put just after its last close."
)
async def test_an_empty_file_follows_its_last_close_where_no_process_is_seen(
    tmp_path: Path,
) -> None:
    mount = MortalMount(tmp_path)
    async with mount.serving() as process:
        root = process.operations.inodes.root
        made = process.writer.create(root, "empty", 0o644, os.O_WRONLY, process.caller())
        assert isinstance(made, tuple)
        fh = made[1].fh
        answer = process.writer.flusher.flush(fh)  # a shell has duplicated it
        assert answer is not None
        await answer
        assert "empty" not in mount.store.contents()
        landed = landing(mount, "empty", b"")
        await process.close(fh)
        await eventually(landed.is_set)


@states(
    "A file that stays open is uploaded a minute after a change, or where it is larger than that"
    " after a second for each MiB, in place of what was there; what only grows, up to 8 MiB, is"
    " written on meanwhile, other writes wait."
)
async def test_a_file_that_stays_open_is_uploaded_now_and_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (appends.pause_s(1), appends.pause_s(1 << 30)) == (appends.EVERY_S, 1024)
    assert appends.EVERY_S + backlog.RETRY_S <= 60
    monkeypatch.setattr(backlog, "RETRY_S", 0.02)
    monkeypatch.setattr(appends, "EVERY_S", 0.05)
    mount = MortalMount(tmp_path)
    async with mount.serving() as process, trio.open_nursery() as nursery:
        nursery.start_soon(process.writer.backlog.run)
        fh = await process.create("log", b"")
        for content in (b"line", b"line 2"):
            landed = landing(mount, "log", content)
            await process.write(fh, 0, content)
            await eventually(landed.is_set)
        await trio.sleep(0.2)
        assert mount.store.count("PUT") == 2
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("new", [NewAttributes(size=2), NewAttributes(mode=0o600)])
async def test_a_change_by_name_does_not_wait_for_readers_to_close(
    tmp_path: Path, new: NewAttributes
) -> None:
    mount = MortalMount(tmp_path)
    async with mount.serving() as process:
        fh = await process.create("log", b"line")
        await process.open("log")  # and never closed
        await process.close(fh)
        inode = await process.node("log")
        mutations = process.operations.mutations
        assert mutations is not None
        await mutations.setattr(inode.nodeid, new)
        size = 4 if new.size is None else new.size
        mode = str(stat.S_IFREG | (0o644 if new.mode is None else new.mode))

        def is_stored() -> bool:
            stored = mount.store.objects["log"]
            has_mode = (stored.info.metadata or {})["mode"] == mode
            return has_mode and stored.data == b"line"[:size]

        # A size is there at once; a mode follows within a second.
        assert new.size is None or is_stored()
        landed = trio.Event()
        mount.store.after = lambda _what, _key: landed.set() if is_stored() else None
        if not is_stored():
            await eventually(landed.is_set)


async def test_what_waits_is_as_old_as_it_was_under_the_next_process(tmp_path: Path) -> None:
    mount = MortalMount(tmp_path)
    async with mount.serving() as process:
        await process.create("log", b"line")
        begun = trio.current_time()
        await trio.sleep(0.3)
    async with mount.serving() as process:
        (staged,) = process.writer.backlog.files("log")
        # The file system's clock ticks every 10 ms at least.
        assert staged.since <= begun + 0.02


async def test_with_local_durability_each_close_is_safe_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mount = MortalMount(tmp_path)
    synced: list[bytes] = []

    def fsync(fd: int) -> None:
        if stat.S_ISREG(os.fstat(fd).st_mode) and os.fstat(fd).st_size < 20:
            synced.append(os.pread(fd, 20, 0))

    monkeypatch.setattr(os, "fsync", fsync)
    async with mount.serving(durability=LOCAL) as process:
        fh = await process.create("log", b"one")
        await process.writer.flusher.flush(fh)  # a child that was forked has ended
        await process.write(fh, 3, b" two")
        await process.writer.flusher.flush(fh)
    # With the first one the file that names the bucket.
    assert synced == [b"one", b"test", b"one two"]
