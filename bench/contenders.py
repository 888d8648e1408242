"""Who is measured: the bare disk, the bare client, fusefs in its variants, the peers.

A contender that is mounted shows the whole bucket below `root`. `start`
begins with an empty cache of its own, `stop` leaves nothing behind; both can
be called again, and `stop` after a failed `start`. The options of the peers
are those that were fastest where they were tried: large chunks, many streams,
long-lived attributes, no checksums. For writing, peers are mounted in the way
in which close returns when the bucket has the file.
"""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from bench import processes
from bench.bucket import Bucket
from bench.processes import BenchError, Usage
from tests.support.s3_server import ACCESS_KEY, REGION, SECRET_KEY

COMMAND_WAIT_S = 60.0

# fusefs where close waits for the local disk alone; it is measured for writing only.
LOCAL = "fusefs-local"
WRITABLE = "fusefs-writable"


@dataclass(frozen=True, slots=True)
class Place:
    """What contenders share: the bucket, the local copy of its files, room for mounts."""

    bucket: Bucket
    native_root: Path
    scratch: Path


class Contender:
    """Base of all: something that does not need starting and uses nothing.

    `is_mount` tells a FUSE mount from the bare disk and the bare client,
    `is_writable` how it is mounted.
    """

    is_mount = False
    is_writable = False

    def __init__(self, name: str, place: Place) -> None:
        self.name = name
        self.place = place
        self.root = place.native_root
        self.cache = place.scratch / "caches" / name

    def writing_to(self, bucket: Bucket) -> Self:
        """The same contender, to be started for writing, on another bucket."""
        other = copy.copy(self)
        other.place = replace(self.place, bucket=bucket)
        other.is_writable = True
        return other

    def missing(self) -> str | None:
        """Why it cannot be measured here; None if it can."""
        return None

    def version(self) -> str:
        return ""

    def command(self) -> str:
        """How it is started, for the record."""
        return ""

    def start(self) -> None:
        """Make it ready, with nothing cached."""

    def stop(self) -> None:
        """End it and remove its cache."""

    def settle(self) -> None:
        """Have in the bucket what was written, where close did not wait for that."""

    def usage(self) -> Usage | None:
        """What its processes have used since `start`."""
        return None

    def requests(self) -> dict[str, int]:
        """Requests made to S3 since `start`, where the contender counts them."""
        return {}


class Native(Contender):
    """The files on the local disk: what a cached read is compared with."""

    def writing_to(self, bucket: Bucket) -> Self:
        other = super().writing_to(bucket)
        other.root = other.cache
        return other

    def start(self) -> None:
        self.cache.mkdir(parents=True, exist_ok=True)

    def stop(self) -> None:
        shutil.rmtree(self.cache, ignore_errors=True)


class BareClient(Native):
    """obstore without a file system: what a first read and an upload are compared with."""

    def version(self) -> str:
        import obstore

        return f"obstore {obstore.__version__}"


class Mount(Contender):
    """A contender with a mountpoint and a cache directory."""

    is_mount = True

    def __init__(self, name: str, place: Place) -> None:
        super().__init__(name, place)
        self.root = place.scratch / "mounts" / name
        self.log = place.scratch / f"{name}.log"

    def _prepare(self) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(self.cache, ignore_errors=True)
        self.cache.mkdir(parents=True, mode=0o700)

    def _clear(self) -> None:
        processes.unmount(self.root)
        shutil.rmtree(self.cache, ignore_errors=True)


