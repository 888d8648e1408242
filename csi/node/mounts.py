"""The mounts of the volumes: each mount has a key, is made once and bound to many target paths.

Pods of a node that use a volume in the same way, as the same identity, share one mount. The target
paths of a mount are read from mountinfo: all mountpoints of its file system except its own root.

A mount is *alive* while its keeper or its daemon has the mount's connection open, as their sockets
show; no file of the mount is accessed. A dead mount is unmounted from its root and made anew; its
bind mounts stay below the new ones (see `service`). A mount whose connection only the descriptor
store holds is resumed: it gets a new keeper and daemon. If that fails for `RESUME_S`, the store
drops the connection, so that programs get an error, and the mount is dead.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from csi.daemons.client import SupervisorClient
from csi.errors import AbortedError, CsiError, MountError, UnavailableError
from csi.identities.credentials import CredentialFiles
from csi.node import bind_mount
from csi.node.bind_mount import MountTable
from csi.node.mount_record import MountRecord, MountRecords
from fusefs.launch import preflight, registry
from fusefs.launch.control import ControlError
from fusefs.launch.launcher import NotUpError, resume, start
from fusefs.launch.mount_requests import daemon_pid, keeper_pid, keeper_request, keeper_status
from fusefs.launch.preflight import LaunchError
from fusefs.launch.registry import MountsError
from fusefs.linux.mountinfo import KernelMount
from fusefs.linux.processes import has_ended
from fusefs.settings.mount import MountSettings, SettingsError

log = logging.getLogger(__name__)

ANSWER_TIMEOUT_S = 1.0
# Time limits for the end of a mount's processes: after the connection was aborted, after SIGKILL.
ENDED_S = 2.0
KILL_S = 5.0
POLL_S = 0.05
# The time for which mounts are resumed, the same as a keeper's (LONGEST_PAUSE in service.py).
RESUME_S = 900.0


class Mounts:
    """Makes, resumes and ends the mounts below `roots`. Callers serialise calls for a volume."""

    def __init__(
        self,
        records: MountRecords,
        files: CredentialFiles,
        roots: Path,
        supervisor: SupervisorClient,
    ) -> None:
        self.records = records
        self._files = files
        self._roots = roots
        self.supervisor = supervisor
        # The time of the first failure to resume a mount, by key.
        self._stuck: dict[str, float] = {}
        # Children of this process, whose exit status it has to collect.
        self._keepers: set[subprocess.Popen[bytes]] = set()
        roots.mkdir(mode=0o700, parents=True, exist_ok=True)

    # --- what is there ---

    def root_of(self, key: str) -> Path:
        return self._roots / key

    def unknown(self) -> list[str]:
        """Return the keys of the mounts whose directory exists, but which have no record."""
        return [key for key in os.listdir(self._roots) if self.records.read(key) is None]

    def key_behind(self, mount: KernelMount, table: MountTable) -> str | None:
        """Return the key of the mount of which `mount` is a bind mount; None if unknown."""
        for one in table.of_device(mount.device):
            if one.mountpoint.parent == self._roots:
                return one.mountpoint.name
        return None

    def behind(self, mount: KernelMount, table: MountTable) -> MountRecord | None:
        """Return the record of the mount of which `mount` is a bind mount; None without one."""
        key = self.key_behind(mount, table)
        return self.records.read(key) if key is not None else None

    def references(self, key: str, table: MountTable) -> list[Path]:
        """Return the target paths that a mount is bound to."""
        top = table.top(self.root_of(key))
        if top is None:
            return []
        found = (one.mountpoint for one in table.of_device(top.device))
        # Roots are recognised by their names, because a root may be visible at several paths.
        return [path for path in found if path.name != key]

    def is_alive(self, record: MountRecord, table: MountTable) -> bool:
        """True if the mount has a keeper, or a daemon that serves it without a keeper."""
        root = Path(record.root)
        top = table.top(root)
        if top is None or not top.is_fusefs:
            return False
        try:
            return bool(keeper_status(root, ANSWER_TIMEOUT_S)["connection"] == top.connection)
        except ControlError:
            if keeper_pid(root) is not None:
                return True
            # A supervisor's daemon needs a new keeper; other daemons serve without a keeper.
            return daemon_pid(root) is not None and not self.supervisor.serves(
                root, if_silent=False
            )

    def is_dead(self, record: MountRecord) -> bool:
        """True if the mount exists, but can only be made anew; may raise UnavailableError."""
        table = MountTable()
        top = table.top(Path(record.root))
        return top is not None and not self.is_alive(record, table) and not self._is_held(top)

    # --- beginning ---

    def start(self, record: MountRecord, deadline: float) -> None:
        """Make the mount of a record, or resume it if it exists, until `deadline` (monotonic).

        Raises:
            CsiError: a new mount could not be made, and nothing is mounted; or an existing mount
                is not resumed yet, and may be resumed later.
        """
        root = Path(record.root)
        top = MountTable().top(root)
        if top is None:
            self._end_processes(root)  # they may serve a copy in another mount namespace
        elif not self._is_held(top):
            self._end_processes(root)
            bind_mount.pop_all(root)
            top = None
        self.records.write(record.key, record)  # first, because mounts without a record are ended
        if top is None:
            bind_mount.make_directory(root, 0o700)
        try:
            self._run(record, deadline, is_mounted=top is not None)
        except CsiError:
            if top is not None:
                self._drop_if_hopeless(record, top)
            raise
        self._stuck.pop(record.key, None)
        log.info("%s is mounted for %s as uid %d", record.source, record.volume_id, record.uid)

    def resume(self, record: MountRecord, deadline: float) -> bool:
        """Resume a mount that has no keeper; return False if the mount is dead.

        Raises:
            UnavailableError: the mount is not resumed yet, but may be later.
        """
        path = Path(record.root)
        root = MountTable().top(path)
        if root is None or not self._is_held(root):
            return False
        try:
            self.start(record, deadline)
        except CsiError as error:
            raise UnavailableError(str(error)) from error
        now = MountTable().top(path)
        return now is not None and now.device == root.device

    def _is_held(self, root: KernelMount) -> bool:
        self.supervisor.check()  # an earlier one, whose successor has died, listens again soon
        try:
            return self.supervisor.has(root)
        except OSError as error:
            raise UnavailableError(f"what is held is not known: {error}") from error

    def _drop_if_hopeless(self, record: MountRecord, root: KernelMount) -> None:
        now = time.monotonic()
        is_stuck = now - self._stuck.setdefault(record.key, now) >= RESUME_S
        if is_stuck and not self.supervisor.serves(Path(record.root), if_silent=True):
            log.error("%s is given up: it can't be resumed", record.source)
            with contextlib.suppress(OSError):  # the next attempt tries again
                self.supervisor.drop(root)

    def _run(self, record: MountRecord, deadline: float, *, is_mounted: bool) -> None:
        """Start a keeper, and so a daemon, for a new mount or (`is_mounted`) an existing mount."""
        inherited = {
            name: text
            for name, text in os.environ.items()
            if not name.startswith(("AWS_", "FUSEFS"))
        }
        self.supervisor.check()
        self._reap()
        begin = resume if is_mounted else start
        try:
            # After a roll-back the settings may be those of a newer driver, with unknown names.
            settings = MountSettings.from_texts(record.settings)
            environment = inherited | record.environment
            if not is_mounted:
                preflight.check(settings)
            keeper = begin(
                settings, self.supervisor.address, environment=environment, deadline=deadline
            )
        except NotUpError:
            raise AbortedError(
                f"the mount of {record.source} is not up yet: it waits for its store, or for"
                " credentials; the log of the node's daemons' pod has more"
            ) from None
        except LaunchError as error:
            raise MountError(f"{error}, as {record.who}", error.code) from error
        except (MountsError, SettingsError) as error:
            raise UnavailableError(f"{error}, as {record.who}") from error
        except OSError as error:
            where = f"{error.filename}: " if error.filename else ""
            raise UnavailableError(f"{where}{error.strerror}, as {record.who}") from error
        if keeper is None:
            raise UnavailableError(f"another keeper may come up for {record.source}")
        self._keepers.add(keeper)

    def _reap(self) -> None:
        """Collect the exit status of the keepers that have ended."""
        for keeper in tuple(self._keepers):
            if keeper.poll() is not None:
                self._keepers.discard(keeper)

    def ensure_held(self, record: MountRecord, deadline: float) -> None:
        """Have a missing descriptor sent to the store; resume a mount that only the store holds.

        Raises:
            CsiError: the mount could not be resumed.
            OSError, ControlError: the supervisor or the keeper does not answer.
        """
        table = MountTable()
        root = table.top(Path(record.root))
        if root is None or not self.supervisor.is_there:
            return
        is_held = self.supervisor.has(root)
        is_alive = self.is_alive(record, table)
        if is_alive:
            self._stuck.pop(record.key, None)
        if is_alive and not is_held:
            self.supervisor.bring(root)
        elif is_held and not is_alive:
            self.start(record, deadline)

    def not_held(self) -> list[str]:
        """Return the s3:// URLs of mounts that the descriptor store lacks; all if it is silent."""
        table = MountTable()
        roots = [(record.source, table.top(Path(record.root))) for record in self.records.all()]
        mounted = {root: source for source, root in roots if root is not None}
        try:
            lacking = self.supervisor.lacks(list(mounted))
        except OSError:
            lacking = list(mounted)
        return [mounted[root] for root in lacking]

    # --- ending ---

    def end(self, record: MountRecord, deadline: float, *, is_forced: bool = False) -> None:
        """End an unused mount, and remove its directory, its files of secrets and its record.

        Raises:
            AbortedError: processes still run at `deadline` (monotonic); `is_forced` kills them.
            OSError: the mount cannot be unmounted.
        """
        self.end_key(record.key, deadline, is_forced=is_forced)
        log.info("the mount of %s for %s has ended", record.source, record.volume_id)

    def end_key(self, key: str, deadline: float, *, is_forced: bool = False) -> None:
        """End the mount `key` like `end`, with its errors, even if only the directory is left."""
        root = self.root_of(key)
        with self._processes(root) as processes:
            bind_mount.pop_all(root)
            if not self._have_ended(root, processes, deadline):
                if not is_forced:
                    raise AbortedError(f"the mount at {root} is still ending")
                self._kill(root, processes)
        self._reap()
        registry.unregister(root)
        registry.keeper_socket(root).unlink(missing_ok=True)
        self._stuck.pop(key, None)
        bind_mount.remove_directory(root)
        self._files.remove(key)
        self.records.remove(key)

    def _have_ended(self, root: Path, processes: list[int], deadline: float) -> bool:
        """Wait for the end of a mount's processes and daemons; False if `deadline` passes first."""
        if not _have_ended(processes, deadline):
            return False
        while self.supervisor.serves(root, if_silent=True):
            if time.monotonic() >= deadline:
                return False
            time.sleep(POLL_S)
        return True

    @contextlib.contextmanager
    def _processes(self, root: Path) -> Iterator[list[int]]:
        """Yield pidfds of a mount's processes; the keeper, which could start others, comes first.

        Processes in other PID namespaces, such as a supervisor's daemons, are not included.
        """
        pids: list[int | None]
        try:
            status = keeper_status(root, ANSWER_TIMEOUT_S)
            pids = [status["pid"], status["daemon"]]
        except ControlError:
            pids = [keeper_pid(root)]
        with contextlib.ExitStack() as stack:
            pidfds = []
            for pid in dict.fromkeys(filter(None, [*pids, daemon_pid(root)])):
                with contextlib.suppress(ProcessLookupError):
                    pidfds.append(stack.enter_context(open(os.pidfd_open(pid), "rb")).fileno())
            yield pidfds

    def _end_processes(self, root: Path) -> None:
        """Kill the processes of an earlier mount at `root`."""
        with self._processes(root) as processes:
            self._kill(root, processes)

    def _kill(self, root: Path, processes: list[int]) -> None:
        """Abort the FUSE connection at `root`; kill `processes` (pidfds) and supervised daemons."""
        with contextlib.suppress(ControlError):
            # The keeper aborts its own connection: by number, another mount's might be aborted.
            keeper_request(root, {"do": "abort"}, ANSWER_TIMEOUT_S)
            _have_ended(processes, time.monotonic() + ENDED_S)
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(process, signal.SIGKILL)
        if not _have_ended(processes, time.monotonic() + KILL_S):
            log.error("a killed process of a mount hangs in the kernel")
        self.supervisor.end_daemons(root)


def _have_ended(processes: list[int], deadline: float) -> bool:
    """Wait until all processes have ended; False if `deadline` (monotonic clock) passes first."""
    return all(has_ended(process, deadline - time.monotonic()) for process in processes)
