"""Attributes without a kernel: markers, ETags, repetitions, HEADs, and very many of them."""

import errno
import os
import stat
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import trio
import trio.testing

from fusefs.posix.directory.head_policy import SAMPLE
from fusefs.posix.directory.listings import Directories
from fusefs.posix.journal.journal import Journal
from fusefs.posix.metadata import deferred_attributes
from fusefs.posix.metadata.deferred_attributes import AT_ONCE, DeferredAttributes, OwnObjects
from fusefs.posix.metadata.head_cache import HeadCache
from fusefs.posix.namespace.mutations import Mutations
from fusefs.posix.nodes.inode_table import Inode, InodeTable, Ownership
from fusefs.posix.nodes.object_metadata import Meta, read
from fusefs.posix.types import Caller, NewAttributes
from fusefs.settings.patterns import PathRules
from fusefs.store.errors import StoreError
from fusefs.store.interface import ObjectInfo, ObjectVersion, Write
from tests.support.memory_store import HeldCopies, MemoryStore, failing
from tests.support.survival.mortal_mount import DiedError, MortalMount, Process, answered

CREATE, REPLACE = 1, 2


def mutations(process: Process) -> Mutations:
    assert process.operations.mutations is not None
    return process.operations.mutations


async def shown(process: Process, path: str) -> tuple[int, int, int, int]:
    """Mode, owner, group and time of a path, as stat tells them."""
    inode = await process.node(path)
    reported = await process.stat(inode)
    return reported.mode, reported.uid, reported.gid, reported.mtime_ns


def kept(process: Process, inode: Inode) -> dict[str, bytes]:
    return dict(process.operations.head_cache.meta(inode).xattrs)


async def test_a_directory_keeps_what_was_set_in_its_marker(mount: MortalMount) -> None:
    mount.store.put("implied/file", b"x")
    async with mount.serving() as process:
        await process.mkdir("made")
        for path in ("made", "implied"):
            await process.set_attributes(path, mode=0o1770, uid=3, gid=4, mtime_ns=5)
            inode = await process.node(path)
            await process.set_xattr(inode, b"user.a", b"1")
    mount.reboot()
    async with mount.serving() as process:
        for path in ("made", "implied"):
            assert await shown(process, path) == (stat.S_IFDIR | 0o1770, 3, 4, 5)
            assert kept(process, await process.node(path)) == {"user.a": b"1"}


async def test_the_root_of_a_prefix_is_what_its_marker_says() -> None:
    store = MemoryStore()
    store.put("data/set/", mode=str(stat.S_IFDIR | 0o711), mtime="7")
    inodes = InodeTable("data/set/", Journal(None))
    async with trio.open_nursery() as nursery:
        directories = Directories(store, inodes, PathRules(60.0), nursery)
        head_cache = HeadCache(store, directories, inodes, Ownership(1, 2, 0o644, 0o755), nursery)
        assert head_cache.lacks(inodes.root)
        await head_cache.learn(inodes.root)
    found = head_cache.meta(inodes.root)
    unset = frozenset(("uid", "gid"))
    assert found == Meta(stat.S_IFDIR | 0o711, 1, 2, 7_000_000_000, unset=unset)


async def test_a_copy_that_has_another_etag_is_still_the_cached_content(process: Process) -> None:
    HeldCopies(process.store).holds = False  # as on S3 where the source was made of parts
    content = os.urandom(5 << 20)
    process.store.put("whole", b"small")
    process.store.put("cold", content)
    assert await process.load("whole") == b"small"
    fh = await process.open("cold")
    assert await process.read(fh, 0, 10) == content[:10]
    for path in ("whole", "cold"):
        await process.set_attributes(path, mode=0o600)
    gets = process.store.count("GET")
    assert await process.load("whole") == b"small"
    assert process.store.count("GET") == gets
    assert await process.read(fh, 4 << 20, 100) == content[4 << 20 :][:100]


