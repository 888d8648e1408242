"""Mounts that an ordinary user makes, in a mount namespace of their own: whose they are."""

import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.machine.ordinary_user import runnable_by_all
from tests.support.mounting import LIMIT_S
from tests.support.semantics import states
from tests.support.servers.buckets import Bucket
from tests.support.sharing import drop_copies, skip_without_fuse

NOBODY = 65534
# Run by root; what ends the script takes the mount away, and with it the daemon.
SCRIPT = """
set -e
as_nobody() {{
    setpriv --reuid {user} --regid {user} --clear-groups \
        env HOME={home} XDG_RUNTIME_DIR={home}/run "$@"
}}
fusefs() {{ as_nobody {fusefs} "$@"; }}
fusefs_of_root() {{ {fusefs} "$@"; }}
mount --make-rprivate /
mount -t tmpfs tmpfs {home}
mkdir {home}/dev {home}/mnt {home}/run
mknod -m 666 {home}/dev/fuse c 10 229
mount --bind {home}/dev/fuse /dev/fuse
echo user_allow_other > {home}/fuse.conf
mount --bind {home}/fuse.conf /etc/fuse.conf
chown -R {user}:{user} {home}
fusefs mount {source} {home}/mnt --endpoint-url {endpoint} --cache-dir {home}/cache {options}
trap 'umount -l {home}/mnt' EXIT
set +e
mnt={home}/mnt
{commands}
"""

Runner = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def mounted_by_nobody(bucket: Bucket, public_path: Path) -> Iterator[Runner]:
    """Runs commands as root where an ordinary user has mounted the bucket on $mnt.

    `as_nobody` before a command runs it as that user; the rest are options of the mount.
    """
    skip_without_fuse()
    if os.geteuid() != 0:
        pytest.skip("becoming an ordinary user needs root")
    for program in ("unshare", "setpriv", "fusermount3"):
        if shutil.which(program) is None:
            pytest.skip(f"there is no {program}")
    home = public_path / "home"
    home.mkdir()
    with runnable_by_all() as (command, environment):

        def run(commands: str, *options: str) -> subprocess.CompletedProcess[str]:
            script = drop_copies() + SCRIPT.format(
                home=home,
                user=NOBODY,
                fusefs=shlex.join(command),
                source=f"s3://{bucket.name}",
                endpoint=bucket.server.endpoint_url,
                commands=commands,
                options=shlex.join(options),
            )
            return subprocess.run(
                ["unshare", "--mount", "sh", "-c", script],
                capture_output=True,
                text=True,
                env={**os.environ, **bucket.server.environment, **environment},
                timeout=LIMIT_S,
                check=False,
                cwd="/",
            )

        yield run


def test_an_ordinary_user_mounts_without_passthrough(
    mounted_by_nobody: Runner, bucket: Bucket
) -> None:
    bucket.put("a", b"the bytes\n")
    result = mounted_by_nobody("as_nobody cat $mnt/a; fusefs status $mnt --json")
    assert result.returncode == 0, result.stderr
    output, _, status = result.stdout.partition("\n")
    assert output == "the bytes"
    passthrough = json.loads(status)["passthrough"]
    assert not passthrough["on"]
    assert "root" in passthrough["why"]


def test_root_sees_whether_an_ordinary_users_mount_is_healthy(mounted_by_nobody: Runner) -> None:
    result = mounted_by_nobody(
        f"""
        mkdir -p /run/user && mount -t tmpfs tmpfs /run/user && mkdir /run/user/{NOBODY}
        mount --bind "${{mnt%/mnt}}/run" /run/user/{NOBODY}
        fusefs_of_root status $mnt && echo healthy
        pid=$(fusefs_of_root status $mnt | sed -n 's/^ *daemon *pid \\([0-9]*\\),.*/\\1/p')
        kill -STOP $pid; fusefs_of_root status $mnt; echo $?; kill -CONT $pid
        """
    )
    healthy, _, hung = result.stdout.partition("healthy\n")
    assert "session     kernel" in healthy, result.stderr
    assert "belongs to user" in hung
    assert "timed out" in hung
    assert hung.endswith("\n1\n")


@states("Only the user who mounted may use the mount, not even root, unless `--allow-other`.")
def test_root_may_not_use_an_ordinary_users_mount(
    mounted_by_nobody: Runner, bucket: Bucket
) -> None:
    bucket.put("a", b"private\n")
    result = mounted_by_nobody("as_nobody cat $mnt/a; cat $mnt/a; ls $mnt; stat $mnt/a")
    assert result.stdout == "private\n"
    assert result.stderr.count("Permission denied") == 3, result.stderr


def test_root_may_use_a_mount_that_allows_other_users(
    mounted_by_nobody: Runner, bucket: Bucket
) -> None:
    bucket.put("a", b"public\n")
    result = mounted_by_nobody("cat $mnt/a; ls $mnt", "--allow-other")
    assert result.stdout == "public\na\n", result.stderr
