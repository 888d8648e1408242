"""Removing many files: on record at once, sent together, and never lost."""

import errno
import os
import stat
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
import trio

from fusefs.posix.nodes.object_metadata import LONGEST_TARGET
from fusefs.posix.types import LookupResult
from fusefs.posix.write import removals, staging_record
from fusefs.posix.write.removals import MANY
from fusefs.store.errors import AccessDeniedError, StoreError, UnsupportedError
from tests.support.memory_store import HeldCopies, Stop, failing
from tests.support.semantics import states
from tests.support.survival.mortal_mount import LOCAL, MortalMount, Process, answered

COUNT = 40
NAMES = [f"{number:02}" for number in range(COUNT)]


@pytest.fixture
def mount(mount: MortalMount) -> MortalMount:
    mount.store.put("a/")
    for name in NAMES:
        mount.store.put(f"a/{name}", name.encode())
    return mount


async def remove(process: Process, names: Iterable[str] = NAMES) -> None:
    """Remove files as the kernel asks for it."""
    mutations = process.operations.mutations
    parent = await process.node("a")
    for name in names:
        await answered(mutations.unlink(parent.nodeid, name.encode(), process.caller()))


def held(mount: MortalMount) -> Stop:
    """A bucket that answers no DeleteObjects request until `go_on` is set."""
    return Stop(mount.store, "DELETES", "")


@asynccontextmanager
async def killed_after_removing(mount: MortalMount, count: int = COUNT) -> AsyncIterator[list[str]]:
    """A process that has removed the first files, and dies before the bucket hears of most."""
    held(mount)
    async with mount.killed() as process:
        await remove(process, NAMES[:count])
        assert await process.listing("a") == NAMES[count:]
    mount.store.pause = trio.lowlevel.checkpoint
    assert len(mount.store.contents()) == COUNT - MANY
    yield [f"a/{name}" for name in NAMES[MANY:count]]


async def test_many_files_are_deleted_together(process: Process, mount: MortalMount) -> None:
    stop = held(mount)
    await remove(process)
    assert len(process.writer.backlog.unsent("")) == COUNT - MANY
    assert await process.listing("a") == []
    with pytest.raises(FileNotFoundError):
        await process.node(f"a/{NAMES[-1]}")
    stop.go_on.set()
    await process.changes.fsync(await process.node("a"))
    assert process.writer.backlog.unsent("") == []
    assert await process.listing("a") == []
    assert mount.store.contents() == {}
    # The first that is on record by itself, and the others with the next.
    assert mount.store.count("DELETES") <= 2
    assert mount.store.count("DELETE") == MANY


async def test_the_first_file_of_each_directory_is_deleted_at_once(
    process: Process, mount: MortalMount
) -> None:
    mount.store.put("b/")
    mount.store.put("b/file", b"x")
    held(mount)
    await remove(process)
    await process.unlink("b/file")
    assert "b/file" not in mount.store.objects


@pytest.mark.parametrize("how", ["unlink", "rename"])
@pytest.mark.parametrize("is_killed", [True, False])
async def test_a_directory_stays_whose_other_file_is_not_in_the_bucket_yet(
    mount: MortalMount, how: str, *, is_killed: bool
) -> None:
    mount.store.put("d/old", b"x")
    mount.store.before = failing(StoreError("not now"), ("PUT", "d/new"))
    async with mount.serving(durability=LOCAL) as process:
        await process.save("d/new", b"content")
        await (process.unlink("d/old") if how == "unlink" else process.rename("d/old", "other"))
        if not is_killed:
            process.operations._directories.moved("", "")  # no listing is known any more
            assert await process.load("d/new") == b"content"
    async with mount.serving(durability=LOCAL) as process:
        assert await process.load("d/new") == b"content"


async def test_a_refusal_is_reported_to_the_program(process: Process) -> None:
    def refuse(what: str, _key: str) -> None:
        if what.startswith("DELETE"):
            raise AccessDeniedError("not allowed")

    await process.listing("a")
    process.store.before = refuse
    for name in NAMES:
        with pytest.raises(OSError, match="not allowed"):
            await remove(process, [name])
    assert process.writer.backlog.unsent("") == []


