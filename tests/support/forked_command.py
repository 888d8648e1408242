"""`fusefs` without the start of an interpreter: a process that has imported it forks for each call.

Tests run a thousand commands, and most of a short one is imports. What a command starts is a
process of its own as ever, and so is whatever a test runs by `FUSEFS` itself.
"""

import contextlib
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from fusefs.linux import sockets
from fusefs.linux.processes import close_all_but

_PROJECT = Path(__file__).parents[2]
_MOST = 1 << 20


def run(
    arguments: Sequence[str], environment: dict[str, str], timeout_s: float
) -> subprocess.CompletedProcess[str]:
    """Run `fusefs` with these arguments alone in its environment; nothing is on its input.

    Raises:
        subprocess.TimeoutExpired: it did not end; it is killed.
    """
    request = {"arguments": arguments, "environment": environment, "cwd": os.getcwd()}
    with contextlib.ExitStack() as stack:
        ours, its = map(
            stack.enter_context, socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        )
        out, err = (stack.enter_context(_output(name)) for name in ("stdout", "stderr"))
        passed = [its.fileno(), out.fileno(), err.fileno()]
        sockets.send(_forker(), json.dumps(request).encode(), passed)
        its.close()
        pid = int(ours.recv(_MOST))
        ours.settimeout(timeout_s)
        try:
            status = int(ours.recv(_MOST))
        except TimeoutError:
            os.kill(pid, signal.SIGKILL)
            raise subprocess.TimeoutExpired(list(arguments), timeout_s) from None
        for file in (out, err):
            file.seek(0)
        return subprocess.CompletedProcess(list(arguments), status, out.read(), err.read())


def _output(name: str) -> TextIO:
    # Names of files may be no UTF-8.
    return open(os.memfd_create(name), "r+", encoding="utf-8", errors="surrogateescape")


@functools.cache
def _forker() -> socket.socket:
    """The socket to the process that forks, which ends when this one has."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with its:
        command = f"from {__name__} import serve; serve({its.fileno()})"
        subprocess.Popen(
            [
                sys.executable,
                "-P",
                "-c",
                f"import sys; sys.path.insert(0, {str(_PROJECT)!r}); {command}",
            ],
            pass_fds=[its.fileno()],
            stdin=subprocess.DEVNULL,
        )
    return ours


def serve(fd: int) -> None:
    """Fork for each request, until the other side is gone."""
    from fusefs.cli import local_copies, main, mount, sync, umount, warm  # noqa: F401

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(fileno=fd) as requests:
        while True:
            data, fds, _ = sockets.receive(requests, _MOST, 3)
            if not data:
                return
            if os.fork() == 0:
                _wait_for(json.loads(data), fds)
            for passed in fds:
                os.close(passed)


def _wait_for(request: dict[str, object], fds: list[int]) -> None:
    """Fork the command, and tell its pid and its exit status."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid == 0:
        _be_command(request, fds)
    with socket.socket(fileno=fds[0]) as answers:
        for output in fds[1:]:
            os.close(output)
        with contextlib.suppress(OSError):
            answers.send(b"%d" % pid)
            _, status = os.waitpid(pid, 0)
            answers.send(b"%d" % os.waitstatus_to_exitcode(status))
    os._exit(0)


def _be_command(request: dict[str, object], fds: list[int]) -> None:
    from fusefs.cli import main

    status: object = 1
    try:
        os.dup2(fds[1], 1)
        os.dup2(fds[2], 2)
        close_all_but()
        os.chdir(str(request["cwd"]))
        os.environ.clear()
        os.environ.update(request["environment"])  # type: ignore[call-overload]
        sys.stdout = open(1, "w", encoding="utf-8")  # noqa: SIM115
        sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace")  # noqa: SIM115
        status = main.main(request["arguments"])  # type: ignore[arg-type]
    except SystemExit as end:
        status = end.code
    except BaseException:
        traceback.print_exc()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(status if isinstance(status, int) else 0 if status is None else 1)
