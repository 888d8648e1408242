"""What a daemon that was taken over might send to its keeper, or do to it.

Each attack gets the stand-in right after it has begun to serve; what it
returns is left in the stand-in's facts. Files for it are in the cache, where
the test has put them.
"""

from __future__ import annotations

import array
import ctypes
import errno
import os
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fusefs.keeper import protocol

if TYPE_CHECKING:
    from tests.support.survival.standin_daemon import Standin


def _offer(standin: Standin, path: str, flags: int) -> int:
    """The errno with which a descriptor is refused, 0 if it is not."""
    error, _ = standin.register(os.open(path, flags))
    return error


def _in_cache(standin: Standin, name: str) -> str:
    return os.path.join(standin.settings["cache"], name)


def good_file(standin: Standin) -> int:
    return _offer(standin, _in_cache(standin, "through"), os.O_RDWR)


def file_of_the_mount_itself(standin: Standin) -> int:
    """Anything that touched it would wait for this very process."""
    if os.fork() == 0:
        try:
            fd = os.open(os.path.join(standin.settings["mountpoint"], "plain"), os.O_RDONLY)
            protocol.send(standin.channel, protocol.pack(protocol.BACKING_OPEN, 1, 1), fd)
        finally:
            os._exit(0)
    return 0


def more_than_allowed(standin: Standin) -> list[int]:
    """As many as are taken; returns the first error and how many were."""
    fd = os.open(_in_cache(standin, "through"), os.O_RDWR)
    first_error, count = 0, 0
    while not first_error:
        first_error, _ = standin.register(fd)
        count += not first_error
    return [first_error, count]


def register_20000(standin: Standin) -> list[int]:
    fd = os.open(_in_cache(standin, "through"), os.O_RDWR)
    errors = [standin.register(fd)[0] for _ in range(20_000)]
    return [max(errors), errors.count(0)]


def several_files(standin: Standin) -> list[int]:
    """As many in one message as there may be, one of them a wrong one; returns their errors."""
    fd = os.open(_in_cache(standin, "through"), os.O_RDWR)
    null = os.open(os.devnull, os.O_RDWR)
    fds = [null if number == 2 else fd for number in range(protocol.MOST_FILES)]
    _send(standin, protocol.pack(protocol.BACKING_OPEN, 70, len(fds)), *fds)
    answer = standin.hear(protocol.BACKING_OPENED)
    assert (answer.a, answer.b) == (70, len(fds))
    assert len({backing_id for backing_id, _ in answer.pairs}) == len(fds)
    return [error for _, error in answer.pairs]


def ids_of_nobody(standin: Standin) -> list[int]:
    """Close what was never opened, and what was closed before."""
    fd = os.open(_in_cache(standin, "through"), os.O_RDWR)
    _, backing_id = standin.register(fd)
    errors = []
    for one in (0, backing_id + 1, 1 << 40, (1 << 64) - 1, backing_id, backing_id):
        standin.say(protocol.BACKING_CLOSE, 7, one)
        answer = standin.hear(protocol.BACKING_CLOSED)
        assert answer.a == 7
        errors.append(answer.error)
    return errors


def _send(standin: Standin, data: bytes, *fds: int) -> None:
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    standin.channel.sendmsg([data], rights)


def _wait_for_death() -> None:
    time.sleep(600)


def two_descriptors(standin: Standin) -> None:
    fd = os.open(_in_cache(standin, "through"), os.O_RDWR)
    _send(standin, _OPEN, fd, fd)
    _wait_for_death()


_OPEN = protocol.pack(protocol.BACKING_OPEN, 1, 1)


def _flood(standin: Standin, limit_s: float, *messages: bytes) -> int:
    """Send as fast as they are taken, and hear nothing; returns how many were."""
    standin.channel.setblocking(False)
    count = 0
    stop = time.monotonic() + limit_s
    while time.monotonic() < stop:
        try:
            standin.channel.send(messages[count % len(messages)])
            count += 1
        except BlockingIOError:
            time.sleep(0.001)
    return count


def flood_of_everything(standin: Standin) -> int:
    return _flood(
        standin,
        2.0,
        protocol.pack(protocol.SERVING, 1),
        protocol.pack(protocol.ENDING),
        protocol.pack(protocol.TICK, 1 << 63),
    )


