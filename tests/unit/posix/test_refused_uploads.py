"""Large files whose upload was under way, where the bucket does not let it be found again."""

import logging
from typing import Any

import pytest

from fusefs.posix.nodes.inode import StagedFile
from fusefs.posix.write import aborts, upload_steps
from fusefs.store.errors import (
    AccessDeniedError,
    CredentialsError,
    StoreError,
    ThrottledError,
    UnreachableError,
    UnsupportedError,
)
from fusefs.store.interface import PendingUpload, UploadState
from tests.support.memory_uploads import UploadingStore
from tests.support.survival.mortal_mount import MortalMount, Process
from tests.support.waiting import eventually

CONTENT = b"content"
OLD = UploadState("file", "old", 8 << 20, {})


class RefusingStore(UploadingStore):
    """A bucket that lists neither uploads nor parts."""

    def __init__(self, error: StoreError) -> None:
        super().__init__(8 << 20)
        self.error = error
        self.aborted: list[str] = []
        self.refusals: list[StoreError] = []

    async def resume_upload(self, _state: UploadState) -> Any:
        raise self.error

    async def list_uploads(self, _prefix: str) -> list[PendingUpload]:
        raise self.error

    async def abort_upload(self, _key: str, upload_id: str) -> None:
        if self.refusals:
            raise self.refusals.pop(0)
        self.aborted.append(upload_id)


async def with_upload(process: Process, under_way: dict[str, Any]) -> tuple[int, StagedFile]:
    """A new file whose upload was under way: its handle, and the file."""
    fh = await process.create("file", CONTENT)
    staged = (await process.node("file")).staged
    assert staged is not None
    for name, value in under_way.items():
        setattr(staged, name, value)
    return fh, staged


@pytest.mark.parametrize(
    ("under_way", "missing", "aborted"),
    [
        ({"upload_state": OLD}, "s3:ListMultipartUploadParts", ["old"]),
        ({"begun_ns": 1}, "s3:ListBucketMultipartUploads", []),
    ],
)
@pytest.mark.parametrize("kind", [AccessDeniedError, UnsupportedError, StoreError])
async def test_where_it_can_not_be_listed_the_file_is_sent_anew(
    mount: MortalMount,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    under_way: dict[str, Any],
    missing: str,
    aborted: list[str],
    kind: type[StoreError],
) -> None:
    monkeypatch.setattr(upload_steps, "IN_PARTS", 0)
    mount.store = store = RefusingStore(kind("refused"))
    async with mount.serving() as process:
        fh, _ = await with_upload(process, under_way)
        await process.close(fh)
    assert store.contents() == {"file": CONTENT}
    assert store.aborted == aborted
    [warning] = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
    assert "file: " in warning
    assert (missing in warning) == (kind is AccessDeniedError)


async def test_an_upload_of_a_removed_file_is_aborted_once_the_bucket_answers(
    mount: MortalMount, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aborts, "AGAIN_S", 0.0)
    mount.store = store = RefusingStore(AccessDeniedError("access denied"))
    store.refusals = [ThrottledError("slow down"), UnreachableError("no answer")]
    async with mount.serving() as process:
        await with_upload(process, {"upload_state": OLD})
        await process.unlink("file")
        await eventually(lambda: store.aborted == ["old"])
    assert store.refusals == []


@pytest.mark.parametrize("under_way", [{"upload_state": OLD}, {"begun_ns": 1}])
async def test_while_credentials_are_refused_nothing_is_begun_anew(
    mount: MortalMount, under_way: dict[str, Any]
) -> None:
    mount.store = store = RefusingStore(CredentialsError("expired"))
    async with mount.serving() as process:
        _, staged = await with_upload(process, under_way)
        sender = process.writer.uploads
        with pytest.raises(CredentialsError):
            await sender._resumed(staged, len(CONTENT))
        assert {name: getattr(staged, name) for name in under_way} == under_way
    assert store.aborted == []


@pytest.mark.parametrize("is_new_mount", [False, True], ids=["daemon", "mount"])
async def test_what_was_not_aborted_the_next_process_aborts(
    mount: MortalMount, is_new_mount: bool
) -> None:
    mount.store = store = RefusingStore(AccessDeniedError("access denied"))
    async with mount.serving() as process:
        store.refusals = [UnreachableError("no answer")] * 100
        await with_upload(process, {"upload_state": OLD})
        await process.unlink("file")
        assert store.aborted == []
    if is_new_mount:
        mount.reboot()
    for _ in range(2):  # and killed before it has
        async with mount.serving() as process:
            await eventually(lambda: len(store.refusals) < 99)
    store.refusals = []
    async with mount.serving() as process:
        await eventually(lambda: store.aborted == ["old"])
        await eventually(lambda: not process.writer.uploads.aborts.pending)
    mount.reboot()
    async with mount.serving() as process:
        assert process.writer.uploads.aborts.pending == []


async def test_an_upload_of_the_store_itself_is_aborted_by_the_next_process(
    mount: MortalMount,
) -> None:
    mount.store = store = RefusingStore(AccessDeniedError("access denied"))
    async with mount.serving() as process:
        process.writer.uploads.aborts.begun("large", "copied")
        process.writer.uploads.aborts.begun("large2", "done")
        process.writer.uploads.aborts.ended("done")
    async with mount.serving() as process:
        await eventually(lambda: store.aborted == ["copied"])
