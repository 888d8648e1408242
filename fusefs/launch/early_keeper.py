"""A mount's keeper, started before the command knows what to mount; see keeper/early_start.py.

Little is imported: what is imported before the keeper's start delays it.
"""

from __future__ import annotations

import contextlib
import os
import site
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

from fusefs.keeper import early_start
from fusefs.keeper.protocol import ENVIRONMENT
from fusefs.launch.runtime_location import runtime_environment

TYPE_CHECKING = False  # typing itself is not imported: it is large
if TYPE_CHECKING:
    from typing import IO

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

    Raises:
        OSError: it could not be started.
    """

    def __init__(self) -> None:
        with contextlib.ExitStack() as cleanup:
            sockets = [end for _ in range(3) for end in _pair()]
            for sock in sockets[1:]:
                cleanup.callback(sock.close)
            self._socket, stdin, *for_daemon = sockets
            numbers = [sock.fileno() for sock in for_daemon]
            # The one that has its configuration, or is just getting it.
            self.configured: subprocess.Popen[bytes] | None = None
            self._process: subprocess.Popen[bytes] | None = subprocess.Popen(
                [*_COMMAND, *map(str, numbers)],
                stdin=stdin.fileno(),
                stdout=subprocess.PIPE,
                cwd="/",
                start_new_session=True,
                pass_fds=numbers,
                # What was in it from the start is what /proc shows of a process's environment;
                # the package's scripts find mounts by that.
                env={
                    **os.environ,
                    **runtime_environment(),
                    early_start.VARIABLE: "1",
                    ENVIRONMENT: str(numbers[-1]),
                },
            )

    def configure(self, configuration: str, log: IO[bytes]) -> subprocess.Popen[bytes] | None:
        """Have it begin; None if it can't.

        The caller has to end the process, or `configured` if this is interrupted.
        """
        process = self._process
        if process is None or process.poll() is not None:
            return None
        text = os.memfd_create("configuration")
        try:
            with open(text, "wb", closefd=False) as file:
                file.write(configuration.encode())
            os.lseek(text, 0, os.SEEK_SET)
            self.configured, self._process = process, None
            early_start.give(self._socket, {}, text, log.fileno())
        except OSError:
            self.configured, self._process = None, process
            return None
        finally:
            os.close(text)
        self._socket.close()
        return process

    def dismiss(self) -> None:
        """End it and its daemon, unless it has been configured."""
        process, self._process = self._process, None
        self._socket.close()
        if process is None:
            return
        assert process.stdout is not None
        process.stdout.close()
        deadline = time.monotonic() + END_TIMEOUT_S
        while process.poll() is None and time.monotonic() < deadline:
            # Ctrl-C ends the command, which is ending.
            with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
                process.wait(deadline - time.monotonic())
        if process.poll() is None:
            process.kill()
            process.wait()


def _pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _may_import_as_root() -> bool:
    """Whether root's imports are those of another user.

    Packages of root's own may be hidden from that user. Where this interpreter was to leave
    them out, a daemon's would have them.
    """
    flags = sys.flags
    is_different = flags.isolated or flags.no_user_site or flags.ignore_environment
    return not is_different and site.getusersitepackages() not in sys.path


@contextlib.contextmanager
def started() -> Iterator[EarlyKeeper | None]:
    """An early keeper, where there can be one."""
    keeper = None
    if _may_import_as_root() or os.geteuid() != 0:
        with contextlib.suppress(OSError):
            keeper = EarlyKeeper()
    try:
        yield keeper
    finally:
        if keeper is not None:
            keeper.dismiss()
