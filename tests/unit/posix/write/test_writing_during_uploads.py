"""What programs do to a file while it is on its way into the bucket, without a kernel."""

import errno
import os
import stat
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import trio
import trio.testing

from fusefs.daemon import status
from fusefs.posix.write import upload_steps, uploader
from fusefs.settings.types import EVERYWHERE_AUTO
from fusefs.store.errors import CredentialsError, StoreError, UnreachableError
from fusefs.telemetry.stalls import STALLS, WaitCause, served, stage
from tests.support.memory_store import MemoryStore, Stop, failing
from tests.support.memory_uploads import UploadingStore
from tests.support.survival.mortal_mount import LOCAL, MortalMount, Process
from tests.support.waiting import eventually

LIMIT_S = 20.0


@pytest.fixture
def stop(mount: MortalMount) -> Stop:
    """The bucket takes the object no sooner than that."""
    return Stop(mount.store, "PUT", "file")


@pytest.mark.parametrize("lost", ["", "PUT"])
async def test_attributes_that_change_meanwhile_get_into_the_bucket(
    mount: MortalMount, lost: str
) -> None:
    store = mount.store = UploadingStore(8 << 20)
    store.put("file", b"old", mode="33188")
    async with mount.serving() as process:
        fh = await process.open("file", os.O_RDWR)
        await process.write(fh, 0, b"new")
        stop, (staged,) = Stop(store, "PUT", "file"), process.writer.staging
        store.after = failing(UnreachableError, lost)
        process.writer.uploads.start(staged)
        await stop.reached.wait()
        await process.set_attributes(staged.inode, mode=0o600)
        stop.go_on.set()
        await process.writer.uploads.ended(staged)
        store.heal()
        await process.writer.uploads.wait(staged)
    assert store.metadata("file")["mode"] == str(stat.S_IFREG | 0o600)


async def test_what_is_written_meanwhile_waits_and_is_no_part_of_the_object(
    process: Process, stop: Stop
) -> None:
    fh = await process.create("file", b"content")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(process.writer.flusher.fsync, fh)
        await stop.reached.wait()
        nursery.start_soon(process.write, fh, 0, b"CON")
        await trio.testing.wait_all_tasks_blocked()
        assert await process.read(fh) == b"content"
        stop.go_on.set()
    assert process.store.contents() == {"file": b"content"}
    await process.close(fh)
    assert process.store.contents() == {"file": b"CONtent"}


async def test_what_is_appended_meanwhile_waits_for_nothing(process: Process, stop: Stop) -> None:
    fh = await process.create("file", b"content")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(process.writer.flusher.fsync, fh)
        await stop.reached.wait()
        await process.write(fh, 7, b" and more")
        stop.go_on.set()
    assert process.store.contents() == {"file": b"content"}
    await process.close(fh)
    assert process.store.contents() == {"file": b"content and more"}


@pytest.mark.parametrize("is_closed", [False, True])
async def test_a_sync_or_close_that_joins_a_background_upload_ends_on_a_slow_link(
    mount: MortalMount, monkeypatch: pytest.MonkeyPatch, *, is_closed: bool
) -> None:
    """A close that waits for the local disk alone, while the upload still queues."""
    monkeypatch.setattr(upload_steps, "IN_PARTS", 4)
    monkeypatch.setattr(uploader, "BACKGROUND_S", 0.05)
    store = mount.store = UploadingStore(4)
    durability = LOCAL if is_closed else EVERYWHERE_AUTO
    async with mount.serving(uploads=1, durability=durability) as process:
        fh = await process.create("file", b"two parts")
        store.pause = partial(trio.sleep, 0.1)
        (staged,) = process.writer.staging
        async with process.writer.uploads._places[not is_closed]:  # or of large files
            process.writer.uploads.start(staged, is_background=True)
            await (process.close if is_closed else process.writer.flusher.fsync)(fh)
        await process.writer.uploads.ended(staged)
        assert store.contents() == {"file": b"two parts"}


async def test_who_writes_does_not_wait_for_credentials(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploader, "CREDENTIALS_S", 0.05)
    is_refused = True

    def refuse(what: str, key: str) -> None:
        if what == "PUT" and is_refused:
            raise CredentialsError(key)

    process.store.before = refuse
    fh = await process.create("file", b"content")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(process.writer.flusher.fsync, fh)
        with trio.fail_after(LIMIT_S):
            while process.store.count("PUT") < 2:
                await trio.testing.wait_all_tasks_blocked(0.01)
            await process.write(fh, 0, b"CON")
        backlog = process.writer.backlog
        assert backlog.state(backlog.files("")[0]) == "waiting for credentials"
        is_refused = False
    assert process.store.contents() == {"file": b"CONtent"}


async def test_a_fault_in_an_upload_is_a_failed_upload_and_no_more(
    process: Process, caplog: pytest.LogCaptureFixture
) -> None:
    fh = await process.create("file", b"content")
    process.store.before = failing(ZeroDivisionError, "PUT")
    with pytest.raises(OSError, match=f"Errno {errno.EIO}.*ZeroDivisionError"):
        await process.writer.flusher.fsync(fh)
    process.store.heal()
    process.writer.uploads.start(*process.writer.staging)
    assert status.pending(process.writer, "")["under_way"] == 0  # sync waits for no retry
    process.writer.backlog.hurry("")
    assert status.pending(process.writer, "")["under_way"] == 1
    await process.close(fh)
    assert process.store.contents() == {"file": b"content"}
    assert "Traceback" in caplog.text


class SlowAhead(MemoryStore):
    """A bucket that is slow to begin uploads in parts, and then refuses them."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = trio.Event()
        self.may_end = trio.Event()

    async def begin_upload(self, *_: Any, **_more: Any) -> Any:
        with stage(WaitCause.S3_TRANSFER):
            self.begun.set()
            await self.may_end.wait()
        raise StoreError("no uploads in parts")


async def test_a_close_waits_for_what_is_sent_while_the_file_is_written(
    mount: MortalMount, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploader, "AHEAD", 4)
    monkeypatch.setattr(uploader, "IN_PARTS", 4)
    store = mount.store = SlowAhead()

    def waited_s() -> float:
        return STALLS.totals().stalled[WaitCause.S3_TRANSFER]

    async with mount.serving() as process:
        fh = await process.create("file", b"")
        with served():
            await process.write(fh, 0, b"two parts")
        await store.begun.wait()
        before = waited_s()
        assert waited_s() == before  # the write has ended

        async def close() -> None:
            with served():
                await process.close(fh)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(close)
            await trio.testing.wait_all_tasks_blocked(0.01)
            store.may_end.set()
    assert waited_s() > before
    assert store.contents() == {"file": b"two parts"}


async def test_a_fault_while_a_file_is_sent_ahead_ends_no_mount(
    mount: MortalMount, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(uploader, "AHEAD", 4)
    monkeypatch.setattr(uploader, "IN_PARTS", 4)
    store = mount.store = SlowAhead()

    monkeypatch.setattr(store, "begin_upload", Mock(side_effect=ValueError("a fault")))
    store.may_end.set()
    async with mount.serving() as process:
        fh = await process.create("file", b"")
        await process.write(fh, 0, b"two parts")
        await eventually(lambda: "a fault of fusefs" in caplog.text)
        await process.save("other", b"y")
    assert store.contents()["other"] == b"y"
