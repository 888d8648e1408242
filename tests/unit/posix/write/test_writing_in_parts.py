"""What programs do to a file after its upload in parts has failed, without a kernel."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fusefs.linux.libc import KEEP_SIZE, PUNCH_HOLE
from fusefs.posix.types import NewAttributes
from fusefs.posix.write import sparse_edit, upload_steps, writer
from fusefs.store.errors import StaleVersionError, StoreError
from fusefs.store.interface import ObjectInfo, ObjectVersion, Part, UploadState, Write
from fusefs.store.s3.multipart import S3Upload
from tests.support.memory_store import MemoryStore
from tests.support.survival.mortal_mount import MortalMount, Process

PART = 4096


class InParts(S3Upload):
    """An upload to a bucket in memory, which may not complete the first time."""

    def __init__(self, store: StoreInParts, state: UploadState) -> None:
        requester: Any = SimpleNamespace(settings=SimpleNamespace(max_connections=1))
        super().__init__(SimpleNamespace(requester=requester), state)  # type: ignore[arg-type]
        self._store = store
        self._sent: dict[int, bytes] = {}
        self._has_failed = not store.fails_once

    async def copy_part(self, number: int, source: ObjectVersion, start: int, stop: int) -> None:
        found = self._store.objects[source.key]
        if found.info.version != source:
            raise StaleVersionError(source.key)
        self._sent[number] = found.data[start:stop]
        self._parts[number] = Part(number, stop - start, "", "")

    async def _send_part(self, fd: int, size: int, number: int) -> None:
        start, stop = self.part_range(number, size)
        self._sent[number] = os.pread(fd, stop - start, start)
        self._parts[number] = Part(number, stop - start, "", "")

    async def complete(self, size: int, _condition: object = None) -> ObjectInfo:
        if not self._has_failed:
            self._has_failed = True
            raise StoreError("the store is unwell")
        assert not self.missing(size)
        data = b"".join(self._sent[number] for number in range(1, self.part_count(size) + 1))
        self._store.put(self.state.key, data, **self.state.metadata)
        return await self._store.head(self.state.key)


class StoreInParts(MemoryStore):
    """A bucket that takes large objects in parts of PART bytes."""

    fails_once = True

    async def begin_upload(self, key: str, write: Write) -> Any:
        return InParts(self, UploadState(key, "id", PART, write.metadata or {}))


@pytest.fixture
def store() -> StoreInParts:
    return StoreInParts()


@pytest.fixture
def mount(tmp_path: Path, store: StoreInParts, monkeypatch: pytest.MonkeyPatch) -> MortalMount:
    monkeypatch.setattr(upload_steps, "IN_PARTS", PART)
    monkeypatch.setattr(writer, "IN_PARTS", PART)
    mount = MortalMount(tmp_path)
    mount.store = store
    return mount


async def sync(process: Process, fh: int) -> None:
    answer = process.writer.flusher.fsync(fh)
    assert answer is not None
    await answer


async def sent_and_not_completed(process: Process) -> int:
    """A file of four parts, not written in order, which the bucket has but for the last step."""
    fh = await process.create("file", b"")
    await process.write(fh, PART, b"x" * 3 * PART)
    with pytest.raises(OSError, match="unwell"):
        await sync(process, fh)
    return fh


async def test_what_was_cut_off_does_not_come_back_when_the_file_grows(mount: MortalMount) -> None:
    async with mount.serving() as process:
        fh = await sent_and_not_completed(process)
        mutations = process.operations.mutations
        inode = await process.node("file")
        await mutations.setattr(inode.nodeid, NewAttributes(size=1))
        await mutations.setattr(inode.nodeid, NewAttributes(size=4 * PART))
        await sync(process, fh)
    assert mount.store.contents() == {"file": bytes(4 * PART)}


async def test_a_hole_that_reaches_far_behind_the_file_is_in_the_object(mount: MortalMount) -> None:
    async with mount.serving() as process:
        fh = await sent_and_not_completed(process)
        await process.writer.allocate(fh, 2 * PART, 8 << 30, PUNCH_HOLE | KEEP_SIZE)
        await process.write(fh, 4 * PART, b"more")
        await sync(process, fh)
    expected = bytes(PART) + b"x" * PART + bytes(2 * PART) + b"more"
    assert mount.store.contents() == {"file": expected}


async def test_an_edit_that_the_bucket_has_does_not_fail_for_want_of_room_on_the_disk(
    mount: MortalMount, store: StoreInParts, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.fails_once = False
    store.put("file", b"x" * 4 * PART)
    async with mount.serving() as process:
        await process.load("file")
        fh = await process.open("file", os.O_RDWR)
        await process.write(fh, 0, b"y" * PART)

        async def fail(*_: object) -> None:
            raise OSError(errno.ENOSPC, "the disk is full")

        with monkeypatch.context() as full:
            full.setattr(sparse_edit.SparseEditor, "_bring", fail)
            await sync(process, fh)
        await process.write(fh, PART, b"z" * PART)
        assert await process.read(fh) == b"y" * PART + b"z" * PART + b"x" * 2 * PART
        await process.close(fh)
    assert store.contents() == {"file": b"y" * PART + b"z" * PART + b"x" * 2 * PART}
