"""For how long a LIST page is relied on, and which pages are asked for again."""

import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
import trio

from fusefs.posix.directory import freshness
from fusefs.posix.directory.freshness import HOT_S, STILL_S, Creations, belief_s
from fusefs.posix.directory.listings import Directories
from fusefs.posix.directory.segment import ABSENT
from fusefs.posix.journal.journal import Journal
from fusefs.posix.nodes.inode_table import InodeTable
from fusefs.settings.patterns import PathRules
from fusefs.store.interface import ListPage, ObjectInfo, UnansweredChanges
from tests.support.semantics import states
from tests.support.survival.mortal_mount import MortalMount, answered

TTL_S = 60.0
RULE = states(
    "Where others have changed a directory within the last 10 seconds, each open, each listing and"
    " each search for a missing name asks the bucket anew. Later its listing is relied on for a"
    " second at first, and each look that finds it unchanged doubles that, up to"
    " `--metadata-ttl`. Where nothing was modified for an hour it is relied on for that long from"
    " the first look on."
)


@pytest.mark.parametrize(
    ("still_s", "before_s", "expected"),
    [
        (0.0, 0.0, 0.0),
        (HOT_S - 0.1, 32.0, 0.0),
        (HOT_S, 0.0, 1.0),
        (HOT_S, 1.0, 2.0),
        (600.0, 16.0, 32.0),
        (600.0, 32.0, TTL_S),
        (STILL_S, 0.0, TTL_S),
    ],
)
def test_the_belief_doubles_up_to_the_most(
    still_s: float, before_s: float, expected: float
) -> None:
    assert belief_s(still_s, before_s, TTL_S) == expected


@pytest.mark.parametrize("most_s", [0.0, 0.5, math.inf])
def test_a_short_or_endless_ttl_stays_what_it_is(most_s: float) -> None:
    for still_s in (HOT_S, STILL_S):
        assert belief_s(still_s, 0.0, most_s) == most_s


def test_a_program_that_makes_file_after_file_is_known_by_its_pace() -> None:
    made = Creations()
    for number in range(freshness.MANY):
        assert not made.are_many(number * 0.05)
        made.note(number * 0.05, is_new=True)
    latest = (freshness.MANY - 1) * 0.05
    assert made.are_many(latest + 0.05)
    assert not made.are_many(latest + 0.2)
    made.note(latest + 0.05, is_new=False)  # it is in the bucket
    assert made.are_many(latest + 0.1)
    made.note(latest + 0.2, is_new=True)
    assert not made.are_many(latest + 0.2)


class OldBucket:
    """A bucket in memory of one directory, `d/`, whose objects were modified some time ago."""

    def __init__(self, names: list[str], age_s: float) -> None:
        self.objects = {name: self.made(name, age_s) for name in names}
        self.lists = 0
        self.unanswered = UnansweredChanges()

    def made(self, name: str, age_s: float = 0.0, etag: str = '"1"') -> ObjectInfo:
        return ObjectInfo(f"d/{name}", 1, etag, int((time.time() - age_s) * 1e9), "STANDARD")

    async def list_page(self, prefix: str, **_: object) -> ListPage:
        assert prefix == "d/"
        self.lists += 1
        return ListPage([self.objects[name] for name in sorted(self.objects)], [], None, "")


class Doubted(InodeTable):
    """Nodes that note which directories are doubted."""

    def __init__(self) -> None:
        super().__init__("", Journal(None))
        self.doubted: list[str] = []

    def doubt(self, prefix: str) -> None:
        self.doubted.append(prefix)


@asynccontextmanager
async def listings(
    bucket: OldBucket, inodes: InodeTable | None = None
) -> AsyncIterator[Directories]:
    async with trio.open_nursery() as nursery:
        yield Directories(
            bucket,  # type: ignore[arg-type]
            inodes or Doubted(),
            PathRules(TTL_S),
            nursery,
        )
        nursery.cancel_scope.cancel()


async def opened(directories: Directories, name: str = "a") -> object:
    return (await directories.lookup(directories.get("d/"), name, is_opened=True))[0]


def pass_time(directories: Directories, seconds: float) -> None:
    """Let a directory, and what is known of it, be older."""
    directory = directories.get("d/")
    directory.changed -= seconds
    directory.doubted -= seconds
    for segment in directory.segments:
        segment.fetched -= seconds
        segment.expires -= seconds
        segment.sure_until -= seconds


