"""The driver's client of `fusefs-csi daemons`, the supervisor of the node's daemons.

The supervisor has copies of the mounts' /dev/fuse descriptors, and loses them when it ends. So the
driver asks the keepers now and then to send missing copies again.
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


class SupervisorClient:
    """A client of the supervisor at `address`, which runs the daemons of the node named `node`."""

    def __init__(self, address: launcher.SupervisorAddress, node: str = "") -> None:
        self.address = address
        self._path = os.fspath(address.socket)
        self._node = node

    @property
    def is_there(self) -> bool:
        """True if a supervisor listens on the socket."""
        with contextlib.suppress(OSError):
            supervisor_protocol.connect(self._path).close()
            return True
        return False

    def check(self) -> None:
        """Raise UnavailableError if the supervisor has to start daemons but does not run."""
        if self.address.is_needed and not self.is_there:
            raise UnavailableError(
                f"the daemons' pod of node {self._node} does not run: nothing listens on"
                f" {self._path}. `kubectl get pods -A -l {DAEMONS_LABEL}"
                f" --field-selector spec.nodeName={self._node}` names it, and `kubectl"
                " describe` of it, or of the DaemonSet fusefs-csi-daemons, says why"
            )

    # --- descriptors ---

    def held(self) -> set[tuple[int, int]]:
        """Return the numbers of mount and connection of each descriptor that the supervisor holds.

        The set is empty without a supervisor. Raises OSError if the supervisor does not answer.
        """
        held = set()
        with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
            for mount, connection, fd in supervisor_protocol.held(self._path):
                held.add((mount, connection))
                os.close(fd)
        return held

    def has(self, root: KernelMount) -> bool:
        """True if the supervisor holds a descriptor of this mount; OSError without an answer."""
        return not self.lacks([root])

    def lacks(self, roots: Sequence[KernelMount]) -> list[KernelMount]:
        """Return the mounts whose descriptors the supervisor lacks; OSError without an answer."""
        held = self.held() if roots else set()
        return [root for root in roots if _name(root) not in held]

    def bring(self, root: KernelMount) -> None:
        """Ask a mount's keeper to send the supervisor a descriptor soon; may raise ControlError."""
        control.exchange(
            registry.keeper_socket(root.mountpoint), {"do": "deposit"}, ANSWER_TIMEOUT_S
        )

    def drop(self, root: KernelMount) -> None:
        """Have the supervisor close its copy of a mount's descriptor; OSError without an answer."""
        supervisor_protocol.drop(self._path, *_name(root))

    # --- daemons ---

    def serves(self, root: Path, *, if_silent: bool) -> bool:
        """True if the supervisor has daemons of the mount; `if_silent` if it does not answer."""
        try:
            return supervisor_protocol.count(self._path, launcher.mount_number(root)) > 0
        except (FileNotFoundError, ConnectionRefusedError):
            return False
        except OSError:
            return if_silent

    def end_daemons(self, root: Path) -> None:
        """Kill the daemons of the mount at `root`; UnavailableError if the supervisor is silent."""
        try:
            supervisor_protocol.end(self._path, launcher.mount_number(root))
        except (FileNotFoundError, ConnectionRefusedError):
            pass  # no supervisor, so no daemons
        except OSError as error:
            raise UnavailableError(f"the daemons of {root} are not ended: {error}") from error


def _name(root: KernelMount) -> tuple[int, int]:
    return launcher.mount_number(root.mountpoint), root.connection
