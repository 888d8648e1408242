"""A plan's table: positions by opens, in whatever order workers open, and what it costs."""

import os
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from zlib import crc32

import pytest

from fusefs.planning.table import Plan

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


def epoch(seed: int, count: int = 1000) -> list[str]:
    return random.Random(seed).sample([f"f{number}" for number in range(count)], count)


def test_entries_are_found_by_their_positions_and_by_their_paths(plan: Plan) -> None:
    order = [*epoch(1), *epoch(2), *epoch(3)]
    add(plan, order)
    assert plan.size == 3000
    assert [path for at in range(0, 3000, 64) for path in plan.paths(at)] == order
    assert plan.paths(70)[0] == order[70]
    for path in order[:50]:
        places = [at for at, other in enumerate(order) if other == path]
        assert plan.find(mark(path), 0) == places[0]
        assert plan.find(mark(path), places[0] + 1) == places[1]
    assert plan.find(mark("another"), 0) == -1


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
    for number, path in enumerate(order):
        if number % 6:
            plan.opened(mark(path))
    assert not plan.is_ignored
    assert plan.low >= 998 - plan.window


def test_a_reader_that_begins_elsewhere_is_found_again(plan: Plan) -> None:
    order = epoch(1, 5000)
    add(plan, order)
    for path in order[3000:3100]:
        plan.opened(mark(path))
    assert (plan.low, plan.jumps, plan.is_ignored) == (3100, 1, False)
    for path in order[:100]:
        plan.opened(mark(path))
    assert (plan.low, plan.jumps) == (100, 2)


def test_another_order_is_ignored_until_the_plan_is_followed_again(plan: Plan) -> None:
    order = epoch(1)
    add(plan, order * 3)
    for path in epoch(2):
        plan.opened(mark(path))
    assert plan.is_ignored
    for path in order[100:900]:
        plan.opened(mark(path))
    assert not plan.is_ignored
    assert plan.low % 1000 == 900


def test_a_plan_is_confirmed_by_opens_in_its_order_alone(plan: Plan) -> None:
    add(plan, epoch(1))
    for path in epoch(2)[:100]:
        plan.opened(mark(path))
        assert not plan.is_followed


def test_nine_opens_confirm_a_plan(plan: Plan) -> None:
    add(plan, epoch(1))
    followed = []
    for path in epoch(1)[:12]:
        plan.opened(mark(path))
        followed.append(plan.is_followed)
    assert followed == [False] * 8 + [True] * 4


def test_another_order_of_few_files_is_ignored_as_well(plan: Plan) -> None:
    add(plan, [path for seed in range(4) for path in epoch(seed, 80)])
    for path in [*epoch(10, 80), *epoch(11, 80)]:
        plan.opened(mark(path))
    assert plan.is_ignored


def test_files_of_others_say_nothing_about_the_position(plan: Plan) -> None:
    add(plan, epoch(1))
    for number in range(500):
        plan.opened(mark(f"other{number}"))
    assert (plan.low, plan.is_ignored) == (0, False)


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
    assert sum(map(sys.getsizeof, arrays)) + sys.getsizeof(plan._offsets) <= 20 * count
    assert time.process_time() - began < 5