@RULE
async def test_what_was_still_for_an_hour_is_asked_for_once_in_its_time() -> None:
    bucket = OldBucket(["a", "b"], STILL_S + 1)
    async with listings(bucket) as directories:
        for _ in range(59):
            await opened(directories)
            await opened(directories, "b")
            pass_time(directories, 1)
    assert bucket.lists == 1


@RULE
@states(
    "Of a file that is read again and again while others replace it, opens show the new version"
    " after as long as it was unchanged before, `--metadata-ttl` at most."
)
async def test_a_minute_of_looks_at_younger_files_takes_six_requests() -> None:
    bucket = OldBucket(["a"], HOT_S + 1)
    async with listings(bucket) as directories:
        for _ in range(600):
            await opened(directories)
            pass_time(directories, 0.1)
    assert bucket.lists == 6  # after 1, 3, 7, 15 and 31 seconds


@RULE
async def test_what_others_have_just_changed_is_asked_for_at_each_open() -> None:
    bucket = OldBucket(["a"], STILL_S + 1)
    async with listings(bucket) as directories:
        await opened(directories)
        pass_time(directories, TTL_S + 1)
        bucket.objects["a"] = bucket.made("a", etag='"2"')
        for _ in range(5):
            assert await opened(directories) == bucket.objects["a"]
        assert bucket.lists == 6
        pass_time(directories, HOT_S + 1)
        await opened(directories)
        await opened(directories)
        assert bucket.lists == 7


@states(
    "A name that exists, and its attributes, are shown for a second without a request, also where"
    " others change the directory."
)
async def test_names_are_shown_without_a_request_while_a_directory_changes() -> None:
    """`ls -l` there is no request for each file."""
    bucket = OldBucket(["a"], 0)
    async with listings(bucket) as directories:
        directory = directories.get("d/")
        for _ in range(5):
            assert (await directories.lookup(directory, "a"))[0] == bucket.objects["a"]
    assert bucket.lists == 1


async def test_a_missing_name_is_believed_for_a_second_however_still_its_directory_is() -> None:
    bucket = OldBucket(["a"], STILL_S + 1)
    async with listings(bucket) as directories:
        for expected in (1, 1, 2):
            assert await opened(directories, "new") is ABSENT
            assert bucket.lists == expected
            pass_time(directories, 0.6)


@states(
    "Any sign of a change has the whole directory looked at again, and starts that anew: an ETag"
    " that differs, an object that is gone, a change of this mount's own."
)
@pytest.mark.parametrize("sign", ["own write", "another version", "gone"])
async def test_any_sign_of_a_change_has_a_directory_looked_at_again(sign: str) -> None:
    bucket = OldBucket(["a", "b"], STILL_S + 1)
    inodes = Doubted()
    async with listings(bucket, inodes) as directories:
        directory = directories.get("d/")
        await opened(directories)
        await opened(directories)
        assert bucket.lists == 1
        if sign == "own write":
            bucket.objects["c"] = bucket.made("c")
            directories.changed("d/", "c", bucket.objects["c"])
        else:
            theirs = bucket.made("b", etag='"2"') if sign == "another version" else None
            directories.correct(directory, "b", theirs)
        assert inodes.doubted == ["d/"]
        await opened(directories)
        assert bucket.lists == 2


async def test_a_page_that_was_requested_before_a_change_of_ours_is_not_relied_on() -> None:
    bucket = OldBucket(["a"], STILL_S + 1)
    async with listings(bucket) as directories:
        list_page = bucket.list_page

        async def meanwhile(prefix: str, **more: object) -> ListPage:
            page = await list_page(prefix, **more)
            directories.changed("d/", "c", replace(bucket.objects["a"], key="d/c"))
            bucket.list_page = list_page  # type: ignore[method-assign]
            return page

        bucket.list_page = meanwhile  # type: ignore[method-assign]
        await opened(directories)
        await opened(directories)
    assert bucket.lists == 2


@pytest.mark.parametrize(("unsettled_s", "valid_s"), [(0.0, math.inf), (60.0, 0.0)])
async def test_the_kernel_believes_for_ever_only_what_no_request_of_a_dead_daemon_can_change(
    mount: MortalMount, monkeypatch: pytest.MonkeyPatch, unsettled_s: float, valid_s: float
) -> None:
    mount.ttl_s = math.inf
    monkeypatch.setattr(UnansweredChanges, "unsettled_s", unsettled_s)
    async with mount.serving() as process:
        for _ in range(2):
            found = await answered(process.operations.lookup(1, b"missing", process.caller()))
            assert (found.inode, found.valid_s) == (None, valid_s)
