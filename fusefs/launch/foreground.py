"""A mount in the foreground: command and mount end together.

If the keeper is killed, another keeper (keeper/main.py) goes on with the mount, and the
command waits for that keeper. If the command ended instead, a service manager would kill
all its processes and mount again, and programs would lose their open files.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path
from types import FrameType

from fusefs.launch.control import ControlError
from fusefs.launch.mount_requests import keeper_pid, keeper_status
from fusefs.linux import mountinfo, processes, service_manager

# The time that a keeper's successor may take to come up.
SUCCESSOR_S = 15.0
POLL_S = 0.1
ANSWER_S = 2.0


class Foreground:
    """Waits for a mount's end; `process` is the first keeper, or the daemon if not `has_keeper`."""

    def __init__(
        self, process: subprocess.Popen[bytes], mountpoint: Path, *, has_keeper: bool
    ) -> None:
        self._process = process
        self._mountpoint = mountpoint
        self._has_keeper = has_keeper
        # Pidfd of the first keeper's successor; -1 while the first keeper lives.
        self._pidfd = -1
        self._is_ending = False

    def run(self) -> int:
        """Wait until the mount has ended, and return the command's exit status. Blocks."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._end)
        with service_manager.ready(self._works):
            status = self._process.wait()
            while self._has_successor():
                status = self._follow()
            return status

    def _works(self) -> bool:
        # Only the keeper must live: it replaces daemons that hang or have died.
        return not self._has_keeper or keeper_pid(self._mountpoint) is not None

    def _end(self, _number: int, _frame: FrameType | None) -> None:
        self._is_ending = True
        if self._pidfd < 0:
            self._process.terminate()
        else:
            processes.send_signal(self._pidfd, signal.SIGTERM)

    def _has_successor(self) -> bool:
        """Wait up to `SUCCESSOR_S` for the mount's next keeper and open `_pidfd`; False if none."""
        until = time.monotonic() + SUCCESSOR_S
        while self._has_keeper and mountinfo.is_mountpoint(self._mountpoint):
            # The pid in the answer is the keeper's; the socket may be its predecessor's.
            with contextlib.suppress(ControlError, ProcessLookupError):
                self._pidfd = os.pidfd_open(int(keeper_status(self._mountpoint, ANSWER_S)["pid"]))
                return True
            if time.monotonic() >= until:
                break
            time.sleep(POLL_S)
        return False

    def _follow(self) -> int:
        """Wait for the end of the keeper `_pidfd`; return 0 if the mount has ended, else 1."""
        if self._is_ending:  # the signal came while there was no keeper
            processes.send_signal(self._pidfd, signal.SIGTERM)
        try:
            while not processes.has_ended(self._pidfd, 3600.0):
                pass
        finally:
            pidfd, self._pidfd = self._pidfd, -1
            os.close(pidfd)
        return int(mountinfo.is_mountpoint(self._mountpoint))
