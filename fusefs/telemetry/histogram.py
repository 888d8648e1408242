"""Histograms of times: plain integers in fixed buckets.

Each request of a program makes an observation, which takes 0.1 us, a tenth of
prometheus_client's time: observations are collected, and sorted into the buckets by the hundred.
A histogram belongs to one thread.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

# The upper bounds of buckets in seconds, for programs' requests: from answers from memory to waits
# for S3.
REQUEST_BOUNDS = (
    *(0.000_01, 0.000_03, 0.000_1, 0.000_3, 0.001, 0.003, 0.01, 0.03),
    *(0.1, 0.3, 1.0, 3.0, 10.0, 30.0),
)
# The upper bounds of buckets in seconds, for requests to S3, which answers in milliseconds.
S3_BOUNDS = (0.001, 0.003, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 3.0, 10.0, 30.0)


# The number of observations that are collected before they are sorted.
MOST_NEW = 256


class Histogram:
    """A histogram: the counts of observations between `bounds`, and their sum, in seconds."""

    __slots__ = ("_bounds", "_counts", "_new", "_sum", "_weighed", "_weight")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        self._new: list[float] = []
        # Observations that count `_weight` times each.
        self._weighed: list[float] = []
        self._weight = 1

    def observe(self, seconds: float) -> None:
        new = self._new
        new.append(seconds)
        if len(new) == MOST_NEW:
            self._sort_new()

    def weigh(self, seconds: float, weight: int) -> None:
        """Count an observation that stands for `weight` requests."""
        weighed = self._weighed
        if weight != self._weight or len(weighed) == MOST_NEW:
            self._sort_new()
            self._weight = weight
        weighed.append(seconds)

    def observe_all(self, times: list[float], weight: int = 1) -> None:
        """Count each observation `weight` times. Sorts `times`."""
        times.sort()
        start = 0
        for bucket, bound in enumerate(self._bounds):
            stop = bisect_right(times, bound, start)
            self._counts[bucket] += weight * (stop - start)
            start = stop
        self._counts[-1] += weight * (len(times) - start)
        self._sum += weight * sum(times)

    def _sort_new(self) -> None:
        self.observe_all(self._new)
        self._new.clear()
        self.observe_all(self._weighed, self._weight)
        self._weighed.clear()

    @property
    def count(self) -> int:
        self._sort_new()
        return sum(self._counts)

    def sample(self, labels: Mapping[str, str]) -> dict[str, Any]:
        """Return the histogram as a sample, in the form that metrics.py describes."""
        self._sort_new()
        total, buckets = 0, []
        for bound, count in zip((*self._bounds, None), self._counts, strict=True):
            total += count
            buckets.append(["+Inf" if bound is None else repr(bound), total])
        return {"labels": dict(labels), "buckets": buckets, "sum": self._sum, "count": total}
