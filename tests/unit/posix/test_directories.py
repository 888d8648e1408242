"""Listings against a model: whatever the keys and page size, a directory shows what is there."""

import errno
import gc
import math
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from fusefs.posix.directory import walk
from fusefs.posix.directory.listings import MAX_ENTRIES, Directories, _size_of
from fusefs.posix.directory.segment import ABSENT, Entry
from fusefs.posix.journal.journal import Journal
from fusefs.posix.nodes.inode_table import InodeTable
from fusefs.posix.nodes.names import is_expressible, position
from fusefs.settings.patterns import PathRules
from fusefs.store.errors import AccessDeniedError
from fusefs.store.interface import ListPage, ObjectInfo
from tests.support.local_cache import Bucket
from tests.support.semantics import states
from tests.support.survival.mortal_mount import Process


@asynccontextmanager
async def listings(
    bucket: Bucket, ttl_s: float = math.inf, *, top: str = "", most_entries: int = MAX_ENTRIES
) -> AsyncIterator[Directories]:
    async with trio.open_nursery() as nursery:
        inodes, ttl = InodeTable(top, Journal(None)), PathRules(ttl_s)
        yield Directories(bucket, inodes, ttl, nursery, most_entries=most_entries)
        nursery.cancel_scope.cancel()


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
# Half of the folders have a marker, an empty object with the folder's own key.
WITH_MARKERS = PREFIXED.map(
    lambda keys: keys | {key[: key.rindex("/") + 1] for key in keys if len(key) % 2}
)


@given(PREFIXED, st.integers(1, 7))
async def test_a_stream_tells_each_name_once_in_order(keys: set[str], page_size: int) -> None:
    async with listings(Bucket(keys, page_size)) as directories:
        found = await stream(directories, "p/")
    assert [name for name, _ in found] == sorted(expected(keys, "p/"), key=position)
    assert {name: entry is None for name, entry in found} == expected(keys, "p/")


@given(PREFIXED, st.integers(1, 7), st.lists(NAME, min_size=1, max_size=12), st.data())
async def test_lookups_and_streams_in_any_order_tell_what_is_there(
    keys: set[str], page_size: int, looked_up: list[str], data: st.DataObject
) -> None:
    names = expected(keys, "p/")
    async with listings(Bucket(keys, page_size)) as directories:
        for name in looked_up + sorted(names):
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


@given(WITH_MARKERS, st.integers(1, 12), st.sampled_from([0, 3, walk.MOST_BEGUN]))
def test_a_walk_from_folder_to_folder_tells_what_is_there(
    keys: set[str], page_size: int, most_begun: int
) -> None:
    async def check() -> None:
        async with listings(Bucket(keys, page_size)) as directories:
            folders = ["p/"]
            for prefix in folders:
                found = await stream(directories, prefix)
                assert {name: entry is None for name, entry in found} == expected(keys, prefix)
                folders += [prefix + name + "/" for name, entry in found if entry is None]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(walk, "MOST_BEGUN", most_begun)
        trio.run(check)


async def test_a_walk_through_small_folders_costs_a_request_for_many_of_them() -> None:
    bucket = Bucket(f"p/{number:03}/{name}" for number in range(200) for name in "abcde")
    async with listings(bucket) as directories:
        for name, _ in await stream(directories, "p/"):
            assert len(await stream(directories, f"p/{name}/")) == 5
    assert bucket.lists <= 5


async def test_a_folder_that_two_pages_list_is_valid_as_long_as_the_first() -> None:
    bucket = Bucket((f"p/{n:03}/{name:02}" for n in range(9) for name in range(60)), 100)
    async with listings(bucket) as directories:
        for number in range(6):
            await stream(directories, f"p/{number:03}/")
        # One by itself, then pages: 001 and a part of 002, the rest and a part of 004.
        of_1, of_2, of_3 = (directories.get(f"p/00{n}/").segments[0].fetched for n in (1, 2, 3))
    assert of_1 == of_2 < of_3


async def test_a_walk_that_may_not_list_flat_pages_goes_from_folder_to_folder() -> None:
    """As with a policy of S3 that allows a prefix together with a delimiter alone."""

    class Strict(Bucket):
        async def list_page(
            self, prefix: str, *, delimiter: str = "/", start_after: str = "", **options: Any
        ) -> ListPage:
            if not delimiter:
                self.requests.append(("LIST", prefix))
                raise AccessDeniedError("the policy wants a delimiter")
            return await super().list_page(
                prefix, delimiter=delimiter, start_after=start_after, **options
            )

    bucket = Strict(f"p/{number}/{name}" for number in range(9) for name in "abc")
    async with listings(bucket) as directories:
        for name, _ in await stream(directories, "p/"):
            assert len(await stream(directories, f"p/{name}/")) == 3
    assert bucket.lists <= 1 + 9 + 1


async def test_what_is_beside_the_mounted_prefix_is_not_listed() -> None:
    bucket = Bucket(["p/a", "p/b/c", "q/d"])
    async with listings(bucket, ttl_s=0.0, top="p/") as directories:
        for _ in range(2 * walk.WALK_AFTER):
            for prefix in ("p/", "p/b/"):
                await directories.segment_behind(directories.get(prefix), "", time.monotonic())
    assert {prefix for _, prefix in bucket.requests} == {"p/", "p/b/"}


async def test_looking_up_every_file_costs_a_request_a_page_at_most() -> None:
    bucket = Bucket(f"p/{number:05}.jpg" for number in range(5000))
    async with listings(bucket) as directories:
        for number in sorted(range(5000), key=lambda number: hash((number, "shuffled"))):
            entry, _ = await directories.lookup(directories.get("p/"), f"{number:05}.jpg")
            assert isinstance(entry, ObjectInfo)
    assert bucket.lists + bucket.heads <= 40


