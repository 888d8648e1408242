"""Mistakes of whoever mounts: one clear line, and nothing stays behind."""

import os
import signal
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fusefs.linux import mountinfo
from tests.support.mounting import FUSEFS, Mounter, fusefs
from tests.support.semantics import states
from tests.support.servers.buckets import Bucket
from tests.support.servers.faulty_s3 import FaultyS3
from tests.support.servers.s3_server import S3Server
from tests.support.sharing import drop_copies, skip_without_fuse
from tests.support.waiting import until

# Found in /proc/PID/environ of whatever a refused command has left.
MARK = "TEST_BAD_INPUT"
NOBODY = 65534
# Reading and entering what is root's (Python's own files here), and nothing else.
AS_NOBODY = (
    "setpriv",
    f"--reuid={NOBODY}",
    f"--regid={NOBODY}",
    "--clear-groups",
    "--inh-caps=-all,+dac_read_search",
    "--ambient-caps=-all,+dac_read_search",
    "--bounding-set=-all,+dac_read_search",
)


class Attempts:
    """Runs `fusefs mount` with one thing wrong."""

    def __init__(self, bucket: Bucket, directory: Path) -> None:
        self._bucket = bucket
        self.directory = directory
        self.mountpoint = directory / "mnt"
        self.mountpoint.mkdir()
        self.cache = directory / "cache"
        self.environment = dict(bucket.server.environment)

    def arguments(self, *options: object, source: str | None = None) -> list[str]:
        given = [str(option) for option in options]
        places = {
            "--endpoint-url": self._bucket.server.endpoint_url,
            "--cache-dir": str(self.cache),
            "--log-file": str(self.directory / "log"),
        }
        for name, value in places.items():
            if name not in given:
                given += [name, value]
        return ["mount", source or f"s3://{self._bucket.name}", str(self.mountpoint), *given]

    def refused(
        self, *options: object, source: str | None = None, before: tuple[str, ...] = ()
    ) -> str:
        """What the command says, after a look at what it leaves."""
        mark = uuid.uuid4().hex
        environment = {**self.environment, MARK: mark, "PATH": os.environ["PATH"]}
        arguments = self.arguments(*options, source=source)
        if before:
            command = [*before, str(FUSEFS), *arguments]
            result = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=60, check=False
            )
        else:
            result = fusefs(*arguments, environment=environment, check=False)
        assert result.returncode not in (0, -6, -11)
        assert result.stdout == ""
        assert result.stderr.count("\n") == 1, result.stderr
        line = result.stderr.rstrip("\n")
        assert line.startswith("fusefs: ")
        assert "Traceback" not in line
        left = mountinfo.find_mount(self.mountpoint)
        assert left is None or not left.is_fusefs
        until(lambda: not list(_processes_with(mark)), "nothing is left")
        return line.removeprefix("fusefs: ")


def _processes_with(mark: str) -> Iterator[str]:
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (process / "environ").read_bytes():
                yield (process / "cmdline").read_text()
        except OSError:
            continue


@pytest.fixture
def attempts(shared: Bucket, tmp_path: Path) -> Iterator[Attempts]:
    skip_without_fuse()
    yield (made := Attempts(shared, tmp_path))
    if mountinfo.is_mountpoint(made.mountpoint):
        fusefs("umount", "--force", made.mountpoint, check=False)


@pytest.mark.parametrize(
    ("options", "keys", "part"),
    [
        (("--anonymous",), {}, "access denied"),
        (("--profile", "nope"), {}, "there is no AWS profile 'nope'"),
        (("--ca-bundle", "/nonexistent"), {}, "/nonexistent"),
        (("--endpoint-url", "http://127.0.0.1:1"), {}, "127.0.0.1:1: connection refused"),
        ((), {"AWS_ACCESS_KEY_ID": "UNKNOWN"}, "the store does not know the access key"),
        ((), {"AWS_SECRET_ACCESS_KEY": "a wrong one"}, "the secret key does not match"),
        ((), {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}, "no AWS credentials were"),
    ],
)
def test_no_access(
    attempts: Attempts, options: tuple[str, ...], keys: dict[str, str], part: str
) -> None:
    environment = attempts.environment | keys
    attempts.environment = {name: value for name, value in environment.items() if value}
    line = attempts.refused(*options)
    assert part in line
    assert "a wrong one" not in line


