"""Compiled code answers as Python does, and leaves the same behind."""

import errno
import itertools
import os
import socket
import struct
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path

import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fusefs.cache.cached_file import CacheFile
from fusefs.cache.passthrough import PassthroughFiles
from fusefs.cache.readahead import siblings
from fusefs.fuse import fast_path, protocol
from fusefs.fuse.protocol import Opcode
from fusefs.fuse.session import Session
from fusefs.posix.journal.journal import Journal
from fusefs.posix.journal.records import replay
from fusefs.posix.nodes.inode import Inode
from tests.support.survival.mortal_mount import MortalMount, Process
from tests.support.waiting import eventually

FILES = 4
CONTENT = [bytes([65 + number]) * (1000 * (number + 1)) for number in range(FILES)]
PASSTHROUGH = protocol.Fopen.PASSTHROUGH
OPEN_IN = struct.Struct("=II")
RELEASE_IN = struct.Struct("=QIIQ")
NAMES = [b"security.selinux", b"system.posix_acl_access", b"user", b"user.", b"user.a", b"u", b""]
READ_IN = struct.Struct("=QQIIQII")


class Registrar:
    """Gives numbers to files, as the kernel does.

    That of a file is its size: what is fetched ahead is registered when it has come, which may
    be earlier in one mount than in another.
    """

    async def open_backing(self, fds: Sequence[int]) -> list[tuple[int, int]]:
        await trio.lowlevel.checkpoint()
        return [(os.fstat(fd).st_size, 0) for fd in fds]

    def close_backing(
        self, backing_id: int, done: Callable[[int, int], None] | None = None
    ) -> trio.Event:
        assert done is not None
        done(0, 0)
        event = trio.Event()
        event.set()
        return event


class Side:
    """A mount whose kernel is a test, with compiled code or without."""

    def __init__(self, directory: Path, process: Process, session: Session, end: socket.socket):
        self.directory = directory
        self.operations = process.operations
        self.session = session
        self.nodes: list[Inode] = []
        self.open: list[int] = []  # handles, in the order of their opens
        self._end = end
        self._unique = 1 << 20

    def send(self, opcode: Opcode, nodeid: int, body: bytes, mark: int = 0) -> None:
        self._unique += 2
        size = protocol.IN_HEADER.size + len(body)
        unique = self._unique | mark
        header = protocol.IN_HEADER.pack(size, opcode, unique, nodeid, 0, 0, 1, 0, 0)
        self._end.send(header + body)

    async def receive(self) -> tuple[int, bytes]:
        """The next reply: its error, and what is behind its header."""
        with trio.fail_after(20):
            await trio.lowlevel.wait_readable(self._end)
        reply = self._end.recv(1 << 18)
        size, error, _ = protocol.OUT_HEADER.unpack_from(reply)
        assert size == len(reply)
        return -error, reply[protocol.OUT_HEADER.size :]

    async def ask(
        self, opcode: Opcode, nodeid: int, body: bytes, mark: int = 0
    ) -> tuple[int, bytes]:
        self.send(opcode, nodeid, body, mark)
        return await self.receive()

    async def opens(self, number: int, mark: int = 0) -> tuple[int, int, int]:
        """Open a file for reading; returns the error, the reply's flags and the backing id."""
        nodeid = self.nodes[number].nodeid
        body = OPEN_IN.pack(os.O_RDONLY, 0)
        error, answer = await self.ask(Opcode.OPEN, nodeid, body, mark)
        if error:
            return error, 0, 0
        fh, flags, backing_id = protocol.OPEN_OUT.unpack_from(answer)
        self.open.append(fh)
        return 0, flags, backing_id

    async def closes(self, which: int) -> tuple[int, bytes]:
        fh = self.open.pop(which % len(self.open))
        return await self.ask(Opcode.RELEASE, 1, RELEASE_IN.pack(fh, 0, 0, 0))

    def file(self, number: int) -> CacheFile | None:
        info = self.nodes[number].info
        return self.operations.cache.find(info.version)

    async def settled(self) -> None:
        """Wait until another task has run, which finds settled what compiled code did."""
        await trio.lowlevel.checkpoint()

    def left(self) -> dict[str, object]:
        """What there is behind all answers."""
        operations, times = self.operations, self.session.times
        handles = operations.handles.files.values()
        return {
            "handles": [(h.fh, h.inode.nodeid, h.flags, h.backing_id, h.version) for h in handles],
            "nodes": [(n.served, n.passthrough, n.looked_up, n.is_current) for n in self.nodes],
            "pins": [file.pins if (file := self.file(n)) else None for n in range(FILES)],
            "counters": asdict(operations.counters),
            "requests": self.session.requests,
            "counts": times.counts,
            "refused": times._failed,
            "record": replay(self.directory / "journal", is_live=True).state.handles,
        }


