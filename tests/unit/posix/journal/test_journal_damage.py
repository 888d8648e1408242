"""Damaged logs: the journal's, and those of lines."""

import contextlib
import errno
import itertools
import os
import random
from collections.abc import Iterable
from pathlib import Path

import pytest

from fusefs.posix.journal import records
from fusefs.posix.journal.journal import Journal
from fusefs.posix.journal.line_log import LineLog, line, load_lines
from fusefs.posix.journal.records import UnusableJournalError, replay
from tests.unit.posix.journal.test_journal import filled, tell

# 200 bytes that a journal has behind its last record; the rest is like them.
BEHIND = 200


@pytest.fixture
def path() -> Iterable[Path]:
    """Where no disk is in the way: each of the tests writes thousands of files."""
    path = Path(f"/dev/shm/fusefs-journal-{os.getpid()}")
    yield path
    path.unlink(missing_ok=True)


@pytest.mark.parametrize("seed", range(3))
def test_each_byte_with_any_other_value_is_noticed_or_does_no_harm(path: Path, seed: int) -> None:
    whole = filled(path, 12)
    data = bytearray(path.read_bytes()[: replay(path).stop + BEHIND])
    dice = random.Random(seed)
    for at in range(len(data)):
        before = data[at]
        data[at] = dice.choice([0, 255, before ^ dice.randrange(1, 256)])
        path.write_bytes(data)
        with contextlib.suppress(UnusableJournalError):
            assert replay(path).state == whole, at
        data[at] = before


def test_a_log_cut_before_its_end_is_damaged(path: Path) -> None:
    whole = filled(path, 12)
    end = replay(path).stop
    data = path.read_bytes()
    for cut in range(end):
        path.write_bytes(data[:cut])
        with pytest.raises(UnusableJournalError):
            replay(path)
        # As a file system does that has lost blocks.
        path.write_bytes(data[:cut] + bytes(BEHIND))
        if any(data[cut:end]):
            with pytest.raises(UnusableJournalError):
                replay(path)
    for cut in range(end, end + BEHIND):
        path.write_bytes(data[:cut])
        assert replay(path).state == whole


def test_records_that_are_lost_doubled_or_in_another_order_are_noticed(path: Path) -> None:
    filled(path, 12)
    data = path.read_bytes()
    stops = [records.HEADER_SIZE, *(one.stop for one in records.parse(data))]
    parts = [data[start:stop] for start, stop in itertools.pairwise(stops)]
    header = data[: records.HEADER_SIZE]
    for index in range(1, len(parts) - 1):
        lost = parts[:index] + parts[index + 1 :]
        doubled = [*parts[: index + 1], *parts[index:]]
        swapped = [*parts[:index], parts[index + 1], parts[index], *parts[index + 2 :]]
        for wrong in (lost, doubled, swapped, parts[:index]):
            path.write_bytes(header + b"".join(wrong) + bytes(BEHIND))
            with pytest.raises(UnusableJournalError, match="is damaged"):
                replay(path)


def test_the_error_names_the_place(path: Path) -> None:
    filled(path, 12)
    data = bytearray(path.read_bytes())
    stops = [one.stop for one in records.parse(data)]
    data[stops[4] + 2] ^= 1
    path.write_bytes(data)
    wanted = rf"5 records check out, up to byte {stops[4]}, .* up to byte {stops[-1]}$"
    with pytest.raises(UnusableJournalError, match=wanted):
        replay(path)


def test_a_kill_at_any_instruction_leaves_a_usable_log(path: Path) -> None:
    """A record is copied and then committed; each may have happened in part."""
    log = Journal(path)
    model = filled(path.with_suffix(".other"), 2)
    path.with_suffix(".other").unlink()
    model.nodes.clear()
    model.handles.clear()
    for number in range(1, 6):
        before = path.read_bytes()[:4096]
        known = replay(path).state
        tell(log, model, ("opened", number, number, number, 0, 0))
        after = path.read_bytes()[:4096]
        size = records.HEADER_SIZE
        changed = [at for at in range(4096) if before[at] != after[at]]
        for at in [*changed, 4096]:
            if at >= size:  # the record up to here, and no commit
                path.with_suffix(".torn").write_bytes(before[:size] + after[size:at] + before[at:])
            else:  # the whole record, and the commit up to here
                path.with_suffix(".torn").write_bytes(after[:at] + before[at:size] + after[size:])
            found = replay(path.with_suffix(".torn")).state
            assert found in (known, model)
            resumed, _ = Journal.resume(path.with_suffix(".torn"))
            resumed.closed(99)
            assert replay(path.with_suffix(".torn")).state == found
            resumed.close(remove=True)
    log.close(remove=True)


def test_the_log_of_a_daemon_that_writes_is_read_as_a_trial(path: Path) -> None:
    """Between the reading of the header and of the rest."""
    filled(path, 12)
    earlier = path.read_bytes()
    resumed, _ = Journal.resume(path)
    for number in range(50):
        resumed.opened(number, 100 + number, 1, 0, 0, 0)
    later = path.read_bytes()
    size = records.HEADER_SIZE
    path.with_suffix(".mixed").write_bytes(earlier[:size] + later[size:])
    found = replay(path.with_suffix(".mixed"), is_live=True).state
    assert found == replay(path).state
    path.with_suffix(".mixed").write_bytes(later[:size] + earlier[size:])
    with pytest.raises(UnusableJournalError):
        replay(path.with_suffix(".mixed"), is_live=True)
    path.with_suffix(".mixed").unlink()
    resumed.close(remove=True)


def test_nothing_is_left_of_what_an_earlier_process_had_on_record(tmp_path: Path) -> None:
    path = tmp_path / "log"
    LineLog(path).append(line(["key", 1]))
    later = LineLog(path)
    later.write_anew([])
    assert load_lines(path) == {}
    later.append(line(["other", 2]))
    assert load_lines(path) == {"other": [2]}


@pytest.mark.parametrize("torn", [line(["b", 2])[:-5], line(["b", 2])[:-1], b"\0\0\0"])
def test_a_line_that_a_power_cut_has_torn_spoils_no_other(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "log"
    path.write_bytes(line(["a", 1]) + torn)
    log = LineLog(path)
    for key in "cd":
        log.append(line([key, 3]))
    found = load_lines(path)
    assert (found["a"], found["c"], found["d"]) == ([1], [3], [3])
    assert b"\n\n" not in path.read_bytes()


def test_half_a_line_that_a_failing_disk_keeps_spoils_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "log"
    log = LineLog(path)
    log.append(line(["a", 1]))
    write = os.write

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "fails")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda fd, data: write(fd, data[:-3]))
        patch.setattr(os, "truncate", fail)
        with pytest.raises(OSError, match="fails"):
            log.append(line(["b", 2]))
    log.append(line(["c", 3]))
    assert load_lines(path) == {"a": [1], "c": [3]}


def test_a_log_in_which_much_is_left_is_not_always_written_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fusefs.posix.journal.line_log.COMPACT_FROM", 100)
    log = LineLog(tmp_path / "log")
    log.append(line(["a", "x" * 150]))
    assert log.is_large
    log.write_anew([line(["a", "x" * 150])])
    log.append(line(["b", 1]))
    assert not log.is_large
    log.append(line(["a", "y" * 150]))
    assert log.is_large
