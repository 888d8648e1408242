"""A real Prometheus scrapes a real mount: expressions have values, and no alert fires.

Which alert fires when, scenarios say (monitoring/prometheus/tests.yaml).
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prometheus_client.metrics_core import GaugeMetricFamily, Metric

from fusefs.exporter.collector import MountCollector, registry_of
from fusefs.exporter.queries import target_at
from fusefs.exporter.serving import serve
from tests.support.mounting import Mount, Mounter
from tests.support.servers.buckets import Bucket
from tests.support.servers.prometheus import (
    Prometheus,
    dashboard_expressions,
    free_port,
    hurried,
    program,
    rules,
    without_thresholds,
)

KIB = 1 << 10
# A limit that does not depend on what else fills this machine's disk.
ROOMY = ("--cache-size", "256MiB", "--min-free", "1%")
POD = ("team", "trainer-0")


class Gpus:
    """What NVIDIA's dcgm-exporter reports, as a collector."""

    def collect(self) -> Iterator[Metric]:
        family = GaugeMetricFamily(
            "DCGM_FI_DEV_GPU_UTIL", "GPU utilization (in %).", labels=["gpu", "namespace", "pod"]
        )
        family.add_metric(["0", *POD], 40.0)
        yield family


@pytest.fixture
def watch(tmp_path: Path) -> Iterator[Callable[..., Prometheus]]:
    """Starts a Prometheus that watches mounts, with a pod and its GPU."""
    program("prometheus")
    with contextlib.ExitStack() as stack:

        def start(*mounts: Mount) -> Prometheus:
            targets = [target_at(mount.path, str(mount.path), [POD]) for mount in mounts]
            port = free_port()
            registry = registry_of(MountCollector(lambda: targets), Gpus())
            stack.callback(serve("127.0.0.1", port, registry))
            directory = tmp_path / "prometheus"
            directory.mkdir()
            return stack.enter_context(Prometheus(directory, port, free_port()))

        yield start


def load(mount: Mount) -> Callable[[], None]:
    """Something of everything, a little more at each call: reads, opens, lists, writes."""
    numbers = itertools.count()

    def step() -> None:
        number = next(numbers)
        for offset in range(3):
            (mount.path / f"small/{(3 * number + offset) % 300:03}").read_bytes()
        (mount.path / "large").read_bytes()
        (mount.path / f"written-{number}").write_bytes(b"y" * KIB)
        (mount.path / f"missing-{number}").exists()

    return step


def test_every_expression_has_a_value_under_load_and_no_alert_fires(
    mounter: Mounter, bucket: Bucket, watch: Callable[..., Prometheus]
) -> None:
    for number in range(300):
        bucket.put(f"small/{number:03}", b"x" * 10 * KIB)
    bucket.put("large", os.urandom(8 << 20))
    # What the kernel reads itself would be no value for the rates of what the daemon serves.
    mount = mounter("--no-read-only", "--passthrough", "off", *ROOMY)
    server = watch(mount)
    expressions = {
        rule.get("record") or rule["alert"]: without_thresholds(hurried(rule["expr"]))
        for rule in rules()
    }
    expressions |= {
        name: hurried(expression) for name, expression in dashboard_expressions().items()
    }
    assert server.wait_for(expressions, load(mount)) == []
    assert server.firing() == set()