@asynccontextmanager
async def one_side(
    directory: Path, *, is_compiled: bool = True, more: int = 0
) -> AsyncIterator[Side]:
    """A mount whose files are cached, and known to the kernel, which has not opened any.

    Of `more` files none was opened by any program.
    """
    mount = MortalMount(directory)
    mount.backing = backing = PassthroughFiles(Registrar())
    backing.is_on = True
    for number, content in enumerate(CONTENT):
        mount.store.put(str(number), content)
    for number in range(FILES, FILES + more):
        mount.store.put(str(number), b"more")
    end, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    its.setblocking(False)
    with end, its:
        async with mount.serving() as process, trio.open_nursery() as nursery:
            operations = process.operations
            log = operations._state.journal
            assert isinstance(log, Journal)
            session = Session(its.fileno(), operations, log, has_fast_path=is_compiled)
            side = Side(directory, process, session, end)
            for number in range(FILES):
                side.nodes.append(await process.node(str(number)))
                await process.stat(side.nodes[-1])
                fh = await process.open(str(number))
                operations.release(fh)
            for number in range(FILES, FILES + more):
                side.nodes.append(await process.node(str(number)))
            nursery.start_soon(session.run)
            for inode in side.nodes:
                await side.ask(Opcode.GETATTR, inode.nodeid, bytes(16))  # packs them
            # What was fetched ahead is pinned until it has been registered.
            await eventually(lambda: not backing.gathered)
            yield side
            session.stop_reading()
            nursery.cancel_scope.cancel()


@pytest.fixture
async def side(tmp_path: Path) -> AsyncIterator[Side]:
    async with one_side(tmp_path) as one:
        yield one


@asynccontextmanager
async def both(directory: Path) -> AsyncIterator[list[Side]]:
    async with (
        one_side(directory / "compiled") as compiled,
        one_side(directory / "python", is_compiled=False) as python,
    ):
        yield [compiled, python]


async def test_an_open_and_its_close_need_no_python(side: Side) -> None:
    before = side.session.compiled_requests or 0
    assert (await side.opens(0))[1] & PASSTHROUGH
    assert await side.closes(0) == (0, b"")
    assert (await side.ask(Opcode.IOCTL, side.nodes[0].nodeid, bytes(32)))[0] == errno.ENOTTY
    error, shown = await side.ask(Opcode.GETATTR, side.nodes[0].nodeid, bytes(16))
    assert (error, len(shown)) == (0, 104)
    name = bytes(8) + b"security.selinux\0"
    assert await side.ask(Opcode.GETXATTR, 1 << 40, name) == (errno.ENODATA, b"")
    assert side.session.compiled_requests == before + 5


