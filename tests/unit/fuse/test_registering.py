"""Files that are registered ahead of their opens go to the keeper together."""

import errno
import os
import socket
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import cast

import pytest
import trio

from fusefs.cache.cached_file import CacheFile
from fusefs.cache.passthrough import PassthroughFiles
from fusefs.keeper import client, protocol
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
    done: list[tuple[int, int, int]] = field(default_factory=list)  # which, its id, its errno

    def add(self, *which: int) -> None:
        for one in which:
            self.client.open_backing_later(
                self.fd, lambda value, error, one=one: self.done.append((one, value, error))
            )

    async def receive(self) -> KeeperMessage:
        """The next message that is no tick; its descriptors are closed."""
        while True:
            await trio.lowlevel.wait_readable(self.there)
            message = protocol.receive(self.there, protocol.FROM_DAEMON)
            for fd in message.fds:
                os.close(fd)
            if message.kind != protocol.TICK:
                return message

    async def answer(self, message: KeeperMessage, error: int = 0) -> None:
        pairs = [(0, error) if error else (100 + number, 0) for number in range(message.b)]
        answer = protocol.pack(protocol.BACKING_OPENED, message.a, len(pairs))
        self.there.send(protocol.with_pairs(answer, pairs))
        count = len(self.done) + len(pairs)
        await eventually(lambda: len(self.done) == count)


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


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "GATHER_S", 1000.0)


async def test_what_comes_shortly_after_each_other_goes_together() -> None:
    async with registering() as one:
        one.add(1, 2, 3)
        message = await one.receive()
        assert (message.kind, message.b, len(message.fds)) == (protocol.BACKING_OPEN, 3, 3)
        await one.answer(message)
        assert one.done == [(1, 100, 0), (2, 101, 0), (3, 102, 0)]
        one.add(4)
        message = await one.receive()
        await one.answer(message, errno.ENOSPC)
        assert one.done[3:] == [(4, 0, errno.ENOSPC)]


async def test_a_message_that_is_full_waits_for_nothing(patient: None) -> None:
    async with registering() as one:
        one.add(*range(2 * MOST_FILES + 1))
        assert [(await one.receive()).b for _ in range(2)] == [MOST_FILES, MOST_FILES]


async def test_what_is_needed_goes_at_once(patient: None) -> None:
    async with registering() as one:
        one.add(1)
        one.client.open_gathered()
        assert (await one.receive()).b == 1


async def test_only_so_many_messages_are_on_their_way() -> None:
    async with registering() as one:
        one.add(*range(MOST_FILES * (client.MOST_UNANSWERED + 1) + 1))
        messages = [await one.receive() for _ in range(client.MOST_UNANSWERED)]
        with trio.move_on_after(3 * client.GATHER_S) as waited:
            await one.receive()
        assert waited.cancelled_caught
        await one.answer(messages[0])
        rest = await one.receive()
        await one.answer(messages[1])
        last = await one.receive()
        assert (rest.b, last.b) == (MOST_FILES, 1)
        for message in (*messages[2:], rest, last):
            await one.answer(message)
        assert sorted(which for which, _, _ in one.done) == list(range(len(one.done)))


async def test_what_waits_for_others_fails_with_the_keeper(patient: None) -> None:
    async with registering() as one:
        one.add(*range(5))
        one.there.close()
        await eventually(lambda: len(one.done) == 5)
        assert {error for _, _, error in one.done} == {errno.ECONNRESET}
        one.add(5)
        assert one.done[-1] == (5, 0, errno.ECONNRESET)


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
