"""The walk along a plan, without a mount."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from fusefs.planning.prefetcher import Prefetcher, Walk
from fusefs.planning.table import Plan


async def test_a_plan_whose_file_cannot_be_read_is_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "plan").write_bytes(b"a\0b\0")
    plan = Plan("rank", "", os.open(tmp_path / "plan", os.O_WRONLY))  # a read of it is EBADF
    plan.add(b"a\0b\0")
    downloader: Any = SimpleNamespace(path=SimpleNamespace(width=1), room=1 << 30)
    nothing: Any = None
    prefetcher = Prefetcher("", nothing, nothing, nothing, downloader)
    with trio.fail_after(10):
        await prefetcher._walk(Walk(plan, trio.CancelScope()))
    assert plan.is_ignored
    assert "the plan of 'rank' can't be read" in caplog.text
