"""Ceph's S3 gateway for tests: one monitor, one OSD in memory and one radosgw, on loopback.

They come with Debian's packages ceph-mon, ceph-osd and radosgw; a manager is
not needed. The OSD keeps everything in memory (memstore). All die with `stop`,
and with the process that started them, however that ends.
"""

import contextlib
import random
import shutil
import subprocess
import uuid
from pathlib import Path

from tests.support.servers.s3_server import (
    ACCESS_KEY,
    DOMAIN,
    SECRET_KEY,
    S3Server,
    ServerError,
    is_free,
    spawn,
)

PROGRAMS = ("ceph", "ceph-mon", "ceph-osd", "monmaptool", "radosgw", "radosgw-admin")
COMMAND_LIMIT_S = 60
# The bytes of all objects together; they are taken as they come.
MEMORY = 8 << 30
# Ports of tests' servers are below those that the kernel gives out by itself.
_PORTS = range(31_000, 32_000)

_CONFIGURATION = """\
[global]
fsid = {fsid}
mon_host = v2:127.0.0.1:{monitor}
public_addr = 127.0.0.1
auth_cluster_required = none
auth_service_required = none
auth_client_required = none
# Without authentication radosgw finds no mode that it could encrypt in.
ms_cluster_mode = crc
ms_service_mode = crc
ms_client_mode = crc
ms_mon_cluster_mode = crc
ms_mon_service_mode = crc
ms_mon_client_mode = crc
osd_pool_default_size = 1
osd_pool_default_min_size = 1
osd_pool_default_pg_num = 4
osd_pool_default_pg_autoscale_mode = off
mon_allow_pool_size_one = true
# The monitor waits for more changes by itself, and each pool is one.
paxos_propose_interval = 0.05
paxos_min_wait = 0.01
mon_data_avail_crit = 0
mon_data_avail_warn = 0
osd_crush_chooseleaf_type = 0
osd_objectstore = memstore
memstore_device_bytes = {memory}
run_dir = {directory}
crash_dir = {directory}
admin_socket =
pid_file =
log_file = {directory}/$name.log
keyring = {directory}/keyring
mon_data = {directory}/mon
osd_data = {directory}/osd
rgw_data = {directory}/rgw
rgw_dns_name = {domain}
rgw_frontends = beast endpoint=127.0.0.1:{gateway}
rgw_dynamic_resharding = false
"""


def missing() -> str:
    """What is not installed of Ceph, for a skip's reason; "" if nothing is."""
    programs = [program for program in PROGRAMS if shutil.which(program) is None]
    if not programs:
        return ""
    return f"Ceph is not installed (ceph-mon, ceph-osd, radosgw): no {', '.join(programs)}"


class CephServer(S3Server):
    """A cluster with its state below `directory`, from `start` to `stop`."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._running: list[subprocess.Popen[bytes]] = []
        self._gateway = 0

    @property
    def endpoint_url(self) -> str:
        return f"http://127.0.0.1:{self._gateway}"

    def start(self) -> None:
        """Start it; returns when a bucket can be made and written to.

        Raises:
            ServerError: it ended, or was not ready in START_LIMIT_S.
        """
        monitor, self._gateway = _free_ports()
        fsid = str(uuid.uuid4())
        for name in ("mon", "osd", "rgw"):
            (self._directory / name).mkdir(parents=True)
        text = _CONFIGURATION.format(
            fsid=fsid,
            monitor=monitor,
            gateway=self._gateway,
            domain=DOMAIN,
            directory=self._directory,
            memory=MEMORY,
        )
        self._configuration.write_text(text)
        address = f"[v2:127.0.0.1:{monitor}]"
        monmap = self._directory / "monmap"
        _run("monmaptool", "--create", "--fsid", fsid, "--addv", "a", address, monmap)
        self._ceph("ceph-mon", "--mkfs", "-i", "a", "--monmap", monmap)
        self._spawn("ceph-mon", "-i", "a")
        osd = str(uuid.uuid4())
        self._ceph("ceph", "osd", "new", osd)
        self._ceph("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", osd)
        self._spawn("ceph-osd", "-i", "0")
        self._ceph(
            "radosgw-admin",
            "user",
            "create",
            "--uid=owner",
            "--display-name=owner",
            f"--access-key={ACCESS_KEY}",
            f"--secret-key={SECRET_KEY}",
            "--max-buckets=0",
        )
        self._process = self._spawn("radosgw", "-n", "client.admin")
        self._wait_until_writable()

    def stop(self) -> None:
        for process in reversed(self._running):
            process.kill()
        for process in self._running:
            process.wait()
        self._running = []
        self._process = None
        # What they held is in memory; the monitor's database is 100 MB.
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self._directory / "mon")

    @property
    def _log(self) -> Path:
        return self._directory / "client.admin.log"

    @property
    def _configuration(self) -> Path:
        return self._directory / "ceph.conf"

    def _ceph(self, program: str, *arguments: object) -> None:
        _run(program, "-c", self._configuration, *arguments)

    def _spawn(self, program: str, *arguments: str) -> subprocess.Popen[bytes]:
        command = [program, "-f", "-c", str(self._configuration), *arguments]
        process = spawn(command, self._directory / f"{program}.out")
        self._running.append(process)
        return process


def _run(*arguments: object) -> None:
    try:
        subprocess.run(
            [str(argument) for argument in arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=COMMAND_LIMIT_S,
            check=True,
        )
    except subprocess.CalledProcessError as error:
        raise ServerError(f"{arguments[0]} failed: {error.stderr[-300:]}") from error
    except subprocess.TimeoutExpired as error:
        raise ServerError(f"{arguments[0]} took longer than {COMMAND_LIMIT_S} s") from error


def _free_ports() -> tuple[int, int]:
    """Of the monitor and of the gateway; the OSD finds its own."""
    for _ in range(100):
        ports = random.sample(_PORTS, 2)
        if all(is_free(port) for port in ports):
            return ports[0], ports[1]
    raise ServerError("no free ports for Ceph")
