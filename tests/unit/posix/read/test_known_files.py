"""The order in which readahead sees a folder: behind the reader first, then from the start."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

from fusefs.cache.listing_cache import NoListingCache
from fusefs.posix.directory.listings import Directories
from fusefs.posix.read.known_files import KnownFiles
from tests.support.local_cache import Bucket

FILES = [f"d/{number:02}" for number in range(30)]
KEYS = [*FILES, "d/sub/x", "e/1", "g", "h/1"]


@asynccontextmanager
async def known(page_size: int = 1000) -> AsyncIterator[tuple[KnownFiles, Directories]]:
    store = Bucket(KEYS, page_size)
    async with trio.open_nursery() as nursery:
        directories = Directories(store, math.inf, NoListingCache(), nursery)  # type: ignore[arg-type]
        yield KnownFiles(directories), directories
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
        async with known(page_size) as (files, directories):
            await list_all(directories, "d/")
            keys = [info.key for info in files.files("d/", "d/12")]
            assert keys == FILES[13:] + FILES[:13]
            assert [info.key for info in files.files("d/", "")] == FILES


async def test_what_is_not_listed_is_not_known() -> None:
    async with known() as (files, _):
        assert list(files.files("d/", "d/12")) == []
        assert files.next_folder("d/") is None


async def test_the_next_folder_is_the_one_that_follows_in_the_parent() -> None:
    async with known() as (files, directories):
        await list_all(directories, "")
        assert files.next_folder("d/") == "e/"
        assert files.next_folder("e/") == "h/"
        assert files.next_folder("h/") is None
