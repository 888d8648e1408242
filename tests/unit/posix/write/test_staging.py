"""Staged files: which wait, which are sent, and what a full disk leaves of them."""

import errno
import os
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import trio
import trio.testing

from fusefs.posix.nodes.temporary_names import has_random_part, is_temporary
from fusefs.posix.write import backlog, flush, staging_record
from fusefs.store.errors import StoreError
from tests.support.memory_store import failing
from tests.support.semantics import states
from tests.support.survival.mortal_mount import LOCAL, MortalMount, Process, answered
from tests.support.waiting import eventually

LIMIT_S = 20.0


async def test_what_could_not_be_uploaded_is_tried_again_while_a_reader_has_it_open(
    mount: MortalMount, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backlog, "RETRY_S", 0.05)

    async with mount.serving() as process, trio.open_nursery() as nursery:
        fh = await process.create("log", b"line")
        await process.open("log")  # and never closed
        nursery.start_soon(process.writer.backlog.run)
        mount.store.before = failing(StoreError("log"), "PUT")
        with pytest.raises(OSError, match="log"):
            await process.close(fh)
        process.operations.release(fh)
        await trio.testing.wait_all_tasks_blocked()
        mount.store.heal()
        await eventually(lambda: mount.store.contents() == {"log": b"line"})
        nursery.cancel_scope.cancel()


@states(
    "Where the mount cannot see whose a close is, an empty file is put just after its last close."
)
async def test_an_empty_file_follows_its_last_close_where_no_process_is_seen(
    process: Process, mount: MortalMount
) -> None:
    root = process.operations.inodes.root
    made = process.writer.create(root, "empty", 0o644, os.O_WRONLY, process.caller())
    assert isinstance(made, tuple)
    fh = made[1].fh
    await answered(process.writer.flusher.flush(fh))  # a shell has duplicated it
    assert "empty" not in mount.store.contents()
    await process.close(fh)
    await eventually(lambda: mount.store.contents() == {"empty": b""})