async def test_the_first_open_of_a_file_that_was_fetched_ahead_needs_no_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And it has further ones fetched, as an open has that Python answers."""
    monkeypatch.setattr(siblings, "UNREAD_EACH", 1)
    async with one_side(tmp_path, more=10) as side:
        ids = side.operations.backing.ids

        def ahead() -> list[int]:
            """The files that have an id, and that nothing has opened."""
            numbers = range(FILES, FILES + 10)
            files = {number: side.file(number) for number in numbers}
            return [n for n, file in files.items() if file in ids and file.last_use is None]

        await eventually(lambda: len(ahead()) == FILES)
        first = side.file(ahead()[0])
        assert first.pins == 1, "for a while nothing evicts it"
        before = side.session.compiled_requests or 0
        error, flags, _ = await side.opens(ahead()[0])
        assert (error, flags & PASSTHROUGH) == (0, PASSTHROUGH)
        assert side.session.compiled_requests == before + 1
        # One is not unread any more, and one more that was of use allows for one more.
        await eventually(lambda: len(ahead()) == FILES + 1)


async def test_what_was_opened_is_on_record_before_other_tasks_run(
    side: Side, tmp_path: Path
) -> None:
    """The journal has it with the reply, so a kill at any moment loses nothing."""
    seen = []
    settle = side.operations.opener.was_opened
    journal = tmp_path / "journal"

    def note(*of: object, **more: object) -> None:
        seen.append(list(replay(journal, is_live=True).state.handles))
        settle(*of, **more)  # type: ignore[arg-type]

    side.operations.opener.was_opened = note  # type: ignore[method-assign]
    await side.opens(2)
    await side.settled()
    assert seen == [side.open]


@pytest.mark.parametrize(
    "change", ["is_written", "is_replaced", "is_served", "is_evicted", "is_unchecked", "is_shut"]
)
async def test_what_is_unusual_is_left_to_python(side: Side, change: str) -> None:
    inode, operations = side.nodes[0], side.operations
    file = side.file(0)
    if change == "is_written":
        error, _ = await side.ask(Opcode.OPEN, inode.nodeid, OPEN_IN.pack(os.O_RDWR, 0))
        assert error == 0
        assert inode.staged is not None
        inode.served -= 1  # which alone would show it
    elif change == "is_replaced":
        operations.inodes.mark_replaced(inode)
    elif change == "is_served":
        inode.served += 1
    elif change == "is_evicted":
        await operations.cache.evict(file)
    elif change == "is_unchecked":
        file.is_checked = False
    else:
        operations.is_shut = True
    before = side.session.compiled_requests
    await side.opens(0)
    assert side.session.compiled_requests == before
    if change == "is_served":
        inode.served -= 1
    if change == "is_written":
        inode.served += 1


async def test_a_journal_that_is_rewritten_is_pythons(side: Side, tmp_path: Path) -> None:
    journal = side.operations._state.journal
    assert isinstance(journal, Journal)
    await side.opens(0)
    before = side.session.compiled_requests
    journal.begin_compaction()
    await side.opens(1)
    assert side.session.compiled_requests == before
    await side.operations.write_all(journal)
    journal.finish_compaction()
    await side.opens(2)
    assert side.session.compiled_requests == (before or 0) + 1
    assert sorted(replay(tmp_path / "journal", is_live=True).state.handles) == side.open


async def test_a_journal_that_is_full_grows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fusefs.posix.journal.journal.STEP", 8192)
    async with one_side(tmp_path) as side:
        for number in range(300):
            await side.opens(number % FILES)
            if number % 2:
                await side.closes(0)
        assert list(replay(tmp_path / "journal", is_live=True).state.handles) == side.open
        assert (tmp_path / "journal").stat().st_size > 16384


async def test_a_journal_that_the_disk_does_not_take_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fusefs.posix.journal.journal.STEP", 4096)
    async with one_side(tmp_path) as side:

        def is_full(*_: object) -> None:
            raise OSError(errno.ENOSPC, "no room")

        monkeypatch.setattr(os, "posix_fallocate", is_full)
        count = 200  # of 48 bytes each, and all are there before the first is read
        for number in range(count):
            nodeid = side.nodes[number % FILES].nodeid
            side.send(Opcode.OPEN, nodeid, OPEN_IN.pack(os.O_RDONLY, 0))
        errors = [(await side.receive())[0] for _ in range(count)]
        assert errors == [0] * count
        assert not (tmp_path / "journal").exists()
        assert len(side.operations.handles.files) == count


async def test_a_fault_in_what_is_taken_over_ends_the_process(
    side: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one has it from the journal; trio would go on without it."""
    ended = []
    monkeypatch.setattr(os, "_exit", ended.append)

    def fails(*_: object, **__: object) -> None:
        raise ValueError("a fault")

    was_opened = side.operations.opener.was_opened
    side.operations.opener.was_opened = fails  # type: ignore[method-assign]
    await side.opens(0)
    await side.settled()
    assert ended == [1]
    side.operations.opener.was_opened = was_opened  # type: ignore[method-assign]


