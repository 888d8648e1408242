"""Lines of /etc/fstab and systemd's units, with the system's own mount(8) and umount(8)."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.mounting import FUSEFS, LIMIT_S, fusefs
from tests.support.servers.buckets import Bucket
from tests.support.sharing import skip_without_fuse

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts from fstab")

# The helpers are in /sbin for one process and its children alone: a namespace of their own.
SCRIPT = """
set -e
sbin=$(readlink -f /sbin)
mount -t overlay overlay -o "lowerdir={helpers}:$sbin" "$sbin" || exit 77
trap '{fusefs} umount --force {path} 2>/dev/null || :' EXIT
mount --all --fstab {fstab} -t fusefs
cat {path}/hello
mount --all --fstab {fstab} -t fusefs
findmnt --noheadings --output FSTYPE,OPTIONS {path}
umount {path}
findmnt {path} && exit 1
exit 0
"""


@pytest.fixture
def bucket(shared: Bucket) -> Bucket:
    skip_without_fuse()
    shared.put("fstab/hello", b"hello\n")
    return shared


def test_a_line_of_fstab_is_mounted_and_unmounted(bucket: Bucket, tmp_path: Path) -> None:
    helpers, path = tmp_path / "helpers", tmp_path / "data"
    helpers.mkdir()
    path.mkdir()
    for name, target in (("mount.fusefs", "mount.fusefs"), ("umount.fuse.fusefs", "umount.fusefs")):
        (helpers / name).symlink_to(Path(sys.prefix) / "bin" / target)
    keys = tmp_path / "keys"
    keys.write_text(credentials(bucket))
    options = [
        "_netdev",
        "ro",
        "allow_other",
        f"credentials={keys}",
        f"endpoint_url={bucket.server.endpoint_url}",
        "region=us-east-1",
        f"cache_dir={tmp_path / 'cache'}",
        f"log_file={tmp_path / 'log'}",
    ]
    fstab = tmp_path / "fstab"
    fstab.write_text(f"s3://{bucket.name}/fstab {path} fusefs {','.join(options)} 0 0\n")
    script = SCRIPT.format(helpers=helpers, fstab=fstab, path=path, fusefs=FUSEFS)
    try:
        done = subprocess.run(
            ["unshare", "--mount", "sh", "-c", script],
            env={"PATH": os.environ["PATH"]},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
    finally:
        shutil.rmtree(tmp_path / "cache", ignore_errors=True)
    if done.returncode == 77:
        pytest.skip("overlayfs cannot be mounted here")
    assert done.returncode == 0, done.stderr
    content, shown = done.stdout.splitlines()
    assert content == "hello"
    assert shown.split()[0] == "fuse.fusefs"
    assert "ro" in shown.split()[1].split(",")


def credentials(bucket: Bucket) -> str:
    variables = bucket.server.environment
    return (
        f"[default]\naws_access_key_id = {variables['AWS_ACCESS_KEY_ID']}\n"
        f"aws_secret_access_key = {variables['AWS_SECRET_ACCESS_KEY']}\n"
    )


def test_a_service_in_the_foreground_is_ready_when_it_answers(
    bucket: Bucket, tmp_path: Path
) -> None:
    path = tmp_path / "data"
    path.mkdir()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(LIMIT_S)
        variables = {
            "NOTIFY_SOCKET": str(tmp_path / "notify"),
            "WATCHDOG_USEC": "200000",
            "FUSEFS_ENDPOINT_URL": bucket.server.endpoint_url,
            "FUSEFS_CACHE_DIR": str(tmp_path / "cache"),
            "FUSEFS_READ_ONLY": "true",
        }
        process = subprocess.Popen(
            [FUSEFS, "mount", "--foreground", f"s3://{bucket.name}/fstab", path],
            env={**os.environ, **bucket.server.environment, **variables},
            stderr=subprocess.DEVNULL,
        )
        try:
            assert systemd.recv(99) == b"READY=1"
            assert (path / "hello").read_bytes() == b"hello\n"
            assert systemd.recv(99) == b"WATCHDOG=1"
            fusefs("umount", path)
            assert process.wait(LIMIT_S) == 0
        finally:
            fusefs("umount", "--force", path, check=False)
            process.kill()
            process.wait()
