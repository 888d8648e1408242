"""Lines of /etc/fstab and systemd's units, with the system's own mount(8) and umount(8)."""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.mounting import FUSEFS, LIMIT_S, fusefs
from tests.support.servers.buckets import Bucket
from tests.support.sharing import drop_copies, skip_without_fuse

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

# As systemd for x-systemd.automount: a program's first access has the kernel ask for the mount, for
# which all wait but the members of one process group, of which the helper is.
AUTOMOUNTER = """
import ctypes, fcntl, os, struct, subprocess, sys
fstab, path = sys.argv[1:]
READY, FAIL = 0x9360, 0x9361  # AUTOFS_IOC_READY, AUTOFS_IOC_FAIL
os.setpgid(0, 0)
asked, asks = os.pipe()
options = f"fd={asks},pgrp={os.getpgrp()},minproto=5,maxproto=5,direct"
libc = ctypes.CDLL(None, use_errno=True)
if libc.mount(b"systemd-1", path.encode(), b"autofs", 0, options.encode()):
    sys.exit(77)
control = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
reader = subprocess.Popen(["cat", f"{path}/hello"], process_group=0)
token = struct.unpack_from("iiI", os.read(asked, 304))[2]
try:
    mount = subprocess.run(["mount", "--fstab", fstab, path], timeout=60).returncode
except subprocess.TimeoutExpired:
    mount = 124
fcntl.ioctl(control, FAIL if mount else READY, token)
reader.wait()
os.close(control)
umount = subprocess.run(["umount", path]).returncode
sys.exit(mount or reader.returncode or umount)
"""
AUTOMOUNT_SCRIPT = """
set -e
sbin=$(readlink -f /sbin)
mount -t overlay overlay -o "lowerdir={helpers}:$sbin" "$sbin" || exit 77
trap '{fusefs} umount --force {path} 2>/dev/null || :' EXIT
{python} -c "$AUTOMOUNTER" {fstab} {path}
findmnt --noheadings --output FSTYPE {path}
"""


@pytest.fixture
def bucket(shared: Bucket) -> Bucket:
    skip_without_fuse()
    shared.put("fstab/hello", b"hello\n")
    return shared


def test_a_line_of_fstab_is_mounted_and_unmounted(bucket: Bucket, tmp_path: Path) -> None:
    done = run_with_fstab(SCRIPT, bucket, tmp_path, "ro,users")
    assert done.returncode == 0, done.stderr
    content, shown = done.stdout.splitlines()
    assert content == "hello"
    assert shown.split()[0] == "fuse.fusefs"
    assert {"ro", "noexec"} <= set(shown.split()[1].split(","))  # which `users` brings


def test_a_line_of_fstab_is_mounted_when_a_program_first_needs_it(
    bucket: Bucket, tmp_path: Path
) -> None:
    done = run_with_fstab(AUTOMOUNT_SCRIPT, bucket, tmp_path, "ro,noauto,x-systemd.automount")
    assert done.returncode == 0, done.stderr
    # Unmounted it waits for the next program.
    assert done.stdout.splitlines() == ["hello", "autofs"]


def run_with_fstab(
    script: str, bucket: Bucket, directory: Path, options: str
) -> subprocess.CompletedProcess[str]:
    """Run a shell script that has a file like /etc/fstab, and the helpers in /sbin."""
    helpers, path = directory / "helpers", directory / "data"
    helpers.mkdir()
    path.mkdir()
    for name, target in (("mount.fusefs", "mount.fusefs"), ("umount.fuse.fusefs", "umount.fusefs")):
        (helpers / name).symlink_to(Path(sys.prefix) / "bin" / target)
    keys = directory / "keys"
    keys.write_text(credentials(bucket))
    given = [
        "_netdev",
        options,
        "allow_other",
        f"credentials={keys}",
        f"endpoint_url={bucket.server.endpoint_url}",
        "region=us-east-1",
        f"cache_dir={directory / 'cache'}",
        f"log_file={directory / 'log'}",
    ]
    fstab = directory / "fstab"
    fstab.write_text(f"s3://{bucket.name}/fstab {path} fusefs {','.join(given)} 0 0\n")
    names = {"helpers": helpers, "fstab": fstab, "path": path, "fusefs": FUSEFS}
    script = drop_copies() + script.format(**names, python=sys.executable)
    try:
        done = subprocess.run(
            ["unshare", "--mount", "sh", "-c", script],
            env={"PATH": os.environ["PATH"], "AUTOMOUNTER": AUTOMOUNTER},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
    finally:
        shutil.rmtree(directory / "cache", ignore_errors=True)
    if done.returncode == 77:
        pytest.skip("overlayfs or autofs cannot be mounted here")
    return done


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
