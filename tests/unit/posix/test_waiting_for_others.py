"""Changes that wait for others, and changes that walks meet."""

import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
import trio.testing
from trio.testing import wait_all_tasks_blocked

from fusefs.posix.directory import pending_changes
from fusefs.posix.directory.listings import Directories
from fusefs.posix.directory.pending_changes import KEPT_S, PendingChanges
from fusefs.posix.directory.segment import ABSENT, Segment
from fusefs.posix.journal.journal import Journal
from fusefs.posix.metadata.deferred_attributes import DeferredAttributes
from fusefs.posix.nodes.inode_table import InodeTable
from fusefs.posix.write import flush, staged_sums, uploader
from fusefs.posix.write.removals import MANY, Removals
from fusefs.settings.patterns import PathRules
from fusefs.settings.types import Durability
from fusefs.store.errors import StoreError
from fusefs.store.interface import ObjectInfo
from fusefs.telemetry.stalls import CAUSES, STALLS, WaitCause, served, stage
from tests.support.local_cache import Bucket
from tests.support.memory_store import MemoryStore, failing
from tests.support.survival.mortal_mount import MortalMount
from tests.support.waiting import eventually
from tests.unit.posix.test_directories import listings

# A cause that nothing else has in these tests.
AT = WaitCause.THROTTLED


class Held:
    """Something that takes until it may end, and is at AT meanwhile."""

    def __init__(self) -> None:
        self.begun = trio.Event()
        self.may_end = trio.Event()

    async def pass_by(self) -> None:
        with stage(AT):
            self.begun.set()
            await self.may_end.wait()


class HeldStore(MemoryStore):
    """A bucket that answers changes of files when it may."""

    def __init__(self, held: Held) -> None:
        super().__init__()
        self.held = held
        self.pause = self._pause
        self.kinds = ["PUT", "COPY", "DELETE", "DELETES"]
        self.changes: list[str] = []

    async def _pause(self) -> None:
        what, key = self.requests[-1]
        if what in self.kinds and not key.endswith("/"):
            self.changes.append(key)
            await self.held.pass_by()


def waited() -> dict[str, float]:
    return dict(zip(CAUSES, STALLS.totals().wait, strict=True))


async def assert_waits_for(held: Held, request: Callable[[], Awaitable[object]]) -> None:
    """The request waits for what is held, for nothing else, and from its own start on."""
    await held.begun.wait()
    before = waited()
    assert waited() == before  # nothing waits yet

    async def serve() -> None:
        with served():
            await request()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve)
        await trio.testing.wait_all_tasks_blocked()
        changed = {cause for cause, seconds in waited().items() if seconds > before[cause]}
        held.may_end.set()
    assert changed == {CAUSES[AT], "any"}
    before = waited()
    assert waited() == before  # the request has its answer


async def test_a_write_waits_for_the_upload_of_its_file(mount: MortalMount) -> None:
    mount.store = HeldStore(held := Held())
    async with mount.serving() as process:
        fh = await process.create("file", b"content")
        staged = (await process.node("file")).staged
        assert staged is not None
        process.writer.uploads.start(staged)
        await assert_waits_for(held, lambda: process.write(fh, 0, b"CON"))
        await process.close(fh)
    assert mount.store.contents() == {"file": b"CONtent"}


async def test_programs_do_not_wait_behind_uploads_that_no_program_waits_for(
    mount: MortalMount, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flush, "LATER_S", 0.01)
    monkeypatch.setattr(staged_sums, "SMALL", 0)
    monkeypatch.setattr(staged_sums, "_checking", trio.CapacityLimiter(0))  # of large files
    monkeypatch.setattr(uploader, "IN_PARTS", 1)  # larger files have places of their own
    store = mount.store = HeldStore(held := Held())
    store.kinds = ["PUT"]
    rules = PathRules(Durability.LOCAL, ((Durability.BUCKET, "new/**"),))
    async with mount.serving(durability=rules, uploads=2) as process, trio.open_nursery() as tasks:
        await process.mkdir("old")
        for name in (*"abcdefi", "old/g", "old/h"):
            await process.save(name, name[-1:].encode())
            await eventually(lambda: len(store.changes) == min(2, len(process.writer.staging)))
        await process.save("large", b"large")
        await eventually(lambda: len(store.changes) == 3)
        process.writer.backlog.hurry("")  # as `fusefs sync` does, here and below for one file
        await wait_all_tasks_blocked()
        await process.rename("c", "moved")
        await process.unlink("d")
        await process.overwrite("e", b"E")
        (last,) = process.writer.backlog.files("f")
        with trio.move_on_after(0.1):  # the program is killed then
            await process.writer.uploads.wait(last)
        assert store.changes == ["a", "b", "large", "f"]
        process.writer.backlog.hurry("i")
        tasks.start_soon(process.rename, "old", "new")
        await eventually(lambda: sorted(store.changes[4:]) == ["i", "new/g", "new/h"])
        held.may_end.set()
        await eventually(lambda: not process.writer.staging.pending)
    changed = {"i": b"i", "large": b"large", "moved": b"c", "e": b"E", "new/g": b"g", "new/h": b"h"}
    assert store.contents() == {"a": b"a", "b": b"b", "f": b"f"} | changed


