"""What a late request has undone is put back, whatever other clients wrote beside it."""

from pathlib import Path

import pytest
import trio

from fusefs.posix.late.repair import Repairer
from fusefs.posix.late.request_log import DELETE, Change
from fusefs.posix.late.uncertain_keys import UncertainKey, UncertainKeys
from fusefs.posix.late.watched_store import WatchedStore
from fusefs.store.errors import StoreError
from fusefs.store.fencing import without_token
from fusefs.store.interface import Expect, ObjectInfo, Write
from fusefs.store.s3.store import S3Store
from tests.support.machine.local_file import MakeFile
from tests.support.servers.buckets import Bucket, stored
from tests.support.servers.faulty_s3 import FaultyS3
from tests.support.store_writing import PART, opened
from tests.support.waiting import eventually


async def test_metadata_that_cannot_be_sent_again_keep_no_content_from_being_put_back(
    direct: S3Store, bucket: Bucket, tmp_path: Path
) -> None:
    """An object of another client's that was renamed here keeps what that wrote beside it."""
    late = UncertainKeys(tmp_path / "late", "bucket", (60.0,))
    store = WatchedStore(direct, late)
    entry = late.note_unanswered(Change(DELETE, "file"))
    content = late.content_path(entry)
    content.write_bytes(b"content")
    metadata = {"title": "caf\xe9", "owner": "x"}
    expected = ObjectInfo("file", 7, '"gone"', 0, metadata=metadata)
    late.expect(entry, expected, content.name)
    await Repairer(store, lambda _key, _state: None).check(entry)
    assert stored(bucket, "file") == b"content"
    assert without_token((await store.head("file")).metadata or {}) == {"owner": "x"}
    store.close(remove=False)


async def test_keys_of_a_delete_of_many_without_an_answer_are_uncertain(
    store: S3Store, faulty: FaultyS3, bucket: Bucket, tmp_path: Path
) -> None:
    late = UncertainKeys(tmp_path / "late", "bucket")
    for key in "ab":
        bucket.put(key, b"x")
    faulty.add("DELETE MANY", lose_answer=True, times=1)
    await WatchedStore(store, late).delete_many("ab")
    assert [entry.key for entry in late] == ["a", "b"]


async def test_a_completion_without_an_answer_may_have_made_the_object(
    bucket: Bucket, faulty: FaultyS3, make_file: MakeFile, tmp_path: Path
) -> None:
    file, late = make_file(PART), UncertainKeys(tmp_path / "late", "bucket")
    async with opened(bucket, faulty, retry_time_s=0.5) as inner:
        store = WatchedStore(inner, late)
        upload = await store.begin_upload("file", Write())
        await upload.send(file.fd, upload.missing(PART), PART)
        faulty.add("COMPLETE", lose_answer=True)
        faulty.add("HEAD", "file", status=500, body=b"")
        with pytest.raises(StoreError):
            await store.complete(upload, PART, Expect(None))
        faulty.clear()
        assert late.may_have_made(await store.head("file"))


async def test_neither_a_fault_nor_a_long_check_of_a_key_stops_those_of_others(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(_repairer: Repairer, entry: UncertainKey) -> bool:
        await trio.sleep(60 if entry.key == "slow" else 0)
        raise ValueError(f"a fault about {entry.key}")

    monkeypatch.setattr(Repairer, "_is_right", fail)
    async with opened(bucket, bucket.server) as inner, trio.open_nursery() as nursery:
        late = UncertainKeys(tmp_path / "late", "bucket", (0.0,))
        store = WatchedStore(inner, late)
        nursery.start_soon(Repairer(store, lambda _key, _state: None).run)
        for key in ("slow", "one", "two"):
            entry = late.note_unanswered(Change(DELETE, key))
            late.expect(entry, ObjectInfo(key, 0, '"e"', 0), None)
            await trio.sleep(0.1)
        await eventually(lambda: len(late) == 1)
        nursery.cancel_scope.cancel()
    store.close(remove=False)
