"""The S3 server of a run: SeaweedFS on loopback, its data on the same disk.

A first read is to measure the reader and not the server's disk, so `warm`
brings the server's files into the page cache before each one; dropping the
page cache, which the bench does all the time, takes them out again.
"""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from obstore.store import S3Store

from bench import pagecache, processes

REGION = "us-east-1"
ACCESS_KEY = "bench-access"
SECRET_KEY = "bench-secret"
BUCKET = "bench"

# weed puts each gRPC port this far above the HTTP port.
GRPC_DISTANCE = 10_000


@dataclass(frozen=True, slots=True)
class Bucket:
    """Where the objects are, and the environment that gives a program access to them."""

    endpoint: str
    name: str = BUCKET
    region: str = REGION

    def environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_REGION": self.region,
        }

    def reader_options(self) -> dict[str, str]:
        """What the readers need to reach it, without the keys."""
        return {"bucket": self.name, "endpoint": self.endpoint, "region": self.region}


class Server:
    """A SeaweedFS below `scratch`, from `start` to `stop`."""

    def __init__(self, scratch: Path) -> None:
        self._data = scratch / "server"
        self._log = scratch / "server.log"
        self._config = scratch / "server.json"
        self._process: subprocess.Popen[bytes] | None = None
        self._ports: list[int] = []

    @property
    def bucket(self) -> Bucket:
        return Bucket(f"http://127.0.0.1:{self._ports[3]}")

    def start(self) -> None:
        """Start it and make the bucket; returns when the bucket can be written to."""
        self._data.mkdir()
        keys = {"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}
        actions = ["Admin", "Read", "Write", "List", "Tagging"]
        identity = {"name": "bench", "credentials": [keys], "actions": actions}
        self._config.write_text(json.dumps({"identities": [identity]}))
        self._ports = _free_ports()
        master, volume, filer, s3 = self._ports[:4]
        argv = [
            _program("weed"), f"-logdir={self._data}", "server", f"-dir={self._data}",
            "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-s3", f"-s3.port={s3}",
            f"-s3.config={self._config}", f"-master.port={master}", f"-volume.port={volume}",
            f"-filer.port={filer}", "-s3.port.iceberg=0", "-s3.port.lance=0",
            "-master.telemetry=false", "-volume.max=50", "-master.volumeSizeLimitMB=1024",
        ]  # fmt: skip
        self._process = processes.start(argv, self._log, self.bucket.environment())
        processes.wait_until(self._answers, f"S3 server ({self._log})", limit_s=60)
        self._make_bucket()

    def stop(self) -> None:
        if self._process is not None:
            processes.stop(self._process)
            self._process = None
        # weed leaves its local sockets behind when it is told to end.
        for port in self._ports:
            for socket_path in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
                socket_path.unlink(missing_ok=True)

    def store(self) -> Any:
        """A client for the upload of the data set."""
        bucket = self.bucket
        return S3Store(
            bucket.name, endpoint=bucket.endpoint, region=bucket.region,
            access_key_id=ACCESS_KEY, secret_access_key=SECRET_KEY,
            client_options={"allow_http": True},
        )  # fmt: skip

    def warm(self) -> None:
        """Read the server's own files once, so that it serves from memory."""
        pagecache.load(self._data)

    def _answers(self) -> bool:
        if self._process is not None and self._process.poll() is not None:
            raise processes.BenchError(f"S3 server ended: {processes.tail(self._log)}")
        try:
            urllib.request.urlopen(self.bucket.endpoint, timeout=1).close()
        except urllib.error.HTTPError:
            return True  # it refuses an unsigned request, and so it is up
        except OSError:
            return False
        return True

    def _make_bucket(self) -> None:
        import boto3
        from botocore.exceptions import ClientError

        client = boto3.client(
            "s3", endpoint_url=self.bucket.endpoint, region_name=REGION,
            aws_access_key_id=ACCESS_KEY, aws_secret_access_key=SECRET_KEY,
        )  # fmt: skip

        def made() -> bool:
            # The gateway answers a little before its master has volumes to write to.
            try:
                client.create_bucket(Bucket=BUCKET)
                client.put_object(Bucket=BUCKET, Key="ready", Body=b"ready")
                client.delete_object(Bucket=BUCKET, Key="ready")
            except client.exceptions.BucketAlreadyOwnedByYou:
                pass
            except ClientError:
                return False
            return True

        processes.wait_until(made, "the first object in the bucket", limit_s=60)


def _program(name: str) -> str:
    """A program of the virtual environment that runs the bench."""
    return str(Path(sys.prefix) / "bin" / name)


def _free_ports() -> list[int]:
    """Four neighbouring ports that are free, then their gRPC counterparts."""
    for _ in range(100):
        first = random.randrange(20_000, 30_000)
        ports = [first + step + number for step in (0, GRPC_DISTANCE) for number in range(4)]
        if all(map(_is_free, ports)):
            return ports
    raise processes.BenchError("no free ports for the S3 server")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
