"""The text of `fusefs status`, made from the daemons' answers.

A daemon's answer has plain numbers (bytes, seconds, counts); this module adds labels and units.
Values that an answer lacks are left out, because the daemon may be older than the command.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

from fusefs.diagnosis import stall_report
from fusefs.launch.control import MALFORMED
from fusefs.settings.display import counted, human_duration, human_size, shown

Status = Mapping[str, Any]

_LABEL_WIDTH = 12
# A cache counts as full above this share of its limit.
FULL = 0.9
# S3 counts as failing for this long after its last failure.
FAILING_S = 60.0
# The maximum number of waiting uploads that are listed by name.
MOST_PENDING = 5


def as_text(status: Status) -> str:
    """Return the block of lines for one mount, also if its status is missing or malformed."""
    try:
        return render_silent(status) if "not_answering" in status else render(status)
    except MALFORMED as error:
        why = f"its status can't be read: {type(error).__name__}: {error}; fusefs upgrade"
        known = {name: status.get(name) for name in ("mountpoint", "source")}
        return render_silent({**known, "not_answering": status.get("not_answering") or why})


def render(status: Status) -> str:
    rows: list[tuple[str, str]] = [("source", str(status.get("source", "")))]
    for label, section, describe in (
        ("session", status, _session),
        ("cache", status.get("cache"), _cache),
        ("pinned", (status.get("pins") or {}).get("paths"), lambda paths: counted(paths, "path")),
        ("hits", status.get("cache"), _hits),
        ("cluster", status.get("cluster_cache"), cluster_cache),
        ("checksums", status.get("integrity"), _integrity),
        ("S3", status if status.get("s3") else None, _s3),
        ("conditions", status.get("conditions"), _conditions),
        ("metadata", status.get("metadata"), _metadata),
        ("requests", status.get("requests"), _requests),
        ("writing", status.get("writing"), _writing),
        ("daemon", status.get("daemon"), _daemon),
        ("survival", status if "survival" in status else None, _survival),
    ):
        if section:
            rows.append((label, describe(section)))
    if status.get("stalls"):
        rows += [("waits", sentence) for sentence in stall_report.sentences(status["stalls"])]
        cache = status.get("cache") or {}
        limit = cache.get("limit_bytes")
        has_room = limit is None or cache.get("used_bytes", 0) < FULL * limit
        if hint := stall_report.hint(status["stalls"], has_room=has_room):
            rows.append(("hint", hint))
    writing = status.get("writing") or {}
    rows += [("pending", _pending(file)) for file in writing.get("pending", ())[:MOST_PENDING]]
    rows += [("renaming", _renaming(job)) for job in writing.get("renames", ())]
    late = writing.get("late_requests") or {}
    if any(late.values()):
        uncertain = counted(late.get("uncertain", 0), "key")
        put_back = f"{late.get('repairs', 0):,} put back"
        rows.append(("late", f"{uncertain} with requests without an answer, {put_back}"))
    rows += [
        (
            "pinning" if job.get("is_pinned") else "warming",
            f"{job['path'] or '.'}: {warm_progress(job)}",
        )
        for job in status.get("warming", ())
    ]
    rows += [("plan", plan_progress(plan)) for plan in status.get("plans", ())]
    rows += [("warning", warning) for warning in _warnings(status)]
    return _block(status, rows)


def render_silent(status: Status) -> str:
    """Return the block of lines for a mount whose daemon gave no status."""
    pid = status.get("daemon", {}).get("pid")
    who = f"not answering, pid {pid}" if pid else "not answering"
    rows = [
        ("source", str(status.get("source", ""))),
        ("daemon", f"{who} ({status['not_answering']})"),
    ]
    if "requests" in status:
        rows.append(("requests", _requests(status["requests"])))
    if "keeper" in status:
        rows.append(("survival", _survival(status)))
    return _block(status, rows)


def _block(status: Status, rows: Iterable[tuple[str, str]]) -> str:
    lines = [f"  {label:<{_LABEL_WIDTH}}{shown(text)}" for label, text in rows]
    return "\n".join([shown(str(status.get("mountpoint", ""))), *lines])


def _session(status: Status) -> str:
    passthrough = status.get("passthrough", {})
    state = "on" if passthrough.get("on") else "off"
    why = f" ({passthrough['why']})" if passthrough.get("why") else ""
    mode = "read-only" if status.get("read_only") else "writable"
    return f"{status.get('session', '?')}, {mode}, passthrough {state}{why}"


def _cache(cache: Status) -> str:
    used = human_size(cache.get("used_bytes", 0))
    limit = cache.get("limit_bytes")
    of_limit = f" of {human_size(limit)}" if limit is not None else ""
    if cache.get("limit_why"):
        of_limit += f" ({cache['limit_why']})"
    text = f"{used}{of_limit} in {counted(cache.get('files', 0), 'file')}"
    return f"{text}, {cache.get('evicted_files', 0):,} evicted, {cache.get('directory', '?')}"


def _hits(cache: Status) -> str:
    hits, misses = cache.get("hits", 0), cache.get("misses", 0)
    hit_bytes, miss_bytes = cache.get("hit_bytes", 0), cache.get("miss_bytes", 0)
    total = hit_bytes + miss_bytes
    share = f" ({hit_bytes / total:.1%})" if total else ""
    # The daemon does not see reads of files that are open for passthrough, so each such open counts
    # as one read of the whole file.
    opened, sizes = cache.get("passthrough_opens", 0), human_size(cache.get("passthrough_bytes", 0))
    unseen = f"; {sizes} of it for {counted(opened, 'passthrough open')}, whose reads are not seen"
    unseen = unseen if opened else ""
    return (
        f"{human_size(hit_bytes)} of {human_size(total)} read were served locally{share},"
        f" {human_size(miss_bytes)} were fetched for it; {hits:,} of {hits + misses:,} reads"
        f"{unseen}"
    )


def _integrity(integrity: Status) -> str:
    """Describe how many cached files differed from their checksums or could not be read."""
    differed, unreadable = integrity["differed_files"], integrity["unreadable_files"]
    faults = [f"{counted(differed, 'file')} differed"] if differed else []
    if unreadable:
        faults.append(f"{counted(unreadable, 'file')} could not be read from the cache disk")
    scrub = _scrub(integrity.get("scrub") or {})
    if not faults:
        return f"no cached file differed{scrub}"
    last = integrity["latest"][-1]
    return f"{', '.join(faults)}, dropped and fetched again{scrub}; the last: {last}"


def _scrub(scrub: Status) -> str:
    match scrub.get("state"):
        case "under way":
            return f"; scrub under way, {human_size(scrub['done_bytes'])} so far"
        case "done":
            ago = human_duration(max(0.0, time.time() - scrub["ended"]))
            return f"; {human_size(scrub['done_bytes'])} scrubbed, {ago} ago"
    return ""


def cluster_cache(found: Status) -> str:
    """Describe the cluster cache: its state, its counts of blocks found and stored, its errors."""
    lookups, fills = found["lookups"], found["fills"]
    state = {"closed": "in use", "opening": "not reached yet"}.get(found["state"], "not in use")
    why = f" ({found['why']})" if found["why"] else ""
    of = sum(lookups[name] for name in ("hits", "misses"))
    troubles = [
        f"{lookups[name]:,} {label}"
        for name, label in (
            ("late", "late"),
            ("failed", "without an answer"),
            ("refused", "refused"),
            ("bad", "damaged"),
        )
        if lookups[name]
    ]
    troubles += [f"{fills['failed']:,} not taken"] if fills["failed"] else []
    troubles += [f"{fills['dropped']:,} not stored for lack of time"] if fills["dropped"] else []
    return (
        f"{found['place']}: {state}{why}; {lookups['hits']:,} of {of:,} lookups found a block,"
        f" {human_size(found['read_bytes'])}; {fills['stored']:,} stored,"
        f" {human_size(found['stored_bytes'])}, {found['queued_fills']:,} to come;"
        f" {', '.join(troubles) or 'no errors'}"
    )


def _s3(status: Status) -> str:
    s3 = status["s3"]
    names = [("gets", "GET"), ("heads", "HEAD"), ("lists", "LIST")]
    if not status.get("read_only"):
        names += [("puts", "PUT"), ("copies", "COPY"), ("deletes", "DELETE")]
    requests = ", ".join(f"{s3.get(name, 0):,} {label}" for name, label in names)
    moved = f"{human_size(s3.get('bytes_fetched', 0))} fetched"
    if not status.get("read_only"):
        moved += f", {human_size(s3.get('bytes_sent', 0))} sent"
    failing = _s3_failure(s3)
    troubles = [failing] if failing is not None else []
    troubles += [
        f"{s3[name]:,} {label}"
        for name, label in (
            # `errors` do not include successful retries, missing objects and lost races.
            ("errors", "failed for good (errors)"),
            ("retries", "retried"),
            ("throttled", "throttled"),
        )
        if s3.get(name)
    ]
    last = s3.get("last_error")
    if failing is None and last is not None:
        troubles.append(
            f"the last error {human_duration(round(last['ago_s']))} ago: {last['what']}"
        )
    return f"{requests}; {moved}; {', '.join(troubles) or 'no errors'}"


def _s3_failure(s3: Status) -> str | None:
    """Describe the present failure of S3 and its duration; return None if S3 answers."""
    last = s3.get("last_error")
    if last is None or last["since_s"] is None or last["ago_s"] > FAILING_S:
        return None
    return f"failing for {human_duration(round(last['since_s']))}: {last['what']}"


def is_healthy(status: Status) -> bool:
    """True if the mount answers, S3 answers and does not refuse it, and no upload has failed.

    A mount of another user counts as healthy, because its state is not known.
    """
    if "not_answering" in status:
        return bool(status.get("is_foreign"))
    try:
        pending = (status.get("writing") or {}).get("pending", ())
        return not (
            _s3_failure(status.get("s3") or {})
            or (status.get("access") or {}).get("is_shut")
            or any(file["state"] == "failed" for file in pending)
        )
    except MALFORMED:
        return False


def _conditions(conditions: Status) -> str:
    """Describe how the store honours conditional requests (If-Match and the like)."""
    missing = conditions.get("missing", ())
    without = f"; not honoured: {', '.join(missing)}" if missing else ""
    if not conditions.get("known"):
        return f"not known ({conditions.get('why', '?')}){without}"
    return f"probed{without}" if missing else "honoured (probed)"


def _metadata(metadata: Status) -> str:
    text = (
        f"listings used for {human_duration(metadata.get('ttl_s'))}; "
        f"{counted(metadata.get('directories', 0), 'listing')}, "
        f"{counted(metadata.get('nodes', 0), 'node')}"
    )
    if hidden := metadata.get("hidden_keys", 0):
        text += f"; {counted(hidden, 'key')} hidden (docs/semantics.md says why)"
    if sorted_here := metadata.get("sorted_listings", 0):
        text += f"; {counted(sorted_here, 'folder')} listed whole, for the store has no order"
    return text


def _requests(requests: Status) -> str:
    waiting = requests.get("in_kernel", requests.get("waiting", 0))
    answered = f"{requests['total']:,} answered, " if "total" in requests else ""
    return f"{answered}{waiting:,} waiting"


def _survival(status: Status) -> str:
    keeper = status.get("keeper")
    if keeper is None:
        survival = status.get("survival", {})
        return f"{'on' if survival.get('on') else 'off'} ({survival.get('why', '?')})"
    restarts, upgrades = keeper.get("restarts", 0), keeper.get("upgrades", 0)
    text = f"keeper pid {keeper.get('pid', '?')}, {counted(restarts, 'restart')}"
    text += f", {counted(upgrades, 'upgrade')}" if upgrades else ""
    if not restarts and not upgrades:
        return text
    ago = max(0.0, time.time() - keeper.get("last_death_ns", 0) / 1e9)
    return (
        f"{text}, the last {human_duration(ago)} ago ({keeper.get('last_reason', '?')}); "
        f"longest pause {human_duration(keeper.get('longest_pause_s', 0.0))}"
    )


def _writing(writing: Status) -> str:
    count = writing.get("pending_files", 0)
    rules = writing.get("durability", "auto")
    more = "" if rules == "auto" else f"; durability {rules}"
    if not count:
        return f"everything is in the bucket{more}"
    size = human_size(writing.get("pending_bytes", 0))
    return f"{counted(count, 'file')}, {size}, not in the bucket yet{more}"


def _pending(file: Status) -> str:
    why = f" ({file['error']})" if file.get("error") else ""
    size, age = human_size(file["bytes"]), human_duration(file["since_s"])
    return f"{file['key']}: {file['state']}, {size}, for {age}{why}"


def _renaming(job: Status) -> str:
    done = f"{job['copied']:,} of {job['files']:,} copied, {job['deleted']:,} deleted"
    age = human_duration(job["since_s"])
    text = f"{job['from']} to {job['to']}: {job['phase']}, {done}, for {age}"
    if not job.get("waiting"):
        return text
    more = ", ..." if job["waiting"] > len(job["waiting_keys"]) else ""
    named = ", ".join(job["waiting_keys"]) + more
    return f"{text}; {counted(job['waiting'], 'change')} of this mount waiting for it: {named}"


def warm_progress(job: Status) -> str:
    """Describe the progress of a job of `fusefs warm`, or its result."""
    troubles = warming_troubles(job)
    if job.get("unshared_blocks"):
        troubles.append(f"the cluster cache did not take {job['unshared_blocks']:,} blocks")
    if job["state"] == "under way":
        return "; ".join([progress(job), *troubles])
    if job["state"] == "listing":
        return "listing"
    here = f"{counted(job['done_files'], 'file')}, {human_size(job['done_bytes'])} in the cache"
    return "; ".join([*(["cancelled"] if job["state"] == "cancelled" else []), here, *troubles])


def plan_progress(plan: Status) -> str:
    """Describe a plan of `fusefs plan`: the files fetched ahead, and reasons of late opens."""
    reader = f"{plan['reader']}: " if plan["reader"] else ""
    text = (
        f"{reader}{plan['state']}, {plan['position']:,} of {counted(plan['entries'], 'file')} read"
    )
    text += f", {counted(plan['ahead_files'], 'file')} ({human_size(plan['ahead_bytes'])}"
    if plan["ahead_s"] is not None:
        text += f", {human_duration(plan['ahead_s'])}"
    text += ") ahead"
    if plan["opens"]:
        text += f"; {plan['in_time'] / plan['opens']:.1%} of {plan['opens']:,} opens in time"
    reasons = {"rate": "the rate of S3", "room": "room", "position": "an unknown position"}
    late = [f"{plan['late'][key]:,} for {why}" for key, why in reasons.items() if plan["late"][key]]
    if late:
        text += f", late {', '.join(late)}"
    if plan.get("late_since"):
        text += f", no open in time for {human_duration(time.time() - plan['late_since'])}"
    if plan["missing"]:
        text += f"; {plan['missing']:,} not in the bucket, the first: {plan['first_missing']}"
    return text


def progress(job: Status) -> str:
    """Return a job's progress as a text such as `41%, 3.1 of 7.5 GiB, ETA 2 min`."""
    wanted = job["bytes"] - job["left_out_bytes"]
    done, of = human_size(job["done_bytes"]), human_size(wanted)
    if done.split()[1] == of.split()[1]:
        done = done.split()[0]
    if not job["is_listed"]:
        return f"{done} of at least {of}"
    share = min(1.0, job["done_bytes"] / wanted) if wanted else 1.0
    text = f"{int(100 * share)}%, {done} of {of}"
    eta_s = job["eta_s"]
    if eta_s is None:
        return text
    rounded = 60 * round(eta_s / 60) if eta_s >= 60 else max(1, round(eta_s))
    return f"{text}, ETA {human_duration(rounded)}"


