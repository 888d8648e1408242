"""Listings against a model: whatever the keys and page size, a directory shows what is there."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable

import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from fusefs.posix.directories import ABSENT, Directories, Entry
from fusefs.posix.names import is_expressible, position
from fusefs.store.base import (
    ChunkWriter,
    ListPage,
    ObjectInfo,
    ObjectVersion,
    Priority,
    Urgency,
    demanded,
)
from fusefs.store.errors import NotFoundError


class SortedKeys:
    """Lists keys as S3 does, a few at a time."""

    def __init__(self, keys: Iterable[str], page_size: int) -> None:
        self.keys = sorted(keys)
        self.page_size = page_size
        self.lists = 0
        self.heads = 0

    async def list_page(
        self,
        prefix: str,
        *,
        delimiter: str = "/",
        start_after: str = "",
        token: str | None = None,
        max_keys: int = 1000,
        priority: Priority = Priority.DEMAND,
    ) -> ListPage:
        await trio.lowlevel.checkpoint()
        self.lists += 1
        entries: list[str] = []
        for key in self.keys[bisect_right(self.keys, start_after) if start_after else 0 :]:
            if not key.startswith(prefix):
                continue
            rest = key[len(prefix) :]
            cut = rest.find(delimiter) if delimiter else -1
            entry = key if cut < 0 else prefix + rest[: cut + 1]
            if not entries or entries[-1] != entry:
                entries.append(entry)
        size = min(self.page_size, max_keys)
        page = entries[:size]
        objects = [info(key) for key in page if not key.endswith("/") or key == prefix]
        prefixes = [key for key in page if key.endswith("/") and key != prefix]
        token = "more" if len(entries) > size else None
        return ListPage(objects, prefixes, token, page[-1] if page else "")

    async def head(self, key: str, *, priority: Priority = Priority.DEMAND) -> ObjectInfo:
        await trio.lowlevel.checkpoint()
        self.heads += 1
        if key not in self.keys:
            raise NotFoundError(key)
        return info(key)

    async def download(
        self,
        version: ObjectVersion,
        start: int,
        stop: int,
        write: ChunkWriter,
        *,
        priority: Urgency = demanded,
    ) -> None:
        raise AssertionError("nothing is read here")

    def hurry(self) -> None:
        pass

    def counters(self) -> dict[str, int]:
        return {}


def info(key: str) -> ObjectInfo:
    return ObjectInfo(key, 1, '"e"', 0)


def expected(keys: Iterable[str], prefix: str) -> dict[str, bool]:
    """The names in a directory, and whether each is a directory."""
    found: dict[str, bool] = {}
    for key in keys:
        rest = key[len(prefix) :]
        if key.startswith(prefix) and rest:
            name, slash, _ = rest.partition("/")
            found[name] = found.get(name, False) or bool(slash)
    return found


async def stream(directories: Directories, prefix: str, at: str = "") -> list[tuple[str, Entry]]:
    """Read a directory to its end, from a position on, as a directory handle does."""
    directory = directories.get(prefix)
    result: list[tuple[str, Entry]] = []
    position_now: str | None = at
    while position_now is not None:
        segment = await directories.segment_behind(directory, position_now, 0.0)
        for name in segment.ordered[segment.after(position_now) :]:
            result.append((name, segment.entries[name]))
        position_now = segment.stop
    return result


# Characters on both sides of "/" in S3's order, few enough for names to be prefixes of others.
NAME = st.text("ab-.0\U0001f600", min_size=1, max_size=4).filter(is_expressible)
KEYS = st.sets(st.lists(NAME, min_size=1, max_size=3).map("/".join), min_size=1, max_size=40)
PREFIXED = KEYS.map(lambda keys: {"p/" + key for key in keys})


@given(PREFIXED, st.integers(1, 7))
@settings(deadline=None)
def test_a_stream_tells_each_name_once_in_order(keys: set[str], page_size: int) -> None:
    async def check() -> None:
        found = await stream(Directories(SortedKeys(keys, page_size), math.inf), "p/")
        assert [name for name, _ in found] == sorted(expected(keys, "p/"), key=position)
        assert {name: entry is None for name, entry in found} == expected(keys, "p/")

    trio.run(check)


@given(PREFIXED, st.integers(1, 7), st.lists(NAME, min_size=1, max_size=12), st.data())
@settings(deadline=None)
def test_lookups_and_streams_in_any_order_tell_what_is_there(
    keys: set[str], page_size: int, asked: list[str], data: st.DataObject
) -> None:
    async def check() -> None:
        directories = Directories(SortedKeys(keys, page_size), math.inf)
        names = expected(keys, "p/")
        for name in asked + sorted(names):
            if data.draw(st.booleans()):
                ordered = sorted(names, key=position)
                start = data.draw(st.sampled_from(["", *map(position, ordered)]))
                found = [name for name, _ in await stream(directories, "p/", start)]
                assert found == [name for name in ordered if position(name) > start]
            entry, _ = await directories.lookup(directories.get("p/"), name)
            if name in names:
                assert entry is not ABSENT
                assert (entry is None) == names[name]
            else:
                assert entry is ABSENT

    trio.run(check)


def test_looking_up_every_file_costs_a_request_a_page_at_most() -> None:
    async def check() -> None:
        store = SortedKeys([f"p/{number:05}.jpg" for number in range(5000)], 1000)
        directories = Directories(store, math.inf)
        for number in sorted(range(5000), key=lambda number: hash((number, "shuffled"))):
            entry, _ = await directories.lookup(directories.get("p/"), f"{number:05}.jpg")
            assert isinstance(entry, ObjectInfo)
        assert store.lists + store.heads <= 40

    trio.run(check)


def test_a_name_that_is_not_there_is_asked_for_once() -> None:
    async def check() -> None:
        store = SortedKeys(["p/a", "p/b"], 1000)
        directories = Directories(store, math.inf)
        for _ in range(3):
            entry, _ = await directories.lookup(directories.get("p/"), "absent")
            assert entry is ABSENT
        assert (store.lists, store.heads) == (1, 0)

    trio.run(check)


def test_with_a_ttl_of_zero_every_lookup_asks_again() -> None:
    async def check() -> None:
        store = SortedKeys(["p/a"], 1000)
        directories = Directories(store, 0.0)
        assert isinstance((await directories.lookup(directories.get("p/"), "a"))[0], ObjectInfo)
        store.keys = []
        assert (await directories.lookup(directories.get("p/"), "a"))[0] is ABSENT

    trio.run(check)