class Fusefs(Mount):
    """fusefs, which goes into the background by itself and tells about itself."""

    def __init__(self, name: str, place: Place, options: list[str]) -> None:
        super().__init__(name, place)
        self._options = options

    @property
    def _program(self) -> str:
        return str(Path(sys.prefix) / "bin" / "fusefs")

    def missing(self) -> str | None:
        try:
            self._run("--help")
        except BenchError as error:
            return f"the command does not run: {error}"
        return None

    def command(self) -> str:
        return " ".join(["fusefs", *self._mount_arguments()])

    def start(self) -> None:
        self._prepare()
        self._run(*self._mount_arguments())
        if not processes.is_mounted(self.root):
            raise BenchError("mount returned 0, and nothing is mounted")

    def stop(self) -> None:
        try:
            if processes.is_mounted(self.root):
                self._end()
        finally:
            self._clear()

    def _end(self) -> None:
        pid = self._pid("daemon")
        try:
            self._run("umount", str(self.root))
        except BenchError:
            self._run("umount", str(self.root), "--force")
        if pid is not None:
            # The cache must not be removed underneath a daemon that still closes it.
            processes.wait_gone(pid)

    def settle(self) -> None:
        self._run("sync", str(self.root))

    def usage(self) -> Usage | None:
        # The daemon is a child of its keeper, where it has one.
        pid = self._pid("keeper") or self._pid("daemon")
        return None if pid is None else processes.usage_of(pid)

    def requests(self) -> dict[str, int]:
        counts = self._status().get("s3", {})
        return {
            name: int(counts[name])
            for name in ("gets", "heads", "lists", "bytes_fetched")
            if name in counts
        }

    def _pid(self, process: str) -> int | None:
        """One of the mount's processes, by its name in the status; None if it has none."""
        try:
            return int(self._status()[process]["pid"])
        except (BenchError, KeyError):
            return None

    def wait_for_daemon(self, other_than: int | None) -> int:
        """The process of a daemon that answers and is not the one that was killed."""
        found: list[int] = []

        def is_new() -> bool:
            pid = self._pid("daemon")
            if pid is not None and pid != other_than:
                found.append(pid)
            return bool(found)

        processes.wait_until(is_new, f"a daemon after {other_than}")
        return found[0]

    def _status(self) -> dict[str, dict[str, int]]:
        answer = json.loads(self._run("status", str(self.root), "--json"))
        if not isinstance(answer, dict):
            raise BenchError(f"status is not one mount's: {answer}")
        return answer

    def _mount_arguments(self) -> list[str]:
        bucket = self.place.bucket
        return [
            "mount", f"s3://{bucket.name}", str(self.root),
            "--endpoint-url", bucket.server.endpoint_url, "--region", REGION,
            "--cache-dir", str(self.cache), "--no-read-only" if self.is_writable else "--read-only",
            "--log-file", str(self.log.with_suffix(".daemon.log")), *self._options,
        ]  # fmt: skip

    def _run(self, *arguments: str) -> str:
        # Output goes to files: a daemon that keeps the pipe would hold us up.
        output = self.log.with_suffix(".out")
        try:
            with output.open("wb") as out, self.log.open("ab") as errors:
                code = subprocess.run(
                    [self._program, *arguments], stdin=subprocess.DEVNULL, stdout=out,
                    stderr=errors, env=self.place.bucket.environment(), timeout=COMMAND_WAIT_S,
                    start_new_session=True,
                ).returncode  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            raise BenchError(f"fusefs {arguments[0]}: {error}") from error
        if code != 0:
            raise BenchError(f"fusefs {arguments[0]}: exit {code}: {processes.tail(self.log)}")
        return output.read_text()


class Peer(Mount, ABC):
    """Another program that mounts a bucket, run in the foreground by the bench."""

    def __init__(self, name: str, place: Place, program: str | None) -> None:
        super().__init__(name, place)
        self._program = program
        self._process: subprocess.Popen[bytes] | None = None

    def missing(self) -> str | None:
        return None if self._program else "not installed"

    def version(self) -> str:
        done = subprocess.run(
            [str(self._program), "--version"], capture_output=True, text=True, timeout=30
        )
        return done.stdout.partition("\n")[0]

    def command(self) -> str:
        return " ".join(self._argv())

    def start(self) -> None:
        self._prepare()
        self._process = processes.start(self._argv(), self.log, self._environment())
        processes.wait_until(self._is_up, f"mount of {self.name}")

    def stop(self) -> None:
        try:
            processes.unmount(self.root)
        finally:
            if self._process is not None:
                processes.stop(self._process)
                self._process = None
        self._clear()

    def usage(self) -> Usage | None:
        return processes.usage_of(self._process.pid) if self._process is not None else None

    def _is_up(self) -> bool:
        if self._process is not None and self._process.poll() is not None:
            raise BenchError(f"{self.name} ended: {processes.tail(self.log)}")
        return processes.is_mounted(self.root)

    @abstractmethod
    def _argv(self) -> list[str]:
        """The command that mounts it and stays in the foreground."""

    def _environment(self) -> dict[str, str]:
        return self.place.bucket.environment()


