"""`fusefs profile`: an access log of one mount while it runs, and a summary with advice."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from fusefs.launch import control
from fusefs.launch.mount_requests import daemon_request
from fusefs.settings.display import human_duration, human_size
from fusefs.telemetry.access_summary import Access, AccessSummary, MountContext

ANSWER_TIMEOUT_S = 5.0
POLL_S = 0.25
MOST_TAKEN = 10
_LABEL_WIDTH = 12
# Operations that the summary names, those with the most time first.
MOST_OPERATIONS = 6


def profile(
    mountpoint: Path, seconds: float, begun: Callable[[], None], show: Callable[[Access], None]
) -> tuple[AccessSummary, float, str]:
    """Record the requests of a mount; return their summary, how long that was in seconds, and "".

    `begun` is called once the daemon records, `show` with each request. SIGINT ends it early;
    so does the end of the daemon, and then the last of the results says so.

    Raises:
        ControlError: the mount has ended, or another command records.
    """
    summary = AccessSummary()
    number = _ask(mountpoint, {"command": "start profile"})["number"]
    began, why = time.monotonic(), ""
    try:
        with _interrupted() as stopped:
            begun()
            try:
                while not stopped.is_set() and (left := began + seconds - time.monotonic()) > 0:
                    stopped.wait(min(POLL_S, left))
                    _take(mountpoint, number, summary, show)
                _take(mountpoint, number, summary, show)
            except control.ControlError as error:
                why = str(error)
        return summary, time.monotonic() - began, why
    finally:
        with contextlib.suppress(control.ControlError):  # else it ends by itself, unheard
            _ask(mountpoint, {"command": "end profile", "number": number})


@contextlib.contextmanager
def _interrupted() -> Iterator[threading.Event]:
    """An event that SIGINT sets, in place of an exception in the middle of an answer."""
    stopped = threading.Event()
    before = signal.signal(signal.SIGINT, lambda *_: stopped.set())
    try:
        yield stopped
    finally:
        signal.signal(signal.SIGINT, before)


def _take(
    mountpoint: Path, number: int, summary: AccessSummary, show: Callable[[Access], None]
) -> None:
    """Take what is on record by now."""
    # Not for ever: requests may come faster than this takes them.
    for _ in range(MOST_TAKEN):
        taken = _ask(mountpoint, {"command": "take profile", "number": number})
        summary.lost += taken["lost"]
        # They are on record as they ended; of those that overlapped the first comes first here.
        for access in sorted(Access(*entry) for entry in taken["entries"]):
            summary.add(access)
            show(access)
        if not taken["has_more"]:
            break


def _ask(mountpoint: Path, message: dict[str, Any]) -> dict[str, Any]:
    return daemon_request(mountpoint, message, ANSWER_TIMEOUT_S)


def surroundings(mountpoint: Path) -> MountContext:
    """What the mount is set to; nothing if its daemon does not answer."""
    try:
        status = _ask(mountpoint, {"command": "status"})
    except control.ControlError:
        return MountContext()
    return MountContext(status["cache"]["limit_bytes"], status["metadata"]["ttl_s"])


def line(access: Access) -> str:
    """One request as a line of the log."""
    where = f" [{access.offset}, {access.offset + access.size})" if access.handle else ""
    error = f" {os.strerror(access.errno)}" if access.errno else ""
    took = f"{1e3 * access.seconds:.3f} ms"
    what = f"{access.operation} {access.key!r}{where}{error}"
    return f"{access.at_s:10.4f} {took:>12} {access.source:<11} {what}"


def json_line(access: Access) -> str:
    return json.dumps(access._asdict())


def report(summary: AccessSummary, seconds: float, around: MountContext) -> str:
    """The summary and the advice as lines for people."""
    rows = [("requests", _requests(summary, seconds)), ("files", _files(summary, seconds))]
    rows += [("reads", sentence) for sentence in _reads(summary)]
    rows.append(("working set", _working_set(summary, around)))
    rows += [("latency", sentence) for sentence in _latencies(summary)]
    advice = list(summary.advice(around))
    rows += [("advice", sentence) for sentence in advice or ["nothing stands out"]]
    return "\n".join(f"{label:<{_LABEL_WIDTH}}{text}" for label, text in rows)


def _requests(summary: AccessSummary, seconds: float) -> str:
    text = f"{summary.requests:,} in {human_duration(round(seconds, 1))}"
    if summary.failed:
        text += f", {summary.failed:,} answered with an error"
    if summary.lost:
        text += f"; {summary.lost:,} more came too fast to be recorded"
    return text


def _files(summary: AccessSummary, seconds: float) -> str:
    sizes = summary.opened_files
    if not sizes:
        return "none was opened"
    spread = f"{human_size(sizes[0])} to {human_size(sizes[-1])}"
    return (
        f"{len(sizes):,} opened in {summary.opens:,} opens ({summary.opens / seconds:.1f} a"
        f" second), {summary.reopened_files:,} of them again; {spread}, median"
        f" {human_size(sizes[len(sizes) // 2])}"
    )


def _reads(summary: AccessSummary) -> Iterable[str]:
    if summary.passthrough_opens:
        yield (
            f"of {summary.passthrough_opens:,} opens the kernel reads the cache itself, which is"
            " not seen here"
        )
    if summary.all_reads:
        total = sum(summary.read_bytes.values())
        share = summary.sequential_reads / summary.all_reads
        sources = ", ".join(
            f"{human_size(size)} from {source}" for source, size in summary.read_bytes.most_common()
        )
        yield (
            f"{summary.all_reads:,} of {human_size(total / summary.all_reads)} on average,"
            f" {share:.0%} in sequence; {sources}; {human_size(summary.again_bytes)} read again"
        )
    if summary.written_bytes:
        yield f"{human_size(summary.written_bytes)} were written"


def _working_set(summary: AccessSummary, around: MountContext) -> str:
    limit = around.cache_limit
    of_cache = f"; the cache may hold {human_size(limit)}" if limit is not None else ""
    left_out = summary.left_out_files
    more = f", and {left_out:,} requests for more files" if left_out else ""
    return f"{human_size(summary.working_set)} of different bytes{more}{of_cache}"


def _latencies(summary: AccessSummary) -> Iterable[str]:
    for operation, count in summary.operations.most_common(MOST_OPERATIONS):
        median, slow = summary.median_s(operation), summary.percentile_99_s(operation)
        waits = summary.waits[operation]
        from_s3 = f", {waits:,} waited for S3" if waits else ""
        yield f"{operation}: {count:,}, median {_short(median)}, 99% {_short(slow)}{from_s3}"


def _short(seconds: float) -> str:
    return f"{1e6 * seconds:.0f} us" if seconds < 0.001 else f"{1e3 * seconds:.1f} ms"


def as_json(summary: AccessSummary, seconds: float, around: MountContext) -> dict[str, Any]:
    """The summary for programs: bytes, seconds and counts."""
    sizes = summary.opened_files
    return {
        "seconds": seconds,
        "requests": summary.requests,
        "lost": summary.lost,
        "failed": summary.failed,
        "operations": dict(summary.operations),
        "opened_files": len(sizes),
        "opens": summary.opens,
        "passthrough_opens": summary.passthrough_opens,
        "reopened_files": summary.reopened_files,
        "median_file_bytes": sizes[len(sizes) // 2] if sizes else None,
        "largest_file_bytes": sizes[-1] if sizes else None,
        "reads": summary.all_reads,
        "sequential_reads": summary.sequential_reads,
        "read_bytes": dict(summary.read_bytes),
        "read_again_bytes": summary.again_bytes,
        "written_bytes": summary.written_bytes,
        "working_set_bytes": summary.working_set,
        "advice": list(summary.advice(around)),
    }