async def test_other_tasks_have_their_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However much is there to be answered."""
    monkeypatch.setattr(fast_path, "MOST_AT_ONCE", 16)
    async with one_side(tmp_path) as side:
        warm = side.session._warm
        turns: list[int] = []
        is_done = False

        async def other() -> None:
            while not is_done:
                turns.append(warm.compiled.requests)
                await trio.lowlevel.checkpoint()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(other)
            for _ in range(5):
                for _ in range(60):
                    side.send(Opcode.GETATTR, side.nodes[0].nodeid, bytes(16))
                for _ in range(60):
                    await side.receive()
            is_done = True
        most = max(after - before for before, after in itertools.pairwise(turns))
        assert 0 < most <= 2 * 16  # trio takes tasks in any order, each once a round


async def test_many_opens_at_once_are_all_taken(side: Side) -> None:
    """More than are noted at a time, from a kernel that does not wait for replies."""
    count = 3000
    async with trio.open_nursery() as nursery:

        async def send() -> None:
            for number in range(count):
                await trio.lowlevel.wait_writable(side._end)
                nodeid = side.nodes[number % FILES].nodeid
                side.send(Opcode.OPEN, nodeid, OPEN_IN.pack(os.O_RDONLY, 0))

        nursery.start_soon(send)
        for _ in range(count):
            error, answer = await side.receive()
            assert error == 0
            side.open.append(protocol.OPEN_OUT.unpack_from(answer)[0])
    await side.settled()
    assert list(side.operations.handles.files) == side.open
    assert len(set(side.open)) == count


@pytest.mark.disk
async def test_a_read_is_answered_with_the_right_bytes(tmp_path: Path) -> None:
    async with both(tmp_path) as sides:
        for side in sides:
            side.operations.backing.ids.clear()
            side.operations.backing.is_on = False  # type: ignore[misc]
            await side.opens(3)
            fh = side.open[0]
            whole = CONTENT[3]
            for offset, size in ((0, 4096), (100, 50), (3990, 100), (4000, 10), (9000, 1)):
                body = READ_IN.pack(fh, offset, size, 0, 0, 0, 0)
                assert await side.ask(Opcode.READ, 1, body) == (0, whole[offset : offset + size])
        await sides[0].settled()
        assert sides[0].left() == sides[1].left()
        assert sides[0].session.compiled_requests


Step = Callable[[Side], object]

steps = st.lists(
    st.one_of(
        st.tuples(st.just("open"), st.integers(0, FILES - 1)),
        st.tuples(st.just("close"), st.integers(0, 7)),
        st.tuples(st.just("show"), st.integers(0, FILES - 1)),
        st.tuples(st.just("terminal"), st.integers(0, FILES - 1)),
        st.tuples(st.just("attribute"), st.integers(0, len(NAMES) - 1)),
        st.tuples(st.just("sent again"), st.integers(0, FILES - 1)),
        st.tuples(st.just("evict"), st.integers(0, FILES - 1)),
        st.tuples(st.just("expire"), st.integers(0, FILES - 1)),
        st.tuples(st.just("look up"), st.integers(0, FILES - 1)),
        st.tuples(st.just("others run"), st.just(0)),
    ),
    max_size=40,
)


async def take(side: Side, step: str, number: int) -> object:
    """Take one step; returns what a program gets to see of it."""
    inode = side.nodes[number % FILES]
    match step:
        case "open":
            return await side.opens(number)
        case "sent again":
            return await side.opens(number, protocol.UNIQUE_RESEND)
        case "close":
            return await side.closes(number) if side.open else None
        case "show":
            error, shown = await side.ask(Opcode.GETATTR, inode.nodeid, bytes(16))
            return error, shown[16:]  # behind for how long it holds
        case "terminal":
            return await side.ask(Opcode.IOCTL, inode.nodeid, bytes(32))
        case "attribute":
            body = struct.pack("=II", 0, 0) + NAMES[number] + b"\0"
            return await side.ask(Opcode.GETXATTR, inode.nodeid, body)
        case "evict":
            file = side.file(number)
            if file is not None and not file.pins:
                await side.operations.cache.evict(file)
        case "expire":
            inode.valid_until, inode.looked_up = 0.0, False
        case "look up":
            inode.looked_up = True
        case _:
            await side.settled()
    return None


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps)
def test_both_answer_alike(
    tmp_path_factory: pytest.TempPathFactory, taken: list[tuple[str, int]]
) -> None:
    async def compare() -> None:
        async with both(tmp_path_factory.mktemp("alike")) as sides:
            for step, number in taken:
                seen = [await take(side, step, number) for side in sides]
                assert seen[0] == seen[1], (step, number)
                assert sides[0].open == sides[1].open
            for side in sides:
                await eventually_idle(side)
            assert sides[0].left() == sides[1].left()

    with pytest.MonkeyPatch.context() as patch:
        # What is fetched ahead comes when it comes, in one mount before the other, and is pinned
        # until it is registered, so that it is evicted in one alone.
        patch.setattr(siblings, "MOST_UNREAD", 0)
        trio.run(compare)


async def eventually_idle(side: Side) -> None:
    await eventually(lambda: not side.session.waiting)
    await side.settled()
