"""Distributions of times: plain integers in fixed buckets, found by bisection.

An observation takes 0.2 us, a fifth of what prometheus_client's takes: it is made for each
request of a program. A histogram belongs to one thread, unless its owner locks it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any

# Upper bounds in seconds: of what is answered from memory in microseconds, up to what waits for S3.
REQUEST_BOUNDS = (
    *(0.000_01, 0.000_03, 0.000_1, 0.000_3, 0.001, 0.003, 0.01, 0.03),
    *(0.1, 0.3, 1.0, 3.0, 10.0, 30.0),
)
# The same of requests to S3, which answers in milliseconds.
S3_BOUNDS = (0.001, 0.003, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 3.0, 10.0, 30.0)


class Histogram:
    """How many observations fell below each of `bounds`, and their sum, in seconds."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, seconds: float, weight: int = 1) -> None:
        """Count an observation, which stands for `weight` of them."""
        self._counts[bisect_left(self._bounds, seconds)] += weight
        self._sum += weight * seconds

    @property
    def count(self) -> int:
        return sum(self._counts)

    def sample(self, labels: Mapping[str, str]) -> dict[str, Any]:
        """The histogram as metrics.py describes it."""
        total, buckets = 0, []
        for bound, count in zip((*self._bounds, None), self._counts, strict=True):
            total += count
            buckets.append(["+Inf" if bound is None else repr(bound), total])
        return {"labels": dict(labels), "buckets": buckets, "sum": self._sum, "count": total}