@states("Later changes of such a name wait until the old object is gone.")
@pytest.mark.parametrize("how", ["create", "rename", "symlink"])
async def test_what_is_made_anew_waits_for_the_removal(mount: MortalMount, how: str) -> None:
    stop = held(mount)
    mount.store.put("other", b"new")
    async with mount.serving() as process, trio.open_nursery() as nursery:
        await remove(process)
        name = f"a/{NAMES[-1]}"
        is_made = trio.Event()

        async def make() -> None:
            if how == "create":
                await process.save(name, b"new")
            elif how == "rename":
                await process.rename("other", name)
            else:
                await process.symlink(name, b"new")
            is_made.set()

        nursery.start_soon(make)
        await trio.testing.wait_all_tasks_blocked()
        assert not is_made.is_set()
        assert mount.store.contents()[name] == NAMES[-1].encode()
        stop.go_on.set()
        await is_made.wait()
        assert await process.listing("a") == [NAMES[-1]]
    assert mount.store.contents()[name] == b"new"


@states(
    "`rmdir` and a rename of the directory, `fsync` of it or of one above, `fusefs sync` and "
    "`fusefs umount` wait until the bucket has it."
)
@pytest.mark.parametrize("how", ["rmdir", "rename", "fsync"])
async def test_the_directory_waits_for_its_removals(mount: MortalMount, how: str) -> None:
    stop = held(mount)
    async with mount.serving() as process, trio.open_nursery() as nursery:
        await remove(process)
        is_done = trio.Event()

        async def act() -> None:
            if how == "rmdir":
                await process.rmdir("a")
            elif how == "rename":
                await process.rename("a", "b")
            else:
                await process.changes.fsync(process.operations.inodes.root)
            is_done.set()

        nursery.start_soon(act)
        await trio.testing.wait_all_tasks_blocked()
        assert not is_done.is_set()
        stop.go_on.set()
        await is_done.wait()
        assert process.writer.backlog.unsent("") == []
    assert mount.store.contents() == {}


@pytest.mark.parametrize("how", ["attributes", "upload"])
async def test_the_version_that_was_waited_for_is_removed(
    process: Process, mount: MortalMount, how: str
) -> None:
    """A file is removed while a copy or an upload of it is under way, which makes another ETag."""
    held = HeldCopies(mount.store)
    name = NAMES[-1]
    inode = await process.node(f"a/{name}")
    async with trio.open_nursery() as nursery:
        if how == "attributes":
            await process.set_attributes(inode, mode=0o600)
            process.writer.deferred.hurry(f"a/{name}")
            await held.is_made.wait()
        else:
            fh = await process.open(f"a/{name}", os.O_WRONLY)
            await process.write(fh, 0, b"other content")
            hold(mount, "PUT", held.answer)
            process.operations.release(fh)
        await remove(process, NAMES[: 2 * MANY])
        nursery.start_soon(remove, process, [name])
        await trio.testing.wait_all_tasks_blocked()
        held.answer.set()
    await process.changes.fsync(await process.node("a"))
    assert f"a/{name}" not in mount.store.contents()


async def test_a_file_is_removed_while_its_last_handle_is_closed(
    process: Process, mount: MortalMount
) -> None:
    go_on = trio.Event()
    fh = await process.create("a/new", b"content")
    await process.writer.flusher.fsync(fh)
    async with trio.open_nursery() as nursery:
        hold(mount, "DELETE", go_on)
        nursery.start_soon(process.unlink, "a/new")
        await trio.testing.wait_all_tasks_blocked()
        process.operations.release(fh)
        go_on.set()
    assert list(process.writer.staging) == []
    assert "a/new" not in mount.store.contents()


def hold(mount: MortalMount, what: str, until_set: trio.Event) -> None:
    """Have the bucket execute requests of a kind no sooner than that."""

    def before(request: str, _key: str) -> None:
        is_held = request == what
        mount.store.pause = until_set.wait if is_held else trio.lowlevel.checkpoint

    mount.store.before = before


async def test_what_fails_stays_on_record_and_is_tried_again(process: Process) -> None:
    process.store.put("other")
    await process.listing("a")
    process.store.before = failing(StoreError("not now"), "DELETED", "HEAD")
    await remove(process)
    with pytest.raises(StoreError, match="not now"):
        await process.changes.fsync(await process.node("a"))
    with pytest.raises(StoreError, match="not now"):
        await process.rmdir("a")
    assert await process.listing("a") == []
    await process.writer.removals.drain()
    waiting = process.writer.backlog.unsent("")
    assert {process.writer.backlog.state(one) for one in waiting} == {"failed"}
    process.store.heal()
    HeldCopies(process.store)
    await process.set_attributes("other", mode=0o600)
    await process.writer.backlog.drain(1)
    assert process.writer.removals.pending("") == []
    await process.rmdir("a")
    assert [*process.store.objects] == ["other"]


