"""What a daemon reports as metrics, over its control socket."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

from fusefs.launch.mount_requests import daemon_request
from fusefs.telemetry.metrics import METRICS
from tests.support.buckets import Bucket
from tests.support.mounting import Mount

pytestmark = pytest.mark.fuse

MIB = 1 << 20
Metrics = dict[str, Any]


def metrics_of(mount: Mount) -> Metrics:
    answer: Metrics = daemon_request(mount.path, {"command": "metrics"}, 5.0)["metrics"]
    return answer


def number(metrics: Metrics, name: str, **labels: str) -> float:
    """The sum of the samples of a counter or gauge that have these labels."""
    return sum(
        sample["value"]
        for sample in metrics[name]["samples"]
        if labels.items() <= sample["labels"].items()
    )


def test_metrics_are_those_of_the_table(bucket: Bucket, mount: Callable[..., Mount]) -> None:
    bucket.put("a", os.urandom(2 * MIB))
    one = mount()
    assert (one.path / "a").read_bytes()
    metrics = metrics_of(one)
    assert list(metrics) == list(METRICS)
    for name, metric in metrics.items():
        assert metric["type"] == METRICS[name].type
        assert name.endswith("_total") == (metric["type"] == "counter")
        for sample in metric["samples"]:
            assert tuple(sample["labels"]) == METRICS[name].labels
            assert "buckets" in sample if metric["type"] == "histogram" else "value" in sample


def test_opens_and_requests_are_counted(bucket: Bucket, mount: Callable[..., Mount]) -> None:
    bucket.put("a", os.urandom(MIB))
    one = mount()
    for _ in range(3):
        (one.path / "a").read_bytes()
    metrics = metrics_of(one)
    assert number(metrics, "requests_total", operation="open", outcome="ok") == 3
    assert number(metrics, "opens_total") == 3
    passed = number(metrics, "opens_total", mode="passthrough")
    assert number(metrics, "opened_passthrough_bytes_total") == passed * MIB
    assert number(metrics, "s3_received_bytes_total") == MIB
    assert number(metrics, "daemon_restarts_total") == 0
    assert number(metrics, "daemon_cpu_seconds_total") > 0
