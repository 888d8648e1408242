"""What ends a broker's session with a daemon, and what does not."""

import errno
import os
import socket
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from fusefs.keeper import protocol as wire
from fusefs.keeper.broker import CUT_OFF, FROM_BROKER, Broker
from fusefs.keeper.state import Configuration, KeeperState, Program
from fusefs.keeper.supervisor_protocol import ProcessHandle
from fusefs.linux import sockets
from tests.support.machine.ordinary_user import NOBODY

LIMIT_S = 10.0


@contextmanager
def serving(**more: object) -> Iterator[tuple[socket.socket, socket.socket]]:
    """A broker in a child, with a descriptor that is no FUSE's: the keeper's end, and the daemon's.

    `more` is configuration, without which it may register nothing.
    """
    ours, keeper = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs, daemon = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.setblocking(False)
    given = {"is_privileged": False, "most_backing_ids": 10, "cache_device": 1} | more
    configuration = cast(Configuration, SimpleNamespace(**given))
    state = KeeperState(Program([], ""))
    state.fuse_fd = os.open(os.devnull, os.O_RDWR)
    broker = Broker(configuration, state, theirs, cast(ProcessHandle, None), wire.TAKE_OVER)
    broker.attach()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            keeper.close()
            daemon.close()
            broker.serve(ours)
            status = 0
        finally:
            os._exit(status)
    for one in (ours, theirs):
        one.close()
    os.close(state.fuse_fd)
    keeper.settimeout(LIMIT_S)
    daemon.settimeout(LIMIT_S)
    with keeper, daemon:
        yield keeper, daemon
    assert os.waitpid(pid, 0)[1] == 0, "it ended on its own"


TICK = wire.pack(wire.TICK)
PAIR = wire.PAIR.pack(1, 1)


def open_files(count: int) -> bytes:
    return wire.pack(wire.BACKING_OPEN, 1, count)


@pytest.mark.parametrize(
    ("message", "descriptors"),
    [
        (open_files(1), 0),
        (open_files(1), 2),
        (open_files(1), 200),
        (open_files(3), 2),
        (open_files(3), 4),
        (open_files(0), 0),
        (open_files(0), 1),
        (open_files(wire.MOST_FILES + 1), wire.MOST_FILES + 1),
        (open_files((1 << 64) - 1), 1),
        (TICK + PAIR, 0),
        (open_files(1) + PAIR, 1),
        (wire.pack(wire.REGISTERED, 0, 1) + PAIR, 0),  # a broker's
        (TICK, 1),
        (TICK[:-1], 0),
        (TICK + b"\0", 0),
        (TICK * 1000, 0),
        (b"", 1),
        (wire.pack(0), 0),
        (wire.pack(0xFFFFFFFF), 0),
        (wire.pack(wire.TAKE), 1),  # a keeper's
        (wire.pack(wire.HELLO, wire.VERSION), 0),
        (wire.pack(wire.MOUNT), 0),
        (wire.pack(wire.DEPOSIT), 1),
        (wire.pack(wire.PREPARED), 0),
        # No kernel gives these as an id.
        *((wire.pack(wire.KNOWN, 0, backing_id, 5), 0) for backing_id in (0, 1 << 31, 1 << 40)),
    ],
)
def test_a_message_that_the_protocol_does_not_have_is_a_breach(
    message: bytes, descriptors: int
) -> None:
    with serving() as (keeper, daemon), open(os.devnull) as file:
        sockets.send(daemon, message, [file.fileno()] * descriptors)
        told = wire.receive(keeper, FROM_BROKER)
        assert (told.kind, told.a) == (CUT_OFF, 1)


def own_file(directory: Path, flags: int, owner: int = NOBODY) -> int:
    path = directory / "file"
    path.touch()
    os.chown(path, owner, owner)
    return os.open(path, flags)


def linked_file(directory: Path) -> int:
    fd = own_file(directory, os.O_RDWR)
    os.link(directory / "file", directory / "link")
    return fd


