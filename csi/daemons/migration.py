"""Moves a node's mounts from one `fusefs-csi daemons` to the next by upgrades of their daemons.

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

from fusefs.keeper import supervisor_protocol as wire
from fusefs.keeper.exchange import HOPELESS
from fusefs.launch import control

log = logging.getLogger(__name__)

# Number of mounts that move at the same time: each of them has two daemons meanwhile.
AT_ONCE = 4
EVERY_S = 0.5
STATUS_S = 2.0
# Time limit for one upgrade: a new daemon checks the bucket, and retries its requests.
UPGRADE_S = 600.0
PATIENCE_S = 120.0


class Migration:
    """Moves the mounts whose keepers listen in `keepers` from supervisor `old` to `number`."""

    def __init__(self, old: socket.socket, keepers: Path, number: int) -> None:
        self._old = old
        self._keepers = keepers
        self._number = number
        self._since: dict[Path, float] = {}

    def run(self) -> None:
        """Move the mounts; return when the old supervisor has no daemon left."""
        with ThreadPoolExecutor(AT_ONCE) as threads:
            while self._left():
                list(threads.map(self._move, sorted(self._keepers.glob("*.keeper"))))
                time.sleep(EVERY_S)

    def _left(self) -> int:
        """Return the count of the old supervisor's daemons; 1 if it does not answer in time.

        A supervisor on a busy node may answer late, and 0 would end `run` with daemons unmoved.
        """
        try:
            return wire.ask(self._old, wire.pack(wire.COUNT)).a
        except TimeoutError:
            return 1  # the next call may read the late answer
        except OSError:
            return 0  # the supervisor has ended, and its daemons too

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
            log.info("%s: %s", keeper.name, error)  # the mount or its keeper has ended
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
                # Before Linux 6.9 a replacement would end the mount, so the keeper refuses it.
                log.warning("%s is not moved by force: %s", keeper.name, error)
