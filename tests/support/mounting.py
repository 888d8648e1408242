"""Mounts for tests: real daemons on real directories, ended for sure.

A mount that a test leaves behind in whatever state is aborted at the end, so
that no process hangs on it for ever.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fusefs.cli.umount import end_mount
from fusefs.diagnosis import mount_status
from fusefs.launch import control, registry
from fusefs.launch.control import CommandError
from fusefs.launch.registry import resolve
from fusefs.linux import libc
from fusefs.linux.unmount import UnmountError
from fusefs.store.s3.conditions import NOT_TRIED
from tests.support import forked_command
from tests.support.machine.disks import recorded_by
from tests.support.servers.buckets import Bucket
from tests.support.waiting import until

FUSEFS = Path(sys.prefix) / "bin" / "fusefs"
LIMIT_S = 60
mount_status.ANSWER_TIMEOUT_S = LIMIT_S  # a status without a busy daemon's answer is none
# Those flags of statvfs(2) that are flags of mount(2) as well: read-only, nosuid, nodev, noexec.
_MS_FLAGS = 0xF
_MS_REMOUNT = 32
# The environment in which a mount's kernel is one before Linux 6.9.
OLD_KERNEL = {"PYTHONPATH": str(Path(__file__).parent / "old_kernel")}


def fusefs(
    *arguments: object, environment: dict[str, str] | None = None, check: bool = True
) -> subprocess.CompletedProcess[str]:
    """Run the command; with `check` a failure is an error that shows its output.

    A status that is shown is none: its exit status is that of the mounts, also of other tests'.
    """
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("AWS_", "FUSEFS_"))}
    given = {**clean, **(environment or {})}
    result = forked_command.run([*map(str, arguments)], given, LIMIT_S)
    if check and result.returncode and not (arguments[0] == "status" and result.stdout):
        raise AssertionError(f"fusefs {arguments} failed: {result.stderr}")
    return result


@dataclass
class Mount:
    """One mount of a bucket, from `start` to `end`; may be started again on the same cache.

    It is read-only unless an option says otherwise.
    """

    source: str
    path: Path
    cache: Path
    endpoint_url: str
    environment: dict[str, str]
    log: Path
    options: tuple[str, ...] = ()
    said: str = ""
    _pids: list[int] = field(default_factory=list)

    def arguments(self, *options: str) -> list[str]:
        """The command line of `fusefs` that makes the mount."""
        places = ("--endpoint-url", self.endpoint_url, "--cache-dir", str(self.cache))
        log = ("--log-file", str(self.log), "--log-level", "debug")
        what = ("mount", self.source, str(self.path), "--read-only")
        return [*what, *places, *log, *self.options, *options]

    def start(self, *options: str) -> None:
        """Make the mount; `said` is what the command says."""
        try:
            self.said = fusefs(*self.arguments(*options), environment=self.environment).stderr
        except AssertionError as error:
            if self.log.is_file():
                error.add_note("its log:\n" + self.log.read_text(errors="replace")[-8000:])
            raise
        self._pids.append(self.pid)
        # So that the requests that a test counts are its own.
        until(self._has_tried_conditions, "the mount knows what the store honours")

    def _has_tried_conditions(self) -> bool:
        conditions = self.status()["conditions"]
        return conditions["known"] or conditions["why"] != NOT_TRIED

    def status(self) -> dict[str, Any]:
        """As `fusefs status PATH --json`; without a process of its own, which tests wait in."""
        try:
            found = mount_status.mount_status(resolve(self.path))
        except CommandError as error:
            raise AssertionError(str(error)) from error
        return dict(json.loads(json.dumps(found)))

    def is_recorded(self) -> bool:
        """True if all that has arrived would be found after a kill."""
        used: int = self.status()["cache"]["used_bytes"]
        return recorded_by(self.cache) == used

    def forget(self) -> None:
        """Have the kernel forget names, attributes and pages that no program uses.

        Its cached files are read from the disk again.
        """
        for copy in self.cache.glob("*/objects/*/*"):
            with contextlib.suppress(FileNotFoundError), copy.open("rb") as file:
                os.fdatasync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        # The kernel drops all of a file system's dentries that are not in use when it is remounted.
        flags = os.statvfs(self.path).f_flag & _MS_FLAGS
        libc.mount("", str(self.path), "", _MS_REMOUNT | flags, "")

    @property
    def pid(self) -> int:
        pid: int = self.status()["daemon"]["pid"]
        return pid

    def kill(self) -> None:
        """SIGKILL the daemon, and take the dead mount away."""
        pid = self.pid
        handle = os.pidfd_open(pid)
        os.kill(pid, signal.SIGKILL)
        _wait_for(handle)
        self.force()

    def end(self) -> None:
        """Unmount as a user would."""
        fusefs("umount", self.path)

    def force(self) -> None:
        """As `fusefs umount --force PATH`, whatever comes of it; without a process of its own."""
        here = Path.cwd()
        try:
            with contextlib.suppress(CommandError, UnmountError):
                end_mount(self.path, is_forced=True, is_lazy=False)
        finally:
            os.chdir(here)

    def clean_up(self) -> None:
        """Whatever the test did: no mount and no daemon afterwards."""
        self.force()
        for pid in self._pids:
            # It may end at any moment, also between open() and read().
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                if b"fusefs" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, signal.SIGKILL)


Mounter = Callable[..., Mount]


def _wait_for(handle: int) -> None:
    with os.fdopen(handle) as process:
        ended = select.poll()
        ended.register(process, select.POLLIN)
        ended.poll(1000 * LIMIT_S)


WRITABLE = "--no-read-only"


def uploads(bucket: Bucket) -> list[str]:
    """The keys of multipart uploads that are neither complete nor aborted."""
    page = bucket.client.list_multipart_uploads(Bucket=bucket.name)
    return [one["Key"] for one in page.get("Uploads", [])]


def pending(mount: Mount) -> list[dict[str, Any]]:
    """What the mount says is not in the bucket yet."""
    return list(status(mount)["writing"]["pending"])


def metadata(bucket: Bucket, key: str) -> dict[str, str]:
    answer = bucket.client.head_object(Bucket=bucket.name, Key=bucket.prefix + key)
    metadata: dict[str, str] = answer["Metadata"]
    return metadata


def status(mount: Mount) -> dict[str, Any]:
    """As `mount.status`, without a process; one would close copies of open files."""
    return control.request(registry.mount_directory(mount.path) / "status.sock", "status", 30)


def fetched(mount: Mount) -> int:
    """The bytes that the mount has had from the bucket."""
    count: int = mount.status()["s3"]["bytes_fetched"]
    return count


def all_sent(mount: Mount) -> None:
    """Wait until the bucket has everything, attributes as well."""
    until(lambda: not pending(mount), "the bucket has everything")


def cost(mount: Mount, call: Callable[[], object]) -> dict[str, int]:
    """Which requests to the bucket a call takes, by their kind."""
    kinds = ("gets", "heads", "lists", "puts", "copies", "deletes")
    before = status(mount)["s3"]
    call()
    after = status(mount)["s3"]
    return {kind: after[kind] - before[kind] for kind in kinds if after[kind] != before[kind]}
