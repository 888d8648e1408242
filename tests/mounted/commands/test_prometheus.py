"""A real Prometheus scrapes real mounts: expressions have values, and the right alert fires."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prometheus_client.metrics_core import GaugeMetricFamily, Metric

from fusefs.exporter.collector import MountCollector, registry_of
from fusefs.exporter.queries import target_at
from fusefs.exporter.serving import serve
from tests.support.machine.disks import fill, small_disk
from tests.support.mounting import Mount, Mounter
from tests.support.servers.buckets import Bucket
from tests.support.servers.faulty_s3 import FaultyS3
from tests.support.servers.prometheus import (
    Prometheus,
    dashboard_expressions,
    free_port,
    hurried,
    program,
    rules,
    without_thresholds,
)
from tests.support.waiting import until

KIB = 1 << 10
READERS = 12
DISK_MIB = 64
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
def faults(faulty: FaultyS3) -> Iterator[FaultyS3]:
    yield faulty
    faulty.clear()


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


@pytest.mark.root
def test_the_right_alert_fires_alone(
    mounter: Mounter,
    bucket: Bucket,
    faults: FaultyS3,
    tmp_path: Path,
    watch: Callable[..., Prometheus],
) -> None:
    for number in range(READERS):
        bucket.put(f"cold/{number}", b"x" * 10 * KIB)
    with small_disk(tmp_path / "disk", DISK_MIB):
        throttled = mounter(*ROOMY, endpoint_url=faults.endpoint_url, cache="throttled")
        killed = mounter(*ROOMY, cache="killed")
        filled = mounter("--min-free", "10%", cache="disk/cache")
        server = watch(throttled, killed, filled)
        ups = {f"{mount.path}": up_of(mount) for mount in (throttled, killed, filled)}
        assert server.wait_for(ups, lambda: None) == []
        assert server.firing() == set()

        faults.add("GET", code="SlowDown")
        readers = [
            threading.Thread(target=(throttled.path / f"cold/{number}").read_bytes)
            for number in range(READERS)
        ]
        for reader in readers:
            reader.start()
        fill(tmp_path / "disk")
        os.kill(killed.pid, signal.SIGKILL)

        expected = {
            (str(throttled.path), "FusefsThrottled"),
            (str(killed.path), "FusefsDaemonDied"),
            (str(filled.path), "FusefsCacheDiskFull"),
        }
        seen: set[tuple[str, str]] = set()

        def look() -> bool:
            seen.update(server.firing())
            return seen >= expected

        until(look, f"the alerts fire: {expected}")
        faults.clear()
        for reader in readers:
            reader.join()
        assert seen == expected
        filled.end()


def up_of(mount: Mount) -> str:
    """An expression that has a value once this mount was scraped."""
    labels = f'volume="{mount.path}"'
    return f"fusefs_volume_up{{{labels}}} == 1 and fusefs_daemon_restarts_total{{{labels}}} == 0"