def flood_without_listening(standin: Standin) -> int:
    # It is killed meanwhile: a daemon that reads again is heard again.
    asks = protocol.pack(protocol.BACKING_CLOSE, 1, 1)
    return _flood(standin, 600.0, asks, protocol.pack(protocol.TICK))


def hostile_file(standin: Standin) -> None:
    """No process that looks at the descriptor, or closes it, gets away."""
    path = os.path.join(standin.settings["hostile"], "file")
    standin.say(protocol.BACKING_OPEN, 1, 1, fd=os.open(path, os.O_RDWR))


def hostile_files_in_one_message(standin: Standin) -> None:
    path = os.path.join(standin.settings["hostile"], "file")
    files = os.open(path, os.O_RDWR), os.open(path, os.O_RDWR)
    _send(standin, protocol.pack(protocol.BACKING_OPEN, 1, 2), *files)
    _wait_for_death()


def hostile_file_behind_others(standin: Standin) -> None:
    """In one message: those before it have been registered when the broker hangs."""
    good = os.open(_in_cache(standin, "through"), os.O_RDWR)
    hostile = os.open(os.path.join(standin.settings["hostile"], "file"), os.O_RDWR)
    _send(standin, protocol.pack(protocol.BACKING_OPEN, 1, 3), good, good, hostile)
    _wait_for_death()


def child_that_keeps_the_socket(standin: Standin) -> None:
    """It goes on talking when the daemon is dead."""
    if os.fork() == 0:
        os.setsid()
        while True:
            try:
                standin.say(protocol.SERVING, 1)
            except OSError:
                time.sleep(0.01)


_PIDFD_GETFD = 438
_PTRACE_ATTACH = 16
_libc = ctypes.CDLL(None, use_errno=True)


def reach_for_the_keeper(standin: Standin) -> dict[str, Any]:
    """What each attempt on keeper and broker ends with, by its name."""
    keeper = os.getppid()
    with open(f"/proc/{keeper}/task/{keeper}/children") as file:
        brokers = [int(pid) for pid in file.read().split() if int(pid) != os.getpid()]
    assert brokers
    results: dict[str, Any] = {}
    for pid in (keeper, *brokers):
        for name, attempt in _ATTEMPTS.items():
            try:
                attempt(pid)
                results[f"{name} {pid}"] = 0
            except OSError as error:
                results[f"{name} {pid}"] = error.errno
    return results


def _kill(pid: int) -> None:
    os.kill(pid, 0)


def _take_descriptor(pid: int) -> None:
    pidfd = os.pidfd_open(pid)
    for number in range(20):
        result = _libc.syscall(_PIDFD_GETFD, pidfd, number, 0)
        if result >= 0 or ctypes.get_errno() != errno.EBADF:
            _check(result)
            return
    raise OSError(errno.EBADF, "")


def _trace(pid: int) -> None:
    _check(_libc.ptrace(_PTRACE_ATTACH, pid, None, None))


def _open(name: str) -> Callable[[int], None]:
    def attempt(pid: int) -> None:
        os.close(os.open(f"/proc/{pid}/{name}", os.O_RDONLY))

    return attempt


def _list_descriptors(pid: int) -> None:
    os.listdir(f"/proc/{pid}/fd")


def _check(result: int) -> None:
    if result < 0:
        raise OSError(ctypes.get_errno(), "")


_ATTEMPTS: dict[str, Callable[[int], None]] = {
    "kill": _kill,
    "pidfd_getfd": _take_descriptor,
    "ptrace": _trace,
    "mem": _open("mem"),
    "environ": _open("environ"),
    "fd": _list_descriptors,
}


def look(standin: Standin) -> dict[str, Any]:
    """Not an attack: what this process sees of others, and what the keeper says of them."""
    from fusefs.linux import callers

    pids = standin.settings["looked_at"]
    standin.say(protocol.SERVING, 1)
    namespace = standin.hear(protocol.ABLE).b
    fates = []
    for pid in pids:
        standin.say(protocol.LOOK, 5, pid)
        fates.append(standin.hear(protocol.LOOKED).b)
    return {"namespace": namespace, "fates": fates, "own": [callers.fate(pid) for pid in pids]}
