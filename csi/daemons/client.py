"""Clients of `fusefs-csi daemons`: one for its descriptor store, one for its supervisor.

The descriptor store has copies of the mounts' /dev/fuse descriptors, and loses them when its
process dies. So the keepers are asked now and then to send missing copies again.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from csi.errors import UnavailableError
from fusefs.keeper import supervisor_protocol
from fusefs.launch import control, launcher, registry
from fusefs.linux.mountinfo import KernelMount

ANSWER_TIMEOUT_S = 2.0
DAEMONS_LABEL = "app.kubernetes.io/name=fusefs-csi-daemons"


class FdStoreClient:
    """The descriptor store of the supervisor that listens on `path`."""

    def __init__(self, path: Path) -> None:
        self._path = os.fspath(path)

    def held(self) -> set[tuple[int, int]]:
        """Return (mount number, connection) of each held descriptor; empty if nothing listens.

        Raises:
            ControlError: a process listens, but does not answer.
        """
        held = set()
        try:
            for mount, connection, fd in supervisor_protocol.held(self._path):
                held.add((mount, connection))
                os.close(fd)
        except (FileNotFoundError, ConnectionRefusedError):
            return set()
        except OSError as error:
            raise control.ControlError(f"{self._path}: {error.strerror or error}") from error
        return held

    def has(self, root: KernelMount) -> bool:
        """True if the store holds a descriptor of this mount; raises as `held`."""
        return not self.lacks([root])

    def lacks(self, roots: Sequence[KernelMount]) -> list[KernelMount]:
        """Return the mounts whose descriptors the store does not hold; raises as `held`."""
        held = self.held() if roots else set()
        return [root for root in roots if _name(root) not in held]

    def bring(self, root: KernelMount) -> None:
        """Ask the mount's keeper to send the store a copy, which follows within moments.

        Raises:
            ControlError: the keeper does not answer.
        """
        control.exchange(
            registry.keeper_socket(root.mountpoint), {"do": "deposit"}, ANSWER_TIMEOUT_S
        )

    def drop(self, root: KernelMount) -> None:
        """Make the store close its copy of a mount's descriptor, which may be the last one.

        Raises:
            ControlError: the store does not answer.
        """
        try:
            supervisor_protocol.drop(self._path, *_name(root))
        except OSError as error:
            raise control.ControlError(f"{self._path}: {error.strerror or error}") from error

    @property
    def is_there(self) -> bool:
        """True if a process listens on the socket."""
        with contextlib.suppress(OSError):
            supervisor_protocol.connect(self._path).close()
            return True
        return False


def _name(root: KernelMount) -> tuple[int, int]:
    return launcher.mount_number(root.mountpoint), root.connection


class Daemons:
    """The daemons that a supervisor starts for mounts."""

    def __init__(self, supervisor: launcher.SupervisorAddress, node: str) -> None:
        self.supervisor = supervisor
        self._node = node

    def check(self) -> None:
        """Raise UnavailableError unless the daemons' pod, which has to start daemons, runs."""
        if self.supervisor.is_needed:
            try:
                supervisor_protocol.connect(os.fspath(self.supervisor.socket)).close()
            except (FileNotFoundError, ConnectionRefusedError) as error:
                raise UnavailableError(
                    f"the daemons' pod of node {self._node} does not run: nothing listens on"
                    f" {self.supervisor.socket}. `kubectl get pods -A -l {DAEMONS_LABEL}"
                    f" --field-selector spec.nodeName={self._node}` names it, and `kubectl"
                    " describe` of it, or of the DaemonSet fusefs-csi-daemons, says why"
                ) from error

    def serve(self, root: Path, *, if_silent: bool = False) -> bool:
        """True if a daemon serves the mount at `root`; without an answer, returns `if_silent`."""
        path, number = os.fspath(self.supervisor.socket), launcher.mount_number(root)
        try:
            return supervisor_protocol.count(path, number) > 0
        except (FileNotFoundError, ConnectionRefusedError):
            return False
        except OSError:
            return if_silent

    def may_serve(self, root: Path) -> bool:
        """True if a daemon serves the mount, or the supervisor listens but does not answer."""
        return self.serve(root, if_silent=True)

    def end(self, root: Path) -> None:
        """Kill the daemons of the mount at `root`."""
        with contextlib.suppress(OSError):  # then there is none
            supervisor_protocol.end(os.fspath(self.supervisor.socket), launcher.mount_number(root))
