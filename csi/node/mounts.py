"""The mounts behind the volumes: one for each key, made once and bound to many target paths.

Pods of a node that use a volume in the same way, as the same identity, share
one mount of fusefs. How many still use it is read from mountinfo and counted
nowhere else: the mounts of its file system but for its own root.

A mount is *alive* while its keeper holds its connection, or its daemon does;
they say so on their sockets, and the mount itself is never asked. A dead one is
unmounted from its root and made anew; what was bound of it stays below the new
bind (see `node`), for a running container sees only what is mounted on top.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from csi.daemons.client import Daemons, FdStoreClient
from csi.errors import (
    AbortedError,
    CsiError,
    InvalidArgumentError,
    PermissionDeniedError,
    UnauthenticatedError,
    UnavailableError,
)
from csi.identities.credentials import CredentialFiles
from csi.node import bind_mount
from csi.node.bind_mount import Table
from csi.node.mount_record import MountRecord, MountRecords
from fusefs.api import (
    ControlError,
    KernelMount,
    SupervisorAddress,
    daemon_pid,
    daemon_request,
    has_ended,
    keeper_pid,
    keeper_status,
    remove_registration,
    runtime_environment,
)

log = logging.getLogger(__name__)

START = [sys.executable, "-P", "-m", "csi.node.mount_process"]
ANSWER_TIMEOUT_S = 1.0
# For a starter that was told to stop, to take away what it made.
STOP_S = 5.0
# For the processes of a mount that is not waited for any longer.
KILL_S = 5.0
POLL_S = 0.05

# What the daemon says of a bucket that it can't list, and what that means.
_REFUSALS: tuple[tuple[tuple[str, ...], type[CsiError]], ...] = (
    (("no such bucket", "not a valid name for a bucket"), InvalidArgumentError),
    (("access denied",), PermissionDeniedError),
    (
        ("access key", "credentials", "session token", "no AWS profile", "IdentityToken"),
        UnauthenticatedError,
    ),
)


class Mounts:
    """The driver's mounts, below one directory. One call at a time for each volume."""

    def __init__(
        self,
        records: MountRecords,
        files: CredentialFiles,
        roots: Path,
        fd_store: FdStoreClient,
        daemons: Daemons,
    ) -> None:
        self.records = records
        self._files = files
        self._roots = roots
        self._fd_store = fd_store
        self._daemons = daemons
        roots.mkdir(mode=0o700, parents=True, exist_ok=True)

    # --- what is there ---

    def root_of(self, key: str) -> Path:
        return self._roots / key

    def unknown(self) -> list[str]:
        """The directories for mounts that have no record."""
        return [key for key in os.listdir(self._roots) if self.records.read(key) is None]

    def key_behind(self, mount: KernelMount, table: Table) -> str | None:
        """The key of the mount that another one, at a target path, is bound from."""
        for one in table.of_device(mount.device):
            if one.mountpoint.parent == self._roots:
                return one.mountpoint.name
        return None

    def behind(self, mount: KernelMount, table: Table) -> MountRecord | None:
        """The record of the mount that another one, at a target path, is bound from."""
        key = self.key_behind(mount, table)
        return self.records.read(key) if key is not None else None

    def is_used(self, key: str, table: Table) -> bool:
        """Whether a mount is bound to any path."""
        top = table.top(self.root_of(key))
        return top is not None and any(
            one.mountpoint.name != key for one in table.of_device(top.device)
        )

    def references(self, record: MountRecord, table: Table) -> list[Path]:
        """Where a record's mount is used."""
        top = table.top(Path(record.root))
        if top is None:
            return []
        found = (one.mountpoint for one in table.of_device(top.device))
        # By its name, as its root may be seen under several paths.
        return [path for path in found if path.name != record.key]

    def is_alive(self, record: MountRecord, table: Table) -> bool:
        """Whether somebody keeps the record's mount, or will; it is not touched itself."""
        root = Path(record.root)
        top = table.top(root)
        if top is None or not top.is_fusefs:
            return False
        try:
            return bool(keeper_status(root, ANSWER_TIMEOUT_S)["connection"] == top.connection)
        except ControlError:
            if keeper_pid(root) is not None:
                return True
            # A supervisor's daemon waits for a keeper; any other starts one itself.
            return daemon_pid(root) is not None and not self._daemons.serve(root)

    def ask(
        self, record: MountRecord, timeout_s: float = ANSWER_TIMEOUT_S
    ) -> dict[str, Any] | None:
        """What the mount's daemon tells about itself; None if it does not answer in time."""
        try:
            return daemon_request(Path(record.root), {"command": "status"}, timeout_s)
        except ControlError:
            return None

    # --- beginning ---

    def start(self, record: MountRecord, deadline: float) -> None:
        """Make a record's mount, or go on with it. `deadline` is of the monotonic clock.

        Raises:
            CsiError: it could not be made; nothing of it is mounted.
        """
        root = Path(record.root)
        top = Table().top(root)
        if top is not None and not self._fd_store.has(top):
            self._kill(root)
            bind_mount.pop_all(root)
            top = None
        self.records.write(record)  # first: what has no record is taken away
        if top is None:
            bind_mount.make_directory(root, 0o700)
        answer = _run_starter(record, self._daemons.supervisor, deadline)
        if "error" in answer:
            why = str(answer["error"])
            # What the bucket and the prefix are called says nothing.
            kind = _refusal(why.replace(record.source.rstrip("/"), ""))
            raise kind(f"{why}, as {record.who}")
        log.info("%s is mounted for %s as uid %d", record.source, record.volume_id, record.uid)

    def secure(self, record: MountRecord, deadline: float) -> None:
        """Have a mount's connection held by the other process too, and somebody serve it.

        Raises:
            CsiError: no daemon came up.
            OSError, ControlError: its connection could not be handed over.
        """
        table = Table()
        root = table.top(Path(record.root))
        if root is None or not self._fd_store.is_there:
            return
        is_held = self._fd_store.has(root)
        is_alive = self.is_alive(record, table)
        if is_alive and not is_held:
            self._fd_store.bring(root)
        elif is_held and not is_alive:
            self.start(record, deadline)

    # --- ending ---

    def end(self, record: MountRecord, deadline: float, *, is_forced: bool = False) -> None:
        """End a mount that nobody uses, and remove every trace of it.

        Raises:
            AbortedError: its daemon is still at work at `deadline`.
            OSError: it cannot be unmounted.
        """
        self.end_key(record.key, deadline, is_forced=is_forced)
        log.info("the mount of %s for %s has ended", record.source, record.volume_id)

    def end_key(self, key: str, deadline: float, *, is_forced: bool = False) -> None:
        """`end` for a mount of which nothing but its directory may be left."""
        root = self.root_of(key)
        processes = self._processes(root)
        bind_mount.pop_all(root)
        try:
            if not _have_ended(processes, deadline):
                if not is_forced:
                    raise AbortedError(f"the mount at {root} is still ending")
                self._see_out(processes)
            self._see_daemons_out(root, deadline, is_forced=is_forced)
        finally:
            for process in processes:
                os.close(process)
        remove_registration(root)
        bind_mount.remove_directory(root)
        self._files.remove(key)
        self.records.remove(key)

    def _see_daemons_out(self, root: Path, deadline: float, *, is_forced: bool) -> None:
        """Wait for a supervisor's daemons, whose keepers may have been gone before."""
        while self._daemons.serve(root):
            if time.monotonic() >= deadline:
                if not is_forced:
                    raise AbortedError(f"the mount at {root} is still ending")
                self._daemons.end(root)
                return
            time.sleep(POLL_S)

    def _processes(self, root: Path) -> list[int]:
        """The processes of a mount as pidfds, the one that would start the others first.

        As far as they are to be seen from here.
        """
        pids: list[int | None]
        try:
            status = keeper_status(root, ANSWER_TIMEOUT_S)
            pids = [status["pid"], status["daemon"]]
        except ControlError:
            pids = [keeper_pid(root)]
        pidfds = []
        for pid in dict.fromkeys(filter(None, [*pids, daemon_pid(root)])):
            with contextlib.suppress(ProcessLookupError):
                pidfds.append(os.pidfd_open(pid))
        return pidfds

    def _kill(self, root: Path) -> None:
        processes = self._processes(root)
        self._see_out(processes)
        self._daemons.end(root)
        for process in processes:
            os.close(process)

    def _see_out(self, processes: list[int]) -> None:
        """Kill what is left of a mount that is given up."""
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(process, signal.SIGKILL)
        if not _have_ended(processes, time.monotonic() + KILL_S):
            log.error("a process of a mount that was given up hangs in the kernel")