def warming_troubles(job: Status) -> list[str]:
    """Return the reasons why a job of `fusefs warm` has not cached all files; may be empty."""
    troubles = [job["why"]] if job["why"] else []
    if job["left_out_files"]:
        left_out = (
            f"{human_size(job['left_out_bytes'])} of {counted(job['left_out_files'], 'file')}"
        )
        troubles.append(f"no room for {left_out} in the cache ({human_size(job['limit_bytes'])})")
    if job["failed_files"]:
        more = job["failed_files"] - len(job["failed"])
        named = ", ".join(job["failed"]) + (f" and {more:,} more" if more else "")
        troubles.append(f"{counted(job['failed_files'], 'file')} can't be read: {named}")
    return troubles


def _daemon(daemon: Status) -> str:
    return (
        f"pid {daemon.get('pid', '?')}, {human_size(daemon.get('rss_bytes', 0))} of memory, "
        f"up {human_duration(daemon.get('uptime_s', 0))}, {daemon.get('cpu_s', 0):.1f} s of CPU"
    )


def _warnings(status: Status) -> Iterable[str]:
    if warning := (status.get("cache") or {}).get("warning"):
        yield str(warning)
    access = status.get("access") or {}
    if access.get("refused_s") is not None:
        served = "not served any more" if access["is_shut"] else "still served"
        refused = human_duration(access["refused_s"])
        yield f"S3 has refused everything for {refused}; what is cached is {served}"
