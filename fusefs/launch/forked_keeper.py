"""An early keeper whose daemon is a fork of the command, not a program that is executed.

An interpreter that starts, with its `site`, takes a tenth of a mount's start. So the command
forks a process that forks the daemon, and then executes the keeper's program: the daemon is the
keeper's child, as one that the keeper starts. It has a daemon's standard streams, command line,
environment and module path, and closes what else it was forked with. Where the kernel does not
let a process change what /proc shows of it, the daemon's program is executed.

Little is imported, as in early_keeper.py.
"""

from __future__ import annotations

import os
import sys

from fusefs.keeper import early_start

TYPE_CHECKING = False  # typing itself is not imported: it is large
if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable
    from typing import IO, NoReturn

    # What a daemon's process does from its fork to its end.
    Serve = Callable[[], NoReturn]


class ForkedKeeper:
    """A child process, as far as it is used like a `subprocess.Popen`, which has no fork alone."""

    def __init__(self, pid: int, stdout: int) -> None:
        self.pid = pid
        self.stdout: IO[bytes] | None = os.fdopen(stdout, "rb", 0)
        self.returncode: int | None = None
        self._pidfd = os.pidfd_open(pid)

    def poll(self) -> int | None:
        """Its exit status, or minus the signal that has ended it; None while it lives."""
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # SIGCHLD is ignored: how it ended is lost
                pid, status = self.pid, 0
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
                os.close(self._pidfd)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end, and return what `poll` does then. Blocks.

        Raises:
            subprocess.TimeoutExpired: that took longer than `timeout` seconds.
        """
        if self.poll() is None:
            import select

            ended = select.poll()
            ended.register(self._pidfd, select.POLLIN)
            if not ended.poll(None if timeout is None else max(0.0, timeout) * 1000):
                from subprocess import TimeoutExpired

                raise TimeoutExpired("the keeper", timeout or 0.0)
        status = self.poll()
        assert status is not None
        return status

    def terminate(self) -> None:
        """Send SIGTERM, unless it has ended."""
        self._signal(15)

    def kill(self) -> None:
        """Send SIGKILL, unless it has ended."""
        self._signal(9)

    def _signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


if TYPE_CHECKING:
    KeeperProcess = subprocess.Popen[bytes] | ForkedKeeper


def is_possible() -> bool:
    """Whether a fork of this process is as a daemon that is executed.

    Not where this interpreter was started with options, which a daemon's is not, nor where an
    installation's `sitecustomize` has started threads.
    """
    first = sys.orig_argv[1:2]
    has_options = first != ["-m"] and bool(first) and first[0].startswith("-")
    return not has_options and len(os.listdir("/proc/self/task")) == 1


def start(
    command: list[str], stdin: int, for_daemon: list[int], environment: dict[str, str], serve: Serve
) -> ForkedKeeper:
    """Start a keeper with `command` and its early daemon, in which `serve` is called.

    `for_daemon` is as early_start.py has it.

    Raises:
        OSError: no process can be forked.
        SystemExit: in the daemon.
    """
    reader, writer = os.pipe()
    try:
        pid = os.fork()
    except OSError:
        os.close(reader)
        os.close(writer)
        raise
    if pid == 0:
        # What fails here is not to go on as a second command.
        try:
            daemon = _fork_daemon(stdin, writer, for_daemon)
            if daemon:
                arguments = [*command, *map(str, [*for_daemon, daemon])]
                os.execve(arguments[0], arguments, environment)
            _be_daemon(for_daemon, environment)
            serve()
        except Exception:
            os._exit(127)
    os.close(writer)
    return ForkedKeeper(pid, reader)


def _fork_daemon(stdin: int, stdout: int, for_daemon: list[int]) -> int:
    """Be the keeper's process, up to its program; return the daemon's pid, or 0 in the daemon."""
    os.setsid()
    os.chdir("/")
    os.dup2(stdin, 0)
    os.dup2(stdout, 1)
    _keep_alone(for_daemon)
    return os.fork()


def _keep_alone(kept: list[int]) -> None:
    """Close all descriptors but the three standard ones and these, which programs inherit."""
    numbers = sorted([2, *kept])
    for number, following in zip(numbers, [*numbers[1:], os.sysconf("SC_OPEN_MAX")], strict=True):
        os.closerange(number + 1, following)
    for number in kept:
        os.set_inheritable(number, True)


def _be_daemon(for_daemon: list[int], environment: dict[str, str]) -> None:
    """Be as an early daemon that was executed, or execute it."""
    from fusefs.linux.process_title import show_as

    _, stdin, _, channel = for_daemon
    os.dup2(stdin, 0)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    _keep_alone([channel])
    try:
        show_as(early_start.DAEMON, environment)
    except OSError:
        os.execve(early_start.DAEMON[0], early_start.DAEMON, environment)
    os.environ.clear()
    os.environ.update(environment)
    if not sys.flags.safe_path:
        del sys.path[0]  # the directory of the command's program
    sys.argv[:] = sys.argv[:1]
    sys.orig_argv[:] = early_start.DAEMON
    sys.stdin = os.fdopen(0)  # the other one may have noted where the command's stood
