"""The values that a daemon reports as metrics."""

from __future__ import annotations

import threading
from pathlib import Path

import trio
import trio.testing

from fusefs.daemon import metrics


async def test_metrics_do_not_wait_for_a_slow_disk_that_holds_all_threads(tmp_path: Path) -> None:
    """As forty files that are synced at once do."""
    most = int(trio.to_thread.current_default_thread_limiter().total_tokens)
    disk = threading.Event()
    async with trio.open_nursery() as nursery:
        for _ in range(most):
            nursery.start_soon(trio.to_thread.run_sync, disk.wait)
        await trio.testing.wait_all_tasks_blocked()
        with trio.move_on_after(10) as waiting:
            assert await metrics._keeper(tmp_path) == {}
        disk.set()
    assert not waiting.cancelled_caught
