"""The clients of `fusefs-csi daemons`: for its descriptor store, and for its supervisor.

The descriptor store has copies of the mounts' /dev/fuse descriptors, each under the
name of mountpoint and connection, and loses them when it dies. So missing ones are
brought to it now and then, as copies of the keepers' descriptors.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from csi.errors import UnavailableError
from fusefs.keeper import fd_store, supervisor_protocol
from fusefs.keeper.exchange import exchange_fds
from fusefs.launch import control, launcher, registry
from fusefs.linux.mountinfo import KernelMount

ANSWER_TIMEOUT_S = 2.0
DAEMONS_LABEL = "app.kubernetes.io/name=fusefs-csi-daemons"


class FdStoreClient:
    """The descriptor store that listens on `path`."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def names(self) -> frozenset[str]:
        """The names of what it holds; none if no process listens.

        Raises:
            ControlError: one listens, and does not answer, or has not yet all that it will hold.
        """
        try:
            answer = control.exchange(self._path, {"do": "list"}, ANSWER_TIMEOUT_S)
        except control.ControlError:
            if self.is_there:
                raise
            return frozenset()
        return frozenset(answer["names"])

    def has(self, root: KernelMount) -> bool:
        """True if it holds a mount's connection; raises as `names`."""
        return not self.lacks([root])

    def lacks(self, roots: Sequence[KernelMount]) -> list[KernelMount]:
        """Those of the mounts that it does not hold, by one question; raises as `names`."""
        names = self.names() if roots else frozenset()
        return [root for root in roots if _name(root) not in names]

    def bring(self, root: KernelMount) -> None:
        """Have it hold the connection of a mount whose keeper answers.

        Raises:
            ControlError: the keeper does not, or the descriptor store refuses.
        """
        keeper = registry.keeper_socket(root.mountpoint)
        _, fds = exchange_fds(keeper, {"do": "hand"}, ANSWER_TIMEOUT_S)
        if not fds:
            raise control.ControlError("no descriptor came")
        try:
            fd_store.hold(os.fspath(self._path), _name(root), fds[0])
        finally:
            os.close(fds[0])

    def drop(self, root: KernelMount) -> None:
        """Have it hold a mount's connection no longer; without any other holder that ends.

        Raises:
            ControlError: it does not hold it, or does not answer.
        """
        fd_store.drop(os.fspath(self._path), _name(root))

    @property
    def is_there(self) -> bool:
        """True if a process listens on the socket, answering or not."""
        return control.peer(self._path) is not None


def _name(root: KernelMount) -> str:
    return fd_store.name_of(os.fspath(root.mountpoint), root.connection)


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
