"""Rates and shares of a mount's work, computed from the metrics in two of its answers.

A counter that is less than before belongs to a new daemon, which began at 0. All
rates are per second, sizes in bytes, times in seconds, shares from 0 to 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fusefs.exporter.queries import MALFORMED, MountAnswer, samples_of

# The codes that do not count as errors: 404 and 412 are regular answers, and 503 and 429 count as
# throttled.
_NO_ERRORS = ("200", "206", "404", "412", "304", "cancelled", "503", "429")
_Key = tuple[str, frozenset[tuple[str, str]]]


@dataclass(frozen=True, slots=True)
class Operation:
    """Requests of one kind: rate, mean time, and the time within which 99% were answered.

    `within_s` is the bound of a histogram's bucket; None if 99% took longer than all bounds.
    """

    per_s: float
    mean_s: float
    within_s: float | None


@dataclass(slots=True)
class Rates:
    """The rates of one mount over `interval_s` seconds; `why` tells why there are none."""

    volume: str
    is_up: bool = False
    is_malformed: bool = False
    why: str = ""
    source: str = ""
    interval_s: float = 0.0
    read_s: float = 0.0
    read_from: dict[str, float] = field(default_factory=dict)
    sent_s: float = 0.0
    received_s: float = 0.0
    opens: dict[str, float] = field(default_factory=dict)
    stalled: dict[str, float] = field(default_factory=dict)
    outcomes_s: dict[str, float] = field(default_factory=dict)
    requests: dict[str, Operation] = field(default_factory=dict)
    s3_requests: dict[str, Operation] = field(default_factory=dict)
    s3_errors_s: float = 0.0
    s3_throttled_s: float = 0.0
    s3_retries_s: float = 0.0
    connections: dict[str, float] = field(default_factory=dict)
    cache_bytes: float = 0.0
    cache_limit_bytes: float = 0.0
    evicted_s: float = 0.0
    pending_files: float = 0.0
    pending_bytes: float = 0.0
    oldest_pending_s: float = 0.0
    prefetched_bytes: float = 0.0
    wasted_share: float = 0.0
    warm_done_bytes: float = 0.0
    warm_target_bytes: float = 0.0
    has_plan: bool = False
    plan_ahead_files: float = 0.0
    plan_ahead_bytes: float = 0.0
    plan_ahead_s: float = 0.0
    plan_late_s: float = 0.0
    plan_opens_s: dict[str, float] = field(default_factory=dict)
    restarts: float = 0.0
    cpu: float = 0.0
    memory_bytes: float = 0.0


def rates(before: MountAnswer | None, after: MountAnswer) -> Rates:
    """Return the rates between two answers of one mount; without `before` the rates are 0.

    If `after` is malformed, the result has no rates. `before` must be a valid answer.
    """
    if after.metrics is None:
        return Rates(after.target.volume, why=after.why)
    try:
        return _rates(before, after)
    except MALFORMED as error:
        return Rates(after.target.volume, is_malformed=True, why=f"{type(error).__name__}: {error}")


def _rates(before: MountAnswer | None, after: MountAnswer) -> Rates:
    assert after.metrics is not None
    then = before if before is not None and before.metrics is not None else after
    interval_s = after.taken - then.taken
    change = _Change(then.metrics or {}, after.metrics, interval_s)
    read_from = change.by("read_bytes_total", "source")
    prefetched = change.totals_by("prefetch_bytes_total", "outcome")
    fetched = sum(prefetched.values())
    return Rates(
        volume=after.target.volume,
        is_up=True,
        why=after.why,
        source=change.label("volume_info", "source"),
        interval_s=interval_s,
        read_s=sum(read_from.values()),
        read_from=read_from,
        sent_s=change.rate("s3_sent_bytes_total"),
        received_s=change.rate("s3_received_bytes_total"),
        opens=change.by("opens_total", "mode"),
        stalled={
            cause: min(1.0, share)
            for cause, share in change.by("stalled_seconds_total", "cause").items()
        },
        outcomes_s=change.by("requests_total", "outcome"),
        requests=change.operations("request_duration_seconds"),
        s3_requests=change.operations("s3_request_duration_seconds"),
        s3_errors_s=sum(
            rate
            for code, rate in change.by("s3_requests_total", "code").items()
            if code not in _NO_ERRORS
        ),
        s3_throttled_s=change.rate("s3_throttled_total"),
        s3_retries_s=change.rate("s3_retries_total"),
        connections=change.totals_by("s3_connections", "state"),
        cache_bytes=change.value("cache_bytes"),
        cache_limit_bytes=change.value("cache_limit_bytes"),
        evicted_s=change.rate("cache_evicted_bytes_total"),
        pending_files=change.value("upload_pending_files"),
        pending_bytes=change.value("upload_pending_bytes"),
        oldest_pending_s=change.value("upload_oldest_pending_seconds"),
        prefetched_bytes=fetched,
        wasted_share=prefetched.get("wasted", 0.0) / fetched if fetched else 0.0,
        warm_done_bytes=change.value("warm_done_bytes"),
        warm_target_bytes=change.value("warm_target_bytes"),
        has_plan=bool(change.totals_by("plan_ahead_files", "")),
        plan_ahead_files=change.value("plan_ahead_files"),
        plan_ahead_bytes=change.value("plan_ahead_bytes"),
        plan_ahead_s=change.value("plan_ahead_seconds"),
        plan_late_s=change.value("plan_late_seconds"),
        plan_opens_s=change.by("plan_opens_total", "outcome"),
        restarts=change.value("daemon_restarts_total"),
        cpu=change.rate("daemon_cpu_seconds_total"),
        memory_bytes=change.value("daemon_resident_memory_bytes"),
    )


class _Change:
    def __init__(self, then: Mapping[str, Any], now: Mapping[str, Any], interval_s: float) -> None:
        self._metrics = now
        self._then, self._now = _flat(then), _flat(now)
        self._interval_s = interval_s

    def label(self, name: str, label: str) -> str:
        """Return a label of the first sample of a metric; "" if there is none."""
        samples = self._metrics.get(name, {}).get("samples", ())
        return str(samples[0]["labels"].get(label, "")) if samples else ""

    def value(self, name: str) -> float:
        return sum(self.totals_by(name, "").values())

    def rate(self, name: str) -> float:
        return sum(self.by(name, "").values())

    def totals_by(self, name: str, label: str) -> dict[str, float]:
        """Return the sums of a metric's current values, by the values of a label."""
        return self._by(name, label, lambda _key, value: value)

    def by(self, name: str, label: str) -> dict[str, float]:
        """Return the sums of a counter's rates, by the values of a label."""
        return self._by(name, label, self._rate)

    def _by(self, name: str, label: str, of: Callable[[_Key, float], float]) -> dict[str, float]:
        found: dict[str, float] = {}
        for key, value in self._now.items():
            if key[0] == name:
                group = dict(key[1]).get(label, "")
                found[group] = found.get(group, 0.0) + of(key, value)
        return found

    def operations(self, name: str) -> dict[str, Operation]:
        counts, times = self.by(f"{name}_count", "operation"), self.by(f"{name}_sum", "operation")
        return {
            operation: Operation(
                rate, times.get(operation, 0.0) / rate, self._within(name, operation, 0.99 * rate)
            )
            for operation, rate in sorted(counts.items(), key=lambda pair: -pair[1])
            if rate
        }

    def _within(self, name: str, operation: str, rate: float) -> float | None:
        """Return the least bucket bound within which `rate` requests a second ended, or None."""
        below: dict[float, float] = {}
        for key, value in self._now.items():
            labels = dict(key[1])
            if key[0] == f"{name}_bucket" and labels.get("operation") == operation:
                bound = float(labels["le"])
                below[bound] = below.get(bound, 0.0) + self._rate(key, value)
        below.pop(math.inf, None)
        return min((bound for bound, count in below.items() if count >= rate), default=None)

    def _rate(self, key: _Key, value: float) -> float:
        if self._interval_s <= 0:
            return 0.0
        before = self._then.get(key, 0.0)
        return (value - before if value >= before else value) / self._interval_s


def _flat(metrics: Mapping[str, Any]) -> dict[_Key, float]:
    """Return values by name and labels; histograms have a count, a sum and buckets.

    Raises:
        MALFORMED: the metrics have another form.
    """
    found: dict[_Key, float] = {}
    for metric_name, metric in metrics.items():
        for name, labels, value in samples_of(metric_name, metric):
            if not math.isfinite(value):
                raise ValueError(f"{value} is no value of a metric")
            texts = frozenset((str(label), str(text)) for label, text in labels.items())
            found[name, texts] = value
    return found
