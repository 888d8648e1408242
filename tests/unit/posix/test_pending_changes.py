"""What is remembered of this mount's changes, and for how long."""

import time

import pytest
from trio.testing import wait_all_tasks_blocked

from fusefs.posix.directory import pending_changes
from fusefs.posix.directory.listings import Directories
from fusefs.posix.directory.pending_changes import KEPT_S, PendingChanges
from fusefs.posix.directory.segment import ABSENT
from fusefs.store.interface import ObjectInfo
from tests.support.local_cache import Bucket
from tests.unit.posix.test_directories import listings


async def test_a_walk_that_rests_shows_what_was_changed_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys = [f"top/{folder}/{name}" for folder in "abcdefgh" for name in "123"]
    bucket = Bucket(keys, page_size=5)
    elapsed = 0.0
    monotonic = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + elapsed)

    async def names_in(directories: Directories, folder: str) -> list[str]:
        directory = directories.get(f"top/{folder}/")
        segment = await directories.segment_behind(directory, "", time.monotonic())
        return segment.ordered

    async with listings(bucket) as directories:
        for folder in "abcd":  # a walk: what is listed ends within e
            assert await names_in(directories, folder) == ["1", "2", "3"]
            await wait_all_tasks_blocked()
        for folder in "efg":
            bucket.keys.remove(f"top/{folder}/1")
            directories.changed(f"top/{folder}/", "1", ABSENT)
        elapsed = 2 * KEPT_S
        directories.changed("top/h/", "4", ABSENT)
        for folder in "efg":
            assert await names_in(directories, folder) == ["2", "3"]
            await wait_all_tasks_blocked()


async def test_what_a_page_has_left_for_the_next_one_is_not_shown_when_it_is_out_of_date(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bucket = Bucket(["a", "a-1", "a-2", "a-3"], page_size=2)  # "a" stands behind "a-3"
    elapsed = 0.0
    monotonic = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + elapsed)
    async with listings(bucket, ttl_s=60) as directories:
        opened = time.monotonic()
        directory = directories.get("")
        first = await directories.segment_behind(directory, "", opened)
        assert first.stop is not None
        await wait_all_tasks_blocked()
        elapsed = 1000.0
        bucket.keys.remove("a")  # by another client
        second = await directories.segment_behind(directory, first.stop, time.monotonic())
        assert "a" not in second.entries


def test_of_very_many_removals_a_bounded_number_is_known_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pending_changes, "MOST_KEPT", 100)
    local = PendingChanges()
    for number in range(1000):
        local.set("dir/", f"file{number}", ABSENT, lasting=False)
    assert local.removed("dir/") == [f"file{number}" for number in range(900, 1000)]


async def test_a_listing_under_way_shows_changes_before_very_many_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pending_changes, "MOST_KEPT", 10)
    bucket = Bucket(["gone", "stays"])

    async with listings(bucket) as directories:

        def change(_request: str, _key: str) -> None:
            """After the bucket has made its answer, and before that is here."""
            directories.changed("", "gone", ABSENT)
            directories.changed("", "new", ObjectInfo("new", 0, '"1"', 0))
            for number in range(50):
                directories.changed("other/", f"{number}", ABSENT)

        bucket.after = change
        segment = await directories.segment_behind(directories.get(""), "", time.monotonic())
        assert segment.ordered == ["new", "stays"]
        directories.changed("other/", "50", ABSENT)
        assert len(directories.pending_changes.removed("other/")) == 10


async def test_a_walk_that_rests_shows_changes_before_very_many_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pending_changes, "MOST_KEPT", 10)
    bucket = Bucket([f"top/{folder}/{name}" for folder in "abcdefgh" for name in "123"], 5)

    async with listings(bucket) as directories:
        for folder in "abcd":  # a walk: what is listed ends within e
            await directories.segment_behind(directories.get(f"top/{folder}/"), "", 0.0)
            await wait_all_tasks_blocked()
        for folder in "efg":
            bucket.keys.remove(f"top/{folder}/1")
            directories.changed(f"top/{folder}/", "1", ABSENT)
        for number in range(50):
            directories.changed("other/", f"{number}", ABSENT)
        for folder in "efg":
            directory = directories.get(f"top/{folder}/")
            segment = await directories.segment_behind(directory, "", time.monotonic())
            assert segment.ordered == ["2", "3"]
            await wait_all_tasks_blocked()
