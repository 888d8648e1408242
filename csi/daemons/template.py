"""The node's template: a process with a daemon's imports done, from which daemons are forked.

Imports take most of the time of a daemon's start, and a third of its memory. Here one
process does them (fusefs/keeper/template.py), and each daemon that is forked from it shares
that memory, and begins with its own settings at once: a node that starts many volumes pays
for the imports once.

The template is a convenience. If it does not come up, dies or does not answer, daemons
are started as programs, and another template after a while.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import struct
import time
from collections.abc import Mapping, Sequence

from fusefs.keeper import template
from fusefs.linux.processes import Credentials, adopt_orphans, has_ended, spawn

log = logging.getLogger(__name__)

# A daemon that is wanted meanwhile waits as long for the template to come up, once.
COMING_UP_S = 2.0
# For two forks.
FORK_S = 2.0
# Between the start of one template and the next, if it ends.
AGAIN_S = 10.0


class DaemonTemplate:
    """At most one template; `command` is a daemon's, and `environment` what all daemons have."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._command = command
        self._environment = environment
        self._socket: socket.socket | None = None
        self._pid = 0
        self._pidfd = -1
        self._is_ready = False
        self._started = -AGAIN_S
        self._was_waited_for = False

    @property
    def pid(self) -> int:
        """Of the template; 0 if there is none."""
        return self._pid

    def check_process(self) -> None:
        """Start a template if there is none, and one may come up."""
        if self._socket is not None and has_ended(self._pidfd):
            log.warning("the template of the daemons has ended")
            self.end()
        if self._socket is None and time.monotonic() - self._started >= AGAIN_S:
            self._start()
        self._hear_ready(0.0)

    def _start(self) -> None:
        self._started = time.monotonic()
        self._is_ready = self._was_waited_for = False
        ours, stdin = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with stdin:
            try:
                self._pid = spawn(
                    self._command,
                    stdin=stdin.fileno(),
                    stdout=1,
                    kept=[],
                    environment={**self._environment, template.VARIABLE: template.FOR_DAEMONS},
                    credentials=Credentials(os.geteuid(), os.getegid(), []),
                    yields_memory=True,
                )
            except OSError as error:
                log.warning("no template of the daemons can be started: %s", error)
                ours.close()
                return
        self._pidfd = os.pidfd_open(self._pid)
        self._socket = ours

    def fork(self, uid: int, gid: int, *fds: int) -> int:
        """The pid of a child that is to be a daemon, and waits for GO; 0 if there is none. Blocks.

        `fds` are those of LAUNCH. Without GO the child ends with the other end of its
        socket to the supervisor, also one that comes too late.
        """
        if not self._is_up():
            return 0
        assert self._socket is not None
        adopt_orphans(True)
        try:
            request = template.LAUNCH + template.USER.pack(uid, gid)
            socket.send_fds(self._socket, [request], list(fds))
            self._socket.settimeout(FORK_S)
            pid = int(template.PID.unpack(self._socket.recv(64))[0])
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)  # it is our child
        except (OSError, ValueError, struct.error) as error:
            log.warning("the template of the daemons makes none: %s", error)
            self.end()
            return 0
        finally:
            adopt_orphans(False)
        return pid

    def _is_up(self) -> bool:
        wait_s = 0.0 if self._was_waited_for else COMING_UP_S
        self._was_waited_for = True
        self._hear_ready(wait_s)
        return self._is_ready

    def _hear_ready(self, wait_s: float) -> None:
        """Take note that the template can fork, or has ended instead. Blocks for `wait_s`."""
        if self._socket is None or self._is_ready:
            return
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        if not poll.poll(1000 * wait_s):
            return
        try:
            self._is_ready = self._socket.recv(64) == template.READY
        except OSError:
            self._is_ready = False
        if self._is_ready:
            log.info("the template of the daemons is ready")
        else:
            self.end()

    def end(self) -> None:
        """End the template; the daemons that were forked from it go on."""
        if self._socket is None:
            return
        self._socket.close()
        self._socket = None
        self._is_ready = False
        signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        os.close(self._pidfd)
        self._pid = 0