@asynccontextmanager
async def attributes(held: Held, mount: MortalMount) -> AsyncIterator[DeferredAttributes]:
    """Of a mount whose object `file` has a mode that the bucket does not have yet."""
    mount.store = HeldStore(held)
    mount.store.put("file", b"content")
    async with mount.serving() as process:
        node = await process.node("file")
        with served():  # as the request that changes them, which does not wait
            await process.set_attributes(node, mode=0o600)
        yield process.writer.deferred


async def test_an_fsync_waits_for_attributes_that_are_sent(mount: MortalMount) -> None:
    held = Held()
    async with attributes(held, mount) as deferred:
        deferred.hurry("file")
        await assert_waits_for(held, lambda: deferred.flush("file"))


async def test_an_fsync_that_sends_attributes_waits_for_them_once(mount: MortalMount) -> None:
    held = Held()
    async with attributes(held, mount) as deferred, trio.open_nursery() as nursery:

        async def fsync() -> None:
            with served():
                await deferred.flush("file")

        nursery.start_soon(fsync)
        await trio.testing.wait_all_tasks_blocked()
        before = STALLS.totals()
        await trio.sleep(0.01)
        after = STALLS.totals()
        stalled = after.stalled[AT] - before.stalled[AT]
        # One request waits: each second of it is one second of waiting.
        assert after.wait[AT] - before.wait[AT] == pytest.approx(stalled)
        assert stalled > 0
        held.may_end.set()


@asynccontextmanager
async def removals(store: MemoryStore, directory: Path) -> AsyncIterator[Removals]:
    """Of a program that removes many files of the directory `a/`."""
    async with trio.open_nursery() as nursery:
        inodes, ttl = InodeTable("", Journal(None)), PathRules(60.0)
        directories = Directories(store, inodes, ttl, nursery)
        made = Removals(store, directories, directory, nursery)
        for number in range(MANY):
            assert not made.try_defer(f"a/{number}", None)
        made.note_allowed("a/0")
        yield made
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("is_again", [True, False])
async def test_a_change_waits_for_a_removal_that_is_sent_with_others_or_tried_again(
    tmp_path: Path, *, is_again: bool
) -> None:
    store = HeldStore(Held())
    store.put("a/file")
    etag = store.objects["a/file"].info.etag
    async with removals(store, tmp_path) as sent:
        if is_again:
            sent.adopt("a/file", etag, time.time_ns(), is_on_record=False)
        else:
            with served():  # as the request of the program that removes, which does not wait
                assert sent.try_defer("a/file", etag)
        await assert_waits_for(store.held, lambda: sent.flush("a/file"))
    assert store.contents() == {}


async def test_a_removal_that_failed_is_waited_for_by_itself(tmp_path: Path) -> None:
    store = HeldStore(Held())
    store.put("a/file")
    store.held.may_end.set()
    store.before = failing(StoreError("not now"), "DELETED")
    async with removals(store, tmp_path) as sent:
        assert sent.try_defer("a/file", store.objects["a/file"].info.etag)
        (removal,) = sent.pending("")
        await removal.attempted.wait()
        store.held = Held()
        sent.hurry("a/file")
        await assert_waits_for(store.held, lambda: sent.flush("a/file"))
    assert store.contents() == {}


@pytest.mark.parametrize(("later_s", "others"), [(2 * KEPT_S, 1), (0.0, 50)])
async def test_a_walk_that_rests_shows_what_was_changed_before_long_or_very_many_others(
    monkeypatch: pytest.MonkeyPatch, later_s: float, others: int
) -> None:
    monkeypatch.setattr(pending_changes, "MOST_KEPT", 10)
    keys = [f"top/{folder}/{name}" for folder in "abcdefgh" for name in "123"]
    bucket = Bucket(keys, page_size=5)
    monotonic = time.monotonic

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
        monkeypatch.setattr(time, "monotonic", lambda: monotonic() + later_s)
        for number in range(others):
            directories.changed("other/", f"{number}", ABSENT)
        for folder in "efg":
            assert await names_in(directories, folder) == ["2", "3"]
            await wait_all_tasks_blocked()


async def test_what_a_page_has_left_for_the_next_one_is_not_shown_when_it_is_out_of_date(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bucket = Bucket(["a", "a-1", "a-2", "a-3"], page_size=2)  # "a" stands behind "a-3"
    monotonic = time.monotonic
    async with listings(bucket, ttl_s=60) as directories:
        directory = directories.get("")
        first = await directories.segment_behind(directory, "", time.monotonic())
        assert first.stop is not None
        await wait_all_tasks_blocked()
        monkeypatch.setattr(time, "monotonic", lambda: monotonic() + 1000)
        bucket.keys.remove("a")  # by another client
        second = await directories.segment_behind(directory, first.stop, time.monotonic())
        assert "a" not in second.entries


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
        known = [f"{number}" for number in range(41, 51)]
        assert directories.pending_changes.removed("other/") == known


def test_a_page_gets_the_lasting_changes_of_its_own_names_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    local, page = PendingChanges(), Segment("b/", "m/", {}, fetched=math.inf)
    for prefix in ("old/", "new/", "d/"):
        for name in ("z", "c", "m", "a", "c"):
            local.set(prefix, name, ObjectInfo(prefix + name, 0, "", 0), lasting=True)
    local.landed("new/", "c")
    local.move("old/", "new/")
    local.set("d/", "c", ABSENT, lasting=False)
    put: list[str] = []
    monkeypatch.setattr(pending_changes, "put", lambda _page, name, _entry: put.append(name))
    for prefix in ("old/", "new/", "d/"):
        local.apply(prefix, page)
    assert put == ["c", "m", "m"]