def test_a_missing_bucket(attempts: Attempts) -> None:
    line = attempts.refused(source="s3://no-such-bucket/a/b")
    assert "s3://no-such-bucket/a/b" in line
    assert "there is no such bucket" in line


@pytest.mark.parametrize(
    ("fault", "part"),
    [
        ({"code": "AccessDenied"}, "access denied"),
        ({"code": "ExpiredToken"}, "the credentials have expired"),
        ({"body": b"<html><body>Welcome</body></html>"}, "the answer is not a listing"),
    ],
)
def test_an_endpoint_that_refuses_or_is_no_s3(
    attempts: Attempts, s3: S3Server, fault: dict[str, Any], part: str
) -> None:
    with FaultyS3(s3.endpoint_url) as faulty:
        faulty.add(**fault)
        assert part in attempts.refused("--endpoint-url", faulty.endpoint_url)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@states(
    "A mount command that is interrupted, or ended by SIGTERM or SIGHUP, leaves nothing behind."
)
def test_a_command_that_is_ended_while_it_waits_leaves_nothing(
    attempts: Attempts, s3: S3Server, number: int
) -> None:
    mark = uuid.uuid4().hex
    environment = {**attempts.environment, MARK: mark, "PATH": os.environ["PATH"]}
    with FaultyS3(s3.endpoint_url) as faulty:
        rule = faulty.add("LIST", stall=True)
        process = subprocess.Popen(
            [FUSEFS, *attempts.arguments("--endpoint-url", faulty.endpoint_url)],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        until(lambda: rule.used, "the bucket gets a request")
        process.send_signal(number)
        _, output = process.communicate(timeout=60)
    assert (process.returncode, output) == (130, "fusefs: interrupted\n")
    assert not mountinfo.is_mountpoint(attempts.mountpoint)
    until(lambda: not list(_processes_with(mark)), "nothing is left")


def test_a_prefix_with_nothing_below_it_is_mentioned(attempts: Attempts, shared: Bucket) -> None:
    shared.put("there/file", b"content")
    for prefix, is_empty in (("ther", True), ("there", False)):
        arguments = attempts.arguments(source=f"s3://{shared.name}/{prefix}")
        output = fusefs(*arguments, environment=attempts.environment).stderr
        warning = f"fusefs: warning: s3://{shared.name}/{prefix}/ is empty"
        assert output.startswith(warning) if is_empty else output == ""
        fusefs("umount", attempts.mountpoint)


def test_a_mountpoint_that_is_not_an_empty_directory(attempts: Attempts) -> None:
    (attempts.mountpoint / "file").write_text("")
    assert "is not empty" in attempts.refused()
    (attempts.mountpoint / "file").unlink()
    attempts.mountpoint.rmdir()
    assert attempts.refused() == f"{attempts.mountpoint} does not exist; create it first"
    attempts.mountpoint.write_text("")
    assert "is not a directory" in attempts.refused()


@states("A cache directory, or a directory for sockets, inside a fusefs mount is refused.")
def test_a_directory_inside_a_mount(attempts: Attempts, mounter: Mounter) -> None:
    other = mounter()
    link = attempts.directory / "link"
    link.symlink_to(other.path)
    why_not = f"is inside the fusefs mount on {other.path}; choose a directory on a local disk"
    for inside in (other.path / "below" / "cache", link / "below" / "cache"):
        assert attempts.refused("--cache-dir", inside) == f"--cache-dir: {inside} {why_not}"
        attempts.environment["FUSEFS_RUNTIME_DIRECTORY"] = str(inside)
        assert attempts.refused() == f"FUSEFS_RUNTIME_DIRECTORY: {inside} {why_not}"
        del attempts.environment["FUSEFS_RUNTIME_DIRECTORY"]


def test_a_cache_directory_that_is_none(attempts: Attempts) -> None:
    attempts.cache.write_text("")
    assert str(attempts.cache) in attempts.refused()
    below = attempts.cache / "cache"
    assert str(below) in attempts.refused("--cache-dir", below)
    attempts.cache.unlink()
    attempts.cache.mkdir()
    (attempts.cache / "letter.txt").write_text("dear reader")
    assert "is not a cache of fusefs" in attempts.refused()
    assert (attempts.cache / "letter.txt").read_text() == "dear reader"
    os.chown(attempts.cache, NOBODY, NOBODY)
    assert "belongs to another user" in attempts.refused()


def test_a_cache_directory_that_cannot_be_written(attempts: Attempts) -> None:
    attempts.cache.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "none", attempts.cache], check=True)
    try:
        line = attempts.refused()
    finally:
        subprocess.run(["umount", attempts.cache], check=True)
    assert str(attempts.cache) in line
    assert "read-only" in line.lower()


