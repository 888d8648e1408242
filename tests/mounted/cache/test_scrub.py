"""Cached copies compared in the background (the scrub)."""

from pathlib import Path

import pytest
import trio

from fusefs.cache.integrity import scrub
from fusefs.cache.integrity.scrub import Scrub
from tests.support.local_cache import Parts, cache_in, content, version
from tests.support.machine.damage import flip
from tests.support.semantics import states
from tests.support.waiting import eventually

MIB = 1 << 20
LARGE = version("large", 17 * MIB + 5)
OTHER = version("other", 100_000)


async def scrubbed(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> Scrub:
    """The scrub of a cache, after its first round."""
    monkeypatch.setattr(scrub, "START_AFTER_S", 0.0)
    cache = parts.cache
    made = Scrub(cache.residency.pages, cache.integrity)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(made.run)
        await eventually(lambda: made.describe()["state"] == "done")
        nursery.cancel_scope.cancel()
    return made


@states(
    "Larger files are compared with their checksums in the background, once after each start, and"
    " all files once a week."
)
async def test_the_scrub_drops_what_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cache_in(tmp_path) as parts:
        await parts.fetch(LARGE)
        await parts.fetch(OTHER)
        files = parts.files()
    for path in files:
        flip(path, 70_000)
    async with cache_in(tmp_path) as parts:
        made = await scrubbed(parts, monkeypatch)
        assert made.describe()["done_files"] == parts.cache.integrity.differed == 1
        assert parts.cache.find(LARGE) is None
        assert parts.cache.find(OTHER) is not None
        await made.scrub(0)
        assert parts.cache.integrity.differed == 2
        assert parts.cache.find(OTHER) is None
        await parts.fetch(LARGE)


async def test_what_is_opened_while_the_scrub_reads_it_is_dropped_too(tmp_path: Path) -> None:
    async with cache_in(tmp_path) as parts:
        await parts.fetch(LARGE)
        flip(*parts.files(), 70_000)
    async with cache_in(tmp_path, most_in_memory=0) as parts:
        [[found]] = [page async for page in parts.cache.residency.pages(0)]
        await parts.cache.residency.unload(lambda _file: None)
        held = parts.cache.pin(LARGE)
        assert await parts.cache.ensure_open(held)
        await parts.cache.integrity.examine(found)
        assert await parts.read(LARGE, 0, 100_000) == content(LARGE)[:100_000]
        parts.cache.unpin(held)


async def test_the_scrub_keeps_what_is_right_and_sums_what_had_no_sum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cache_in(tmp_path) as parts:
        await parts.fetch(LARGE)
        await parts.cache.record()
        parts.cache._catalog._db.execute("DROP TABLE sums")  # as in an old catalog
    async with cache_in(tmp_path) as parts:
        await scrubbed(parts, monkeypatch)
        file = parts.cache.find(LARGE)
        assert file.is_checked
        (path,) = parts.files()
        flip(path, 5)
        await parts.cache.integrity.examine(file)
        assert parts.cache.find(LARGE) is None


async def test_a_file_that_goes_while_it_is_examined_is_left(tmp_path: Path) -> None:
    async with cache_in(tmp_path) as parts:
        await parts.fetch(OTHER)
        file = parts.cache.find(OTHER)
        assert file is not None
        parts.files()[0].unlink()
        assert await parts.cache.integrity.examine(file) == (0, False)
        assert parts.cache.find(OTHER) is file
