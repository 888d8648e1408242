"""A mount whose command stays: it ends when the mount does, and what ends it ends the mount.

A keeper that is killed has a successor (keeper/main.py), which goes on with the mount. The
command is then followed by that: a service manager that saw it end would end all that it
has started, and mount anew, and programs would lose their open files.
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

# How long after a keeper's death another one may take to come up.
SUCCESSOR_S = 15.0
POLL_S = 0.1
ANSWER_S = 2.0


class Foreground:
    """A mount whose first keeper is `process`; without `has_keeper` its only daemon. Blocks."""

    def __init__(
        self, process: subprocess.Popen[bytes], mountpoint: Path, *, has_keeper: bool
    ) -> None:
        self._process = process
        self._mountpoint = mountpoint
        self._has_keeper = has_keeper
        # Of the keeper that goes on; -1 while the first one lives.
        self._pidfd = -1
        self._is_ending = False

    def run(self) -> int:
        """Stay until the mount has ended, and return the exit status for it."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._end)
        with service_manager.ready(self._works):
            status = self._process.wait()
            while self._has_successor():
                status = self._follow()
            return status

    def _works(self) -> bool:
        # A keeper replaces a daemon that hangs, and one that has died.
        return not self._has_keeper or keeper_pid(self._mountpoint) is not None

    def _end(self, _number: int, _frame: FrameType | None) -> None:
        self._is_ending = True
        if self._pidfd < 0:
            self._process.terminate()
        else:
            processes.send_signal(self._pidfd, signal.SIGTERM)

    def _has_successor(self) -> bool:
        """True if another keeper goes on with the mount, which has not ended: `_pidfd` is its."""
        until = time.monotonic() + SUCCESSOR_S
        while self._has_keeper and mountinfo.is_mountpoint(self._mountpoint):
            # Who answers: the socket may be one that the keeper before has made.
            with contextlib.suppress(ControlError, ProcessLookupError):
                pid = int(keeper_status(self._mountpoint, ANSWER_S)["pid"])
                self._pidfd = os.pidfd_open(pid)
                return True
            if time.monotonic() >= until:
                break
            time.sleep(POLL_S)
        return False

    def _follow(self) -> int:
        """Wait for the end of a process that is no child; return the exit status for it."""
        if self._is_ending:  # the signal came while there was no keeper
            processes.send_signal(self._pidfd, signal.SIGTERM)
        try:
            while not processes.has_ended(self._pidfd, 3600.0):
                pass
        finally:
            pidfd, self._pidfd = self._pidfd, -1
            os.close(pidfd)
        return int(mountinfo.is_mountpoint(self._mountpoint))