def _have_ended(processes: list[int], deadline: float) -> bool:
    """Wait until they all have, or `deadline` of the monotonic clock has passed."""
    return all(has_ended(process, deadline - time.monotonic()) for process in processes)


def _run_starter(
    record: MountRecord, supervisor: SupervisorAddress | None, deadline: float
) -> dict[str, Any]:
    """What the process answers that starts a record's mount; see `starting`.

    Raises:
        AbortedError: it had not at `deadline`.
    """
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "FUSEFS"))
    }
    given = {
        "settings": record.settings,
        "supervisor": os.fspath(supervisor.socket) if supervisor else None,
        "is_needed": supervisor is not None and supervisor.is_needed,
    }
    with subprocess.Popen(
        START,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd="/",
        env=inherited | runtime_environment() | record.environment,
        start_new_session=True,
    ) as starter:
        try:
            told, _ = starter.communicate(
                json.dumps(given).encode(), max(0.0, deadline - time.monotonic())
            )
        except subprocess.TimeoutExpired:
            starter.terminate()
            try:
                told, _ = starter.communicate(timeout=STOP_S)
            except subprocess.TimeoutExpired:
                starter.kill()
            raise AbortedError(f"the mount of {record.source} is not up yet") from None
    try:
        answer: dict[str, Any] = json.loads(told)
    except ValueError:
        answer = {"error": f"what starts the mount of {record.source} died"}
    return answer


def _refusal(why: str) -> type[CsiError]:
    """What the reason for which a mount could not be made means to kubelet."""
    for words, kind in _REFUSALS:
        if any(word in why for word in words):
            return kind
    return UnavailableError
