"""The daemon's answers to commands: `fusefs status`, `sync`, `warm` and the like."""

from __future__ import annotations

import logging
import math
import os
import resource
import time
from collections.abc import Awaitable
from typing import Any

import trio

import fusefs
from fusefs.daemon import metrics
from fusefs.daemon.jobs.cache_warmer import JobSpec
from fusefs.daemon.main import Daemon
from fusefs.launch.control import ControlError
from fusefs.planning.plans import PlanError
from fusefs.posix.namespace.mutations import Mutations
from fusefs.posix.nodes import names
from fusefs.posix.write.backlog import UPLOADING
from fusefs.posix.write.writer import Writer
from fusefs.store.errors import StoreError
from fusefs.telemetry.stalls import CAUSES, STALLS

logger = logging.getLogger("fusefs.daemon")

# The maximum number of items that an answer lists; the others are only counted.
MOST_PENDING = 20
MOST_JOBS = 10
MOST_ENDED_JOBS = 3
# The periods, in seconds until now, for which `fusefs status` shows why requests waited.
STALL_SPANS_S = (10, 60, 300)


def answer(daemon: Daemon, request: dict[str, Any]) -> dict[str, Any] | Awaitable[dict[str, Any]]:
    """Return the answer to a command's request; raise ControlError for an unknown request."""
    match request:
        case {"command": "status"}:
            return collect(daemon)
        case {"command": "settings"}:
            return {"settings": daemon.settings.as_texts()}
        case {"command": "metrics"}:
            return metrics.collect(daemon)
        case {"command": "sync", "path": str(path), "start": bool(is_first)}:
            mutations = daemon.operations.mutations
            if mutations is None:
                return {"pending": [], "under_way": 0}
            return sync(mutations, daemon.settings.source.prefix + path, is_first=is_first)
        case {"command": "warm", "path": str(path)}:
            return _warm(daemon, path, request)
        case {"command": "warm list", "list": str(name), "offset": int(offset), "lines": str(text)}:
            return _append(daemon, name, offset, text)
        case {"command": "cancel warming", "path": str(path)}:
            return {"was_under_way": daemon.warmer.cancel(path)}
        case {"command": "plan", "reader": str(reader), "offset": int(offset), "entries": entries}:
            return _plan(daemon, reader, offset, entries, is_last=bool(request.get("is_last")))
        case {"command": "end plan", "reader": str(reader)}:
            return {"was_there": daemon.plans.end(reader)}
        case {"command": "record", "after": int(after)}:
            return daemon.plans.record(after)
        case {"command": "plans"}:
            return {"plans": daemon.plans.describe()}
        case {"command": "warming"}:
            return {"jobs": daemon.warmer.describe()}
        case {"command": "unpin", "path": str(path), "start": bool(is_first)}:
            _check(path)
            return daemon.local_copies.unpinning(path, is_new=is_first).describe()
        case {"command": "path status" | "drop" as name, "path": str(path), "start": bool(is_new)}:
            _check(path)
            return daemon.local_copies.job(path, is_new=is_new, drops=name == "drop").describe()
        case {"command": "give up", "path": str(path)}:
            return _give_up(daemon, path)
    raise ControlError("no such command")


def _check(path: str) -> None:
    if names.decode(os.fsencode(path)) is None:
        raise ControlError("no object has such a name")


async def _warm(daemon: Daemon, path: str, request: dict[str, Any]) -> dict[str, Any]:
    _check(path)
    try:
        shard, is_pinned = request.get("shard"), request.get("pin", False)
        spec = JobSpec.from_plain(path, shard, is_pinned, request.get("list", ""))
    except (TypeError, ValueError):
        raise ControlError("the request can't be read") from None
    job = await daemon.warmer.start(spec)
    return job.describe_within(daemon.cache.quota.limit)


async def _give_up(daemon: Daemon, path: str) -> dict[str, Any]:
    """Give up unsent changes at and below a path; return counts and where the contents stay."""
    writer = daemon.operations.writer
    if writer is None:
        raise ControlError("a read-only mount has nothing to give up")
    try:
        answer = await writer.backlog.give_up(daemon.settings.source.prefix + path)
    except StoreError as error:
        raise ControlError(
            f"the bucket cannot be asked for its version of the files: {error}"
        ) from error
    return answer | {"kept": str(writer.staging.directory)}


async def _plan(
    daemon: Daemon, reader: str, offset: int, entries: list[str], *, is_last: bool
) -> dict[str, Any]:
    try:
        text = "".join(f"{entry}\0" for entry in entries).encode()
        return await daemon.plans.add(reader, offset, text, is_last=is_last)
    except UnicodeEncodeError:
        raise ControlError("no object has such a name") from None
    except PlanError as error:
        raise ControlError(str(error)) from error


async def _append(daemon: Daemon, name: str, offset: int, lines: str) -> dict[str, Any]:
    await daemon.warmer.append(name, offset, lines)
    return {}


