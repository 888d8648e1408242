"""The walk along a plan, without a mount."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from fusefs.cache.ranges import RangeMap
from fusefs.planning.prefetcher import Prefetcher, Walk, _pieces
from fusefs.planning.table import Plan


async def test_a_plan_whose_file_cannot_be_read_is_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "plan").write_bytes(b"a\0b\0")
    plan = Plan("rank", "", os.open(tmp_path / "plan", os.O_WRONLY))  # a read of it is EBADF
    plan.add(b"a\0b\0")
    prefetcher = Prefetcher("", Mock(), Mock(), Mock(), Mock(path=Mock(width=1), room=1 << 30))
    with trio.fail_after(10):
        await prefetcher._walk(Walk(plan, trio.CancelScope()))
    assert plan.is_ignored
    assert "the plan of 'rank' can't be read" in caplog.text


async def test_ranges_are_fetched_visit_by_visit() -> None:
    begun: list[str] = []

    async def fill(file: Any, *_: object) -> int:
        begun.append(file.name)
        await trio.sleep(0.001)
        return 1

    cache, plan = Mock(look_up=AsyncMock()), Plan("", "", os.open(os.devnull, os.O_RDONLY))
    cache.pin = lambda name: SimpleNamespace(name=name, present=RangeMap(), handles=0)
    downloads = Mock(path=Mock(width=8, latency_s=0), demand=Mock(count=0), most_small=8, fill=fill)
    prefetcher = Prefetcher("", Mock(), Mock(), cache, downloads)
    walk, ranges = Walk(plan, trio.CancelScope()), [(at << 20, (at << 20) + 1) for at in range(40)]
    async with trio.open_nursery() as nursery:
        for name in "ab":
            nursery.start_soon(prefetcher._fetch, walk, 0, ranges, Mock(version=name, size=1 << 30))
            await wait_all_tasks_blocked()
    assert begun[:32] == ["a"] * 32  # the last may begin beside the next visit


def test_ranges_are_rounded_to_blocks_and_end_with_the_file() -> None:
    block = 1 << 18
    ranges = [(9, block + 9), (20 * block - 1, 20 * block + 1), (12 * block, 9**9), (9**9, 9**10)]
    pieces = [(start / block, stop / block) for start, stop in _pieces(ranges, 40 * block)]
    assert pieces == [(0, 2), (19, 21), (12, 19), (21, 32), (32, 40)]
    assert _pieces([], 33 * block + 1) == [(0, 32 * block), (32 * block, 33 * block + 1)]
    assert (_pieces([(5, 6)], 4 * block), _pieces([(5, 6)], 0)) == ([(0, 4 * block)], [])