@pytest.mark.parametrize(
    ("before", "value", "flags", "after"),
    [
        ({}, b"1", CREATE, {"user.a": b"1"}),
        ({"user.a": b"1"}, b"2", REPLACE, {"user.a": b"2"}),
        ({"user.a": b"1"}, None, 0, {}),
    ],
    ids=["created", "replaced", "removed"],
)
async def test_an_attribute_that_was_set_is_not_refused_when_that_is_requested_again(
    mount: MortalMount,
    before: dict[str, bytes],
    value: bytes | None,
    flags: int,
    after: dict[str, bytes],
) -> None:
    """The process dies when the bucket has the change, and the kernel asks the next one."""

    async def change(process: Process, caller: Caller) -> None:
        inode = await process.node("file")
        if value is None:
            await mutations(process).setxattr(inode.nodeid, b"user.a", None, 0, caller)
        else:
            await mutations(process).setxattr(inode.nodeid, b"user.a", value, flags, caller)

    mount.store.put("file", b"x")
    caller = Caller(mount.new_unique(), 0, 0, 1)
    async with mount.killed() as process:
        inode = await process.node("file")
        for name, old in before.items():
            await process.set_xattr(inode, name.encode(), old)
        mount.store.after = failing(DiedError, "COPY")
        await change(process, caller)
    mount.store.heal()
    async with mount.serving() as process:
        await change(process, caller)
        assert kept(process, await process.node("file")) == after


async def test_what_was_refused_is_refused_when_it_is_requested_again(mount: MortalMount) -> None:
    mount.store.put("file", b"x", xattr="%7B%22user.a%22%3A%22MQ%3D%3D%22%7D")
    caller = Caller(mount.new_unique(), 0, 0, 1)
    for _ in range(2):
        async with mount.serving() as process:
            inode = await process.node("file")
            with pytest.raises(FileExistsError):
                await mutations(process).setxattr(inode.nodeid, b"user.a", b"2", CREATE, caller)


async def test_a_change_that_meets_a_fault_is_given_up(
    process: Process, caplog: pytest.LogCaptureFixture
) -> None:
    """The next process would adopt it and meet the fault as well."""
    process.store.put("file", b"x")
    await process.set_attributes("file", mode=0o600)
    process.store.before = failing(LookupError("no name"), "COPY")
    with pytest.raises(OSError, match="no name"):
        await process.writer.deferred.flush("file")
    assert not len(process.writer.deferred)
    assert ["file cannot be changed" in line for line in caplog.messages] == [False, True]


async def test_attributes_beside_much_other_metadata_have_no_room(process: Process) -> None:
    process.store.put("full", b"x", note="n" * 1990)
    with pytest.raises(OSError, match="2 KiB") as caught:
        await process.set_attributes("full", uid=1234567)
    assert caught.value.errno == errno.ENOSPC
    assert process.store.count("COPY") == 0


async def test_what_another_node_has_set_is_requested_when_a_listing_shows_it(
    process: Process,
) -> None:
    process.store.put("file", b"x", mode=str(stat.S_IFREG | 0o600))
    assert (await shown(process, "file"))[0] == stat.S_IFREG | 0o600
    for _ in range(2):
        process.store.put("file", b"x", mode=str(stat.S_IFREG | 0o640))
    directories = process.writer.directories
    directories.correct(directories.get(""), "file", process.store.objects["file"].info)
    assert (await shown(process, "file"))[0] == stat.S_IFREG | 0o640


XATTR = "%7B%22user.a%22%3A%22MQ%3D%3D%22%7D"


@pytest.mark.parametrize(
    "new",
    [os.O_WRONLY, os.O_WRONLY | os.O_TRUNC, NewAttributes(size=3), NewAttributes(uid=7, size=3)],
)
async def test_another_content_keeps_the_mode_that_an_earlier_process_knew(
    mount: MortalMount, new: int | NewAttributes
) -> None:
    mount.store.put("file", b"content", mode=str(stat.S_IFREG | 0o640), xattr=XATTR)
    async with mount.serving() as process:
        nodeid = (await process.node("file")).nodeid
    async with mount.serving() as process:
        if isinstance(new, NewAttributes):
            await mutations(process).setattr(nodeid, new)
            await process.writer.deferred.drain()
        else:
            opened = await answered(process.operations.open(nodeid, new, process.caller()))
            await process.write(opened.fh, 0, b"con")
            await process.close(opened.fh)
    reported = mount.store.metadata("file")
    assert (reported["mode"], reported["xattr"]) == (str(stat.S_IFREG | 0o640), XATTR)
    assert reported.get("uid") == ("7" if new == NewAttributes(uid=7, size=3) else None)
    assert mount.store.objects["file"].data == (b"content" if new == os.O_WRONLY else b"con")


async def test_a_link_is_read_that_an_earlier_process_knew(mount: MortalMount) -> None:
    async with mount.serving() as process:
        await process.symlink("link", b"target")
        nodeid = (await process.node("link")).nodeid
    async with mount.serving() as process:
        assert await process.operations.readlink(nodeid) == b"target"


