"""The values of a mount's metrics; telemetry/metrics.py describes their names and form."""

from __future__ import annotations

import contextlib
import os
import resource
import time
from functools import partial
from pathlib import Path
from typing import Any

import trio

import fusefs
from fusefs.daemon.main import Daemon
from fusefs.launch.control import MALFORMED, ControlError
from fusefs.launch.mount_requests import keeper_status
from fusefs.posix.write.backlog import OPEN
from fusefs.settings.types import SessionKind
from fusefs.telemetry import metrics
from fusefs.telemetry.metrics import Sample, value
from fusefs.telemetry.s3_requests import CLUSTER_REQUESTS, S3_REQUESTS
from fusefs.telemetry.stalls import CAUSES, STALLS

Samples = dict[str, list[Sample]]

# Short, because a keeper that does not answer at once hangs, and the other values would wait.
KEEPER_TIMEOUT_S = 0.5


async def collect(parts: Daemon) -> dict[str, Any]:
    samples = _mount(parts) | _cache(parts) | _store(parts) | _warming(parts) | _process(parts)
    samples |= _plans(parts) | _uploads(parts) | _cluster_cache(parts) | _stalls()
    samples |= S3_REQUESTS.samples() | CLUSTER_REQUESTS.samples()
    if parts.settings.session != SessionKind.PYFUSE3:
        samples |= await _keeper(parts.settings.mountpoint)
    return metrics.answer(samples)


def _mount(parts: Daemon) -> Samples:
    session, counters = parts.session, parts.operations.counters
    assert session is not None
    totals, durations = session.times.samples()
    info = value(
        1,
        source=str(parts.settings.source),
        session=session.name,
        passthrough="on" if parts.backing.is_on else "off",
        version=fusefs.__version__,
    )
    return {
        "volume_info": [info],
        "requests_total": totals,
        "request_duration_seconds": durations,
        "opens_total": [
            value(counters.served_opens, mode="served"),
            value(counters.passthrough_opens, mode="passthrough"),
        ],
        "opened_passthrough_bytes_total": [value(counters.passthrough_bytes)],
    }


def _cache(parts: Daemon) -> Samples:
    cache = parts.cache
    counters = parts.operations.counters
    # The bytes that no reader waited for, of the fetched bytes that were read for the first time.
    ahead = counters.miss_bytes - counters.unkept_bytes - parts.downloader.waited_bytes
    counters.ahead_bytes = max(counters.ahead_bytes, ahead)
    return {
        "read_bytes_total": [
            value(counters.cache_bytes, source="cache"),
            value(counters.s3_bytes, source="s3"),
            value(counters.kernel_bytes, source="kernel"),
        ],
        "cache_evicted_bytes_total": [value(cache.evicted_bytes)],
        "cache_written_bytes_total": [value(cache.order.fetched)],
        "prefetch_bytes_total": [
            value(counters.ahead_bytes, outcome="used"),
            value(cache.evicted_unread, outcome="wasted"),
        ],
        "cache_bytes": [value(cache.quota.used)],
        "cache_limit_bytes": [value(cache.quota.limit)],
        "cache_allowed_bytes": [value(cache.quota.allowed)],
        "cache_files": [value(len(cache))],
    }


def _store(parts: Daemon) -> Samples:
    counters, connections = parts.store.counters(), parts.store.requester.connections
    return {
        "s3_received_bytes_total": [value(counters["bytes_fetched"])],
        "s3_sent_bytes_total": [value(counters["bytes_sent"])],
        "s3_retries_total": [value(counters["retries"])],
        "s3_throttled_total": [value(counters["throttled"])],
        "s3_connections": [
            value(connections.allowed, state="allowed"),
            value(connections.in_use, state="in_use"),
            value(connections.waiting, state="waiting"),
        ],
    }


