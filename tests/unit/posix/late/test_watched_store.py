"""Changes of uncertain keys: late requests that come while they are made."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from fusefs.posix.late.request_log import DELETE, Change
from fusefs.posix.late.uncertain_keys import UncertainKeys
from fusefs.posix.late.watched_store import WatchedStore
from fusefs.store.errors import StoreError
from fusefs.store.interface import ObjectInfo
from fusefs.store.s3.store import S3Store
from tests.support.memory_store import MemoryStore


class Bucket(MemoryStore):
    """A bucket without conditions."""

    requester = SimpleNamespace(on_unanswered=None)
    fence = SimpleNamespace(relies_on=lambda *_: False)


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
    assert entry is not None
    assert isinstance(entry.expected, ObjectInfo)
    assert entry.expected.etag == made.etag
    if others is None:
        assert bucket.contents() == {"old": b"data", "new": b"data"}
        assert entry.content is not None
        assert (late.directory / entry.content).read_bytes() == b"data"
    else:  # what another client has put there since is not for this mount to replace
        assert bucket.contents() == {"old": b"data", "new": b"theirs"}


async def test_a_copy_that_is_undone_each_time_fails(
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
    assert entry is not None
    assert entry.expected is None
