"""What programs do to a file after its upload in parts has failed, without a kernel."""

import errno
import os
from pathlib import Path

import pytest

from fusefs.linux.libc import KEEP_SIZE, PUNCH_HOLE
from fusefs.posix.write import sparse_edit, upload_steps, writer
from fusefs.store.errors import StoreError
from tests.support.memory_store import failing
from tests.support.memory_uploads import UploadingStore
from tests.support.survival.mortal_mount import MortalMount, Process

PART = 4096


@pytest.fixture
def mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MortalMount:
    for module in (sparse_edit, upload_steps, writer):
        monkeypatch.setattr(module, "IN_PARTS", PART)
    mount = MortalMount(tmp_path)
    mount.store = UploadingStore(PART)
    return mount


async def sync(process: Process, fh: int) -> None:
    answer = process.writer.flusher.fsync(fh)
    assert answer is not None
    await answer


async def sent_and_not_completed(mount: MortalMount, process: Process) -> int:
    """A file of four parts, not written in order, which the bucket has but for the last step."""
    fh = await process.create("file", b"")
    await process.write(fh, PART, b"x" * 3 * PART)
    mount.store.before = failing(StoreError("the store is unwell"), "COMPLETE")
    with pytest.raises(StoreError, match="unwell"):
        await sync(process, fh)
    mount.store.heal()
    return fh


async def test_what_was_cut_off_does_not_come_back_when_the_file_grows(
    process: Process, mount: MortalMount
) -> None:
    fh = await sent_and_not_completed(mount, process)
    await process.set_attributes("file", size=1)
    await process.set_attributes("file", size=4 * PART)
    await sync(process, fh)
    assert mount.store.contents() == {"file": bytes(4 * PART)}


async def test_a_hole_far_behind_the_file_and_what_a_mapping_stored_are_in_the_object(
    process: Process, mount: MortalMount
) -> None:
    fh = await sent_and_not_completed(mount, process)
    await process.writer.allocate(fh, 2 * PART, 8 << 30, PUNCH_HOLE | KEEP_SIZE)
    await process.write(fh, 4 * PART, b"more")
    [staged] = process.writer.staging
    staged.may_be_mapped = True
    os.pwrite(staged.fd, b"stored", PART - 6)
    await sync(process, fh)
    expected = bytes(PART - 6) + b"stored" + b"x" * PART + bytes(2 * PART) + b"more"
    assert mount.store.contents() == {"file": expected}


async def test_an_edit_that_the_bucket_has_does_not_fail_for_want_of_room_on_the_disk(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    process.store.put("file", b"x" * 4 * PART)
    await process.load("file")
    fh = await process.open("file", os.O_RDWR)
    await process.write(fh, 0, b"y" * PART)

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "the disk is full")

    with monkeypatch.context() as full:
        full.setattr(sparse_edit.SparseEditor, "_bring", fail)
        full.setattr(os, "pwrite", fail)
        with pytest.raises(OSError, match="full"):
            await process.write(fh, 2 * PART, b"lost" * PART)
        await sync(process, fh)
    await process.write(fh, PART, b"z" * PART)
    assert await process.read(fh) == b"y" * PART + b"z" * PART + b"x" * 2 * PART
    await process.close(fh)
    assert process.store.contents() == {"file": b"y" * PART + b"z" * PART + b"x" * 2 * PART}