async def test_listings_hold_no_more_entries_than_they_may() -> None:
    folders = [f"p{number}/" for number in range(5)]
    keys = [f"{folder}{number:04}" for folder in folders for number in range(1000)]
    async with listings(Bucket(keys, 100), most_entries=700) as directories:
        for folder in folders:
            assert len(await stream(directories, folder)) == 1000
            held = [one for prefix in folders for one in directories.get(prefix).segments]
            assert sum(len(one.entries) for one in held) <= 700
    assert MAX_ENTRIES == 200_000


@given(KEYS, st.integers(1, 7))
async def test_a_stream_tells_each_name_once_where_no_segment_is_kept_for_the_next(
    keys: set[str], page_size: int
) -> None:
    async with listings(Bucket(keys, page_size), most_entries=1) as directories:
        found = await stream(directories, "")
        assert [name for name, _ in found] == sorted(expected(keys, ""), key=position)
        for name in expected(keys, ""):
            entry, _ = await directories.lookup(directories.get(""), name)
            assert entry is not ABSENT
        # From where a segment began, whose neighbours are gone.
        for segment in list(directories.get("").segments):
            for at in filter(None, (segment.start, segment.stop)):
                for known in list(directories.get("").segments):
                    known.distrust()
                behind = [name for name, _ in await stream(directories, "", at)]
                assert behind == sorted(
                    (name for name in expected(keys, "") if position(name) > at), key=position
                )


async def test_what_is_looked_up_again_and_again_stays_while_others_are_dropped() -> None:
    bucket = Bucket([f"d{number:03}/a" for number in range(100)], 100)
    async with listings(bucket, most_entries=120) as directories:
        for number in range(100):
            for prefix, name in (("", f"d{number:03}"), (f"d{number:03}/", "a")):
                await directories.lookup(directories.get(prefix), name)
    # The root once, and each folder.
    assert bucket.lists == 101


async def test_a_directory_of_which_nothing_is_known_takes_no_memory() -> None:
    bucket = Bucket([f"d{number}/a" for number in range(100)], 10)
    async with listings(bucket, most_entries=20) as directories:
        for number in range(100):
            await directories.lookup(directories.get(f"d{number}/"), "a")
        gc.collect()
        assert len(directories) <= 7


async def test_a_removal_holds_where_a_page_ended_and_the_next_one_was_dropped() -> None:
    bucket = Bucket(["p/a", "p/b", "p/c"], 2)
    async with listings(bucket) as directories:
        assert [name for name, _ in await stream(directories, "p/")] == ["a", "b", "c"]
        directory = directories.get("p/")
        first, second = directory.segments
        assert first.pending  # the page ends with `b`, which stands behind its end
        directory.segments.remove(second)
        bucket.keys.remove("p/b")
        directories.changed("p/", "b", ABSENT)
        assert [name for name, _ in await stream(directories, "p/")] == ["a", "c"]


async def test_a_newer_answer_holds_where_a_page_ended_and_the_next_one_was_dropped() -> None:
    bucket = Bucket(["p/a", "p/b", "p/c"], 2)
    async with listings(bucket) as directories:
        await stream(directories, "p/")
        directory = directories.get("p/")
        dropped = directory.segments[1]
        directory.segments.remove(dropped)
        directories._entries -= _size_of(dropped)
        del directories._by_use[id(dropped)]
        heads = bucket.heads
        directories.correct(directory, "b", ObjectInfo("p/b", 9, '"new"', 0))
        assert [name for name, _ in await stream(directories, "p/")] == ["a", "b", "c"]
        assert bucket.heads > heads, "a HEAD tells of the object itself"
        sizes = [_size_of(one) for one in directory.segments]
        assert directories._entries == sum(sizes)


async def test_what_is_changed_while_its_name_is_requested_is_not_taken_back() -> None:
    bucket = Bucket(["p/a", *(f"p/a-{number}" for number in range(9))], 2)
    new = ObjectInfo("p/a", 9, '"new"', 0)

    def change(what: str, key: str) -> None:
        if (what, key) == ("HEAD", "p/a"):
            directories.changed("p/", "a", new)

    async with listings(bucket) as directories:
        directory = directories.get("p/")
        for name in ("a-0", "a-8"):  # behind the last page `a` is in doubt
            await directories.lookup(directory, name)
        bucket.before = change
        assert (await directories.lookup(directory, "a"))[0] == new
        assert bucket.heads == 1


@pytest.mark.parametrize("is_listed", [True, False])
@pytest.mark.parametrize("key", ["d//file", "d/../file", "d/" + "n" * 256, "d/file"])
@states(
    "A directory that has hidden keys alone is not empty: `rmdir` is ENOTEMPTY, also after it"
    " was listed."
)
async def test_a_directory_with_hidden_keys_is_not_removed(
    process: Process, key: str, *, is_listed: bool
) -> None:
    """It would come back with the next listing. `d/file` is beside `d/file/below`."""
    for one in ("d/", key) + (("d/file/below",) if key == "d/file" else ()):
        process.store.put(one, b"")
    if is_listed:
        assert await process.listing("d") == (["file"] if key == "d/file" else [])
    if key == "d/file":
        await process.unlink("d/file/below")
        await process.rmdir("d/file")
    with pytest.raises(OSError, match="d") as caught:
        await process.rmdir("d")
    assert caught.value.errno == errno.ENOTEMPTY
    assert sorted(process.store.objects) == ["d/", key]
