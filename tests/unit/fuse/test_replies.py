"""Long READs are answered by a thread, as far as the page cache has what they ask for."""

import errno
import gc
import os
import random
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import AsyncMock

import pytest
import trio

from fusefs.fuse import protocol
from fusefs.fuse._replies import ReplyThread
from fusefs.fuse.protocol import Opcode
from fusefs.fuse.session import Session
from fusefs.posix.journal.journal import Journal
from fusefs.posix.read.read import MAX_READ
from fusefs.store.errors import AccessDeniedError
from tests.support.survival.mortal_mount import MortalMount

CONTENT = os.urandom(3 * MAX_READ)
HEADER = protocol.OUT_HEADER
SO_SNDBUFFORCE = 32  # socket(7); a message is as long as a reply
READ_IN = struct.Struct("=QQIIQII")


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Sockets in place of /dev/fuse: the kernel's end and the daemon's."""
    kernels, daemons = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (kernels, daemons):
        end.setsockopt(socket.SOL_SOCKET, SO_SNDBUFFORCE, 8 << 20)
    with kernels, daemons:
        yield kernels, daemons


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    (tmp_path / "file").write_bytes(CONTENT)
    fd = os.open(tmp_path / "file", os.O_RDWR)
    yield fd
    os.close(fd)


def received(end: socket.socket) -> tuple[int, bytes]:
    """The next reply: the request's unique number, and the bytes."""
    end.settimeout(20)
    reply = end.recv(2 * MAX_READ)
    size, error, unique = HEADER.unpack_from(reply)
    assert (size, error) == (len(reply), 0)
    return unique, reply[HEADER.size :]


def test_each_reply_has_the_bytes_of_its_range(
    ends: tuple[socket.socket, socket.socket], file: int
) -> None:
    given_back: list[tuple[int, ...]] = []
    thread = ReplyThread(ends[1].fileno(), MAX_READ, lambda *of: given_back.append(of))
    gc.collect()  # else what earlier tests have left is closed meanwhile
    open_before = len(os.listdir("/proc/self/fd"))
    for unique in range(300):
        offset, size = random.randrange(2 * MAX_READ), random.randrange(1, MAX_READ + 1)
        assert thread.send(unique, 7, file, offset, size, 0)
        assert received(ends[0]) == (unique, CONTENT[offset : offset + size])
    assert not thread.send(1, 7, file, 0, MAX_READ + 1, 0), "the buffer is smaller"
    thread.close()
    assert not thread.send(1, 7, file, 0, 1, 0)
    assert len(os.listdir("/proc/self/fd")) <= open_before
    assert given_back == []


def test_what_is_taken_is_answered_before_the_end(
    ends: tuple[socket.socket, socket.socket], file: int
) -> None:
    thread = ReplyThread(ends[1].fileno(), MAX_READ, lambda *_of: None)
    taken = [thread.send(unique, 7, file, unique, 1000, 0) for unique in range(200)]
    thread.close()
    assert [received(ends[0]) for _ in taken] == [
        (unique, CONTENT[unique : unique + 1000]) for unique in range(200)
    ]


@pytest.mark.parametrize("fault", ["too short", "refused"])
def test_what_can_not_be_answered_is_given_back(
    ends: tuple[socket.socket, socket.socket], file: int, fault: str
) -> None:
    given_back: list[tuple[int, ...]] = []
    thread = ReplyThread(ends[1].fileno(), MAX_READ, lambda *of: given_back.append(of))
    if fault == "refused":
        ends[0].close()
    assert thread.send(5, 7, file, 2 * MAX_READ + 1, MAX_READ, 0)
    thread.close()
    assert given_back == [(5, 7, 2 * MAX_READ + 1, MAX_READ)]


@pytest.mark.parametrize("is_cached", [True, False])
async def test_a_long_read_of_a_served_handle(
    tmp_path: Path, ends: tuple[socket.socket, socket.socket], is_cached: bool
) -> None:
    """Also where the page cache has lost the bytes; it counts once in either case."""
    end, its = ends
    its.setblocking(False)
    mount = MortalMount(tmp_path)
    mount.store.put("object", CONTENT)
    async with mount.serving() as process, trio.open_nursery() as nursery:
        log = process.operations._state.journal
        assert isinstance(log, Journal)
        session = Session(its.fileno(), process.operations, log)
        nursery.start_soon(session.run)
        fh = await process.open("object")
        handle = process.operations.handles.files[fh]
        await process.operations.downloader.wait_for(handle.file, 0, len(CONTENT))
        if not is_cached:
            os.fsync(handle.file.fd)
            os.posix_fadvise(handle.file.fd, 0, 0, os.POSIX_FADV_DONTNEED)
        for unique, offset in ((2, 0), (4, MAX_READ), (6, len(CONTENT) - 100_000)):
            body = READ_IN.pack(fh, offset, MAX_READ, 0, 0, 0, 0)
            size = protocol.IN_HEADER.size + len(body)
            head = protocol.IN_HEADER.pack(
                size, Opcode.READ, unique, handle.inode.nodeid, 0, 0, 1, 0, 0
            )
            end.send(head + body)
            reply = await trio.to_thread.run_sync(received, end)
            assert reply == (unique, CONTENT[offset : offset + MAX_READ])
        assert session.times.counts[Opcode.READ] == 3
        assert not session.waiting
        session.stop_reading()
        nursery.cancel_scope.cancel()


async def test_an_error_of_the_bucket_ends_one_request_and_not_the_session(
    tmp_path: Path, ends: tuple[socket.socket, socket.socket]
) -> None:
    end, its = ends
    its.setblocking(False)
    end.settimeout(20)
    async with MortalMount(tmp_path).serving() as process, trio.open_nursery() as nursery:
        process.operations.readlink = AsyncMock(side_effect=AccessDeniedError)
        session = Session(its.fileno(), process.operations, Journal(None), has_fast_path=False)
        nursery.start_soon(session.run)
        size = protocol.IN_HEADER.size
        end.send(protocol.IN_HEADER.pack(size, Opcode.READLINK, 2, 1, 0, 0, 1, 0, 0))
        reply = await trio.to_thread.run_sync(end.recv, HEADER.size)
        assert HEADER.unpack_from(reply) == (HEADER.size, -errno.EACCES, 2)
        nursery.cancel_scope.cancel()


async def test_an_unknown_handle_is_refused_as_ever(tmp_path: Path) -> None:
    async with MortalMount(tmp_path).serving() as process:
        with pytest.raises(OSError, match="unknown file handle") as caught:
            await process.operations.read_again(99, 0, 1000)
    assert caught.value.errno == errno.EBADF
