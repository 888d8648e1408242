"""Files that are registered ahead of their opens go to the keeper together."""

import errno
import os
import socket
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import cast

import trio

from fusefs.cache.cached_file import CacheFile
from fusefs.cache.passthrough import PassthroughFiles
from fusefs.keeper import protocol
from fusefs.keeper.client import KeeperClient
from fusefs.keeper.protocol import MOST_FILES, KeeperMessage
from tests.support.waiting import eventually

LIMIT_S = 10


@dataclass
class Registering:
    """A client, and the keeper's end of its socket."""

    client: KeeperClient
    there: socket.socket
    fd: int
    done: list[list[tuple[int, int]]] = field(default_factory=list)

    async def register(self, count: int) -> None:
        self.done.append(await self.client.open_backing([self.fd] * count))

    async def receive(self) -> KeeperMessage:
        """The next message that is no tick; its descriptors are closed."""
        while True:
            await trio.lowlevel.wait_readable(self.there)
            message = protocol.receive(self.there, protocol.FROM_DAEMON)
            for fd in message.fds:
                os.close(fd)
            if message.kind != protocol.TICK:
                return message

    def answer(self, message: KeeperMessage, error: int = 0) -> None:
        pairs = [(0, error) if error else (100 + number, 0) for number in range(message.b)]
        answer = protocol.pack(protocol.BACKING_OPENED, message.a, len(pairs))
        self.there.send(protocol.with_pairs(answer, pairs))


@asynccontextmanager
async def registering() -> AsyncIterator[Registering]:
    """A client whose keeper is the test."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    there.setblocking(False)
    keeper = KeeperClient(here)
    with here, there, tempfile.TemporaryFile() as file, trio.fail_after(LIMIT_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(keeper.run, lambda: 1, 30.0)
            there.send(protocol.pack(protocol.ABLE, 0, 5))
            await eventually(lambda: keeper.namespace == 5)
            yield Registering(keeper, there, file.fileno())
            nursery.cancel_scope.cancel()


async def test_several_files_go_together() -> None:
    async with registering() as one, trio.open_nursery() as nursery:
        nursery.start_soon(one.register, 3)
        message = await one.receive()
        assert (message.kind, message.b, len(message.fds)) == (protocol.BACKING_OPEN, 3, 3)
        nursery.start_soon(one.register, 1)
        another = await one.receive()
        one.answer(another, errno.ENOSPC)
        await eventually(lambda: one.done == [[(0, errno.ENOSPC)]])
        one.answer(message)
        await eventually(lambda: one.done[1:] == [[(100, 0), (101, 0), (102, 0)]])


async def test_files_that_wait_fail_with_the_keeper() -> None:
    async with registering() as one, trio.open_nursery() as nursery:
        nursery.start_soon(one.register, MOST_FILES)
        await one.receive()
        one.there.close()
        lost = (0, errno.ECONNRESET)
        await eventually(lambda: one.done == [[lost] * MOST_FILES])
        await one.register(2)
        assert one.done[1] == [lost] * 2


class Copy:
    """What is known of a cache file that can be registered."""

    pins = 0

    def __init__(self, st_ino: int, fd: int) -> None:
        self.st_ino = st_ino
        self.fd = fd


async def test_what_is_given_up_without_a_keeper_is_given_back_by_the_next() -> None:
    async with registering() as one:
        files = PassthroughFiles(one.client)
        used, dropped, answered = (cast(CacheFile, Copy(number, one.fd)) for number in (1, 2, 3))
        for file in (used, dropped, answered):
            files.ids[file] = 100 + file.st_ino
        files.drop(answered)
        closing = await one.receive()
        assert (closing.kind, closing.b) == (protocol.BACKING_CLOSE, 103)
        one.there.send(protocol.pack(protocol.BACKING_CLOSED, closing.a))
        await eventually(lambda: len(files.table()) == 2)
        one.there.close()
        await one.client.gone.wait()
        event = files.drop(dropped)
        assert event.is_set(), "no eviction waits for a keeper that has gone"
        assert sorted(files.table()) == [(101, 1), (102, 2)], "the kernel has both"
    async with registering() as another:
        files.move_to(another.client)
        closing = await another.receive()
        assert (closing.kind, closing.b) == (protocol.BACKING_CLOSE, 102)
        another.there.send(protocol.pack(protocol.BACKING_CLOSED, closing.a))
        await eventually(lambda: files.table() == [(101, 1)])


async def test_what_the_keeper_has_not_answered_is_given_back_by_the_next() -> None:
    async with registering() as one:
        files = PassthroughFiles(one.client)
        file = cast(CacheFile, Copy(1, one.fd))
        files.ids[file] = 101
        files.drop(file)
        assert (await one.receive()).b == 101
        one.there.close()
        await one.client.gone.wait()
        assert files.table() == [(101, 1)]
    async with registering() as another:
        files.move_to(another.client)
        closing = await another.receive()
        assert closing.b == 101
        # It had been closed before the keeper went.
        another.there.send(protocol.pack(protocol.BACKING_CLOSED, closing.a, error=errno.ENOENT))
        await eventually(lambda: files.table() == [])
