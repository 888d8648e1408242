"""`fusefs-csi node` as a process, and kubelet's side of its socket."""

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from csi.daemons import forking
from csi.generated import csi_pb2, csi_pb2_grpc
from fusefs.linux import libc, mountinfo, unmount
from tests.support.machine.ordinary_user import runnable_by_all
from tests.support.servers.s3_server import ACCESS_KEY, SECRET_KEY
from tests.support.sharing import PATIENCE_S, drop_copies, skip_without_fuse
from tests.support.waiting import until

# Bidirectional, as the driver's container has kubelet's directory.
OWN_MOUNTS = ("unshare", "--mount", "--propagation", "unchanged", "sh", "-c")
START = "import sys; from csi.main import main; sys.exit(main())"
SECRETS = {"accessKeyId": ACCESS_KEY, "secretAccessKey": SECRET_KEY}
Mode = csi_pb2.VolumeCapability.AccessMode
MULTI = Mode.MULTI_NODE_MULTI_WRITER
NOT_FINAL = (
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
)


def capability(
    mode: int = MULTI, *, flags: tuple[str, ...] = (), group: str = ""
) -> csi_pb2.VolumeCapability:
    return csi_pb2.VolumeCapability(
        mount=csi_pb2.VolumeCapability.MountVolume(mount_flags=flags, volume_mount_group=group),
        access_mode=Mode(mode=mode),
    )