@pytest.mark.parametrize("size", [4095, 4096])
async def test_what_is_too_long_for_a_target_is_not_read(process: Process, size: int) -> None:
    """An object of any size may say that it is a link, and would be read into memory."""
    process.store.put("link", b"t" * size, mode=str(stat.S_IFLNK | 0o777))
    nodeid = (await process.node("link")).nodeid
    if size < 4096:
        assert await process.operations.readlink(nodeid) == b"t" * size
        del process.store.objects["link"]
        with pytest.raises(OSError, match="replaced"):  # by another node: ESTALE
            await process.operations.readlink(nodeid)
        assert not process.operations.inodes.get(nodeid).is_current
        return
    with pytest.raises(OSError, match=rf"\[Errno {errno.ENAMETOOLONG}\]"):
        await process.operations.readlink(nodeid)
    assert process.store.count("GET") == 0


NAMES = [f"{number:03}" for number in range(100)]


async def walk(mount: MortalMount, names: list[str]) -> list[int]:
    """Look names up one after the other; how many HEADs had been sent after each."""
    for name in NAMES:
        mount.store.put("d/" + name, b"x", mode=str(stat.S_IFREG | 0o600))
    async with mount.serving() as process:
        await process.node("d")
        before = mount.store.count("HEAD")
        heads = []
        for name in names:
            assert (await shown(process, "d/" + name))[0] == stat.S_IFREG | 0o600
            heads.append(mount.store.count("HEAD") - before)
    return heads


async def test_heads_are_sent_ahead_of_who_goes_through_a_directory_in_order(
    mount: MortalMount,
) -> None:
    heads = await walk(mount, NAMES)
    assert heads[0] == 1
    assert heads[30] > 45, heads
    assert max(ahead - done for done, ahead in enumerate(heads)) <= 2 * 32
    assert heads[-1] == len(NAMES)


async def test_a_head_from_before_an_own_change_is_not_believed(process: Process) -> None:
    """A chmod to the mode that it had told was taken for none."""
    private, shared = (str(stat.S_IFREG | mode) for mode in (0o600, 0o640))
    process.store.put("d/a", b"x", mode=private)
    await process.listing("d")
    deferred, left = process.writer.deferred, {"mode": shared}
    deferred.put(process.store.objects["d/a"].info, read(left, Ownership(1, 2, 0o644, 0o755).file))
    await deferred.flush("d/a")
    await process.set_attributes("d/a", mode=0o600)
    await deferred.flush("d/a")
    assert process.store.objects["d/a"].info.metadata["mode"] == private


