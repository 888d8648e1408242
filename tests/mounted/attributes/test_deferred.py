"""Attributes that change after a close: shown at once, sent together, and never lost."""

import errno
import os
import stat
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from fusefs.posix.journal.line_log import LineLog
from fusefs.posix.metadata.deferred_attributes import DEFER_S
from fusefs.posix.write import backlog
from fusefs.posix.write.staging import SOURCE
from fusefs.store.errors import StoreError
from fusefs.store.interface import ObjectInfo
from tests.support.memory_store import HeldCopies, failing
from tests.support.mounting import WRITABLE, Mount, Mounter, all_sent, cost, fusefs, metadata
from tests.support.semantics import states
from tests.support.servers.buckets import Bucket, stored
from tests.support.survival.mortal_mount import DiedError, MortalMount, Process
from tests.support.waiting import until

TIME_NS = 10**18 + 7
MODE = str(stat.S_IFREG | 0o600)


@pytest.fixture
def mount(tmp_path: Path) -> MortalMount:
    made = MortalMount(tmp_path)
    made.store.put("file", b"content", mode=str(stat.S_IFREG | 0o644), note="kept")
    return made


@asynccontextmanager
async def next_mount(mount: MortalMount) -> AsyncIterator[Process]:
    """A mount after a restart of the machine, which sends what it has found when it ends."""
    mount.reboot()
    async with mount.serving() as process:
        yield process
        await process.writer.deferred.drain()


async def describe(process: Process, path: str) -> None:
    """As tar and rsync do after a close."""
    await process.set_attributes(path, mtime_ns=TIME_NS)
    await process.set_attributes(path, uid=3, gid=4)
    await process.set_attributes(path, mode=0o600)
    assert await shown(process, path) == (0o600, 3, 4, TIME_NS)


async def shown(process: Process, path: str) -> tuple[int, int, int, int]:
    inode = await process.node(path)
    attributes = await process.stat(inode)
    return (stat.S_IMODE(attributes.mode), attributes.uid, attributes.gid, attributes.mtime_ns)


def check(mount: MortalMount, key: str) -> None:
    kept = mount.store.metadata(key)
    assert (kept["mode"], kept["uid"], kept["gid"]) == (MODE, "3", "4")
    assert kept["mtime"] == "1000000000.000000007"


async def test_what_is_changed_together_is_sent_together(mount: MortalMount) -> None:
    async with mount.serving() as process:
        await describe(process, "file")
        assert mount.store.count("COPY") == 0
        await process.writer.deferred.drain()
        assert mount.store.count("COPY") == 1
        assert await shown(process, "file") == (0o600, 3, 4, TIME_NS)
    check(mount, "file")
    assert mount.store.metadata("file")["note"] == "kept"


@pytest.mark.parametrize("is_written", [True, False])
@pytest.mark.parametrize(("path", "old", "copies"), [("file", "file", 1), ("a/b/file", "a", 2)])
async def test_a_rename_takes_them_along(
    mount: MortalMount, path: str, old: str, copies: int, *, is_written: bool
) -> None:
    mount.store.objects.clear()
    mount.store.put(path, b"content")
    renamed = path.replace(old, "new", 1)
    async with mount.serving() as process:
        if is_written:
            await process.save(path, b"content")
        await describe(process, path)
        await process.rename(old, "new")
        await process.writer.deferred.drain()
        assert mount.store.count("COPY") == copies
        assert await shown(process, renamed) == (0o600, 3, 4, TIME_NS)
    check(mount, renamed)
    assert mount.store.contents() == {renamed: b"content"}


async def test_a_rename_takes_along_what_is_changed_while_they_are_sent(mount: MortalMount) -> None:
    """Though the object that was sent is another version than the one that was to be renamed."""
    held = HeldCopies(mount.store)
    async with mount.serving() as process, trio.open_nursery() as nursery:
        await process.set_attributes("file", mode=0o640)
        process.writer.deferred.hurry("file")
        await held.is_made.wait()
        await process.set_attributes("file", mode=0o600)
        nursery.start_soon(process.rename, "file", "new")
        await trio.testing.wait_all_tasks_blocked()
        held.answer.set()
    assert mount.store.metadata("new")["mode"] == MODE
    assert mount.store.contents() == {"new": b"content"}


async def test_an_edit_takes_them_along(mount: MortalMount) -> None:
    async with mount.serving() as process:
        await describe(process, "file")
        fh = await process.open("file", os.O_WRONLY)
        await process.write(fh, 0, b"C")
        await process.close(fh)
        await process.writer.deferred.drain()
        assert (await shown(process, "file"))[:3] == (0o600, 3, 4)
    assert (mount.store.metadata("file")["mode"], mount.store.count("COPY")) == (MODE, 0)
    assert mount.store.contents() == {"file": b"Content"}


async def test_an_open_for_writing_alone_loses_none(mount: MortalMount) -> None:
    async with mount.serving() as process:
        await describe(process, "file")
        await process.close(await process.open("file", os.O_WRONLY))
        await process.writer.deferred.drain()
        assert await shown(process, "file") == (0o600, 3, 4, TIME_NS)
    check(mount, "file")
    assert mount.store.count("PUT") == 0


async def test_what_is_made_anew_under_the_name_has_its_own(mount: MortalMount) -> None:
    async with mount.serving() as process:
        await describe(process, "file")
        await process.unlink("file")
        await process.save("file", b"content")
        await process.writer.deferred.drain()
        assert (await shown(process, "file"))[0] == 0o644
    assert (mount.store.metadata("file")["mode"], mount.store.count("COPY")) == (
        str(stat.S_IFREG | 0o644),
        0,
    )


@pytest.mark.parametrize("fills_disk", [False, True])
async def test_what_is_changed_while_it_is_sent_is_sent_as_well(
    mount: MortalMount, monkeypatch: pytest.MonkeyPatch, *, fills_disk: bool
) -> None:
    async with mount.serving() as process:
        await describe(process, "file")
        inode = await process.node("file")

        def change_again(what: str, _key: str) -> None:
            if what == "COPY" and mount.store.count("COPY") == 1:
                assert inode.info is not None
                old = process.operations.head_cache.meta(inode)
                process.writer.deferred.put(inode.info, old.changed(uid=5))
                if fills_disk:
                    monkeypatch.setattr(LineLog, "append", is_full)

        mount.store.before = change_again
        await process.writer.deferred.flush("file")
    assert (mount.store.metadata("file")["uid"], mount.store.count("COPY")) == ("5", 2)


async def test_a_name_that_the_kernel_has_forgotten_shows_them(mount: MortalMount) -> None:
    async with mount.serving() as process:
        await describe(process, "file")
        inode = await process.node("file")
        process.operations.inodes.forget(inode.nodeid, inode.nlookup)
        assert process.operations.inodes.find(inode.nodeid) is None
        assert await shown(process, "file") == (0o600, 3, 4, TIME_NS)
        assert mount.store.count("COPY") == 0


@states(
    "It is on record before the call returns, and the next daemon, or the next mount with the "
    "same cache directory, sends it."
)
@pytest.mark.parametrize(
    ("is_mounted_anew", "has_full_disk"), [(True, False), (False, False), (False, True)]
)
async def test_a_process_that_was_killed_loses_none(
    mount: MortalMount,
    monkeypatch: pytest.MonkeyPatch,
    *,
    is_mounted_anew: bool,
    has_full_disk: bool,
) -> None:
    async with mount.serving() as process:
        await describe(process, "file")
    assert mount.store.count("COPY") == 0
    if is_mounted_anew:
        mount.reboot()
    if has_full_disk:
        monkeypatch.setattr(LineLog, "append", is_full)
    async with mount.serving() as process:
        assert await shown(process, "file") == (0o600, 3, 4, TIME_NS)
        await process.writer.deferred.drain()
    check(mount, "file")
    assert [path for path in mount.directory.rglob("attributes") if path.read_bytes()] == []


async def test_what_no_bucket_is_known_of_is_left_alone_and_reported(
    mount: MortalMount, caplog: pytest.LogCaptureFixture
) -> None:
    async with mount.serving() as process:
        await describe(process, "file")
        directory = process.writer.staging.directory
    (directory / SOURCE).unlink()
    mount.reboot()
    async with mount.serving() as process:
        assert f"{directory} has ['attributes'], which no mount sends" in caplog.text
        (directory / SOURCE).write_text(process.writer.staging.source)
    async with next_mount(mount):
        pass
    check(mount, "file")


