"""A plan's table: positions by opens, in whatever order workers open, and what it costs."""

import os
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from zlib import crc32

import pytest

from fusefs.planning.table import Plan, planned

PREFIX = "data/"


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    return Plan("", PREFIX, os.open(tmp_path / "plan", os.O_RDWR | os.O_CREAT))


def add(plan: Plan, paths: Sequence[str]) -> None:
    text = "".join(f"{path}\0" for path in paths).encode()
    os.pwrite(plan.fd, text, plan.text_bytes)
    for at in range(0, len(text), 999):  # pieces end in the middle of an entry
        plan.add(text[at : at + 999])


def mark(path: str) -> int:
    return crc32(f"{PREFIX}{path}".encode())


def opens(plan: Plan, paths: Sequence[str]) -> list[bool]:
    """After each open, whether the plan is followed."""
    return [plan.opened(mark(path)) >= 0 and plan.is_followed for path in paths]


def epoch(seed: int, count: int = 1000) -> list[str]:
    return random.Random(seed).sample([f"f{number}" for number in range(count)], count)


def test_entries_are_found_by_their_positions_and_by_their_paths(plan: Plan) -> None:
    order = [*epoch(1), *epoch(2), *epoch(3)]
    add(plan, order)
    assert plan.size == 3000
    assert [path for at in range(0, 3000, 64) for path, _ in plan.visits(at, 3000)] == order
    assert plan.visits(70, 72) == [(order[70], []), (order[71], [])]
    for path in order[:50]:
        places = [at for at, other in enumerate(order) if other == path]
        assert plan.find(mark(path), 0) == places[0]
        assert plan.find(mark(path), places[0] + 1) == places[1]
    assert plan.find(mark("another"), 0) == -1


def test_ranges_of_a_file_in_a_row_are_one_entry(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranges = [(3, 9), (0, 4), (9, 100)]
    add(plan, [planned(path, f"{start}-{stop}") for path in "aba" for start, stop in ranges])
    add(plan, ["a", planned("a", "5-6"), "a", "/5-/no range", planned("a\n/", "0-1")])
    visits = [*((path, ranges) for path in "aba"), ("a", []), ("a", [])]
    assert plan.visits(0, 99) == [*visits, ("/5-/no range", []), ("a\n/", [(0, 1)])]
    assert [plan.opened(mark(path)) for path in "aabbbaa"] == [1, 0, 1, 0, 0, 1, 0]
    monkeypatch.setattr("fusefs.planning.table.BLOCK_BYTES", 100)
    add(plan, [planned("long", f"{at}-{at + 1}") for at in range(10, 60)])
    add(plan, ["last"])
    [(_, first)] = plan.visits(7, 99)
    assert (first[0], 6 <= len(first) < 50, plan.visits(8, 99)) == ((10, 11), True, [("last", [])])
    for span in ("9-3", "3-3", "-5", "5-", "5", "0x1-9", "1-2-3", "\u0661-9", "1-" + 19 * "9"):
        with pytest.raises(ValueError, match="is no range of bytes, START-STOP"):
            planned("a", span)


def test_workers_that_open_batches_out_of_order_move_the_position(plan: Plan) -> None:
    order = [*epoch(1), *epoch(2)]
    add(plan, order)
    batches = [order[at : at + 16] for at in range(0, len(order), 16)]
    for first in range(0, len(batches), 4):
        turns = batches[first : first + 4]
        for step in range(16):
            for batch in turns:
                if step < len(batch):
                    plan.opened(mark(batch[step]))
                    plan.opened(mark(batch[step]))  # once more, as to look at a header
    assert (plan.low, plan.jumps, plan.is_ignored) == (2000, 0, False)
    # At most the last files of an epoch that are among the first ones of the next.
    assert plan.skipped <= 4


def test_samples_that_are_left_out_are_passed_over(plan: Plan) -> None:
    order = epoch(1)
    add(plan, order)
    opens(plan, [path for number, path in enumerate(order) if number % 6])
    assert not plan.is_ignored
    assert plan.low >= 998 - plan.window


def test_a_reader_that_begins_elsewhere_is_found_again(plan: Plan) -> None:
    order = epoch(1, 5000)
    add(plan, order)
    opens(plan, [f"other{number}" for number in range(500)])
    assert (plan.low, plan.is_ignored) == (0, False)  # they say nothing
    opens(plan, order[3000:3100])
    assert (plan.low, plan.jumps, plan.is_ignored) == (3100, 1, False)
    opens(plan, order[:100])
    assert (plan.low, plan.jumps) == (100, 2)


def test_another_order_is_ignored_until_the_plan_is_followed_again(plan: Plan) -> None:
    order = epoch(1)
    add(plan, order * 3)
    opens(plan, epoch(2))
    assert plan.is_ignored
    opens(plan, order[100:900])
    assert not plan.is_ignored
    assert plan.low % 1000 == 900


@pytest.mark.parametrize(("seed", "least"), [(1, 9), (2, 101)])
def test_nine_opens_in_its_order_confirm_a_plan(plan: Plan, seed: int, least: int) -> None:
    add(plan, epoch(1))
    assert opens(plan, epoch(seed)[:100]) == [number >= least for number in range(1, 101)]


def test_another_order_of_few_files_is_ignored_as_well(plan: Plan) -> None:
    add(plan, [path for seed in range(4) for path in epoch(seed, 80)])
    opens(plan, [*epoch(10, 80), *epoch(11, 80)])
    assert plan.is_ignored


def test_an_entry_costs_at_most_twenty_bytes(plan: Plan) -> None:
    count = 1 << 20
    began = time.process_time()
    for first in range(0, count, 4096):
        plan.add(b"".join(b"train/%d.jpg\0" % at for at in range(first, first + 4096)))
    arrays = [
        part
        for segment in plan._segments
        for part in (segment.marks, segment._links, segment._heads)
    ]
    arrays += [plan._firsts, plan._offsets]
    assert sum(map(sys.getsizeof, arrays)) <= 20 * count
    assert time.process_time() - began < 5
