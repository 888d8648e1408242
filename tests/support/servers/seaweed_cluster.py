"""A SeaweedFS of several processes, whose parts a test kills, stops, fills and damages.

One master, one filer with the S3 gateway, and volume servers that each have a directory
of their own. A bucket has its volumes on all volume servers. All die with `stop`, and with
the process that started them, however that ends.
"""

import contextlib
import json
import mmap
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.servers.s3_server import S3Server, ServerError, free_ports, is_free, spawn
from tests.support.sharing import drop_copies

VOLUME_SERVERS = 3
# How many copies a block has: digits for other data centres, other racks, other servers.
REPLICATIONS = ("000", "001")
# A volume takes no more; small, so that none of its files is grown for long.
VOLUME_LIMIT_MB = 64
# Of one bucket. The master spreads them over the servers.
VOLUMES_PER_BUCKET = 6
# An object is found in a volume's file by so many of its first bytes, which are random.
MARK = 64
READY_LIMIT_S = 60


@dataclass
class ClusterProcess:
    """One process of the cluster, which may be killed, stopped and started again."""

    name: str
    port: int
    command: list[str]
    log: Path
    environment: dict[str, str] = field(default_factory=dict)
    _process: subprocess.Popen[bytes] | None = None

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def has_ended(self) -> bool:
        """True if it was started and has ended by itself."""
        return self._process is not None and self._process.poll() is not None

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None
        return self._process

    def start(self) -> None:
        """Start it; the cluster's `wait` tells when it answers."""
        self._process = spawn(self.command, self.log, **self.environment)

    def kill(self) -> None:
        """SIGKILL, also where it is stopped."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def freeze(self) -> None:
        """SIGSTOP: its connections stay open, and nothing is answered."""
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def wait_until_listening(self) -> None:
        """Return when its port is taken.

        Raises:
            ServerError: it has ended, or READY_LIMIT_S are over.
        """
        deadline = time.monotonic() + READY_LIMIT_S
        while is_free(self.port):
            if self.has_ended or time.monotonic() > deadline:
                raise ServerError(f"weed {self.name} did not start")
            time.sleep(0.02)


class SeaweedCluster(S3Server):
    """The cluster, with its state below `directory`, from `start` to `stop`.

    `replication` is one of REPLICATIONS: "001" keeps two copies of each block. With
    `small_disk_bytes` the first volume server has a file system of its own, of that size,
    which is empty again after each of its starts (see `can_have_small_disks`).
    """

    access_key = "cluster-access"
    secret_key = "cluster-secret"

    def __init__(
        self, directory: Path, *, replication: str = "000", small_disk_bytes: int | None = None
    ) -> None:
        super().__init__(directory)
        self.replication = replication
        self._small_disk_bytes = small_disk_bytes
        self.volume_servers: list[ClusterProcess] = []

    @property
    def data(self) -> Path:
        return self._directory

    @property
    def endpoint_url(self) -> str:
        return f"http://127.0.0.1:{self._ports[2]}"

    def _start(self) -> None:
        self._ports = free_ports(3 + VOLUME_SERVERS)
        master, filer, gateway, *volumes = self._ports
        self.master = self._master(master)
        self.volume_servers = [
            self._volume_server(number, port, master) for number, port in enumerate(volumes)
        ]
        self.filer = self._filer(filer, gateway, master)
        self.master.start()
        self.master.wait_until_listening()
        for one in (*self.volume_servers, self.filer):
            one.start()
        self._process = self.filer.process
        self._wait_for_volume_servers()
        self._wait_until_writable()

    def stop(self) -> None:
        for one in self._processes():
            one.kill()
        self._process = None
        self._remove_sockets()

    def restart(self, one: ClusterProcess) -> None:
        """Kill a process and start it again with what it has on its disk."""
        one.kill()
        one.start()
        if one is self.filer:
            self._process = one.process
        one.wait_until_listening()

    def heal(self) -> None:
        """Have all processes run again; returns when a bucket can be written to.

        Raises:
            ServerError: it was not ready in START_LIMIT_S.
        """
        for one in self._processes():
            if one.is_running:
                one.thaw()
            else:
                self.restart(one)
        self._wait_for_volume_servers()
        self._wait_until_writable()

    @property
    def pids(self) -> list[int]:
        """The processes that run."""
        return [one.process.pid for one in self._processes() if one.is_running]

    def write_credentials(self, path: Path) -> Path:
        """Write the keys of the gateway as an AWS credentials file."""
        path.touch(mode=0o600)
        path.write_text(
            "[default]\n"
            f"aws_access_key_id = {self.environment['AWS_ACCESS_KEY_ID']}\n"
            f"aws_secret_access_key = {self.environment['AWS_SECRET_ACCESS_KEY']}\n"
        )
        return path

    def keys(self, bucket: str) -> list[str]:
        """The keys of all objects of a bucket."""
        pages = self.client().get_paginator("list_objects_v2").paginate(Bucket=bucket)
        return [entry["Key"] for page in pages for entry in page.get("Contents", [])]

    def flip_by_writing(self, bucket: str, key: str, position: int) -> None:
        """Write an object again with one bit of the byte at `position` changed."""
        content = bytearray(self.client().get_object(Bucket=bucket, Key=key)["Body"].read())
        content[position] ^= 1
        self.client().put_object(Bucket=bucket, Key=key, Body=bytes(content))

    def flip_at_rest(self, bucket: str, key: str, position: int) -> None:
        """Change one bit of an object in the volumes' files, in each copy.

        `position` is counted from the object's begin and lies in its first 4 MiB, which
        are in one piece.
        """
        for _, path, begin in self._copies(bucket, key):
            with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as data:
                data[begin + position] ^= 1

    def holders(self, bucket: str, key: str) -> list[ClusterProcess]:
        """The volume servers that have the begin of an object, which all have to run."""
        return [self.volume_servers[number] for number, _, _ in self._copies(bucket, key)]

    def fullest(self, bucket: str) -> ClusterProcess:
        """The volume server that has most bytes of a bucket."""
        sizes = [
            sum(path.stat().st_size for path in self._volume_files(number, bucket))
            for number in range(VOLUME_SERVERS)
        ]
        return self.volume_servers[sizes.index(max(sizes))]

    def disk(self, number: int) -> Path:
        """Where a volume server that runs has its files."""
        directory = self._volume_directory(number)
        if number or self._small_disk_bytes is None:
            return directory
        # It is mounted in the process's own namespace.
        root = Path(f"/proc/{self.volume_servers[number].process.pid}/root")
        return root / directory.relative_to("/")

    def fill_disk(self) -> None:
        """Take all room that the first volume server's small disk still has."""
        with self._filler.open("ab", buffering=0) as file:
            for size in (1 << 20, 512):
                with contextlib.suppress(OSError):
                    while True:
                        file.write(bytes(size))

    def free_disk(self) -> None:
        """Give back what `fill_disk` has taken."""
        self._filler.unlink(missing_ok=True)

    @property
    def _filler(self) -> Path:
        assert self._small_disk_bytes is not None
        return self.disk(0) / "filler"

    def _copies(self, bucket: str, key: str) -> Iterator[tuple[int, Path, int]]:
        """The copies of an object's begin: number of the server, volume file, offset."""
        content = self.client().get_object(Bucket=bucket, Key=key)["Body"].read()
        for number in range(VOLUME_SERVERS):
            for path in self._volume_files(number, bucket):
                with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as data:
                    begin = data.rfind(content[:MARK])
                if begin >= 0:
                    yield number, path, begin

    def _volume_files(self, number: int, bucket: str) -> list[Path]:
        return list(self.disk(number).glob(f"{bucket}_*.dat"))

    def _has_ended(self) -> bool:
        return any(one.has_ended for one in self._processes())

    def _wait_for_volume_servers(self) -> None:
        deadline = time.monotonic() + READY_LIMIT_S
        while self._registered() < VOLUME_SERVERS:
            if self._has_ended() or time.monotonic() > deadline:
                raise ServerError("the cluster has not all of its volume servers")
            time.sleep(0.05)

    def _registered(self) -> int:
        """How many volume servers the master knows."""
        url = f"http://127.0.0.1:{self.master.port}/dir/status"
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                topology = json.load(answer)["Topology"]
        except OSError:
            return 0
        racks = [rack for center in topology.get("DataCenters") or () for rack in center["Racks"]]
        return sum(len(rack.get("DataNodes") or ()) for rack in racks)

    def _processes(self) -> list[ClusterProcess]:
        return [self.master, *self.volume_servers, self.filer] if self.volume_servers else []

    def _volume_directory(self, number: int) -> Path:
        return self._directory / f"volume{number}"

    def _master(self, port: int) -> ClusterProcess:
        directory = self._directory / "master"
        directory.mkdir(parents=True, exist_ok=True)
        growth = {f"WEED_MASTER_VOLUME_GROWTH_COPY_{n}": str(VOLUMES_PER_BUCKET) for n in (1, 2)}
        return self._weed(
            "master",
            port,
            f"-mdir={directory}",
            "-peers=none",
            f"-defaultReplication={self.replication}",
            f"-volumeSizeLimitMB={VOLUME_LIMIT_MB}",
            "-volumePreallocate=false",
            "-telemetry=false",
            **growth,
        )

    def _volume_server(self, number: int, port: int, master: int) -> ClusterProcess:
        directory = self._volume_directory(number)
        directory.mkdir(parents=True, exist_ok=True)
        process = self._weed(
            "volume",
            port,
            f"-dir={directory}",
            f"-mserver=127.0.0.1:{master}",
            "-max=200",
            "-minFreeSpace=0",
        )
        if number == 0 and self._small_disk_bytes is not None:
            process.command = _on_small_disk(process.command, directory, self._small_disk_bytes)
        return process

    def _filer(self, port: int, gateway: int, master: int) -> ClusterProcess:
        directory = self._directory / "filer"
        directory.mkdir(parents=True, exist_ok=True)
        return self._weed(
            "filer",
            port,
            f"-master=127.0.0.1:{master}",
            f"-defaultStoreDir={directory}",
            f"-defaultReplicaPlacement={self.replication}",
            "-s3",
            f"-s3.port={gateway}",
            f"-s3.config={self._write_identities()}",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
        )

    def _weed(self, role: str, port: int, *options: str, **environment: str) -> ClusterProcess:
        command = [
            str(Path(sys.prefix) / "bin" / "weed"),
            f"-logdir={self._directory}",
            role,
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            f"-port={port}",
            *options,
        ]
        return ClusterProcess(role, port, command, self._log, environment)


def can_have_small_disks() -> bool:
    """True if a process may mount a file system of its own here (with unshare, as root)."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        return False
    trial = ["unshare", "--mount", "mount", "-t", "tmpfs", "-o", "size=1m", "trial", "/mnt"]
    return subprocess.run(trial, capture_output=True).returncode == 0


def _on_small_disk(command: list[str], directory: Path, size: int) -> list[str]:
    """The command in a mount namespace of its own, whose end takes the file system along."""
    script = f'{drop_copies()}mount -t tmpfs -o size={size} small "$0" && exec "$@"'
    return ["unshare", "--mount", "sh", "-c", script, str(directory), *command]