class Node:
    """One node: kubelet's directories, the driver, and calls of its socket.

    Kubelet's directory is a shared mount here, and the driver has a mount namespace of its own,
    as in its container. `serves` is the driver's command, `node` or `all`.
    """

    def __init__(
        self,
        directory: Path,
        stores: dict[str, str],
        command: list[str],
        environment: Any,
        serves: str,
    ) -> None:
        self.directory = directory
        self.serves = serves
        self.kubelet = directory / "kubelet"
        self.mounts = self.kubelet / "plugins" / "mounts"
        self.cache = directory / "cache"
        self.pods = self.kubelet / "pods"
        self.pods.mkdir(parents=True)
        bind = ["mount", "--bind", "--make-shared", self.kubelet, self.kubelet]
        subprocess.run(bind, check=True)
        self.state = Path(tempfile.mkdtemp(prefix="csi", dir="/dev/shm"))
        self.log = directory / "driver.log"
        self.socket = directory / "csi.sock"
        self.stores = directory / "stores.toml"
        self.stores.write_text(
            "".join(
                f'[stores.{name}]\nendpoint-url = "{url}"\nregion = "us-east-1"\n'
                for name, url in stores.items()
            )
        )
        # The driver's own identity.
        own = directory / "own-keys"
        own.write_text(
            f"[default]\naws_access_key_id = {ACCESS_KEY}\naws_secret_access_key = {SECRET_KEY}\n"
        )
        self.command = command
        self.environment = {**environment, "AWS_SHARED_CREDENTIALS_FILE": str(own)}
        self.process: subprocess.Popen[bytes] | None = None
        self._channel: grpc.Channel | None = None

    def start(self, *options: str) -> None:
        clean = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("AWS_", "FUSEFS_"))
        }
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [
                    *(*OWN_MOUNTS, f'{drop_copies()}exec "$@"', "sh"),
                    *self.command,
                    self.serves,
                    f"--endpoint=unix://{self.socket}",
                    "--node-id=node-1",
                    f"--state-dir={self.state}",
                    f"--stores={self.stores}",
                    f"--kubelet-dir={self.kubelet}",
                    f"--mounts-dir={self.mounts}",
                    f"--cache-dir={self.cache}",
                    "--min-free=1%",
                    "--log-level=debug",
                    *options,
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**clean, **self.environment},
                start_new_session=True,
            )
        # A channel of its own connection: the process before this one had the same address.
        alone = [("grpc.use_local_subchannel_pool", 1)]
        self._channel = grpc.insecure_channel(f"unix:{self.socket}", alone)
        self.node = csi_pb2_grpc.NodeStub(self._channel)
        self.identity = csi_pb2_grpc.IdentityStub(self._channel)
        self.identity.Probe(csi_pb2.ProbeRequest(), wait_for_ready=True, timeout=PATIENCE_S)

    def kill(self) -> None:
        """SIGKILL the driver and nothing else."""
        self.process.kill()
        self.process.wait()
        if self._channel is not None:
            self._channel.close()

    def target(self, pod: str, volume: str = "data") -> Path:
        path = self.pods / pod / "volumes" / "kubernetes.io~csi" / volume / "mount"
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def publish(
        self, volume: str, target: Path | str, *, timeout_s: float = PATIENCE_S, **fields: Any
    ) -> None:
        """NodePublishVolume; see `request` for its fields."""
        self.node.NodePublishVolume(self.request(volume, target, **fields), timeout=timeout_s)

    def request(
        self,
        volume: str,
        target: Path | str,
        *,
        cap: csi_pb2.VolumeCapability | None = None,
        readonly: bool = False,
        secrets: dict[str, str] | None = None,
        **context: str,
    ) -> csi_pb2.NodePublishVolumeRequest:
        """What kubelet sends; `context` is the volume's."""
        return csi_pb2.NodePublishVolumeRequest(
            volume_id=volume,
            target_path=str(target),
            readonly=readonly,
            volume_capability=cap or capability(),
            secrets=SECRETS if secrets is None else secrets,
            volume_context={"store": "main", **context},
        )

    def unpublish(self, volume: str, target: Path | str, *, timeout_s: float = PATIENCE_S) -> None:
        self.node.NodeUnpublishVolume(
            csi_pb2.NodeUnpublishVolumeRequest(volume_id=volume, target_path=str(target)),
            timeout=timeout_s,
        )

    def records(self) -> list[dict[str, Any]]:
        """The driver's records of its mounts."""
        return [json.loads(path.read_text()) for path in (self.state / "mounts").glob("*.json")]

    def mounted(self) -> list[mountinfo.KernelMount]:
        """The mounts below kubelet's directory."""
        return [
            mount for mount in mountinfo.kernel_mounts() if self.kubelet in mount.mountpoint.parents
        ]

    def roots(self) -> list[mountinfo.KernelMount]:
        return [mount for mount in self.mounted() if mount.mountpoint.parent == self.mounts]

    def processes(self) -> dict[int, str]:
        """The mounts' processes and their commands, by pid; the driver and zombies are none."""
        found = {}
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and self._is_of_mount(entry):
                    command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                    if command and _is_forked(entry):
                        command = forking.NAME
                    if command and "csi.main" not in command:
                        found[int(entry.name)] = command
        return found

    def _is_of_mount(self, process: Path) -> bool:
        state = os.fsencode(self.state)
        environment = (process / "environ").read_bytes()
        if state in environment:
            return True
        # It shows the environment of its supervisor, which names no mount.
        if not _is_forked(process):
            return False
        [parent_pid] = _status(process, "PPid")
        parent = Path("/proc", parent_pid)
        is_ours = state in (parent / "cmdline").read_bytes()
        return is_ours or os.fsencode(self.directory) in (process / "maps").read_bytes()

    def daemons(self) -> list[int]:
        return [
            pid
            for pid, command in self.processes().items()
            if forking.NAME in command or "fusefs daemon" in command
        ]

    def holders_of(self, secret: bytes) -> list[Path]:
        """Files that have a secret: the log, the node's own, and what /proc shows of processes."""
        pids = [*self.processes(), self.process.pid] if self.process else [*self.processes()]
        shown = [Path("/proc", str(pid), name) for pid in pids for name in ("cmdline", "environ")]
        own = [path for place in (self.state, self.cache) for path in place.rglob("*")]

        def has_it(path: Path) -> bool:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has gone
                return path.is_file() and secret in path.read_bytes()
            return False

        return [path for path in (self.log, *shown, *own) if has_it(path)]

    def kill_all(self, whom: str = "") -> None:
        """SIGKILL all keepers and daemons, or those whose command says so, at one moment.

        Returns when they have closed all that they held.
        """
        dying: dict[int, int] = {}
        while found := {pid for pid, it in self.processes().items() if whom in it} - dying.keys():
            for pid in found:  # a keeper that is not stopped yet may have a new broker
                with contextlib.suppress(ProcessLookupError):
                    dying[pid] = os.pidfd_open(pid)
                    os.kill(pid, signal.SIGSTOP)
        for process in dying.values():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(process, signal.SIGKILL)
        for process in dying.values():
            select.select([process], [], [], PATIENCE_S)
            os.close(process)

    def leftovers(self) -> list[str]:
        """What is left of mounts: to be nothing when all volumes are unpublished."""
        left = [str(mount.mountpoint) for mount in self.mounted()]
        left += [f"{pid} {command}" for pid, command in self.processes().items()]
        left += [str(path) for path in self.mounts.iterdir()]
        # Their names alone, as a mount may be there.
        for parent in self.pods.glob("*/volumes/*/*"):
            left += [str(parent / name) for name in os.listdir(parent)]
        for name in ("mounts", "credentials", "fusefs", "pods"):
            if (self.state / name).exists():
                left += [str(path) for path in (self.state / name).iterdir()]
        return left

    def clean_up(self) -> None:
        """Whatever the test did: no mount and no process afterwards."""
        if self.process is not None and self.process.poll() is None:
            self.kill()
        connections = {mount.connection for mount in self.mounted() if mount.is_fusefs}
        for connection in connections:
            with contextlib.suppress(unmount.UnmountError):
                unmount.abort_connection(connection)
        for mount in reversed(self.mounted()):
            with contextlib.suppress(OSError):
                libc.umount(str(mount.mountpoint), libc.MNT_DETACH | libc.UMOUNT_NOFOLLOW)
        deadline = time.monotonic() + PATIENCE_S
        while (left := self.processes()) and time.monotonic() < deadline:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
        if os.environ.get("SHOW_DRIVER_LOG"):
            print(self.log.read_text())
        if not self.mounted():
            libc.umount(str(self.kubelet), libc.MNT_DETACH | libc.UMOUNT_NOFOLLOW)
            shutil.rmtree(self.state, ignore_errors=True)


