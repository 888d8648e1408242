"""Distributions in fixed buckets, and the form in which metrics are reported."""

from __future__ import annotations

import errno
import random
import time

import pytest

from fusefs.telemetry import metrics
from fusefs.telemetry.histogram import REQUEST_BOUNDS, Histogram
from fusefs.telemetry.requests import RequestTimes


def test_buckets_are_cumulative_and_include_their_bounds() -> None:
    histogram = Histogram((0.001, 1.0))
    for seconds in (0.0005, 0.001, 0.5, 2.0):
        histogram.observe(seconds)
    assert histogram.sample({"operation": "read"}) == {
        "labels": {"operation": "read"},
        "buckets": [["0.001", 2], ["1.0", 3], ["+Inf", 4]],
        "sum": 2.5015,
        "count": 4,
    }


def test_observations_that_are_sorted_later_are_in_the_same_buckets() -> None:
    chance = random.Random(1)
    seconds = [chance.choice(REQUEST_BOUNDS) * chance.choice((0.9, 1, 2)) for _ in range(1000)]
    histogram = Histogram(REQUEST_BOUNDS)
    for number, each in enumerate(seconds):
        histogram.observe(each)
        histogram.weigh(each, 17 if number < 500 else 3)
    weights = [18] * 500 + [4] * 500
    below = [
        [
            repr(bound),
            sum(weight for each, weight in zip(seconds, weights, strict=True) if each <= bound),
        ]
        for bound in REQUEST_BOUNDS
    ]
    sample = histogram.sample({})
    assert sample["buckets"] == [*below, ["+Inf", sum(weights)]]
    total = sum(each * weight for each, weight in zip(seconds, weights, strict=True))
    assert sample["sum"] == pytest.approx(total)
    assert sample["count"] == histogram.count == sum(weights)


def test_requests_are_counted_by_operation_and_outcome() -> None:
    times = RequestTimes({1: "lookup", 15: "read"})
    began = time.monotonic()
    times.answered(15, began)
    for number in (errno.ENOENT, errno.EACCES, errno.EIO, errno.EINTR, None):
        times.failed(1, began, number)
    times.failed(99, began, errno.ENOSYS)
    totals, durations = times.samples()
    counts = {tuple(one["labels"].values()): one["value"] for one in totals}
    assert counts == {
        ("read", "ok"): 1,
        ("lookup", "refused"): 2,
        ("lookup", "error"): 2,
        ("lookup", "interrupted"): 1,
        ("99", "refused"): 1,
    }
    assert [one["count"] for one in durations] == [one["value"] for one in totals]


def test_of_requests_that_are_answered_at_once_some_stand_for_the_others() -> None:
    times = RequestTimes({14: "open", 15: "read"})
    for number in range(100_000):
        opcode = 14 + number % 2
        if not number % times.period:
            times.sampled(opcode, time.monotonic())
        times.counts[opcode] += 1
    totals, durations = times.samples()
    assert [one["value"] for one in totals] == [50_000, 50_000]
    assert all(49_000 < one["count"] < 51_000 for one in durations)


def test_each_metric_is_reported_though_it_has_no_samples() -> None:
    reported = metrics.answer({"cache_files": [metrics.value(3)]})["metrics"]
    assert list(reported) == list(metrics.METRICS)
    assert reported["cache_files"]["samples"] == [{"labels": {}, "value": 3}]
    assert reported["cache_bytes"]["samples"] == []
