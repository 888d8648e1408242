"""`fusefs report` on real mounts: what the archive has, and what never gets into it."""

from __future__ import annotations

import json
import os
import signal
import stat
import tarfile
from pathlib import Path
from typing import Any

from tests.support.mounting import Mount, Mounter, fusefs
from tests.support.servers.buckets import Bucket

TOKEN = "planted-session-token-0123456789"
PASSWORD = "planted-password"


def reported(path: Path, *arguments: object, **environment: str) -> dict[str, str]:
    """The texts of a report, by their names without the first directory."""
    fusefs("report", "--output", path, *arguments, environment=environment)
    with tarfile.open(path) as tar:
        return {
            member.name.partition("/")[2]: tar.extractfile(member).read().decode()  # type: ignore[union-attr]
            for member in tar
        }


def leaks(texts: dict[str, str], word: str) -> list[str]:
    """The lines with a word."""
    return [
        f"{name}: {line[:200]}"
        for name, text in texts.items()
        for line in text.splitlines()
        if word.lower() in line.lower()
    ]


def plant(mount: Mount) -> None:
    """Have the mount's log say what a log should never say."""
    with mount.log.open("a") as log:
        log.write(f"x-amz-security-token: {TOKEN}\n")
        log.write(f"proxy http://user:{PASSWORD}@proxy:3128 refused\n")


def test_reports_of_one_mount_have_everything_and_no_secret(
    bucket: Bucket, mounter: Mounter, tmp_path: Path
) -> None:
    """As it is, without names, and of a daemon that does not answer."""
    bucket.put("patients/smith.dcm", b"x" * 1000)
    mount = mounter(prefix="patients/")
    (mount.path / "smith.dcm").read_bytes()
    (mount.path / "missing-jones.dcm").exists()
    plant(mount)
    secret = bucket.server.secret_key
    with mount.log.open("a") as log:
        log.write(f"a request signed with {secret}\n")
    path = tmp_path / "fusefs-report.tar.gz"
    texts = reported(path, mount.path, **bucket.server.environment)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    has_everything(texts, mount)
    for planted in (TOKEN, PASSWORD, secret):
        assert leaks(texts, planted) == []

    texts = reported(tmp_path / "r.tar.gz", mount.path, "--redact", **bucket.server.environment)
    for name in ("smith", "jones", "patients", bucket.name, str(tmp_path), TOKEN, PASSWORD):
        assert leaks(texts, name) == []
    assert json.loads(texts["mount-1/status.json"])["session"] == "kernel"
    assert "Daemon.run" in texts["mount-1/stacks-tasks.txt"]

    pid = mount.pid
    os.kill(pid, signal.SIGSTOP)
    try:
        texts = reported(tmp_path / "silent.tar.gz", mount.path)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert json.loads(texts["mount-1/metrics.json"])["not_answering"]
    assert json.loads(texts["mount-1/settings.json"])["source"]
    assert "State:\tT" in texts["mount-1/process/status"]


def has_everything(texts: dict[str, str], mount: Mount) -> None:
    assert json.loads(texts["versions.json"])["packages"]["trio"]
    status: dict[str, Any] = json.loads(texts["mount-1/status.json"])
    assert status["mountpoint"] == str(mount.path)
    assert json.loads(texts["mount-1/settings.json"])["endpoint_url"]
    assert "requests_total" in json.loads(texts["mount-1/metrics.json"])["metrics"]
    assert "Daemon.run" in texts["mount-1/stacks-tasks.txt"]
    assert "thread MainThread" in texts["mount-1/stacks-threads.txt"]
    assert "serving s3://" in texts["mount-1/log"]
    assert leaks(texts, "smith.dcm") or leaks(texts, str(mount.path))


def test_an_existing_file_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "there"
    path.write_text("mine")
    result = fusefs("report", "--output", path, check=False)
    assert result.returncode == 1
    assert path.read_text() == "mine"