async def test_a_file_that_is_put_back_keeps_its_name(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    process.store.put("file", b"x", mode=str(stat.S_IFREG | 0o600))
    gone, unanswered = process.store.objects.pop("file"), process.store.unanswered

    async def restored(key: str) -> None:
        process.store.objects[key] = gone

    monkeypatch.setattr(unanswered, "restored", restored)
    monkeypatch.setattr(unanswered, "has_undone", lambda *_: True)
    monkeypatch.setattr(unanswered, "expected_below", lambda _prefix: {"file": gone.info})
    assert (await shown(process, "file"))[0] == stat.S_IFREG | 0o600


async def test_a_file_that_is_put_back_while_it_is_renamed_keeps_its_mode(
    process: Process,
) -> None:
    """A write after the rename was sent with the mode from before the chmod."""
    process.store.put("file", b"x", mode=str(stat.S_IFREG | 0o644))
    await shown(process, "file")
    await process.set_attributes("file", mode=0o600)
    async with process.writer.deferred.taken("file"):
        process.operations.show_repaired("file", process.store.objects["file"].info)
        assert (await process.node("file")).meta.mode == stat.S_IFREG | 0o600


async def test_a_failed_head_is_sent_again(process: Process) -> None:
    process.store.put("file", b"x")

    process.store.before = failing(StoreError("not now"), "HEAD")
    with pytest.raises(OSError, match="not now"):
        await process.node("file")
    process.store.heal()
    assert (await shown(process, "file"))[0] == stat.S_IFREG | 0o644


async def test_a_listing_asks_a_few_files_and_looking_up_names_the_others_once(
    process: Process,
) -> None:
    for name in NAMES:
        process.store.put("d/" + name, b"x", mode=str(stat.S_IFREG | 0o600))
    before = process.store.count("HEAD")
    assert await process.listing("d") == NAMES
    assert process.store.count("HEAD") - before == SAMPLE + 1
    for name in NAMES:
        await process.node("d/" + name)
    assert process.store.count("HEAD") - before == len(NAMES) + 1


async def test_what_was_fetched_once_is_known_when_the_kernel_has_forgotten_the_name(
    process: Process,
) -> None:
    process.store.put("old", b"x", mode=str(stat.S_IFREG | 0o600))
    process.store.put("new", b"x", mode=str(stat.S_IFREG | 0o600))
    stored = process.store.objects["new"]
    stored.info = replace(stored.info, mtime_ns=time.time_ns() + 3600 * 10**9)
    for name, heads in (("old", 1), ("new", 2)):
        for _ in range(2):
            inode = await process.node(name)
            assert process.operations.head_cache.meta(inode).mode == stat.S_IFREG | 0o600
            process.operations.inodes.forget(inode.nodeid, inode.nlookup)
        # What is new may change again within the second that S3 tells.
        assert process.store.requests.count(("HEAD", name)) == heads


class Bucket(MemoryStore):
    """Takes attributes when it may, or refuses them."""

    def __init__(self) -> None:
        super().__init__()
        self.may_end = trio.Event()
        self.refuses = False

    async def copy(self, source: ObjectVersion, key: str, _write: Write) -> ObjectInfo:
        self.requests.append(("COPY", key))
        await self.may_end.wait()
        if self.refuses:
            raise StoreError("refused")
        return ObjectInfo(key, source.size, source.etag, 0)


@asynccontextmanager
async def changed(bucket: Bucket, directory: Path, count: int) -> AsyncIterator[DeferredAttributes]:
    """With the attributes of so many files to be sent, and due."""

    async def landed(_old: ObjectInfo, _new: ObjectInfo) -> None:
        pass

    async with trio.open_nursery() as nursery:
        made = DeferredAttributes(
            nursery, directory, bucket, OwnObjects(bucket), landed, lambda _info: None
        )
        for number in range(count):
            made.put(ObjectInfo(f"file{number}", 7, '"1"', 0), Meta(0o600, 0, 0))
        await trio.sleep(2)
        yield made
        nursery.cancel_scope.cancel()


async def test_what_waits_to_be_sent_has_no_task_of_its_own(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    bucket = Bucket()
    before = trio.lowlevel.current_statistics().tasks_living
    async with changed(bucket, tmp_path, 10 * AT_ONCE) as attributes:
        assert trio.lowlevel.current_statistics().tasks_living <= before + AT_ONCE + 1
        bucket.may_end.set()
        await trio.sleep(1)
        assert not len(attributes)


@pytest.mark.parametrize("refuses", [False, True])
async def test_a_change_waits_while_there_are_very_many_unless_the_bucket_takes_none(
    tmp_path: Path,
    autojump_clock: trio.testing.MockClock,
    monkeypatch: pytest.MonkeyPatch,
    refuses: bool,
) -> None:
    monkeypatch.setattr(deferred_attributes, "MOST", 20)
    bucket = Bucket()
    bucket.refuses = refuses
    async with changed(bucket, tmp_path, 20) as attributes:
        with trio.move_on_after(100) as scope:
            await attributes.wait_for_room()
        assert scope.cancelled_caught
        bucket.may_end.set()
        await attributes.wait_for_room()
        assert attributes.is_full == refuses
        await trio.sleep(1)
        with trio.fail_after(0.01):  # not until what was refused is tried again
            await attributes.wait_for_room()
        for _ in range(3 if refuses else 0):
            with pytest.raises(StoreError):
                await attributes.flush("file0")
        before = bucket.count("COPY")
        await trio.sleep(deferred_attributes.RETRY_S + 1)  # each is tried again once
        assert bucket.count("COPY") - before == len(attributes)


async def test_a_file_that_is_removed_makes_room(
    tmp_path: Path, autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deferred_attributes, "MOST", 20)
    async with changed(Bucket(), tmp_path, 20) as attributes, trio.open_nursery() as nursery:
        nursery.start_soon(attributes.wait_for_room)
        await trio.testing.wait_all_tasks_blocked()
        attributes.drop("file19")


async def test_a_chmod_waits_for_those_before(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deferred_attributes, "MOST", 1)
    for name in "ab":
        process.store.put(name, b"x")
    mutations = process.operations.mutations
    nodes = [(await process.node(name)).nodeid for name in "ab"]
    new = NewAttributes(mode=0o600)
    await mutations.setattr(nodes[0], new)
    assert mutations.setattr_now(nodes[1], new) is None
    mutations.writer.deferred.hurry("")
    await mutations.setattr(nodes[1], new)
    assert process.store.metadata("a")["mode"] == str(0o100600)