@pytest.mark.parametrize("time_ns", [TIME_NS, None])
@pytest.mark.parametrize("is_written", [True, False])
async def test_what_is_changed_of_an_open_file_is_sent_by_the_next_mount(
    mount: MortalMount, time_ns: int | None, *, is_written: bool
) -> None:
    """Its content was never closed: it is kept where it is, if it is another one."""
    async with mount.serving() as process:
        before_ns = (await shown(process, "file"))[3]
        fh = await process.open("file", os.O_RDWR)
        if is_written:
            await process.write(fh, 0, b"another")
        set_ns = time.time_ns() if time_ns is None else time_ns
        await process.set_attributes("file", mode=0o600, uid=3, mtime_ns=set_ns)
    async with next_mount(mount) as process:
        expected_ns = before_ns if is_written else set_ns
        assert await shown(process, "file") == (0o600, 3, 0, expected_ns)
        await process.writer.deferred.drain()
        assert mount.store.metadata("file")["mode"] == MODE
        await process.set_attributes("file", mode=0o640)
    async with next_mount(mount):
        pass
    assert mount.store.metadata("file")["mode"] == str(stat.S_IFREG | 0o640)
    assert mount.store.contents()["file"] == b"content"
    left = [path for path in (mount.directory / "staging").rglob("[0-9]*") if path.is_file()]
    contents = [path.read_bytes() for path in left if path.suffix != ".json"]
    if is_written or time_ns is not None:  # else the content is too young to be known as clean
        assert contents == ([b"another"] if is_written else [])


@pytest.mark.parametrize("is_done", [True, False])
async def test_a_process_that_was_killed_while_sending_loses_none(
    mount: MortalMount, *, is_done: bool
) -> None:
    async with mount.killed() as process:
        await describe(process, "file")
        setattr(mount.store, "after" if is_done else "before", failing(DiedError, "COPY"))
        await process.writer.deferred.drain()
    mount.store.heal()
    async with mount.serving() as process:
        assert await shown(process, "file") == (0o600, 3, 4, TIME_NS)
        await process.writer.deferred.drain()
    check(mount, "file")


@pytest.mark.parametrize("is_renamed", [True, False])
async def test_what_is_changed_while_a_process_is_killed_over_an_answer_is_sent(
    mount: MortalMount, *, is_renamed: bool
) -> None:
    """The object is another version by then, which the next process knows for its forerunner's."""
    held = HeldCopies(mount.store)
    async with mount.killed() as process:
        await process.set_attributes("file", mode=0o640)
        process.writer.deferred.hurry("file")
        await held.is_made.wait()
        await process.set_attributes("file", mode=0o600)
    held.holds = False
    async with next_mount(mount) as process:
        if is_renamed:
            await process.rename("file", "new")
    assert mount.store.metadata("new" if is_renamed else "file")["mode"] == MODE


async def test_what_is_changed_after_a_request_without_an_answer_is_sent(
    mount: MortalMount,
) -> None:
    HeldCopies(mount.store).holds = False
    copy = mount.store.copy

    async def fail(*arguments: Any, **options: Any) -> ObjectInfo:
        await copy(*arguments, **options)
        raise StoreError("no answer")

    async with mount.serving() as process:
        deferred = process.writer.deferred
        mount.store.copy = fail  # type: ignore[method-assign]
        for mode in (0o604, 0o640):
            await process.set_attributes("file", mode=mode)
            with pytest.raises(StoreError, match="no answer"):
                await deferred.flush("file")
        mount.store.copy = copy  # type: ignore[method-assign]
        await process.set_attributes("file", mode=0o600)
        await deferred.flush("file")
    assert mount.store.metadata("file")["mode"] == MODE


async def test_what_somebody_else_has_replaced_is_given_up(mount: MortalMount) -> None:
    """Also after a request without an answer."""
    async with mount.serving() as process:
        await describe(process, "file")
        mount.store.before = failing(StoreError("not now"), "COPY")
        with pytest.raises(StoreError, match="not now"):
            await process.writer.deferred.flush("file")
        mount.store.heal()
        mount.store.put("file", b"somebody else's", mode="theirs")
        await process.writer.deferred.flush("file")
        assert len(process.writer.deferred) == 0
    assert mount.store.metadata("file")["mode"] == "theirs"