@states(
    "A file that stays open is uploaded a minute after a change, or where it is larger than that"
    " after a second for each MiB, in place of what was there; what only grows, up to 8 MiB, is"
    " written on meanwhile, other writes wait."
)
async def test_a_file_that_stays_open_is_uploaded_now_and_then(
    mount: MortalMount, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (flush.pause_s(1), flush.pause_s(1 << 30)) == (flush.EVERY_S, 1024)
    assert flush.EVERY_S + backlog.RETRY_S <= 60
    monkeypatch.setattr(backlog, "RETRY_S", 0.02)
    monkeypatch.setattr(flush, "EVERY_S", 0.05)
    async with mount.serving() as process, trio.open_nursery() as nursery:
        nursery.start_soon(process.writer.backlog.run)
        fh = await process.create("log", b"")
        for content in (b"line", b"line 2"):
            await process.write(fh, 0, content)
            await eventually(lambda new=content: mount.store.contents() == {"log": new})
        await trio.sleep(0.2)
        assert mount.store.count("PUT") == 2
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("new", [{"size": 2}, {"mode": 0o600}])
async def test_a_change_by_name_does_not_wait_for_readers_to_close(
    process: Process, new: dict[str, int]
) -> None:
    fh = await process.create("log", b"line")
    await process.open("log")  # and never closed
    await process.close(fh)
    await process.set_attributes("log", **new)
    size = new.get("size", 4)
    mode = str(stat.S_IFREG | new.get("mode", 0o644))

    def is_stored() -> bool:
        stored = process.store.objects["log"]
        has_mode = (stored.info.metadata or {})["mode"] == mode
        return has_mode and stored.data == b"line"[:size]

    # A size is there at once; a mode follows within a second.
    assert "size" not in new or is_stored()
    await eventually(is_stored)


async def test_where_the_bucket_does_not_answer_nothing_is_given_up(
    mount: MortalMount, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backlog, "GIVE_UP_S", 0.1)
    mount.store.put("file", b"old", mode=str(stat.S_IFREG | 0o644))
    async with mount.serving() as process:
        await process.set_attributes("file", mode=0o600)
        mount.store.pause = trio.sleep_forever
        process.writer.backlog.hurry("")
        await trio.testing.wait_all_tasks_blocked()
        with trio.fail_after(LIMIT_S), pytest.raises(StoreError, match="no answer"):
            await process.writer.backlog.give_up("")
        mount.store.pause = trio.lowlevel.checkpoint


async def test_what_waits_is_as_old_as_it_was_under_the_next_process(mount: MortalMount) -> None:
    async with mount.serving() as process:
        await process.create("log", b"line")
        begun = trio.current_time()
        await trio.sleep(0.3)
    async with mount.serving() as process:
        (staged,) = process.writer.backlog.files("log")
        # The file system's clock ticks every 10 ms at least.
        assert staged.since <= begun + 0.02


async def test_with_local_durability_each_close_is_safe_on_the_disk(
    mount: MortalMount, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[bytes] = []

    def fsync(fd: int) -> None:
        if stat.S_ISREG(os.fstat(fd).st_mode) and os.fstat(fd).st_size < 20:
            synced.append(os.pread(fd, 20, 0))

    monkeypatch.setattr(os, "fsync", fsync)
    async with mount.serving(durability=LOCAL) as process:
        fh = await process.create("log", b"one")
        downloads = trio.to_thread.current_default_thread_limiter()
        downloads.total_tokens = 1
        async with downloads:  # while they wait for the disk
            await process.writer.flusher.flush(fh)  # a child that was forked has ended
            await process.write(fh, 3, b" two")
            await process.writer.flusher.flush(fh)
    # With the first one the file that names the bucket.
    assert synced == [b"one", b"test", b"one two"]


def test_two_programs_may_sync_one_file_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = threading.Barrier(2, timeout=10)
    monkeypatch.setattr(os, "fsync", lambda _fd: both.wait())
    write = partial(staging_record.write, str(tmp_path / "16"), b"record", is_safe=True)
    with ThreadPoolExecutor() as threads:
        for done in [threads.submit(write) for _ in range(2)]:
            done.result()
    assert os.listdir(tmp_path) == ["16.json"]


async def test_a_file_that_could_not_be_created_is_nowhere(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = process.operations.inodes.root
    known = set(process.operations.inodes.by_id)

    def fail(_inode: object) -> int:
        raise OSError(errno.ENOSPC, "the disk is full")

    monkeypatch.setattr(process.writer.staging, "prepare", fail)

    async def create(flags: int) -> None:
        mode = stat.S_IFREG | 0o644
        answer = process.writer.create(root, f"{flags}.lock", mode, flags, process.caller())
        assert not isinstance(answer, tuple)
        await answer

    for flags in (os.O_RDWR, os.O_RDWR | os.O_EXCL):
        with pytest.raises(OSError, match="full"):
            await create(flags)
    assert set(process.operations.inodes.by_id) == known
    assert process.store.contents() == {}


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
async def test_a_write_is_repeated_once_the_cache_has_made_room(
    process: Process, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    fh = await process.create("file", b"first")
    pwrite, room = os.pwrite, []

    def write(fd: int, data: bytes, offset: int) -> int:
        if not room:
            raise OSError(number, os.strerror(number))
        return pwrite(fd, data, offset)

    async def make_room() -> None:
        room.append(1)

    monkeypatch.setattr(process.writer, "_make_room", make_room)
    monkeypatch.setattr(os, "pwrite", write)
    await process.write(fh, 5, b" second")
    assert await process.read(fh) == b"first second"
    assert len(room) == 1


def test_a_record_that_the_disk_does_not_take_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "write", lambda _fd, _data: 1)
    with pytest.raises(OSError, match="space"):
        staging_record.write(str(tmp_path / "16"), b"record")
    assert os.listdir(tmp_path) == []


RANDOM = (".tmpAb3xYz", "tmpk2_xw9qz", "tmp_obj_a7Bc9d", "tmp_pack_Xy12ab", "tmp.5oXhbEd7fK")
FILES = (
    "tmpk2_xw9qz.json",
    "sedB3kLmX",
    ".model.bin.Xy12aB",
    "mod.cpython-311.pyc.140234",
    ".~notebook.ipynb",
    "RECORDx_9ab2k1.tmp",
    "state.json.tmp-1234",
    "model.safetensors.incomplete",
    "data.csv.partial",
)
LASTING = (
    "tmp",
    "tmp_results",
    "template.py",
    "page.tmpl",
    ".vimrc.backup",
    "uv.lock",
    ".~lock.sheet.ods#",
    "a.pyc",
    "party",
)


@states(
    "Temporary are names with a random part (those of Python's and Rust's tempfile, of `mktemp`,"
    " git and rsync), NAME.tmp, NAME.temp, NAME.part, NAME.partial, NAME.incomplete, .~NAME, the"
    " first names of compiled Python modules and of `sed -i`, and NAME.lock if O_EXCL created it."
)
def test_names_of_temporary_files() -> None:
    for name in (*RANDOM, *FILES):
        assert is_temporary(f"a/{name}", is_exclusive=False), name
    for name in LASTING:
        assert not is_temporary(f"a/{name}", is_exclusive=False), name
    assert is_temporary("a/index.lock", is_exclusive=True)


@pytest.mark.parametrize("name", RANDOM)
def test_what_is_below_a_random_name_is_temporary(name: str) -> None:
    assert has_random_part(name)
    assert is_temporary(f"{name}/package/a.py", is_exclusive=False)
    assert not is_temporary("a.tmp/package/a.py", is_exclusive=False)
