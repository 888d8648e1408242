"""Other programs that mount a bucket, with the options that were fastest in trials.

These options are large chunks, many streams, long-lived attributes, no checksums. JuiceFS has its
own format in the bucket, and its metadata in a Redis: only its cached reads can be compared.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from abc import ABC, abstractmethod
from pathlib import Path

from bench import processes
from bench.bucket import Bucket
from bench.contenders.contender import Mount, Place
from bench.dataset import LARGE
from bench.processes import BenchError, Usage
from tests.support.servers.s3_server import ACCESS_KEY, REGION, SECRET_KEY

# The directories that are copied into a file system with its own format.
COPIED = (LARGE.partition("/")[0], "small", "tree")
COPY_LIMIT_S = 300.0


def find(program: str) -> str | None:
    """Find a program, first beside the running Python, where packages install it, or None."""
    return shutil.which(program, path=str(Path(sys.prefix) / "bin")) or shutil.which(program)


def rclone_environment(bucket: Bucket) -> dict[str, str]:
    """Return the variables that give rclone a single remote, `bench`: the bucket's server."""
    return {
        **bucket.environment(),
        "RCLONE_CONFIG": os.devnull,
        "RCLONE_CONFIG_BENCH_TYPE": "s3",
        "RCLONE_CONFIG_BENCH_PROVIDER": "SeaweedFS",
        "RCLONE_CONFIG_BENCH_ENDPOINT": bucket.endpoint_url,
        **({} if bucket.authority is None else {"RCLONE_CA_CERT": str(bucket.authority)}),
        "RCLONE_CONFIG_BENCH_REGION": REGION,
        "RCLONE_CONFIG_BENCH_ACCESS_KEY_ID": ACCESS_KEY,
        "RCLONE_CONFIG_BENCH_SECRET_ACCESS_KEY": SECRET_KEY,
    }


class Peer(Mount, ABC):
    """The program `name`, run in the foreground by the bench."""

    def __init__(self, name: str, place: Place) -> None:
        super().__init__(name, place)
        self._program = find(name)
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
        """Return the command that mounts the bucket and stays in the foreground."""

    def _environment(self) -> dict[str, str]:
        return self.place.bucket.environment()


class Rclone(Peer):
    """rclone mount with its full cache; its remote is defined in the environment.

    With its cache, close returns before the upload, whatever its options; without a cache, data is
    sent when it is written, and close waits for the end of the upload.
    """

    def _argv(self) -> list[str]:
        if self.is_writable:
            mode = [
                "--vfs-cache-mode",
                "off",
                "--s3-chunk-size",
                "16M",
                "--s3-upload-concurrency",
                "8",
                "--s3-disable-checksum",
            ]
        else:
            mode = ["--read-only", "--vfs-cache-mode", "full", "--vfs-cache-max-age", "24h"]
        if self.cache_limit is not None:
            mode += ["--vfs-cache-max-size", f"{self.cache_limit}B"]
            mode += ["--vfs-cache-poll-interval", "1s"]
        return [
            str(self._program),
            "mount",
            f"bench:{self.place.bucket.name}",
            str(self.root),
            "--allow-other",
            "--cache-dir",
            str(self.cache),
            *mode,
            "--vfs-read-chunk-size",
            "4M",
            "--vfs-read-chunk-streams",
            "16",
            "--vfs-read-ahead",
            "256M",
            "--vfs-fast-fingerprint",
            "--use-server-modtime",
            "--no-checksum",
            "--dir-cache-time",
            "24h",
            "--attr-timeout",
            "10m",
            "--poll-interval",
            "0",
            "--max-read-ahead",
            "1M",
            "--transfers",
            "8",
        ]

    def _environment(self) -> dict[str, str]:
        return rclone_environment(self.place.bucket)


class S3fs(Peer):
    """s3fs with its local cache."""

    def start(self) -> None:
        passwords = self._passwords()
        passwords.touch(mode=0o600)
        passwords.write_text(f"{ACCESS_KEY}:{SECRET_KEY}\n")
        super().start()

    def _environment(self) -> dict[str, str]:
        bucket = self.place.bucket
        trusted = {} if bucket.authority is None else {"CURL_CA_BUNDLE": str(bucket.authority)}
        return bucket.environment() | trusted

    def _passwords(self) -> Path:
        return self.place.scratch / "s3fs.passwd"

    def _argv(self) -> list[str]:
        options = [
            f"url={self.place.bucket.endpoint_url}",
            "use_path_request_style",
            *([] if self.is_writable else ["ro"]),
            f"use_cache={self.cache}",
            f"passwd_file={self._passwords()}",
            "allow_other",
            "kernel_cache",
            "big_writes",
            "max_write=131072",
            "max_readahead=1048576",
            "parallel_count=20",
            "multireq_max=30",
            "multipart_size=16",
            "max_stat_cache_size=200000",
            "stat_cache_expire=86400",
            "enable_noobj_cache",
            "list_object_max_keys=1000",
            "listobjectsv2",
        ]
        bucket = self.place.bucket.name
        return [str(self._program), bucket, str(self.root), "-f", "-o", ",".join(options)]


