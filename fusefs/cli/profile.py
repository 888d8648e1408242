"""`fusefs profile`: what a mount did over some time, with advice.

The daemon counts requests, their times and what they waited for anyway (telemetry/metrics.py).
This command asks for the counters twice; all that it shows is the difference.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from fusefs.diagnosis import stall_report
from fusefs.exporter.queries import MountAnswer, target_at
from fusefs.launch.control import CommandError
from fusefs.launch.mount_requests import daemon_request
from fusefs.settings.display import human_duration, human_size
from fusefs.top import lines
from fusefs.top.rates import Rates, rates

ANSWER_TIMEOUT_S = 5.0
_LABEL_WIDTH = 12
# Operations that the summary names, the most frequent first.
MOST_OPERATIONS = 6
# A smaller share of what S3 sent is no reason for a larger cache.
LEAST_EVICTED = 0.1
_OUTCOMES = {
    "refused": "refused",
    "error": "answered with an error",
    "interrupted": "interrupted",
}


def profile(mountpoint: Path, seconds: float) -> Rates:
    """The work of the mount in the next `seconds`; SIGINT ends them early.

    Of a daemon that is replaced meanwhile only what the last one counted is known.

    Raises:
        ControlError: the mount has ended, or its daemon does not answer.
        CommandError: the daemon's answer can't be read.
    """
    ending = threading.Event()
    before = signal.signal(signal.SIGINT, lambda *_: ending.set())
    try:
        early = _ask(mountpoint)
        sentence = f"counting for {human_duration(seconds)}; Ctrl-C ends it"
        print(sentence, file=sys.stderr, flush=True)
        ending.wait(seconds)
        found = rates(early, _ask(mountpoint))
    finally:
        signal.signal(signal.SIGINT, before)
    if not found.is_up:
        raise CommandError(f"{mountpoint}: {lines.trouble(found)} ({found.why}); fusefs upgrade")
    return found


def _ask(mountpoint: Path) -> MountAnswer:
    answer = daemon_request(mountpoint, {"command": "metrics"}, ANSWER_TIMEOUT_S)
    return MountAnswer(
        target_at(mountpoint, str(mountpoint)), answer.get("metrics"), taken=time.monotonic()
    )


def as_json(found: Rates) -> str:
    return json.dumps(asdict(found) | {"advice": advice(found)})


def as_text(found: Rates) -> str:
    used, limit = human_size(found.cache_bytes), human_size(found.cache_limit_bytes)
    evicted = human_size(found.count(found.evicted_s))
    waited = stall_report.sentence(found.stalled, "this time")
    rows = [
        ("requests", _requests(found)),
        ("opens", _opens(found)),
        ("reads", f"{human_size(found.count(found.read_s))}{lines.origins(found)}"),
        ("S3", f"{lines.transfer_text(found)}; {lines.s3_text(found)}"),
        ("cache", f"{used} of {limit}, {evicted} evicted"),
        ("waits", waited or "programs waited for nothing"),
    ]
    rows += [("latency", sentence) for sentence in _latencies(found)]
    rows += [("advice", sentence) for sentence in advice(found) or ["nothing stands out"]]
    return "\n".join(f"{label:<{_LABEL_WIDTH}}{text}" for label, text in rows)


def _requests(found: Rates) -> str:
    total = sum(found.outcomes_s.values())
    parts = [f"{found.count(total):,} in {human_duration(round(found.interval_s, 1))}"]
    parts += [
        f"{found.count(rate):,} {_OUTCOMES[outcome]}"
        for outcome, rate in found.outcomes_s.items()
        if rate and outcome in _OUTCOMES
    ]
    return ", ".join(parts)


def _opens(found: Rates) -> str:
    opens = sum(found.opens.values())
    text = f"{found.count(opens):,} ({opens:.1f} a second)"
    if passed := found.opens.get("passthrough"):
        size = human_size(found.count(found.opened_passthrough_s))
        text += (
            f"; for {found.count(passed):,} of them, of {size} in all, the kernel reads the cache"
            " itself, which is not seen here"
        )
    return text


def _latencies(found: Rates) -> Iterable[str]:
    for operation, times in list(found.requests.items())[:MOST_OPERATIONS]:
        slow = f", 99% within {_short(times.within_s)}" if times.within_s is not None else ""
        yield f"{operation}: {found.count(times.per_s):,}, {_short(times.mean_s)} on average{slow}"


def _short(seconds: float) -> str:
    return f"{1e6 * seconds:.0f} us" if seconds < 0.001 else f"{1e3 * seconds:.1f} ms"


def advice(found: Rates) -> list[str]:
    """Sentences that say what may be changed, the most useful first; none is possible."""
    sentences = []
    from_s3 = found.read_from.get("s3", 0.0)
    if found.evicted_s > LEAST_EVICTED * found.received_s > 0:
        sentences.append(
            "the cache evicts while S3 is read: a larger --cache-size (or disk) reads less twice"
        )
    if from_s3 > found.read_s / 2:
        sentences.append("most of what was read came from S3: fusefs warm fetches it beforehand")
    if hint := stall_report.advice(found.stalled):
        sentences.append(hint)
    return sentences