def _cluster_cache(parts: Daemon) -> Samples:
    if parts.cluster_cache is None:
        return {}
    found = parts.cluster_cache.describe()
    return {
        "cluster_cache_lookups_total": [
            value(count, outcome=outcome) for outcome, count in found["lookups"].items()
        ],
        "cluster_cache_fills_total": [
            value(count, outcome=outcome) for outcome, count in found["fills"].items()
        ],
        "cluster_cache_received_bytes_total": [value(found["read_bytes"])],
        "cluster_cache_sent_bytes_total": [value(found["stored_bytes"])],
        "cluster_cache_in_use": [value(found["state"] == "closed")],
    }


def _stalls() -> Samples:
    stalled, wait = STALLS.totals()
    return {
        "stalled_seconds_total": [
            value(seconds, cause=cause) for cause, seconds in zip(CAUSES, stalled, strict=True)
        ],
        "wait_seconds_total": [
            value(seconds, cause=cause) for cause, seconds in zip(CAUSES, wait, strict=True)
        ],
    }


def _uploads(parts: Daemon) -> Samples:
    writer = parts.operations.writer
    if writer is None:
        return {}
    unsent = writer.backlog.unsent("")
    now = trio.current_time()
    # The upload of a file that a program has open, such as a log, is not due.
    due = [staged for staged in unsent if writer.backlog.state(staged) != OPEN]
    return {
        "upload_pending_files": [value(len(unsent))],
        "upload_pending_bytes": [value(sum(staged.size() for staged in unsent))],
        "upload_oldest_pending_seconds": [
            value(max((now - staged.since for staged in due), default=0.0))
        ],
        "upload_failures_total": [value(writer.flusher.uploads.failures)],
    }


def _warming(parts: Daemon) -> Samples:
    jobs = [job for job in parts.warmer.describe() if job["state"] in ("listing", "under way")]
    return {
        "warm_done_bytes": [value(sum(job["done_bytes"] for job in jobs))],
        "warm_target_bytes": [value(sum(job["bytes"] - job["left_out_bytes"] for job in jobs))],
    }


def _plans(parts: Daemon) -> Samples:
    plans = parts.plans.describe()
    ahead = [plan["ahead_s"] for plan in plans if plan["ahead_s"] is not None]
    late = [time.time() - plan["late_since"] for plan in plans if plan["late_since"] is not None]
    opens = parts.plans.opens
    sums = {
        f"plan_{name}": [value(sum(plan[name] for plan in plans))] if plans else []
        for name in ("ahead_files", "ahead_bytes")
    }
    return sums | {
        "plan_ahead_seconds": [value(min(ahead))] if ahead else [],
        "plan_late_seconds": [value(max([0.0, *late]))] if plans else [],
        "plan_opens_total": [value(count, outcome=outcome) for outcome, count in opens.items()],
    }


def _process(parts: Daemon) -> Samples:
    assert parts.session is not None
    # The CPU time of this thread, the event loop's, without the time in which it polled for
    # requests. The polling is measured by the clock, so preemption may make the difference shrink.
    parts.loop_busy_s = max(parts.loop_busy_s, time.thread_time() - parts.session.polled_s)
    used = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "daemon_loop_busy_seconds_total": [value(parts.loop_busy_s)],
        "daemon_cpu_seconds_total": [value(used.ru_utime + used.ru_stime)],
        "daemon_resident_memory_bytes": [value(resident_bytes())],
    }


async def _keeper(mountpoint: Path) -> Samples:
    """Return the keeper's counters, which outlive daemons; empty if it does not answer."""
    look = partial(keeper_status, mountpoint, KEEPER_TIMEOUT_S)
    try:
        # A limiter for this call alone: calls that wait for a slow disk may occupy all threads of
        # the default limiter.
        thread = trio.CapacityLimiter(1)
        status = await trio.to_thread.run_sync(look, abandon_on_cancel=True, limiter=thread)
    except ControlError:
        return {}
    samples: dict[str, list[Sample]] = {}
    with contextlib.suppress(*MALFORMED):  # a keeper of another version may lack keys
        samples["daemon_restarts_total"] = [value(float(status["restarts"]))]
        paused_s = float(status["pauses_s"] + status["pause_s"])
        samples["daemon_pause_seconds_total"] = [value(paused_s)]
    return samples


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
