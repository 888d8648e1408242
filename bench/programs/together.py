"""Runs readers at the same time: as tasks of a pool, threads, or processes.

Processes are forked and wait at a barrier. Their time is from the first start to the last stop: all
of them read the same monotonic clock.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

# Each child reports its start and stop as JSON padded to this length, so that the reports can be
# separated in the pipe that all children share.
SPAN_SIZE = 80


class ShortReadError(Exception):
    """A file ended before its expected size."""


def run_together(count: int, work: Callable[[int], None]) -> float:
    """Run `work(0..count-1)` at the same time; return the seconds from first start to last stop.

    One reader runs in this process, several in forked ones: threads of one Python process would
    wait for each other.
    """
    if count == 1:
        start = time.monotonic()
        work(0)
        return time.monotonic() - start
    times_reader, times_writer = os.pipe()
    ready_reader, ready_writer = os.pipe()
    go_reader, go_writer = os.pipe()
    children = []
    for number in range(count):
        child = os.fork()
        if child == 0:
            os.close(go_writer)
            _run_child(number, work, ready_writer, go_reader, times_writer)
        children.append(child)
    for _ in range(count):
        os.read(ready_reader, 1)
    os.close(go_writer)  # all children see the end of the pipe together
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    if any(codes):
        raise ShortReadError(f"{sum(map(bool, codes))} of {count} readers failed")
    spans = [json.loads(os.read(times_reader, SPAN_SIZE)) for _ in range(count)]
    for descriptor in (times_reader, times_writer, ready_reader, ready_writer, go_reader):
        os.close(descriptor)
    return float(max(stop for _, stop in spans) - min(start for start, _ in spans))


def _run_child(number: int, work: Callable[[int], None], ready: int, go: int, times: int) -> None:
    """Run the work in a forked reader; never returns into the parent's code."""
    code = 1
    try:
        os.write(ready, b"r")
        os.read(go, 1)
        start = time.monotonic()
        work(number)
        span = json.dumps([start, time.monotonic()])
        os.write(times, span.ljust(SPAN_SIZE).encode())
        code = 0
    except (OSError, ShortReadError) as error:
        print(f"reader {number}: {error}", file=sys.stderr)
    finally:
        os._exit(code)


def by_tasks(names: list[str], threads: int, load: Callable[[str], int], size: int) -> float:
    """Load every name as its own task; return the seconds that it took."""
    with ThreadPoolExecutor(threads) as pool:
        start = time.monotonic()
        for name, count in zip(names, pool.map(load, names), strict=True):
            if count != size:
                raise ShortReadError(f"{name}: {count} of {size} bytes")
        return time.monotonic() - start


def by_threads(names: list[str], threads: int, work: Callable[[list[str]], None]) -> float:
    """Share the names among threads that start together; return the seconds that it took."""
    barrier = threading.Barrier(threads + 1)

    def run(mine: list[str]) -> None:
        barrier.wait()
        work(mine)

    with ThreadPoolExecutor(threads) as pool:
        futures = [pool.submit(run, names[start::threads]) for start in range(threads)]
        barrier.wait()
        start = time.monotonic()
        for future in futures:
            future.result()
        return time.monotonic() - start
