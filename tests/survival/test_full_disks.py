"""Daemons that die while a disk is full which they need for other things than programs' calls."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from pathlib import Path

import pytest

from fusefs.launch import control, registry
from fusefs.launch.registry import RUNTIME_VARIABLE
from tests.support.machine.disks import small_disk
from tests.support.mounting import fusefs
from tests.support.servers.buckets import Bucket
from tests.support.waiting import until

TEXT = "commands do not find this mount for now"


@pytest.mark.root
def test_a_mount_goes_on_where_the_next_daemon_can_not_register(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.put("a", b"content")
    (tmp_path / "mnt").mkdir()
    with small_disk(tmp_path / "run", 1) as run:
        run.chmod(0o755)
        monkeypatch.setenv(RUNTIME_VARIABLE, str(run / "fusefs"))
        environment = bucket.server.environment | {RUNTIME_VARIABLE: str(run / "fusefs")}
        path, log = tmp_path / "mnt", tmp_path / "log"
        options = ["--endpoint-url", bucket.server.endpoint_url, "--cache-dir", tmp_path / "cache"]
        try:
            source = f"s3://{bucket.name}/"
            options += ["--session", "kernel", "--log-file", log]
            fusefs("mount", source, path, *options, environment=environment)
            fill(run / "filler")
            keeper = registry.keeper_socket(path)
            os.kill(control.exchange(keeper, {"do": "status"}, 10)["daemon"], signal.SIGKILL)
            assert (path / "a").read_bytes() == b"content"
            assert TEXT in log.read_text()
            (run / "filler").unlink()
            until(lambda: "commands find this mount again" in log.read_text())
            status = fusefs("status", path, "--json", environment=environment).stdout
            assert json.loads(status)["mountpoint"] == str(path)
        finally:
            fusefs("umount", "--force", path, environment=environment, check=False)


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass
