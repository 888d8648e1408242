"""Uploads that a close does not wait for: when they begin, and when they no longer may."""

import os

import pytest
import trio
from trio.testing import MockClock

from fusefs.posix.write import flush
from fusefs.posix.write.flush import LATER_S
from fusefs.posix.write.uploader import QUIET_S
from tests.support.semantics import states
from tests.support.survival.mortal_mount import LOCAL, MortalMount, Process


@states(
    "With `--durability local`, uploads wait while programs close one file after the other, "
    "5 s at most, unless half of `--staging-size` is used."
)
@pytest.mark.parametrize(("limit", "waits_s"), [(None, 5.0), (100, 5.0), (13, LATER_S)])
async def test_an_upload_waits_while_others_are_closed(
    mount: MortalMount, autojump_clock: MockClock, limit: int | None, waits_s: float
) -> None:
    sent = trio.Event()
    mount.store.before = lambda _what, _key: sent.set()
    async with mount.serving(durability=LOCAL) as process:
        process.writer.staging._limit = limit
        await process.save("file", b"content")
        begun = trio.current_time()
        while not sent.is_set():
            process.writer.uploads.note_closed()
            with trio.move_on_after(QUIET_S / 2):
                await sent.wait()
        assert trio.current_time() - begun == pytest.approx(waits_s)


async def test_a_delayed_upload_that_is_given_up_sends_no_other_file(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flush, "SHORTEST_S", 0.1)
    process.store.put("log", b"0")
    for offset in range(1, flush.WAITING + 2):
        fh = await process.open("log", os.O_WRONLY | os.O_APPEND)
        await process.write(fh, offset, b"+", is_appended=True)
        await process.close(fh)
    (staged,) = process.writer.staging.pending
    await process.writer.backlog.give_up("log")
    await process.create("other", b"other")
    assert [file.fd for file in process.writer.staging] == [staged.fd]
    await process.writer.uploads.ended(staged)
    assert process.store.contents() == {"log": b"0++++"}