@pytest.mark.parametrize("operation", ["COPY", "DELETE"])
async def test_a_rename_that_fails_loses_none(mount: MortalMount, operation: str) -> None:
    async with mount.serving() as process:
        await describe(process, "file")
        mount.store.before = failing(StoreError("not now"), operation)
        with pytest.raises(StoreError, match="not now"):
            await process.rename("file", "new")
        mount.store.heal()
        assert await shown(process, "file") == (0o600, 3, 4, TIME_NS)
        await process.writer.deferred.drain()
    check(mount, "file")


async def test_a_process_that_was_killed_in_a_rename_loses_none(mount: MortalMount) -> None:
    """Though nothing else was left to be sent meanwhile, and the record was written anew."""
    mount.store.put("other", b"content", mode=str(stat.S_IFREG | 0o644), note="kept")
    async with mount.killed() as process:
        await describe(process, "file")
        await describe(process, "other")

        def die(what: str, key: str) -> None:
            if (what, key) == ("COPY", "new"):
                process.writer.deferred.drop("other")
                raise DiedError

        mount.store.before = die
        await process.rename("file", "new")
    mount.store.heal()
    async with mount.serving() as process:
        assert await shown(process, "file") == (0o600, 3, 4, TIME_NS)
        await process.rename("file", "new")
        await process.writer.deferred.drain()
    check(mount, "new")


async def test_what_is_refused_stays_and_is_sent_again(mount: MortalMount) -> None:
    async with mount.serving() as process:
        mount.store.before = failing(StoreError("not now"), "COPY")
        await describe(process, "file")
        with pytest.raises(StoreError, match="not now"):
            await process.writer.deferred.flush("file")
        (waiting,) = process.writer.backlog.unsent("")
        assert process.writer.backlog.state(waiting) == "failed"
        mount.store.heal()
        await process.writer.deferred.drain()
        assert process.writer.backlog.unsent("") == []
    check(mount, "file")


async def test_what_is_given_up_is_counted_though_a_change_is_being_sent(
    mount: MortalMount, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backlog, "GIVE_UP_S", 0.1)
    held = HeldCopies(mount.store)
    names = ("before", "file", "after")
    for name in names:
        mount.store.put(name, b"content")
    async with mount.serving() as process:
        for name in names:
            await process.set_attributes(name, mode=0o600)
        process.writer.deferred.hurry("file")
        await held.is_made.wait()
        answer = await process.writer.backlog.give_up("")
        assert answer == {"files": 1, "in_use": [], "remaining": 2}


async def test_what_a_killed_program_waited_for_is_sent_all_the_same(mount: MortalMount) -> None:
    """Its `fsync` is cancelled while the copy is under way, at the time when it is due anyway."""
    async with mount.serving() as process:
        deferred = process.writer.deferred
        await describe(process, "file")
        with trio.CancelScope() as killed:
            is_under_way = False

            def kill_when_it_is_due(what: str, _key: str) -> None:
                nonlocal is_under_way
                if what == "COPY" and not is_under_way:
                    is_under_way = True
                    killed.deadline = trio.current_time() + 2 * DEFER_S

            mount.store.before = kill_when_it_is_due
            mount.store.pause = trio.sleep_forever
            await deferred.flush("file")
        assert killed.cancelled_caught
        mount.store.pause = trio.lowlevel.checkpoint
        while len(deferred):  # noqa: ASYNC110 - sending it by `drain` would hide the fault
            await trio.sleep(0.1)
    check(mount, "file")


