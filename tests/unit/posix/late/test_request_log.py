"""What is on record of changes that are under way, whenever their process is killed."""

from __future__ import annotations

from pathlib import Path

from fusefs.posix.late.request_log import (
    COPY,
    DELETE,
    PUT,
    SLOT,
    SLOTS,
    Change,
    RequestLog,
    unanswered_in,
)

CHANGES = [
    Change(PUT, "a", ("0123456789abcdef-1",)),
    Change(COPY, "dir/ü", ("0123456789abcdef-2", "0123456789abcdef-1"), '"etag"'),
    Change(DELETE, "k" * 1024),
]


def test_what_has_ended_is_not_left(tmp_path: Path) -> None:
    log = RequestLog(tmp_path)
    slots = [log.begin(change) for change in CHANGES]
    assert sorted(unanswered_in(tmp_path), key=CHANGES.index) == CHANGES
    log.end(slots[1])
    assert set(unanswered_in(tmp_path)) == {CHANGES[0], CHANGES[2]}
    log.close(remove=False)
    assert set(unanswered_in(tmp_path)) == {CHANGES[0], CHANGES[2]}


def test_a_new_log_is_empty(tmp_path: Path) -> None:
    log = RequestLog(tmp_path)
    log.begin(CHANGES[0])
    log.begin_batch(["a", "b"])
    log.close(remove=False)
    RequestLog(tmp_path).close(remove=True)
    assert unanswered_in(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_there_are_more_slots_when_all_are_taken(tmp_path: Path) -> None:
    log = RequestLog(tmp_path)
    changes = {Change(PUT, f"key-{number}") for number in range(3 * SLOTS)}
    slots = [log.begin(change) for change in changes]
    assert set(unanswered_in(tmp_path)) == changes
    for slot in slots:
        log.end(slot)
    assert unanswered_in(tmp_path) == []
    log.close(remove=True)


def test_what_fits_no_slot_is_not_on_record(tmp_path: Path) -> None:
    log = RequestLog(tmp_path)
    slot = log.begin(Change(PUT, "k" * SLOT))
    log.end(slot)
    assert unanswered_in(tmp_path) == []
    log.close(remove=True)


def test_many_deletes_of_one_request_are_on_record_together(tmp_path: Path) -> None:
    log = RequestLog(tmp_path)
    batch = log.begin_batch(["a", "b"])
    assert unanswered_in(tmp_path) == [Change(DELETE, "a"), Change(DELETE, "b")]
    assert batch is not None
    whole = batch.read_bytes()
    for size in range(len(whole)):
        batch.write_bytes(whole[:size])
        assert unanswered_in(tmp_path) == []
    log.end_batch(batch)
    log.close(remove=True)


def test_a_slot_that_was_being_filled_is_not_taken_for_a_change(tmp_path: Path) -> None:
    log = RequestLog(tmp_path)
    slot = log.begin(CHANGES[0])
    log.close(remove=False)
    path = tmp_path / "requests"
    whole = path.read_bytes()
    start = slot * SLOT
    size = 8 + len(CHANGES[0].text())
    for at in range(start, start + size):
        for value in (0, whole[at] ^ 0x40):
            torn = whole[:at] + bytes([value]) + whole[at + 1 :]
            path.write_bytes(torn)
            assert unanswered_in(tmp_path) == ([CHANGES[0]] if torn == whole else [])
    path.write_bytes(whole[: start + size - 1])
    assert unanswered_in(tmp_path) == []
