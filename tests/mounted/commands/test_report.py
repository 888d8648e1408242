"""`fusefs report` on real mounts: what the archive has, and what never gets into it."""

from __future__ import annotations

import json
import os
import signal
import stat
import tarfile
from pathlib import Path

from tests.support.mounting import Mounter, fusefs
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


def test_reports_of_one_mount_have_everything_and_no_secret(
    bucket: Bucket, mounter: Mounter, tmp_path: Path
) -> None:
    """As it is, and of a daemon that does not answer."""
    mount = mounter()
    secret = bucket.server.secret_key
    with mount.log.open("a") as log:  # what it should never say
        log.write(f"x-amz-security-token: {TOKEN}\n")
        log.write(f"proxy http://user:{PASSWORD}@proxy:3128 refused\n")
        log.write(f"a request signed with {secret}\n")
    path = tmp_path / "fusefs-report.tar.gz"
    texts = reported(path, mount.path, **bucket.server.environment)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert json.loads(texts["versions.json"])["packages"]["trio"]
    assert json.loads(texts["mount-1/status.json"])["mountpoint"] == str(mount.path)
    assert json.loads(texts["mount-1/keeper.json"])["daemon"] == mount.pid
    assert json.loads(texts["mount-1/settings.json"])["endpoint_url"]
    assert "serving s3://" in texts["mount-1/log"]
    for planted in (TOKEN, PASSWORD, secret):
        assert not [name for name, text in texts.items() if planted in text]

    pid = mount.pid
    os.kill(pid, signal.SIGSTOP)
    try:
        texts = reported(tmp_path / "silent.tar.gz", mount.path)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert json.loads(texts["mount-1/mount.json"])["not_answering"]
    assert json.loads(texts["mount-1/settings.json"])["source"]


def test_an_existing_file_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "there"
    path.write_text("mine")
    result = fusefs("report", "--output", path, check=False)
    assert result.returncode == 1
    assert path.read_text() == "mine"
