"""`fusefs-csi daemons` as a process beside a driver, with the rights that its container has."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from csi.daemons.client import SupervisorClient
from csi.node.config import SUPERVISOR
from fusefs.launch import control
from fusefs.launch.launcher import SupervisorAddress
from fusefs.linux.processes import has_ended
from tests.support.csi.node import Node
from tests.support.csi.pod import without_kubelet
from tests.support.sharing import PATIENCE_S
from tests.support.waiting import until

# What the manifests give it.
RIGHTS = ["setpriv", "--no-new-privs", "--inh-caps=-all", "--bounding-set=-all,+setuid,+setgid"]


class DaemonsProcess:
    """One pod's."""

    def __init__(self, node: Node, name: str, before: tuple[str, ...] = (), *options: str) -> None:
        self._ready = node.directory / f"{name}.ready"
        self._ready.unlink(missing_ok=True)
        self._socket = node.state / "daemons.sock"
        self.log = node.directory / f"{name}.log"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [
                    *without_kubelet(node, "private"),
                    *before,
                    *RIGHTS,
                    *node.command,
                    "daemons",
                    f"--state-dir={node.state}",
                    f"--ready-file={self._ready}",
                    *options,
                ],
                env={**os.environ, **node.environment},
                start_new_session=True,
                stderr=log,
            )

    @property
    def is_ready(self) -> bool:
        return self._ready.exists()

    def children(self) -> set[int]:
        """The pids of what it has started: daemons, and what holds descriptors."""
        pid = self.process.pid
        return {int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}

    def kill(self) -> None:
        """SIGKILL all of it, as when its container dies."""
        ended = [os.pidfd_open(pid) for pid in self.children()]
        self.process.kill()
        self.process.wait()
        for pidfd in ended:
            until(lambda pidfd=pidfd: has_ended(pidfd), "its children die with it")
            os.close(pidfd)

    def clean_up(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(PATIENCE_S)
        if os.environ.get("SHOW_DRIVER_LOG"):
            print(self.log.read_text())


def held(node: Node) -> list[tuple[int, int]]:
    """What the descriptor store has, which may just not be there."""
    try:
        return list(SupervisorClient(SupervisorAddress(node.state / SUPERVISOR, False)).held())
    except control.ControlError:
        return []


@contextmanager
def daemons_of(
    node: Node, name: str, before: tuple[str, ...] = (), *options: str
) -> Iterator[DaemonsProcess]:
    """One that is ready, and gone at the end whatever happened.

    `before` is a command that starts it, in namespaces of its own say.
    """
    daemons = DaemonsProcess(node, name, before, *options)
    try:
        until(lambda: daemons.is_ready, f"it is ready: {daemons.log}")
        yield daemons
    finally:
        daemons.clean_up()
