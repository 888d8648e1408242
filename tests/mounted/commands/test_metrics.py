"""`fusefs metrics` on a real mount: over HTTP, and as a file for node_exporter."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import urllib.error
import urllib.request
from pathlib import Path

from tests.support.mounting import FUSEFS, LIMIT_S, Mount, Mounter, fusefs
from tests.support.servers.buckets import Bucket
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


def test_an_address_that_is_none_is_a_mistake_of_the_command_line() -> None:
    result = fusefs("metrics", "--listen", "nowhere", check=False)
    assert result.returncode == 2
    assert "127.0.0.1:9811" in result.stderr