@contextlib.contextmanager
def running_node(
    *options: str, serves: str = "node", is_started: bool = True, **stores: str
) -> Iterator[Node]:
    """A node whose driver runs, gone at the end whatever happened. `stores` are URLs by name.

    The caller starts a driver that is not started. Skips where mounting is not possible.
    """
    skip_without_fuse()
    if os.geteuid() != 0:
        pytest.skip("the node service is root's")
    # Not below pytest's own directory, which it keeps closing to other users.
    directory = Path(tempfile.mkdtemp(prefix="node"))
    directory.chmod(0o755)
    try:
        with runnable_by_all() as (command, environment):
            node = Node(directory, stores, [command[0], "-c", START], environment, serves)
            try:
                if is_started:
                    node.start(*options)
                yield node
            finally:
                node.clean_up()
    finally:
        if not any(one.mountpoint.is_relative_to(directory) for one in mountinfo.kernel_mounts()):
            shutil.rmtree(directory, ignore_errors=True)


def _is_forked(process: Path) -> bool:
    """True for a daemon that a supervisor has forked."""
    return (process / "comm").read_text().strip() == forking.NAME


def _status(process: Path, field: str) -> list[str]:
    """The values of a field of /proc/PID/status."""
    lines = (process / "status").read_text().splitlines()
    return next(line.split()[1:] for line in lines if line.startswith(f"{field}:"))


def code_of(error: Any) -> grpc.StatusCode:
    """The status of a failed call."""
    code: grpc.StatusCode = error.value.code()
    return code


def until_final(call: Any, *arguments: Any, **options: Any) -> None:
    """Call as kubelet does: again until the answer is final, which has to be OK."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            call(*arguments, **options)
            return
        except grpc.RpcError as error:
            failure: Any = error
            if failure.code() not in NOT_FINAL or time.monotonic() > deadline:
                raise
        time.sleep(0.1)


@pytest.fixture
def node(running: Node) -> Iterator[Node]:
    """The module's node; each test has to leave nothing on it."""
    yield running
    until(lambda: not running.leftovers(), "nothing is left")