async def test_a_store_without_deleteobjects_gets_a_request_for_each(process: Process) -> None:
    process.store.before = failing(UnsupportedError("no such thing"), "DELETED")
    await remove(process)
    await process.changes.fsync(await process.node("a"))
    assert process.store.contents() == {}


@pytest.mark.parametrize("has_failed", [True, False])
async def test_a_file_that_is_staged_is_removed_on_a_full_disk(
    mount: MortalMount, monkeypatch: pytest.MonkeyPatch, *, has_failed: bool
) -> None:
    def fail(what: str, key: str) -> None:
        if what == "PUT":
            raise StoreError(key)

    def is_full(*_arguments: object, **_options: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async with mount.serving() as process:
        fh = await process.create("a/new", b"content")
        if has_failed:
            mount.store.before = fail
            with pytest.raises(OSError, match="a/new"):
                await process.close(fh)
            mount.store.heal()
        fh = await process.open("a/new")
        with monkeypatch.context() as patch:
            patch.setattr(staging_record, "write", is_full)
            patch.setattr(os, "setxattr", is_full)
            await process.unlink("a/new")
        assert "new" not in await process.listing("a")
        assert await process.read(fh) == b"content"
    mount.reboot()
    async with mount.serving() as process:
        assert process.writer.backlog.unsent("") == []
    assert "a/new" not in mount.store.contents()


async def test_a_full_disk_delays_nothing(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_self: object, _lines: bytes) -> None:
        raise OSError("full")

    monkeypatch.setattr(removals.LineLog, "append", fail)
    await remove(process)
    assert process.store.contents() == {}


@states(
    "Of files that are removed one after the other (`rm -rf`), the first eight, and the first of "
    "each directory, are gone from the bucket when `unlink` returns; of the others the removal is "
    "on record then, and the bucket has it a moment later. This mount shows them no more, and the "
    "next daemon, or the next mount with the same cache directory, sends it."
)
@pytest.mark.parametrize("is_mounted_anew", [True, False])
async def test_a_process_that_was_killed_loses_no_removal(
    mount: MortalMount, *, is_mounted_anew: bool
) -> None:
    async with killed_after_removing(mount):
        if is_mounted_anew:
            mount.reboot()
        async with mount.serving() as process:
            assert await process.listing("a") == []
            await process.writer.removals.flush_below("")
            assert await process.listing("a") == []
    assert mount.store.contents() == {}
    assert [path for path in mount.directory.rglob("removals") if path.read_bytes()] == []


async def test_what_the_end_of_a_mount_could_not_delete_the_next_one_does(
    mount: MortalMount,
) -> None:
    async with mount.serving() as process:
        await remove(process, NAMES[:MANY])
        mount.store.before = failing(StoreError("not now"), "DELETED")
        await remove(process, NAMES[MANY:])
        await process.writer.backlog.drain(1)
    mount.store.heal()
    mount.reboot()
    async with mount.serving() as process:
        await process.writer.backlog.drain(1)
    assert mount.store.contents() == {}
    assert list((mount.directory / "staging").iterdir()) == []


async def test_a_mount_that_removes_nothing_leaves_them_on_record(mount: MortalMount) -> None:
    async with killed_after_removing(mount) as left:
        mount.reboot()
        async with mount.serving(may_delete=False) as process:
            assert await process.listing("a") == [key[2:] for key in left]
        mount.reboot()
        async with mount.serving() as process:
            await process.writer.removals.flush_below("")
    assert mount.store.contents() == {}


@states(
    "Such a removal deletes the object that this mount has shown; what somebody else has put in "
    "its place stays, but for an equal object, of the same ETag, that was put there less than a "
    "minute after the removal."
)
async def test_what_somebody_else_has_put_there_stays(mount: MortalMount) -> None:
    async with killed_after_removing(mount) as left:
        mount.store.put(left[0], b"somebody else's")
        same = mount.store.objects[left[1]]
        same.info = replace(same.info, mtime_ns=time.time_ns() + 10 * removals.CLOCKS_NS)
        soon = mount.store.objects[left[2]]
        soon.info = replace(soon.info, mtime_ns=time.time_ns() + removals.CLOCKS_NS // 2)
        async with mount.serving() as process:
            await process.writer.removals.flush_below("")
    assert mount.store.contents() == {left[0]: b"somebody else's", left[1]: same.data}


async def test_an_equal_file_that_is_made_anew_is_not_taken_for_the_old_one(
    mount: MortalMount, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor where a full disk keeps it from being put on record that the old one is gone."""
    stop = held(mount)
    name = NAMES[-1]
    append = removals.LineLog.append

    def fail(log: removals.LineLog, lines: bytes) -> None:
        raise OSError(errno.ENOSPC, "full")

    async with mount.serving() as process:
        await remove(process, NAMES[:-1])
        await stop.reached.wait()
        await remove(process, [name])
        monkeypatch.setattr(removals.LineLog, "append", fail)
        stop.go_on.set()
        with pytest.raises(OSError, match="full"):
            await process.save(f"a/{name}", name.encode())
        monkeypatch.setattr(removals.LineLog, "append", append)
        inode = await process.node(f"a/{name}")
        assert inode.staged is not None
        await process.writer.uploads.wait(inode.staged)
    async with mount.serving() as process:
        await process.writer.removals.flush_below("")
    assert mount.store.contents() == {f"a/{name}": name.encode()}


async def test_what_an_earlier_process_has_removed_is_removed_once(mount: MortalMount) -> None:
    """Its record ends with it: the third process does not remove what the second has made."""
    async with killed_after_removing(mount, MANY + 1) as (key,):
        name = key.removeprefix("a/")
        async with mount.killed() as process:
            await process.writer.removals.flush_below("")
            await process.save(key, name.encode())
            await process.set_attributes(key, mode=0o600)
        async with mount.serving() as process:
            assert await process.listing("a") == NAMES[MANY:]
            await process.writer.removals.flush_below("")
            await process.writer.deferred.flush(key)
    assert mount.store.contents()[key] == name.encode()
    assert mount.store.metadata(key)["mode"] == str(stat.S_IFREG | 0o600)


async def test_a_record_that_can_not_be_emptied_ends_all_the_same(
    mount: MortalMount, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the last removal: the next process does not remove what was made since."""

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    async with killed_after_removing(mount, MANY + 1) as (key,):
        async with mount.killed() as process:
            with monkeypatch.context() as patch:
                patch.setattr(os, "truncate", fail)
                await process.writer.removals.flush_below("")
            await process.save(key, key.removeprefix("a/").encode())
        async with mount.serving() as process:
            await process.writer.removals.flush_below("")
    assert key in mount.store.contents()


async def test_what_is_made_anew_is_shown_by_the_next_process(mount: MortalMount) -> None:
    """Also before the removal of its forerunner is in the bucket."""
    held(mount)
    path = f"a/{NAMES[MANY]}"
    async with mount.killed() as process:
        await remove(process, NAMES[: MANY + 1])
        fh = await process.create(path, b"new")
    async with mount.serving() as process:
        for _ in range(2):
            assert await process.listing("a") == NAMES[MANY:]
            assert await process.load(path) == b"new"
            await process.writer.removals.flush_below("")
        await process.close(fh)
        assert await process.load(path) == b"new"
    assert mount.store.contents()[path] == b"new"


async def test_a_removal_that_is_sent_again_is_done(mount: MortalMount) -> None:
    mount.begun = {unique := mount.new_unique()}
    async with killed_after_removing(mount), mount.serving() as process:
        await process.unlink(f"a/{NAMES[-1]}", unique)
        with pytest.raises(FileNotFoundError):
            await process.unlink(f"a/{NAMES[-1]}")


async def test_attributes_that_were_to_be_sent_are_given_up(mount: MortalMount) -> None:
    async with killed_after_removing(mount) as left, mount.serving() as process:
        assert not process.writer.deferred.has(left[0])
        await process.writer.removals.flush_below("")
    assert mount.store.count("COPY") == 0


async def test_what_is_about_to_be_removed_has_no_head(process: Process) -> None:
    """Unless a program wants them, or it may be a symbolic link."""
    for name, size in (("large", LONGEST_TARGET + 1), ("small", LONGEST_TARGET)):
        process.store.put(f"a/{name}", bytes(size), mode=str(stat.S_IFREG | 0o600))
    parent = await process.node("a")
    await remove(process)
    heads = process.store.count("HEAD")
    found = process.operations.lookup(parent.nodeid, b"large", process.caller())
    assert isinstance(found, LookupResult)
    assert not found.has_attributes
    assert process.store.count("HEAD") == heads
    assert process.operations.head_cache.needs_head(found.inode)
    inode = await process.operations.getattr(found.inode.nodeid)
    assert stat.S_IMODE(process.operations.attributes(inode).mode) == 0o600
    small = process.operations.lookup(parent.nodeid, b"small", process.caller())
    assert not isinstance(small, LookupResult)
    assert (await small).has_attributes