class Geesefs(Peer):
    """geesefs with its defaults and a disk cache, and where it writes, with closes that wait."""

    def _environment(self) -> dict[str, str]:
        bucket = self.place.bucket
        trusted = {} if bucket.authority is None else {"SSL_CERT_FILE": str(bucket.authority)}
        return bucket.environment() | trusted

    def _argv(self) -> list[str]:
        bucket = self.place.bucket
        return [
            str(self._program),
            "-f",
            f"--endpoint={bucket.endpoint_url}",
            f"--region={REGION}",
            f"--cache={self.cache}",
            *(["--fsync-on-close"] if self.is_writable else ["-o", "ro"]),
            "-o",
            "allow_other",
            bucket.name,
            str(self.root),
        ]


class MountpointS3(Peer):
    """mountpoint-s3 with its default tuning and a disk cache.

    It trusts only the system's certificate authorities, so it runs in a mount namespace where the
    bench's authority is the only one; its mount below `_shared` is visible outside.
    """

    _TRUSTING = (
        'mount --make-private / && mount --bind "$AUTHORITY" /etc/ssl/certs/ca-certificates.crt'
        ' && exec "$@"'
    )

    def __init__(self, name: str, place: Place) -> None:
        super().__init__(name, place)
        self._program = find("mount-s3")
        self._shared = self.root
        self.root = self.root / "mounted"

    def start(self) -> None:
        self._shared.mkdir(parents=True, exist_ok=True)
        for options in (["--bind", str(self._shared)], ["--make-shared"]):
            processes.capture(["mount", *options, str(self._shared)], 30.0)
        super().start()

    def stop(self) -> None:
        try:
            super().stop()
        finally:
            processes.unmount(self._shared)

    def _environment(self) -> dict[str, str]:
        return {**super()._environment(), "AUTHORITY": str(self.place.bucket.authority)}

    def _argv(self) -> list[str]:
        bucket = self.place.bucket
        command = [
            str(self._program),
            bucket.name,
            str(self.root),
            "--foreground",
            f"--endpoint-url={bucket.endpoint_url}",
            f"--region={REGION}",
            "--force-path-style",
            f"--cache={self.cache}",
            *(["--allow-delete", "--allow-overwrite"] if self.is_writable else []),
            "--allow-other",
        ]
        if bucket.authority is None:
            return command
        apart = ["unshare", "--mount", "--propagation=unchanged", "sh", "-euc", self._TRUSTING]
        return [*apart, "sh", *command]


class Juicefs(Peer):
    """juicefs mount with a Redis beside it, filled with copies of the files."""

    def __init__(self, name: str, place: Place) -> None:
        super().__init__(name, place)
        self._redis: subprocess.Popen[bytes] | None = None
        self._port = 0

    def missing(self) -> str | None:
        return super().missing() or (None if find("redis-server") else "no redis-server")

    def start(self) -> None:
        self._port = _free_port()
        self._redis = processes.start(
            [
                str(find("redis-server")),
                "--port",
                str(self._port),
                "--bind",
                "127.0.0.1",
                "--save",
                "",
                "--dir",
                str(self.place.scratch),
            ],
            self.log,
            os.environ,
        )
        processes.wait_until(self._has_redis, "Redis")
        bucket = Bucket.create(self.place.bucket.server)
        processes.capture(
            [
                str(self._program),
                "format",
                "--storage",
                "s3",
                "--bucket",
                f"{bucket.endpoint_url}/{bucket.name}",
                self._metadata(),
                "bench",
            ],
            60.0,
            bucket.environment() | {"ACCESS_KEY": ACCESS_KEY, "SECRET_KEY": SECRET_KEY},
        )
        super().start()
        for name in COPIED:
            source = self.place.native_root / name
            if source.exists():
                processes.capture(["cp", "-r", str(source), str(self.root)], COPY_LIMIT_S)

    def stop(self) -> None:
        try:
            super().stop()
        finally:
            if self._redis is not None:
                processes.stop(self._redis)
                self._redis = None

    def _has_redis(self) -> bool:
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.1", self._port)) == 0

    def _metadata(self) -> str:
        return f"redis://127.0.0.1:{self._port}/1"

    def _argv(self) -> list[str]:
        return [
            str(self._program),
            "mount",
            self._metadata(),
            str(self.root),
            "--cache-dir",
            str(self.cache),
            "--cache-size",
            "102400",
            "--free-space-ratio",
            "0.05",
            "--buffer-size",
            "1024",
            "--max-fuse-io",
            "1M",
            "--attr-cache",
            "3600",
            "--entry-cache",
            "3600",
            "--dir-entry-cache",
            "3600",
            "--open-cache",
            "3600",
            "--readdir-cache",
            "--backup-meta",
            "0",
            "--writeback",
            "--no-usage-report",
            "--no-syslog",
            "-o",
            "allow_other",
        ]


def _free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])