def collect(daemon: Daemon) -> dict[str, Any]:
    """Return the status of the daemon by section: bytes, seconds and counts."""
    settings = daemon.settings
    session, guard = daemon.session, daemon.access_guard
    ttl_s = settings.metadata_ttl.otherwise
    assert session is not None
    return {
        "version": fusefs.__version__,
        "mountpoint": str(settings.mountpoint),
        "source": str(settings.source),
        "read_only": settings.read_only,
        "session": session.name,
        "passthrough": {"on": daemon.backing.is_on, "why": daemon.backing.why},
        "survival": dict(zip(("on", "why"), session.survival, strict=True)),
        "cache": _cache(daemon),
        "pins": {"paths": len(daemon.cache.retention)},
        "cluster_cache": daemon.cluster_cache.describe() if daemon.cluster_cache else None,
        "integrity": _integrity(daemon),
        "access": {"is_shut": guard.is_shut, "refused_s": guard.refused_s},
        "s3": {**daemon.store.counters(), "last_error": daemon.store.requester.last_error()},
        "conditions": daemon.store.fence.describe(),
        "metadata": {
            "ttl_s": None if math.isinf(ttl_s) else ttl_s,
            "directories": len(daemon.directories),
            "nodes": len(daemon.operations.inodes),
            "most_nodes": daemon.name_pruner.most,
            "pruned_nodes": daemon.name_pruner.pruned,
            "can_prune_nodes": daemon.name_pruner.can_prune,
            "hidden_keys": daemon.directories.hidden.count,
            "sorted_listings": daemon.store.sorted_listings.count,
        },
        "requests": {
            "total": session.requests,
            "compiled": session.compiled_requests,
            "waiting": len(session.waiting),
            "downloads": daemon.downloader.under_way,
        },
        "stalls": {
            "shares": {
                str(seconds): dict(zip(CAUSES, STALLS.shares(seconds), strict=True))
                for seconds in STALL_SPANS_S
            }
        },
        "writing": _writing(daemon),
        "warming": _warming(daemon),
        "plans": daemon.plans.describe()[:MOST_JOBS],
        "daemon": _process(daemon),
    }


def _warming(daemon: Daemon) -> list[dict[str, Any]]:
    """Return the warm jobs to show: the latest ended jobs, then those under way."""
    jobs = daemon.warmer.describe()
    under_way = [job for job in jobs if job["state"] in ("listing", "under way")]
    ended = [job for job in jobs if job not in under_way]
    return [*ended[-MOST_ENDED_JOBS:], *under_way[:MOST_JOBS]]


def _writing(daemon: Daemon) -> dict[str, Any] | None:
    """Return the state of written files that wait for upload; None on a read-only mount."""
    writer = daemon.operations.writer
    mutations = daemon.operations.mutations
    if writer is None or mutations is None:
        return None
    return {
        "durability": daemon.settings.durability.shown(),
        "renames": mutations.changes.renames.describe(),
        "staged": len(writer.staging),
        "staged_bytes": writer.staging.charged,
        "late_requests": daemon.unanswered.counters(),
        **pending(writer, ""),
    }


def pending(writer: Writer, prefix: str) -> dict[str, Any]:
    """Return the oldest files at or below a key that wait for upload, and counts of all."""
    now = trio.current_time()
    unsent = sorted(writer.backlog.unsent(prefix), key=lambda staged: staged.since)
    return {
        "pending": [
            {
                "key": staged.key,
                "bytes": staged.size(),
                "since_s": now - staged.since,
                "state": writer.backlog.state(staged),
                "error": str(staged.error) if staged.error is not None else None,
            }
            for staged in unsent[:MOST_PENDING]
        ],
        "pending_files": len(unsent),
        "pending_bytes": sum(staged.size() for staged in unsent),
        "under_way": sum(writer.backlog.state(staged) == UPLOADING for staged in unsent),
    }


def sync(mutations: Mutations, key: str, *, is_first: bool) -> dict[str, Any]:
    """Return `pending` plus unfinished directory renames; `is_first` starts all of them at once."""
    if is_first:
        mutations.writer.backlog.hurry(key)
    renames = mutations.changes.renames.pending(key, hurry=is_first)
    answer = pending(mutations.writer, key)
    answer["pending"] = renames + answer["pending"]
    answer["under_way"] += sum(rename["error"] is None for rename in renames)
    return answer


def _cache(daemon: Daemon) -> dict[str, Any]:
    counters = daemon.operations.counters
    return {
        "directory": str(daemon.cache.directory),
        "used_bytes": daemon.cache.quota.used,
        "limit_bytes": daemon.cache.quota.limit,
        "limit_why": daemon.cache.quota.limit_why,
        "files": len(daemon.cache),
        "hits": counters.hits,
        "hit_bytes": counters.hit_bytes,
        "misses": counters.misses,
        "miss_bytes": counters.miss_bytes,
        "local_share": counters.local_share,
        # Each open counts above as a hit of the whole file, as the bytes read are not known.
        "passthrough_opens": counters.passthrough_opens,
        "passthrough_bytes": counters.passthrough_bytes,
        "evicted_files": daemon.cache.evicted,
        "written_bytes": daemon.cache.order.fetched,
        "warning": daemon.cache.trouble.recent,
    }


def _integrity(daemon: Daemon) -> dict[str, Any]:
    integrity = daemon.cache.integrity
    return {
        "differed_files": integrity.differed,
        "unreadable_files": integrity.unreadable,
        "latest": list(integrity.latest),
        "scrub": daemon.scrub.describe(),
    }


def _process(daemon: Daemon) -> dict[str, Any]:
    used = resource.getrusage(resource.RUSAGE_SELF)
    resident = metrics.resident_bytes()
    return {
        "pid": os.getpid(),
        "uid": os.geteuid(),
        "rss_bytes": resident,
        # The kernel updates the peak only now and then.
        "peak_rss_bytes": max(resident, used.ru_maxrss << 10),
        "cpu_s": used.ru_utime + used.ru_stime,
        "uptime_s": time.monotonic() - daemon.started,
    }


def log_waiting(daemon: Daemon) -> None:
    """Log the waiting requests and the downloads; called on SIGUSR2."""
    now = time.monotonic()
    waiting = daemon.session.waiting if daemon.session is not None else []
    logger.warning("%d requests wait", len(waiting))
    for request in sorted(waiting, key=lambda request: request.since):
        logger.warning("%s", request.describe(now, daemon.operations))
    for line in daemon.downloader.describe():
        logger.warning("%s", line)
