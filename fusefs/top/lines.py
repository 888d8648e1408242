"""The output texts of `fusefs top`: a line or a block of lines for each mount, and advice."""

from __future__ import annotations

from collections.abc import Sequence

from fusefs.diagnosis import stall_report
from fusefs.settings.display import human_duration, human_size, shown
from fusefs.top.rates import Operation, Rates

# Reads by the kernel (passthrough) are estimated as the sizes of the opened files.
SOURCES = {"cache": "cache", "s3": "S3", "kernel": "kernel, estimated"}
# The maximum number of operations in a block, the most frequent first.
MOST_OPERATIONS = 6
# The ratio of evicted bytes to bytes from S3 above which a larger cache is advised.
LEAST_EVICTED = 0.1


def line(mount: Rates) -> str:
    """Return one line about a mount, without a newline."""
    return shown(f"{mount.volume}: {'; '.join(_parts(mount))}")


def block(mount: Rates) -> Sequence[str]:
    """Return the lines about a mount: name and source, then indented lines about its work."""
    parts = _parts(mount)
    if mount.is_up:
        cache = f"{human_size(mount.cache_bytes)} of {human_size(mount.cache_limit_bytes)}"
        daemon = f"{mount.cpu:.0%} of a processor, {human_size(mount.memory_bytes)}"
        parts += [f"cache {cache}", f"daemon {daemon}, {mount.restarts:.0f} restarts"]
        operations = list(mount.requests.items())[:MOST_OPERATIONS]
        parts += [f"{name} {_times_text(times)}" for name, times in operations]
        parts += advice(mount)
    return [shown(f"{mount.volume}  {mount.source}"), *(shown(f"  {part}") for part in parts)]


def _parts(mount: Rates) -> list[str]:
    if not mount.is_up:
        trouble = "its metrics can't be read" if mount.is_malformed else "does not answer"
        return [f"{trouble} ({mount.why})"]
    parts = [
        f"read {rate_text(mount.read_s)}{origins(mount)}",
        f"sent to S3 {rate_text(mount.sent_s)}",
    ]
    waited = stall_report.sentence(mount.stalled, "the time")
    parts += [waited or "programs waited for nothing", s3_text(mount)]
    if mount.pending_files:
        size, age = human_size(mount.pending_bytes), human_duration(mount.oldest_pending_s)
        parts.append(f"{mount.pending_files:.0f} files ({size}) to upload, the oldest for {age}")
    if mount.wasted_share >= stall_report.LEAST_SHARE:
        parts.append(f"fetched ahead and not read {mount.wasted_share:.0%}")
    if mount.warm_target_bytes:
        share = mount.warm_done_bytes / mount.warm_target_bytes
        parts.append(f"warming {share:.0%} of {human_size(mount.warm_target_bytes)}")
    if mount.has_plan:
        parts.append(_plan_text(mount))
    return parts


def _plan_text(mount: Rates) -> str:
    size, seconds = human_size(mount.plan_ahead_bytes), human_duration(mount.plan_ahead_s)
    text = f"plan {mount.plan_ahead_files:.0f} files ({size}, {seconds}) ahead"
    if mount.plan_late_s:
        text += f", no open in time for {human_duration(mount.plan_late_s)}"
    late = {why: rate for why, rate in mount.plan_opens_s.items() if rate and why != "in_time"}
    if opens := sum(mount.plan_opens_s.values()):
        text += f", {1 - sum(late.values()) / opens:.0%} of opens in time"
    return f"{text}, late for {max(late, key=late.__getitem__)}" if late else text


def rate_text(rate: float) -> str:
    return f"{human_size(rate)}/s"


def _times_text(times: Operation) -> str:
    slow = f", 99% within {_short(times.within_s)}" if times.within_s is not None else ""
    return f"{times.per_s:.1f}/s, {_short(times.mean_s)} on average{slow}"


def _short(seconds: float) -> str:
    return f"{1e6 * seconds:.0f} us" if seconds < 0.001 else f"{1e3 * seconds:.1f} ms"


def advice(mount: Rates) -> list[str]:
    """Return sentences of advice for the user, the most useful first; may be empty."""
    sentences = []
    if mount.evicted_s > LEAST_EVICTED * mount.received_s > 0:
        sentences.append(
            "the cache evicts while S3 is read: a larger --cache-size (or disk) reads less twice"
        )
    if mount.read_from.get("s3", 0.0) > mount.read_s / 2:
        sentences.append("most of what was read came from S3: fusefs warm fetches it beforehand")
    if hint := stall_report.advice(mount.stalled):
        sentences.append(hint)
    return sentences


def s3_text(mount: Rates) -> str:
    requests_s = sum(operation.per_s for operation in mount.s3_requests.values())
    text = f"S3 {requests_s:.0f}/s"
    for rate, label in (
        (mount.s3_errors_s, "errors"),
        (mount.s3_throttled_s, "throttled"),
        (mount.s3_retries_s, "retried"),
    ):
        if rate:
            text += f", {rate:.1f}/s {label}"
    return text


def origins(mount: Rates) -> str:
    """Return the shares of read bytes by source, in brackets; "" if nothing was read."""
    if not mount.read_s:
        return ""
    shares = [
        f"{rate / mount.read_s:.0%} {SOURCES.get(source, source)}"
        for source, rate in mount.read_from.items()
        if rate / mount.read_s >= stall_report.LEAST_SHARE
    ]
    return f" ({', '.join(shares)})" if shares else ""