async def test_what_a_full_disk_does_not_take_with_a_rename_is_sent_at_once(
    mount: MortalMount, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with mount.serving() as process:
        await describe(process, "file")

        def fill_and_change_again(what: str, key: str) -> None:
            if (what, key) == ("COPY", "new"):
                inode = process.operations.inodes.root.children["file"]  # type: ignore[index]
                assert inode.info is not None
                old = process.operations.head_cache.meta(inode)
                process.writer.deferred.put(inode.info, old.changed(uid=5))
                monkeypatch.setattr(LineLog, "append", is_full)

        mount.store.before = fill_and_change_again
        await process.rename("file", "new")
        mount.store.heal()
        now = trio.current_time()
        assert all(waiting.due <= now for waiting in process.writer.deferred.pending("new"))
        await process.writer.deferred.drain()
    assert mount.store.metadata("new")["uid"] == "5"


async def test_a_mount_that_meets_a_full_disk_leaves_them_to_the_next(
    mount: MortalMount, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with mount.serving() as process:
        await describe(process, "file")
    with monkeypatch.context() as patch:
        patch.setattr(LineLog, "append", is_full)
        async with next_mount(mount):
            pass
    assert mount.store.count("COPY") == 0
    async with next_mount(mount):
        pass
    check(mount, "file")


async def test_a_mount_of_another_prefix_leaves_them_to_one_of_theirs(mount: MortalMount) -> None:
    for key in ("a/file", "b/file"):
        mount.store.put(key, b"content")
    async with mount.serving() as process:
        await describe(process, "a/file")
        await describe(process, "b/file")
    for prefix, sent in (("c/", []), ("b/", ["b/file"]), ("", ["a/file", "b/file"])):
        mount.prefix = prefix
        async with next_mount(mount):
            pass
        copied = sorted(key for what, key in mount.store.requests if what == "COPY")
        assert copied == sent
    check(mount, "a/file")
    check(mount, "b/file")


def is_full(_log: LineLog, _line: bytes) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


root = pytest.mark.root


@pytest.fixture(scope="module")
def writable(module_mounter: Mounter) -> Mount:
    # Else what is believed of a directory depends on how busy the machine is.
    return module_mounter(WRITABLE, "--metadata-ttl", "indefinite", "--durability", "bucket")


def synchronise(directory: Path, count: int) -> None:
    """New files, as `rsync -a` makes them."""
    for number in range(count):
        temporary = directory / f".{number}.AbCdEf"
        fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        os.write(fd, bytes(10_000))
        os.close(fd)
        os.chown(temporary, 3, 4, follow_symlinks=False)
        os.utime(temporary, ns=(TIME_NS, TIME_NS), follow_symlinks=False)
        os.chmod(temporary, 0o640)
        os.rename(temporary, directory / str(number))


@root
@states(
    "What is changed of a closed file's mode, owner, times and extended attributes is shown on "
    "this mount at once, and in the bucket about a second later, with what else was changed "
    "meanwhile; a rename takes it along in its copy."
)
def test_a_file_that_rsync_makes_takes_a_put_and_a_copy(writable: Mount, shared: Bucket) -> None:
    directory = writable.path / "rsync"
    directory.mkdir()

    def make() -> None:
        synchronise(directory, 10)
        all_sent(writable)

    # Where a file's calls take longer than a second, its attributes are sent before its rename.
    until(lambda: cost(writable, make) == {"puts": 10, "copies": 10, "deletes": 10}, "no more")
    for number in range(10):
        kept = metadata(shared, f"rsync/{number}")
        assert kept["mode"] == str(stat.S_IFREG | 0o640)
        assert (kept["uid"], kept["mtime"]) == ("3", "1000000000.000000007")
        assert (directory / str(number)).stat().st_mtime_ns == TIME_NS


def fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


@root
@states("`fsync` of the file, `fusefs sync` and `fusefs umount` wait until the bucket has it.")
@pytest.mark.parametrize(
    "wait",
    [
        lambda _mount, path: fsync(path),
        lambda _mount, path: fusefs("sync", path),
        lambda mount, _path: (mount.end(), mount.start()),
    ],
    ids=["fsync", "sync", "umount"],
)
def test_who_wants_them_in_the_bucket_can_wait(
    writable: Mount, shared: Bucket, wait: Callable[[Mount, Path], object]
) -> None:
    path = writable.path / "waited"
    path.write_bytes(b"content")
    os.chmod(path, 0o604)
    wait(writable, path)
    assert metadata(shared, "waited")["mode"] == str(stat.S_IFREG | 0o604)
    assert stored(shared, "waited") == path.read_bytes() == b"content"
