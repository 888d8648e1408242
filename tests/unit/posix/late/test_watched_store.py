"""Changes of uncertain keys: late requests that come while they are made, or after all is done."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from fusefs.posix.late import watched_store
from fusefs.posix.late.repair import Repairer
from fusefs.posix.late.request_log import COPY, DELETE, PUT, Change
from fusefs.posix.late.uncertain_keys import ABSENT, CheckResult, KeyState, UncertainKeys
from fusefs.posix.late.watched_store import WatchedStore
from fusefs.store.errors import NotFoundError, StoreError
from fusefs.store.fencing import CHANGE
from fusefs.store.interface import ObjectInfo
from fusefs.store.s3.store import S3Store
from tests.support.memory_store import MemoryStore, failing
from tests.support.survival.mortal_mount import DiedError, MortalMount


class Bucket(MemoryStore):
    """A bucket without conditions."""

    requester = SimpleNamespace(changes=set())
    fence = SimpleNamespace(relies_on=lambda *_: False)
    begin_upload = resume_upload = None


@pytest.fixture
def bucket() -> Bucket:
    return Bucket()


@pytest.fixture
def late(tmp_path: Path) -> Iterator[UncertainKeys]:
    requests = UncertainKeys(tmp_path / "late", "aws/bucket", (3600.0,))
    yield requests
    requests.close(remove=False)


@pytest.fixture
def watched(bucket: Bucket, late: UncertainKeys) -> WatchedStore:
    """A store in which a DELETE of `new` is on its way."""
    store = WatchedStore(cast(S3Store, cast(Any, bucket)), late)
    late.note_unanswered(Change(DELETE, "new"))
    return store


@pytest.mark.parametrize("others", [None, b"theirs"])
async def test_a_copy_that_is_undone_before_it_is_safe_is_made_again(
    bucket: Bucket, late: UncertainKeys, watched: WatchedStore, others: bytes | None
) -> None:
    """What was renamed was deleted next, and its only copy was gone."""
    bucket.put("old", b"data")
    undone = []

    def undo(what: str, key: str) -> None:
        if (what, key) == ("GET", "new") and not undone:
            undone.append(bucket.objects.pop("new"))
            if others is not None:
                bucket.put("new", others)

    bucket.before = undo
    made = await watched.copy(await watched.head("old"), "new")
    entry = late.get("new")
    assert isinstance(entry.expected, ObjectInfo)
    assert entry.expected.etag == made.etag
    if others is None:
        assert bucket.contents() == {"old": b"data", "new": b"data"}
        assert entry.content is not None
        assert (late.directory / entry.content).read_bytes() == b"data"
    else:  # what another client has put there since is not for this mount to replace
        assert bucket.contents() == {"old": b"data", "new": b"theirs"}


async def test_what_is_undone_each_time_fails_and_is_not_confirmed(
    bucket: Bucket, late: UncertainKeys, watched: WatchedStore
) -> None:
    bucket.put("old", b"data")

    def undo(what: str, key: str) -> None:
        if (what, key) == ("GET", "new"):
            del bucket.objects["new"]

    bucket.before = undo
    with pytest.raises(StoreError, match="undo each copy"):
        await watched.copy(await watched.head("old"), "new")
    entry = late.get("new")
    assert entry.expected is None
    bucket.put("new", b"data")
    found = await watched.head("new")
    del bucket.objects["new"]
    with pytest.raises(StoreError, match="was undone by a late request"):
        await watched.confirm("new", found)


async def test_a_large_copy_is_downloaded_just_after_it(
    bucket: Bucket, late: UncertainKeys, watched: WatchedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watched_store, "FETCHED_AT_ONCE", 3)
    bucket.put("old", b"data")
    await watched.copy(await watched.head("old"), "new")
    entry = late.get("new")
    assert (late.due_at(entry), entry.content) == (0.0, None)
    await Repairer(watched, lambda *_: None).check(entry)
    assert (late.directory / entry.content).read_bytes() == b"data"


async def test_what_a_killed_process_sent_last_is_what_the_next_expects(
    bucket: Bucket, late: UncertainKeys, watched: WatchedStore
) -> None:
    """A rename of its directory waited five minutes for the object that it had replaced."""
    bucket.put("new", b"old")
    await watched.confirm("new", old := await watched.head("new"))
    late.note_unanswered(Change(PUT, "new", ("0123456789abcdef-1",)))
    bucket.put("new", b"newer", **{CHANGE: "0123456789abcdef-1"})
    entry, repairer = late.get("new"), Repairer(watched, lambda *_: None)
    bucket.before = failing(NotFoundError, ("GET", "new"))
    await repairer.check(entry)
    assert late.expected_below("") == {"new": old}  # until the newer content is here
    bucket.heal()
    await repairer.check(entry)
    assert late.expected_below("") == {"new": await watched.head("new")}
    assert (late.directory / entry.content).read_bytes() == b"newer"
    assert late.unconfirmed_below("") == ["new"]  # another attempt may come yet


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[MortalMount]:
    made = MortalMount(tmp_path)
    made.store = Bucket()
    yield made
    if isinstance(made.store.unanswered, UncertainKeys):
        made.store.unanswered.close(remove=False)


def unanswered(mount: MortalMount, change: Change, expected: KeyState) -> UncertainKeys:
    late = mount.store.unanswered = UncertainKeys(mount.directory / "late", "test", (3600.0,))
    late.expect(late.note_unanswered(change), expected, None)
    return late


def make_uncertain(mount: MortalMount, kind: str, key: str) -> UncertainKeys:
    """As the next process finds a key whose last change was sent by the killed one."""
    mount.store.heal()
    late = unanswered(mount, Change(DELETE, key), ABSENT)
    late.note_unanswered(Change(kind, key, ("token",)))
    mount.store.confirm = WatchedStore(cast(S3Store, cast(Any, mount.store)), late).confirm
    return late


def check(late: UncertainKeys, key: str) -> None:
    """A late DELETE is repaired: the content is here."""
    entry = late.get(key)
    assert entry.check(ABSENT) is CheckResult.UNDONE
    assert (late.directory / entry.content).read_bytes() == b"content"


async def test_a_copy_of_a_renamed_directory(mount: MortalMount) -> None:
    mount.store.put("old/file", b"content")
    mount.store.after = failing(DiedError, ("COPY", "new/file"))
    async with mount.killed() as process:
        await process.rename("old", "new")
    late = make_uncertain(mount, COPY, "new/file")
    mount.reboot()
    async with mount.serving() as process:
        for one in list(process.changes.renames._unfinished):
            assert await process.changes.renames.finish(one)
    assert mount.store.count("COPY") == 1
    assert mount.store.contents() == {"new/file": b"content"}
    check(late, "new/file")


async def test_a_directory_with_a_file_of_another_client_is_renamed(mount: MortalMount) -> None:
    """Under the name of one that this mount had removed, and whose PUT may come late."""
    unanswered(mount, Change(PUT, "old/file", ("token",)), ABSENT)
    mount.store.put("old/file", b"theirs")
    async with mount.serving() as process:
        await process.rename("old", "new")
    assert mount.store.contents() == {"new/file": b"theirs"}


async def test_an_upload(mount: MortalMount) -> None:
    async with mount.killed() as process:
        fh = await process.create("file", b"content")
        process.writer.staging.close(next(iter(process.writer.staging)))
        mount.store.after = failing(DiedError, ("PUT", "file"))
        await process.close(fh)
    late = make_uncertain(mount, PUT, "file")
    mount.reboot()
    async with mount.serving() as process:
        assert process.adopted == 1
        for staged in process.writer.staging:
            await process.writer.uploads.wait(staged)
    assert mount.store.contents() == {"file": b"content"}
    check(late, "file")


@pytest.mark.parametrize("kind", [DELETE, PUT])
async def test_attributes_are_kept_where_their_object_may_come_back(
    mount: MortalMount, kind: str
) -> None:
    """A DELETE without an answer may have removed it, and then it is put back; a PUT has not."""
    mount.store.put("file", b"content")
    unanswered(mount, Change(kind, "file", ("token",)), mount.store.objects["file"].info)
    async with mount.serving() as process:
        await process.set_attributes("file", mode=0o600)
        del mount.store.objects["file"]
        deferred = process.writer.deferred
        if kind == DELETE:
            with pytest.raises(StoreError, match="late"):
                await deferred.flush("file")
        else:
            await deferred.flush("file")
        assert deferred.has("file") == (kind == DELETE)
