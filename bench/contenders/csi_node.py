"""The CSI driver on a node, as the manifests run it, and kubelet's side of its socket.

`fusefs-csi node` mounts and runs the keepers, `fusefs-csi daemons` runs the daemons; each volume
has one mount, which its pods share. Pods have target paths below a directory that stands in for
kubelet's.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc

from bench import processes
from bench.contenders.contender import Contender, Place
from bench.processes import BenchError
from csi.daemons import forking
from csi.generated import csi_pb2, csi_pb2_grpc
from tests.support.machine.ordinary_user import runnable_by_all
from tests.support.servers.s3_server import ACCESS_KEY, REGION, SECRET_KEY

CALL_LIMIT_S = 60.0
_Mode = csi_pb2.VolumeCapability.AccessMode
MANY_WRITERS = csi_pb2.VolumeCapability(
    mount=csi_pb2.VolumeCapability.MountVolume(),
    access_mode=_Mode(mode=_Mode.MULTI_NODE_MULTI_WRITER),
)
MAIN = "import sys; from csi.main import main; sys.exit(main())"


class CsiNode(Contender):
    """The driver's two processes; a volume is mounted by `publish`."""

    def __init__(self, name: str, place: Place) -> None:
        super().__init__(name, place)
        self._directory = place.scratch / name
        self._cleanup = ExitStack()
        self._published: dict[Path, str] = {}

    def command(self) -> str:
        return "fusefs-csi node --daemons there; fusefs-csi daemons"

    def start(self) -> None:
        for directory in (self._directory, self.cache):
            directory.mkdir(parents=True, exist_ok=True)
        self.place.scratch.chmod(0o711)  # daemons are ordinary users
        # On tmpfs, as the driver demands, and short, because socket paths are limited.
        self._state = Path(tempfile.mkdtemp(prefix="bench-", dir="/dev/shm"))
        self._cleanup.callback(shutil.rmtree, self._state)
        python, environment = self._cleanup.enter_context(runnable_by_all())
        self._run([python[0], "-c", MAIN, "daemons", *self._state_option()], environment)
        # Unmounts after the driver's end, so that no mount is added, and before the daemons' end.
        self._cleanup.callback(self._unmount_all)
        self._run([python[0], "-c", MAIN, "node", *self._options()], environment)
        channel = self._cleanup.enter_context(grpc.insecure_channel(f"unix:{self._socket}"))
        self._node = csi_pb2_grpc.NodeStub(channel)
        _call(csi_pb2_grpc.IdentityStub(channel).Probe, csi_pb2.ProbeRequest())

    def stop(self) -> None:
        try:
            self.unpublish_all()
        finally:
            self._cleanup.close()
            self._published.clear()
            for directory in (self._directory, self.cache):
                shutil.rmtree(directory, ignore_errors=True)

    def _unmount_all(self) -> None:
        for mountpoint in reversed(processes.mounts_below(self._directory)):
            processes.unmount(mountpoint)

    # --- kubelet ---

    def target(self, volume: str, pod: str) -> Path:
        """Return the path at which a pod sees a volume."""
        path = self._kubelet / "pods" / pod / "volumes/kubernetes.io~csi" / volume / "mount"
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def publish(self, volume: str, target: Path) -> None:
        """Call NodePublishVolume with the keys of a Secret."""
        self._published[target] = volume
        request = csi_pb2.NodePublishVolumeRequest(
            volume_id=volume,
            target_path=str(target),
            volume_capability=MANY_WRITERS,
            secrets={"accessKeyId": ACCESS_KEY, "secretAccessKey": SECRET_KEY},
            volume_context={"store": "bench", "bucket": self.place.bucket.name},
        )
        _call(self._node.NodePublishVolume, request)

    def unpublish_all(self) -> None:
        """Call NodeUnpublishVolume for each target; a volume's last one ends its mount."""
        while self._published:
            target, volume = self._published.popitem()
            request = csi_pb2.NodeUnpublishVolumeRequest(volume_id=volume, target_path=str(target))
            _call(self._node.NodeUnpublishVolume, request)

    # --- what it costs ---

    def memory_by_part(self) -> dict[str, int]:
        """Return the bytes of all daemons, keepers and brokers; shared pages count once."""
        found = {"daemon": 0, "keeper": 0, "broker": 0}
        parents = {pid: processes.parent_of(pid) for pid in self._mount_processes()}
        for pid, parent in parents.items():
            if b"fusefs daemon" in _read(pid, "cmdline") or _is_forked(pid):
                part = "daemon"
            else:
                part = "broker" if parent in parents else "keeper"
            found[part] += processes.proportional_size(pid)
        return found

    def _mount_processes(self) -> list[int]:
        """Return the driver's mount processes, found by the state directory in their environment.

        A forked daemon shows its supervisor's environment, so its parent's command line counts.
        """
        found = []
        for pid in processes.all_pids():
            with contextlib.suppress(OSError):
                environment = _read(pid, "environ")
                is_known = os.fsencode(self._state / "fusefs") in environment
                if is_known or (_is_forked(pid) and self._is_of_supervisor(pid)):
                    found.append(pid)
        return found

    def _is_of_supervisor(self, pid: int) -> bool:
        return os.fsencode(self._state) in _read(processes.parent_of(pid), "cmdline")

    # --- processes ---

    @property
    def _kubelet(self) -> Path:
        return self._directory / "kubelet"

    @property
    def _socket(self) -> Path:
        return self._state / "csi.sock"

    def _state_option(self) -> list[str]:
        return ["--state-dir", str(self._state)]

    def _options(self) -> list[str]:
        stores = self._directory / "stores.toml"
        bucket = self.place.bucket
        lines = [f'endpoint-url = "{bucket.endpoint_url}"', f'region = "{REGION}"']
        if bucket.authority is not None:
            lines.append(f'ca-bundle = "{bucket.authority}"')
        stores.write_text("\n".join(["[stores.bench]", *lines, ""]))
        return [
            "--endpoint",
            f"unix://{self._socket}",
            "--node-id",
            "bench",
            *self._state_option(),
            "--stores",
            str(stores),
            "--kubelet-dir",
            str(self._kubelet),
            "--mounts-dir",
            str(self._kubelet / "plugins/mounts"),
            "--cache-dir",
            str(self.cache),
            "--daemons",
            "there",
        ]

    def _run(self, command: list[str], environment: dict[str, str]) -> None:
        log = self.place.scratch / f"{self.name}.log"
        known = {name: text for name, text in os.environ.items() if not name.startswith("AWS_")}
        process = processes.start(command, log, known | environment)
        self._cleanup.callback(processes.stop, process)


def _call(method: Any, request: Any) -> None:
    """Make a call; repeat it while another call for the volume is under way, as kubelet does."""
    deadline = time.monotonic() + CALL_LIMIT_S
    while True:
        try:
            method(request, wait_for_ready=True, timeout=CALL_LIMIT_S)
            return
        except grpc.RpcError as error:
            failure: Any = error
            if failure.code() != grpc.StatusCode.ABORTED or time.monotonic() > deadline:
                raise BenchError(f"{type(request).__name__}: {failure.details()}") from error
        time.sleep(0.1)


def _is_forked(pid: int) -> bool:
    """True if the process is a daemon that a supervisor has forked."""
    return _read(pid, "comm").strip() == forking.NAME.encode()


def _read(pid: int, name: str) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/{name}").read_bytes()
    return b""
