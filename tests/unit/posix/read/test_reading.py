"""Opens: of files that are whole, replaced or fetched ahead, and of names that are just changed."""

import errno
import math
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from fusefs.cache.file_cache import FileCache
from fusefs.cache.quota import Quota
from fusefs.cache.readahead.siblings import FOLDER_AFTER, UNREAD_EACH
from fusefs.posix.directory.listings import Directories
from fusefs.posix.journal.journal import Journal
from fusefs.posix.nodes.inode_table import InodeTable
from fusefs.settings.patterns import PathRules
from fusefs.store.errors import ArchivedError
from fusefs.store.interface import ObjectVersion
from tests.support.local_cache import Bucket
from tests.support.memory_store import MemoryStore
from tests.support.survival.mortal_mount import MortalMount, Process
from tests.support.waiting import eventually

FILES = [f"d/{number:02}" for number in range(30)]
KEYS = [*FILES, "d/sub/x", "e/1", "g", "h/1"]


@asynccontextmanager
async def known(page_size: int = 1000) -> AsyncIterator[Directories]:
    store = Bucket(KEYS, page_size)
    async with trio.open_nursery() as nursery:
        directories = Directories(
            store,  # type: ignore[arg-type]
            InodeTable("", Journal(None)),
            PathRules(math.inf),
            nursery,
        )
        yield directories
        nursery.cancel_scope.cancel()


async def list_all(directories: Directories, prefix: str) -> None:
    directory, position = directories.get(prefix), ""
    while True:
        segment = await directories.segment_behind(directory, position, -math.inf)
        if segment.stop is None:
            return
        position = segment.stop


async def test_files_come_from_the_reader_on_and_then_from_the_start() -> None:
    for page_size in (7, 1000):
        async with known(page_size) as directories:
            await list_all(directories, "d/")
            keys = [info.key for info in directories.files("d/", "d/12")]
            assert keys == FILES[13:] + FILES[:13]
            assert [info.key for info in directories.files("d/", "")] == FILES


async def test_what_is_not_listed_is_not_known() -> None:
    async with known() as directories:
        assert list(directories.files("d/", "d/12")) == []
        assert directories.next_folder("d/") is None


async def test_the_next_folder_is_the_one_that_follows_in_the_parent() -> None:
    async with known() as directories:
        await list_all(directories, "")
        assert directories.next_folder("d/") == "e/"
        assert directories.next_folder("e/") == "h/"
        assert directories.next_folder("h/") is None


async def test_without_passthrough_opens_of_what_was_fetched_ahead_count(tmp_path: Path) -> None:
    mount, count, missed = MortalMount(tmp_path), 300, 0
    for number in range(count):
        mount.store.put(f"d/{number:04}", b"x" * 1000)
    async with mount.serving() as process:
        await process.listing("d")
        operations = process.operations
        for number in range(count):
            info = (await process.node(f"d/{number:04}")).info
            file = operations.cache.find(info.version)
            missed += file is None or not file.is_complete
            handle = await process.open(f"d/{number:04}")
            await process.read(handle)
            operations.release(handle)
            await trio.testing.wait_all_tasks_blocked()
            await eventually(lambda: not operations.downloader.under_way)
    assert missed == FOLDER_AFTER


async def test_a_folder_whose_files_are_refused_is_not_requested_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mount, gets, opens = MortalMount(tmp_path), 0, 10
    for number in range(1000):
        mount.store.put(f"d/{number:04}", b"x" * 1000)

    async def refuse(*_: Any, **__: Any) -> None:
        nonlocal gets
        gets += 1
        await trio.lowlevel.checkpoint()
        raise ArchivedError("it is archived")

    monkeypatch.setattr(mount.store, "download", refuse)
    async with mount.serving() as process:
        await process.listing("d")
        for number in range(opens):
            with pytest.raises(OSError, match="it is archived"):
                await process.open(f"d/{number:04}")
            await trio.testing.wait_all_tasks_blocked()
            await eventually(lambda: not process.operations.downloader.under_way)
    assert opens <= gets <= opens + UNREAD_EACH * FOLDER_AFTER


CONTENT = bytes(range(256)) * (16 << 10)
OTHER = bytes(reversed(CONTENT))


