"""The clients of `fusefs-csi daemons`: for its descriptor store, and for its supervisor.

The descriptor store has copies of the mounts' /dev/fuse descriptors, and loses them
when it dies. So keepers are asked now and then to bring missing ones.
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
        """The numbers of the mounts that it holds, with their connections; none without one.

        Raises:
            ControlError: one listens, and does not answer.
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
        """True if it holds a mount's connection; raises as `held`."""
        return not self.lacks([root])

    def lacks(self, roots: Sequence[KernelMount]) -> list[KernelMount]:
        """Those of the mounts that it does not hold; raises as `held`."""
        held = self.held() if roots else set()
        return [root for root in roots if _name(root) not in held]

    def bring(self, root: KernelMount) -> None:
        """Have a mount's keeper give it a copy, within moments.

        Raises:
            ControlError: the keeper does not answer.
        """
        control.exchange(
            registry.keeper_socket(root.mountpoint), {"do": "deposit"}, ANSWER_TIMEOUT_S
        )

    def drop(self, root: KernelMount) -> None:
        """Have it hold a mount's connection no longer; without any other holder that ends.

        Raises:
            ControlError: it does not answer.
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
    """The daemons that are started for mounts by a supervisor."""

    def __init__(self, supervisor: launcher.SupervisorAddress, node: str) -> None:
        self.supervisor = supervisor
        self._node = node

    def check(self) -> None:
        """See that daemons can be started.

        Raises:
            UnavailableError: the daemons' pod, which has to start them, is not there.
        """
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
        """True if there is one for the mount at `root`; `if_silent` where no answer comes."""
        path, number = os.fspath(self.supervisor.socket), launcher.mount_number(root)
        try:
            return supervisor_protocol.count(path, number) > 0
        except (FileNotFoundError, ConnectionRefusedError):
            return False
        except OSError:
            return if_silent

    def may_serve(self, root: Path) -> bool:
        """True if there is one, or a supervisor listens and does not answer."""
        return self.serve(root, if_silent=True)

    def end(self, root: Path) -> None:
        """Kill those of the mount at `root`."""
        with contextlib.suppress(OSError):  # then there is none
            supervisor_protocol.end(os.fspath(self.supervisor.socket), launcher.mount_number(root))
