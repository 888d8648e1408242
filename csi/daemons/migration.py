"""Moves a node's mounts from one `fusefs-csi daemons` to the next, as `fusefs upgrade` does.

Each keeper moves its own mount: it starts a new daemon under the new supervisor, the old daemon
finishes its running requests, and the new daemon takes over. If that fails, the old daemon
continues, and the move is tried again. If the new daemon cannot start for `PATIENCE_S`, the old one
is killed and replaced as after any death: one volume must not block a roll-out. A mount never moves
if the new daemon cannot read the old one's state, or if the kernel cannot resend requests.
"""

from __future__ import annotations

import logging
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from fusefs.keeper import supervisor_protocol
from fusefs.keeper.exchange import HOPELESS
from fusefs.launch import control

log = logging.getLogger(__name__)

# Mounts that move at the same time: each has two daemons meanwhile.
AT_ONCE = 4
EVERY_S = 0.5
STATUS_S = 2.0
# Time limit: a new daemon checks the bucket, for as long as requests are retried.
UPGRADE_S = 600.0
PATIENCE_S = 120.0


class Migration:
    """Moves all mounts from the supervisor behind `old` to supervisor `number`."""

    def __init__(self, old: socket.socket, keepers: Path, number: int) -> None:
        self._old = old
        self._keepers = keepers
        self._number = number
        self._since: dict[Path, float] = {}

    def run(self) -> None:
        """Move the mounts; return when the old supervisor has no daemon left."""
        with ThreadPoolExecutor(AT_ONCE) as threads:
            while self._left():
                sockets = sorted(self._keepers.glob("*.keeper"))
                list(threads.map(self._move, sockets))
                time.sleep(EVERY_S)

    def _left(self) -> int:
        """Return the count of the old supervisor's daemons; 1 if it does not answer in time.

        A busy node may answer late, and with 0 the remaining daemons would end unmoved.
        """
        try:
            return supervisor_protocol.ask(
                self._old, supervisor_protocol.pack(supervisor_protocol.COUNT)
            ).a
        except TimeoutError:
            return 1  # the answer may still come, and is the next question's then
        except OSError:
            return 0  # it has ended, and they with it

    def _move(self, keeper: Path) -> None:
        try:
            status = control.exchange(keeper, {"do": "status"}, STATUS_S)
            if status.get("supervisor") == self._number or not status["is_serving"]:
                return
            mountpoint = status["mountpoint"]
            program = control.exchange(keeper, {"do": "settings"}, STATUS_S)
            control.exchange(keeper, {"do": "upgrade", **program}, UPGRADE_S)
            log.info("%s has moved", mountpoint)
        except control.NotAnsweringError as error:
            log.info("%s: %s", keeper.name, error)  # its end, or its keeper's
        except control.ControlError as error:
            self._insist(keeper, str(error), is_hopeless=error.code == HOPELESS)
        except control.MALFORMED as error:
            self._insist(keeper, f"its status is of another version: {error!r}")

    def _insist(self, keeper: Path, why: str, *, is_hopeless: bool = False) -> None:
        now = time.monotonic()
        since = self._since.setdefault(keeper, now)
        if since == now:
            log.warning("%s has not moved yet: %s", keeper.name, why)
        if now - since >= PATIENCE_S and not is_hopeless:
            log.warning("%s moves by force, after %.0f s: %s", keeper.name, now - since, why)
            try:
                control.exchange(keeper, {"do": "replace"}, STATUS_S)
            except control.ControlError as error:
                # Before Linux 6.9 this would end the mount, so it stays where it is.
                log.warning("%s is not moved by force: %s", keeper.name, error)
