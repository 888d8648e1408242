"""A mount's keeper, started before the command knows what to mount; see keeper/early_start.py.

The program `fusefs` has the first daemon forked (forked_keeper.py), whoever else mounts has it
executed. Little is imported: what is imported before the keeper's start delays it.
"""

from __future__ import annotations

import contextlib
import os
import site
import sys
import time
from _socket import AF_UNIX, SOCK_SEQPACKET, socketpair  # the module socket takes 3 ms more
from collections.abc import Iterator

from fusefs.keeper import early_start
from fusefs.launch import forked_keeper
from fusefs.launch.runtime_location import runtime_environment

TYPE_CHECKING = False  # typing itself is not imported: it is large
if TYPE_CHECKING:
    from typing import IO

    from fusefs.launch.forked_keeper import KeeperProcess, Serve

# Of a keeper that has nothing to do: it kills its daemon, and ends.
END_TIMEOUT_S = 10.0


def keeper_command(code: str) -> list[str]:
    """How a keeper is started, to run `code`.

    With nothing but the interpreter's own modules: it stays small.
    """
    package = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    return [
        sys.executable,
        "-I",
        "-S",
        "-c",
        f"import sys; sys.path.insert(0, {package!r}); {code}",
    ]


_COMMAND = keeper_command(
    "from fusefs.keeper import early_start; daemon = early_start.start();"
    " early_start.wait_for_packet();"
    " from fusefs.keeper.main import main_early; sys.exit(main_early(daemon))"
)


class EarlyKeeper:
    """A keeper that waits for its configuration, until it gets it or is dismissed.

    With `serve` its daemon is a fork of this process (see forked_keeper.py), which runs that.

    Raises:
        OSError: it could not be started.
    """

    def __init__(self, serve: Serve | None = None) -> None:
        # The one that has its configuration, or is just getting it.
        self.configured: KeeperProcess | None = None
        sockets = [end.detach() for _ in range(3) for end in socketpair(AF_UNIX, SOCK_SEQPACKET)]
        self._socket, *others = sockets
        try:
            self._process: KeeperProcess | None = _start(others[0], others[1:], serve)
        except OSError:
            for fd in sockets:
                os.close(fd)
            raise
        for fd in others:
            os.close(fd)

    def configure(self, configuration: str, log: IO[bytes]) -> KeeperProcess | None:
        """Have it begin; None if it can't.

        The caller has to end the process, or `configured` if this is interrupted.
        """
        process = self._process
        if process is None or process.poll() is not None:
            return None
        import socket

        text = os.memfd_create("configuration")
        try:
            with open(text, "wb", closefd=False) as file:
                file.write(configuration.encode())
            os.lseek(text, 0, os.SEEK_SET)
            self.configured, self._process = process, None
            with socket.socket(fileno=os.dup(self._socket)) as sock:
                early_start.give(sock, {}, text, log.fileno())
        except OSError:
            self.configured, self._process = None, process
            return None
        finally:
            os.close(text)
        os.close(self._socket)
        return process

    def dismiss(self) -> None:
        """End it and its daemon, unless it has been configured."""
        process, self._process = self._process, None
        if process is None:
            return
        os.close(self._socket)
        from subprocess import TimeoutExpired

        assert process.stdout is not None
        process.stdout.close()
        deadline = time.monotonic() + END_TIMEOUT_S
        while process.poll() is None and time.monotonic() < deadline:
            # Ctrl-C ends the command, which is ending.
            with contextlib.suppress(TimeoutExpired, KeyboardInterrupt):
                process.wait(deadline - time.monotonic())
        if process.poll() is None:
            process.kill()
            process.wait()


def _start(stdin: int, for_daemon: list[int], serve: Serve | None) -> KeeperProcess:
    # What was in it from the start is what /proc shows of a process's environment; the
    # package's scripts find mounts by that.
    environment = {
        **os.environ,
        **runtime_environment(),
        early_start.VARIABLE: "1",
        early_start.CHANNEL_VARIABLE: str(for_daemon[-1]),
    }
    if serve is not None:
        return forked_keeper.start(_COMMAND, stdin, for_daemon, environment, serve)
    import subprocess

    return subprocess.Popen(
        [*_COMMAND, *map(str, for_daemon)],
        stdin=stdin,
        stdout=subprocess.PIPE,
        cwd="/",
        start_new_session=True,
        pass_fds=for_daemon,
        env=environment,
    )


def _may_import_as_root() -> bool:
    """Whether root's imports are those of another user.

    Packages of root's own may be hidden from that user. Where this interpreter was to leave
    them out, a daemon's would have them.
    """
    flags = sys.flags
    is_different = flags.isolated or flags.no_user_site or flags.ignore_environment
    return not is_different and site.getusersitepackages() not in sys.path


@contextlib.contextmanager
def started(serve: Serve | None = None) -> Iterator[EarlyKeeper | None]:
    """An early keeper, where there can be one; its daemon is forked where that makes no difference.

    Raises:
        SystemExit: in the daemon.
    """
    keeper = None
    if _may_import_as_root() or os.geteuid() != 0:
        with contextlib.suppress(OSError):
            keeper = EarlyKeeper(serve if forked_keeper.is_possible() else None)
    try:
        yield keeper
    finally:
        if keeper is not None:
            keeper.dismiss()
