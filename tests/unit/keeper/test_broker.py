"""What ends a broker's session with a daemon, and what does not."""

from __future__ import annotations

import errno
import os
import socket
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import cast

import pytest

from fusefs.keeper import protocol as wire
from fusefs.keeper.broker import CUT_OFF, FROM_BROKER, Broker
from fusefs.keeper.state import Configuration, KeeperState, Program
from fusefs.keeper.supervisor_protocol import ProcessHandle
from fusefs.linux import sockets

LIMIT_S = 10.0


@contextmanager
def serving() -> Iterator[tuple[socket.socket, socket.socket]]:
    """A broker in a child, which may register nothing: the keeper's end, and the daemon's."""
    ours, keeper = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs, daemon = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.setblocking(False)
    given = SimpleNamespace(is_privileged=False, most_backing_ids=10, cache_device=1)
    configuration = cast(Configuration, given)
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


@pytest.mark.parametrize("backing_id", [0, 1 << 31, 1 << 40])
def test_what_no_kernel_gives_as_an_id_is_a_breach(backing_id: int) -> None:
    with serving() as (keeper, daemon):
        daemon.send(wire.pack(wire.KNOWN, 0, backing_id, 5))
        message = wire.receive(keeper, FROM_BROKER)
        assert message is not None
        assert (message.kind, message.a) == (CUT_OFF, 1)


def test_an_id_that_another_has_registered_is_passed_on() -> None:
    with serving() as (keeper, daemon):
        daemon.send(wire.pack(wire.KNOWN, 0, 7, 5))
        message = wire.receive(keeper, FROM_BROKER)
        assert message is not None
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
            wire.send(daemon, wire.pack(wire.BACKING_OPEN, number), fd)
            answer = wire.receive(daemon, wire.FROM_KEEPER)
            assert answer is not None
            assert (answer.kind, answer.a) == (wire.BACKING_OPENED, number)
            sockets.send(daemon, wire.pack(wire.BACKINGS_OPEN, 10, 2), (fd, fd))
            answer = wire.receive(daemon, wire.FROM_KEEPER)
            assert answer is not None
            assert (answer.kind, answer.a, answer.b) == (wire.BACKINGS_OPENED, 10, 2)
