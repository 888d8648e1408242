"""The walk along a plan, without a mount."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from fusefs.cli.status_report import plan_progress
from fusefs.planning.prefetcher import Prefetcher
from fusefs.planning.table import Plan


@pytest.fixture
def prefetcher(tmp_path: Path) -> Prefetcher:
    """One with a plan of two files, which can't be read."""
    (tmp_path / "plan").write_bytes(b"a\0b\0")
    plan = Plan("rank", "", os.open(tmp_path / "plan", os.O_WRONLY))  # a read of it is EBADF
    plan.add(b"a\0b\0")
    plan.is_confirmed = True
    downloader: Any = SimpleNamespace(path=SimpleNamespace(width=1), room=1 << 30)
    nothing: Any = None
    found = Prefetcher("", nothing, nothing, nothing, downloader)
    found.begin(plan)
    return found


async def test_a_plan_whose_file_cannot_be_read_is_ignored(
    prefetcher: Prefetcher, caplog: pytest.LogCaptureFixture
) -> None:
    [(plan, walk)] = prefetcher._walks.items()
    with trio.fail_after(10):
        await prefetcher._walk(walk)
    assert plan.is_ignored
    assert "the plan of 'rank' can't be read" in caplog.text


def test_a_stall_lasts_from_the_first_late_open_until_the_next_file_is_there(
    prefetcher: Prefetcher,
) -> None:
    [(plan, walk)] = prefetcher._walks.items()
    prefetcher.opened(plan, is_late=True)
    since = prefetcher.describe(plan)["late_since"]
    prefetcher.opened(plan, is_late=True)
    state = prefetcher.describe(plan)
    assert since == state["late_since"] is not None
    assert "late 2 for the rate of S3, no open in time for 0" in plan_progress(state)
    walk.ready[0] = 1
    assert prefetcher.describe(plan)["late_since"] is None