def unlinked_file(directory: Path) -> int:
    fd = own_file(directory, os.O_RDWR)
    (directory / "file").unlink()
    return fd


def file_elsewhere(_directory: Path) -> int:
    fd = os.memfd_create("elsewhere")
    os.chown(fd, NOBODY, NOBODY)
    return fd


def fifo(directory: Path) -> int:
    os.mkfifo(directory / "fifo")
    return os.open(directory / "fifo", os.O_RDWR)


# What the kernel says of a descriptor that is no FUSE's: the broker has let the file pass.
TAKEN = errno.ENOTTY


@pytest.mark.root
@pytest.mark.parametrize(
    ("made", "is_read_only", "number"),
    [
        (partial(own_file, flags=os.O_RDWR), False, TAKEN),
        (partial(own_file, flags=os.O_RDWR), True, TAKEN),
        (partial(own_file, flags=os.O_RDONLY), True, TAKEN),
        (partial(own_file, flags=os.O_RDONLY), False, errno.EBADF),
        (partial(own_file, flags=os.O_WRONLY), True, errno.EBADF),
        (partial(own_file, flags=os.O_PATH), True, errno.EBADF),
        (partial(own_file, flags=os.O_PATH | os.O_RDWR), False, errno.EBADF),
        (partial(own_file, flags=os.O_RDWR, owner=0), False, errno.EPERM),
        (partial(own_file, flags=os.O_RDONLY, owner=0), True, errno.EPERM),
        (linked_file, False, errno.EMLINK),
        (unlinked_file, False, TAKEN),
        (fifo, False, errno.EINVAL),
        (lambda path: os.open(path, os.O_RDONLY), False, errno.EBADF),
        (lambda path: os.open(path, os.O_RDONLY), True, errno.EINVAL),
        (lambda _: socket.socket(socket.AF_UNIX).detach(), False, errno.EINVAL),
        (lambda _: os.open(os.devnull, os.O_RDWR), False, errno.EINVAL),
        (file_elsewhere, False, errno.EXDEV),
    ],
)
def test_only_a_file_of_the_daemons_own_in_its_cache_is_registered(
    public_path: Path, made: Callable[[Path], int], is_read_only: bool, number: int
) -> None:
    fd = made(public_path)
    given = {
        "is_privileged": True,
        "is_read_only": is_read_only,
        "cache_device": public_path.stat().st_dev,
        "credentials": SimpleNamespace(uid=NOBODY, gid=NOBODY),
    }
    with serving(**given) as (_, daemon):
        wire.send(daemon, wire.pack(wire.BACKING_OPEN, 7, 1), fd)
        answer = wire.receive(daemon, wire.FROM_KEEPER)
        assert (answer.kind, answer.a, answer.pairs) == (wire.BACKING_OPENED, 7, [(0, number)])
    os.close(fd)


def test_an_id_that_another_has_registered_is_passed_on() -> None:
    with serving() as (keeper, daemon):
        daemon.send(wire.pack(wire.KNOWN, 0, 7, 5))
        message = wire.receive(keeper, FROM_BROKER)
        assert (message.kind, message.pairs) == (wire.REGISTERED, [(7, 5)])


def test_a_file_whose_close_fails_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A network file system says then that an earlier write found no room."""
    close, refused = os.close, OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    def refuse(fd: int) -> None:
        is_file = stat.S_ISREG(os.fstat(fd).st_mode)
        close(fd)
        if is_file:
            raise refused

    monkeypatch.setattr("fusefs.keeper.broker.os.close", refuse)
    with tempfile.TemporaryFile() as file, serving() as (_, daemon):
        fd = file.fileno()
        for number in range(2):
            sockets.send(daemon, wire.pack(wire.BACKING_OPEN, number, 2), (fd, fd))
            answer = wire.receive(daemon, wire.FROM_KEEPER)
            assert (answer.kind, answer.a, answer.b) == (wire.BACKING_OPENED, number, 2)
