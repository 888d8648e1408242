"""`fusefs metrics` on real mounts: over HTTP, as a file, and what each daemon counts."""

import os
import signal
import stat
import subprocess
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from fusefs.exporter.queries import MountAnswer, Target
from fusefs.launch.mount_requests import daemon_request
from fusefs.telemetry.metrics import METRICS
from fusefs.top import lines
from fusefs.top.rates import rates
from tests.support.mounting import FUSEFS, LIMIT_S, Mount, Mounter, fusefs
from tests.support.servers.buckets import Bucket
from tests.support.servers.faulty_s3 import FaultyS3
from tests.support.servers.s3_server import free_ports
from tests.support.waiting import until


def test_a_file_is_replaced_with_the_metrics_of_all_mounts_and_they_are_served(
    bucket: Bucket, mounter: Mounter, tmp_path: Path
) -> None:
    bucket.put("a", b"x" * 1000)
    mount = mounter()
    (mount.path / "a").read_bytes()
    path = tmp_path / "fusefs.prom"
    path.write_text("what was there")
    fusefs("metrics", "--textfile", path)
    text = path.read_text()
    assert f'fusefs_volume_up{{volume="{mount.path}"}} 1.0' in text
    assert "what was there" not in text
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert list(tmp_path.glob("fusefs.prom*")) == [path]
    serves_until_it_is_ended(mount)


def serves_until_it_is_ended(mount: Mount) -> None:
    """Metrics over HTTP, also of a daemon that hangs."""
    address = f"127.0.0.1:{free_ports(1)[0]}"

    def scrape() -> str:
        try:
            with urllib.request.urlopen(f"http://{address}/metrics", timeout=LIMIT_S) as answer:
                return str(answer.read().decode())
        except urllib.error.URLError:
            return ""

    command = [str(FUSEFS), "metrics", "--listen", address]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
        try:
            mount_is_up = f'fusefs_volume_up{{volume="{mount.path}"}} 1.0'
            until(lambda: mount_is_up in scrape(), "metrics are served")
            pid = mount.pid
            os.kill(pid, signal.SIGSTOP)
            mount_is_down = f'fusefs_volume_up{{volume="{mount.path}"}} 0.0'
            until(lambda: mount_is_down in scrape(), "the hanging mount is down")
            os.kill(pid, signal.SIGCONT)
        finally:
            process.terminate()
            process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0


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


def test_metrics_are_those_of_the_table(bucket: Bucket, mounter: Mounter) -> None:
    """Opens and requests are counted, and bytes by where they came from."""
    bucket.put("a", os.urandom(6 * MIB))
    one = mounter("--passthrough", "off")
    for _ in range(3):
        (one.path / "a").read_bytes()
    metrics = metrics_of(one)
    assert list(metrics) == list(METRICS)
    for name, metric in metrics.items():
        assert metric["type"] == METRICS[name].type
        assert name.endswith("_total") == (metric["type"] == "counter")
        for sample in metric["samples"]:
            assert tuple(sample["labels"]) == METRICS[name].labels
            assert "buckets" in sample if metric["type"] == "histogram" else "value" in sample
    assert number(metrics, "requests_total", operation="open", outcome="ok") == 3
    assert number(metrics, "opens_total", mode="served") == 3
    assert number(metrics, "opened_passthrough_bytes_total") == 0
    assert number(metrics, "s3_received_bytes_total") == 6 * MIB
    assert number(metrics, "s3_requests_total", operation="get", code="200") >= 1
    assert number(metrics, "read_bytes_total", source="s3") == 6 * MIB
    assert 0 <= number(metrics, "prefetch_bytes_total", outcome="used") < 6 * MIB
    assert number(metrics, "prefetch_bytes_total", outcome="wasted") == 0
    assert number(metrics, "daemon_cpu_seconds_total") > 0


def test_the_kernels_own_reads_are_estimated_by_what_is_opened_for_it(
    bucket: Bucket, passthrough: Mounter
) -> None:
    """Attributes and requests that no file system has are refusals, and no errors."""
    bucket.put("a", os.urandom(MIB))
    one = passthrough()
    (one.path / "a").read_bytes()
    before = MountAnswer(Target("/data", one.path), metrics_of(one))
    for _ in range(2):
        (one.path / "a").read_bytes()
    with pytest.raises(OSError, match="No data"):
        os.getxattr(one.path / "a", "user.none")
    after = MountAnswer(Target("/data", one.path), metrics_of(one))
    assert after.metrics is not None
    assert number(dict(after.metrics), "read_bytes_total", source="s3") == MIB
    assert number(dict(after.metrics), "read_bytes_total", source="kernel") == 2 * MIB
    assert number(dict(after.metrics), "requests_total", outcome="refused") >= 2
    assert number(dict(after.metrics), "requests_total", outcome="error") == 0
    between = rates(before, after)
    assert round(between.read_s * between.interval_s) == 2 * MIB
    assert "(100% kernel, estimated)" in lines.line(between)


def test_a_killed_daemon_is_counted_with_its_pause(bucket: Bucket, mounter: Mounter) -> None:
    bucket.put("a", b"x")
    one = mounter("--session", "kernel")
    pid = one.pid
    os.kill(pid, signal.SIGKILL)
    assert (one.path / "a").read_bytes() == b"x"
    metrics = metrics_of(one)
    assert number(metrics, "daemon_restarts_total") == 1
    assert number(metrics, "daemon_pause_seconds_total") > 0


def test_what_is_written_is_pending_until_it_is_in_the_bucket(
    mounter: Mounter, faulty: FaultyS3
) -> None:
    options = ("--no-read-only", "--durability", "local")
    one = mounter(*options, endpoint_url=faulty.endpoint_url)
    stalled = faulty.add("PUT", "a", stall=True)
    with open(one.path / "a", "wb", buffering=0) as file:
        file.write(b"x" * 1000)
        metrics = metrics_of(one)
        assert number(metrics, "upload_pending_files") == 1
        assert number(metrics, "upload_oldest_pending_seconds") == 0  # as long as it is open
    metrics = metrics_of(one)
    faulty.remove(stalled)
    assert number(metrics, "upload_pending_files") == 1
    assert number(metrics, "upload_pending_bytes") == 1000
    assert number(metrics, "upload_oldest_pending_seconds") > 0
    fusefs("sync", one.path)
    metrics = metrics_of(one)
    assert number(metrics, "upload_pending_files") == 0
    assert number(metrics, "s3_sent_bytes_total") >= 1000