class Rclone(Peer):
    """rclone mount with its full cache; its remote is defined in the environment.

    Its cache uploads after close has returned, whatever its options; without
    a cache it sends what is written, and close waits for the end of that.
    """

    def _argv(self) -> list[str]:
        if self.is_writable:
            mode = ["--vfs-cache-mode", "off", "--s3-chunk-size", "16M",
                    "--s3-upload-concurrency", "8", "--s3-disable-checksum"]  # fmt: skip
        else:
            mode = ["--read-only", "--vfs-cache-mode", "full", "--vfs-cache-max-age", "24h"]
        return [
            str(self._program), "mount", f"bench:{self.place.bucket.name}", str(self.root),
            "--allow-other", "--cache-dir", str(self.cache), *mode,
            "--vfs-read-chunk-size", "4M", "--vfs-read-chunk-streams", "16",
            "--vfs-read-ahead", "256M", "--vfs-fast-fingerprint", "--use-server-modtime",
            "--no-checksum", "--dir-cache-time", "24h", "--attr-timeout", "10m",
            "--poll-interval", "0", "--max-read-ahead", "1M", "--transfers", "8",
        ]  # fmt: skip

    def _environment(self) -> dict[str, str]:
        return {
            **self.place.bucket.environment(),
            "RCLONE_CONFIG": str(self.place.scratch / "rclone.conf"),
            "RCLONE_CONFIG_BENCH_TYPE": "s3",
            "RCLONE_CONFIG_BENCH_PROVIDER": "SeaweedFS",
            "RCLONE_CONFIG_BENCH_ENDPOINT": self.place.bucket.server.endpoint_url,
            "RCLONE_CONFIG_BENCH_REGION": REGION,
            "RCLONE_CONFIG_BENCH_ACCESS_KEY_ID": ACCESS_KEY,
            "RCLONE_CONFIG_BENCH_SECRET_ACCESS_KEY": SECRET_KEY,
        }


class S3fs(Peer):
    """s3fs with its local cache."""

    def start(self) -> None:
        passwords = self._passwords()
        passwords.touch(mode=0o600)
        passwords.write_text(f"{ACCESS_KEY}:{SECRET_KEY}\n")
        super().start()

    def _passwords(self) -> Path:
        return self.place.scratch / "s3fs.passwd"

    def _argv(self) -> list[str]:
        options = [
            f"url={self.place.bucket.server.endpoint_url}", "use_path_request_style",
            *([] if self.is_writable else ["ro"]),
            f"use_cache={self.cache}", f"passwd_file={self._passwords()}", "allow_other",
            "kernel_cache", "big_writes", "max_write=131072", "max_readahead=1048576",
            "parallel_count=20", "multireq_max=30", "multipart_size=16",
            "max_stat_cache_size=200000", "stat_cache_expire=86400", "enable_noobj_cache",
            "list_object_max_keys=1000", "listobjectsv2",
        ]  # fmt: skip
        bucket = self.place.bucket.name
        return [str(self._program), bucket, str(self.root), "-f", "-o", ",".join(options)]


def _find(program: str) -> str | None:
    """Beside the running Python first, where packages install programs, else on the path."""
    return shutil.which(program, path=str(Path(sys.prefix) / "bin")) or shutil.which(program)


# In the order of the table's columns.
CONTENDERS: dict[str, Callable[[str, Place], Contender]] = {
    "native": Native,
    "obstore": BareClient,
    "fusefs-kernel": lambda name, place: Fusefs(name, place, ["--session", "kernel"]),
    "fusefs-nopt": lambda name, place: Fusefs(
        name, place, ["--session", "kernel", "--passthrough", "off"]
    ),
    LOCAL: lambda name, place: Fusefs(
        name, place, ["--session", "kernel", "--durability", "local"]
    ),
    # Reading on a mount that may be written to: the last of two options wins.
    WRITABLE: lambda name, place: Fusefs(name, place, ["--session", "kernel", "--no-read-only"]),
    "fusefs-pyfuse3": lambda name, place: Fusefs(name, place, ["--session", "pyfuse3"]),
    "rclone": lambda name, place: Rclone(name, place, _find("rclone")),
    "s3fs": lambda name, place: S3fs(name, place, _find("s3fs")),
}
PEERS = ("rclone", "s3fs")