@pytest.mark.parametrize("size", [0, 1000, 256 << 10, 1 << 20])
async def test_a_replaced_object_is_not_opened_as_it_was(tmp_path: Path, size: int) -> None:
    """However much of the old version is there: what is missing could not be read any more."""
    mount = MortalMount(tmp_path)
    mount.store.put("file", CONTENT)
    async with mount.serving() as process:
        inode = await process.node("file")
        # As a download leaves it that was broken off, or whose process was killed.
        cache = process.operations.cache
        file = cache.pin(ObjectVersion("file", inode.info.etag, len(CONTENT)))
        await cache.ensure_open(file)
        cache.arrived(file, 0, size)
        mount.store.put("file", OTHER)
        with pytest.raises(OSError, match="stands for something else") as caught:
            await process.open("file")
        assert caught.value.errno == errno.ESTALE
        fh = await process.open("file")
        assert await process.read(fh, 2 << 20, 1000) == OTHER[2 << 20 :][:1000]
        cache.unpin(file)


THERE = bytes(range(256)) * 64


@pytest.fixture
def mount(mount: MortalMount) -> MortalMount:
    mount.store.put("file", THERE)
    return mount


async def fetched(process: Process) -> None:
    """Have the file in the cache, and in its catalog."""
    assert await process.load("file") == THERE
    await process.operations.cache.record()


async def test_a_file_that_is_whole_is_opened_at_once(process: Process) -> None:
    await fetched(process)
    inode = await process.node("file")
    before = len(process.store.requests)
    for _ in range(2):
        opened = process.operations.open(inode.nodeid, 0, process.caller())
        assert not hasattr(opened, "send"), "it waits"
        file = process.operations.handles.files[opened.fh].file
        assert file.fd == -1
    assert await process.read(opened.fh) == THERE
    assert file.fd >= 0
    assert len(process.store.requests) == before


async def test_what_another_mount_evicted_since_is_fetched_again(
    process: Process, tmp_path: Path
) -> None:
    await fetched(process)
    fh = await process.open("file")
    other = FileCache(tmp_path / "cache", "test", Quota(tmp_path, None, lambda _size: 0))
    (same,) = other.files()
    await other.evict(same)
    assert other.evicted == 1
    await other.aclose(sync=False)
    before = process.store.count("GET")
    assert await process.read(fh) == THERE
    assert process.store.count("GET") > before


class SlowListing:
    """Has the answer to the first LIST wait, until `let_go`."""

    def __init__(self, store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
        self.let_go = trio.Event()
        self.answered = 0
        list_page = store.list_page

        async def slow(prefix: str, **options: Any) -> object:
            found = await list_page(prefix, **options)
            self.answered += 1
            if self.answered == 1:
                await self.let_go.wait()
            return found

        monkeypatch.setattr(store, "list_page", slow)


async def open_by_node(process: Process, nodeid: int) -> None:
    """An open for which the kernel does not look the name up, and which asks the bucket."""
    inode = process.operations.inodes.get(nodeid)
    inode.looked_up, inode.valid_until = False, 0.0
    for segment in process.writer.directories.get("").segments:
        segment.sure_until = 0.0
    answer = process.operations.open(nodeid, os.O_RDONLY, process.caller())
    assert hasattr(answer, "__await__")
    with suppress(OSError):  # ESTALE, for the kernel to look the name up
        process.operations.release((await answer).fh)


@pytest.mark.parametrize("is_closed", [True, False])
async def test_an_open_that_asked_before_a_write_takes_nothing_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_closed: bool
) -> None:
    mount = MortalMount(tmp_path)
    mount.store.put("file", b"old")
    async with mount.serving() as process:
        assert await process.load("file") == b"old"
        nodeid = (await process.node("file")).nodeid
        if not is_closed:
            mount.store.put("file", b"another client's")
        listing = SlowListing(mount.store, monkeypatch)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(open_by_node, process, nodeid)
            await eventually(lambda: listing.answered == 1)
            fh = await process.open("file", os.O_WRONLY | os.O_TRUNC)
            await process.write(fh, 0, b"new")
            if is_closed:
                await process.close(fh)
            listing.let_go.set()
        assert await process.load("file") == b"new"
        if not is_closed:
            await process.close(fh)
    assert mount.store.contents()["file"] == b"new"