def test_a_cache_that_cannot_be_used(attempts: Attempts) -> None:
    fusefs(*attempts.arguments(), environment=attempts.environment)
    fusefs("umount", attempts.mountpoint)
    mark, mounts = attempts.cache / "format", attempts.cache / "mounts"
    usable = mark.read_text()
    mark.write_text("fusefs cache 99\n")
    line = attempts.refused()
    assert str(attempts.cache) in line
    assert "remove it" in line
    mark.write_text(usable)
    mounts.rename(attempts.directory / "elsewhere")
    mounts.touch()
    line = attempts.refused()
    assert str(attempts.cache) in line
    assert "can't use the cache directory" in line


def test_a_log_that_cannot_be_written(attempts: Attempts) -> None:
    log = attempts.directory / "a directory"
    log.mkdir()
    assert f"the log {log} cannot be written" in attempts.refused("--log-file", log)


def _in_namespace(command: str) -> tuple[str, ...]:
    """Runs what follows where /dev/fuse is something else; no other process notices."""
    return ("unshare", "--mount", "sh", "-ec", f'{drop_copies()}{command}; exec "$@"', "sh")


@pytest.mark.parametrize(
    "command", ["mount --bind /dev/null /dev/fuse", "mount -t tmpfs none /dev; : > /dev/null"]
)
def test_no_device(attempts: Attempts, command: str) -> None:
    assert "/dev/fuse" in attempts.refused(before=_in_namespace(command))


@pytest.mark.parametrize("session", ["kernel", "pyfuse3"])
def test_a_device_that_cannot_be_opened(attempts: Attempts, session: str) -> None:
    closed = attempts.directory / "closed"
    closed.mkdir()
    before = _in_namespace(
        f"mount -t tmpfs -o nodev none {closed}; mknod -m 666 {closed}/fuse c 10 229;"
        f" mount --bind {closed}/fuse /dev/fuse"
    )
    line = attempts.refused("--session", session, before=before)
    assert line.startswith("/dev/fuse cannot be opened (Permission denied)")


def test_root_without_the_right_to_mount(attempts: Attempts) -> None:
    line = attempts.refused(before=("setpriv", "--bounding-set=-sys_admin", "--inh-caps=-all"))
    assert "CAP_SYS_ADMIN" in line


def test_allow_other_by_an_ordinary_user(attempts: Attempts) -> None:
    # The directories of pytest are root's alone.
    attempts.mountpoint = Path("/tmp") / f"fusefs-mnt-{uuid.uuid4().hex}"
    attempts.mountpoint.mkdir()
    os.chown(attempts.mountpoint, NOBODY, NOBODY)
    node = attempts.directory / "fuse"
    open_device = _in_namespace(
        f"mknod -m 666 {node} c 10 229; mount --bind {node} /dev/fuse;"
        f" : > {attempts.directory}/fuse.conf;"
        f" mount --bind {attempts.directory}/fuse.conf /etc/fuse.conf"
    )
    try:
        line = attempts.refused("--allow-other", before=(*open_device, *AS_NOBODY))
    finally:
        attempts.mountpoint.rmdir()
    assert "user_allow_other" in line
