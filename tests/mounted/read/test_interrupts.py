"""Whose requests are ended when they are interrupted, and who looks at the processes."""

import os
import socket
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
import trio
from trio.testing import MockClock

from fusefs.fuse.interrupts import GRACE_S, SAVING_GRACE_S, Callers, Interrupts
from fusefs.fuse.protocol import Opcode
from fusefs.keeper import protocol
from fusefs.keeper.client import LOOK_LIMIT_S, KeeperClient
from fusefs.linux import callers
from fusefs.linux.callers import EXITS, IS_KILLED, LIVES, UNKNOWN, WAS_KILLED
from fusefs.posix.types import Caller
from tests.support.machine.ordinary_user import NOBODY, public_python
from tests.support.survival.keeping import STANDIN, Kept, needs_fuse, needs_root

PID = 4321


@dataclass
class Request:
    opcode: int = Opcode.READ
    pid: int = PID
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)


class Seen(Callers):
    """Processes whose fate the test decides."""

    def __init__(self, here: int) -> None:
        super().__init__()
        self.here = here

    def fate(self, pid: int) -> int:
        return self.here


class Onlooker:
    """A keeper in a PID namespace."""

    def __init__(self, namespace: int, reported: int) -> None:
        self.namespace = namespace
        self.reported = reported
        self.requested: list[int] = []

    async def look_at_process(self, pid: int) -> int:
        await trio.lowlevel.checkpoint()
        self.requested.append(pid)
        return self.reported


async def ended_after(seen: Callers, request: Request, limit_s: float = 3600.0) -> float:
    """How long an interrupted request goes on, in seconds; infinity beyond the limit."""
    interrupts = Interrupts(seen)
    began = trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(interrupts.run)
        interrupts.note(1, request)
        with trio.move_on_after(limit_s), request.scope:
            await trio.sleep_forever()
        nursery.cancel_scope.cancel()
    return trio.current_time() - began if request.scope.cancel_called else float("inf")


@pytest.mark.parametrize("fate", [IS_KILLED, WAS_KILLED])
async def test_a_request_of_who_is_being_killed_ends_at_once(
    autojump_clock: MockClock, fate: int
) -> None:
    assert await ended_after(Seen(fate), Request()) == 0


@pytest.mark.parametrize("fate", [LIVES, EXITS])
async def test_a_request_of_who_goes_on_goes_on(autojump_clock: MockClock, fate: int) -> None:
    assert await ended_after(Seen(fate), Request()) == float("inf")


async def test_who_is_killed_after_another_signal_is_noticed(autojump_clock: MockClock) -> None:
    seen, request = Seen(LIVES), Request()
    async with trio.open_nursery() as nursery:
        interrupts = Interrupts(seen)
        nursery.start_soon(interrupts.run)
        interrupts.note(1, request)
        await trio.sleep(100)
        assert not request.scope.cancel_called
        seen.here = IS_KILLED  # of which the kernel says nothing more
        await trio.sleep(1)
        assert request.scope.cancel_called
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("opcode", "after_s"),
    [
        (Opcode.READ, GRACE_S),
        (Opcode.OPEN, GRACE_S),
        (Opcode.FLUSH, SAVING_GRACE_S),
        (Opcode.FSYNC, SAVING_GRACE_S),
    ],
)
async def test_without_knowing_whose_it_is_an_interrupted_request_ends_a_little_later(
    autojump_clock: MockClock, opcode: int, after_s: float
) -> None:
    took_s = await ended_after(Seen(UNKNOWN), Request(opcode, pid=0))
    assert after_s <= took_s < after_s + 1


async def test_a_keeper_that_does_not_answer_holds_no_request_up_behind_others(
    autojump_clock: MockClock,
) -> None:
    class Stuck(Onlooker):
        async def look_at_process(self, pid: int) -> int:
            await trio.sleep(LOOK_LIMIT_S)
            return UNKNOWN

    seen = Callers(Stuck(callers.namespace() + 1, UNKNOWN))
    requests = [Request() for _ in range(50)]
    interrupts = Interrupts(seen)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(interrupts.run)
        for unique, request in enumerate(requests):
            interrupts.note(unique, request)
        await trio.sleep(GRACE_S + 2 * LOOK_LIMIT_S)
        assert all(request.scope.cancel_called for request in requests)
        nursery.cancel_scope.cancel()


async def test_a_request_that_was_answered_is_looked_at_no_more(autojump_clock: MockClock) -> None:
    interrupts, request = Interrupts(Seen(UNKNOWN)), Request(pid=0)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(interrupts.run)
        interrupts.note(1, request)
        interrupts.forget(1)
        await trio.sleep(100)
        assert not request.scope.cancel_called
        nursery.cancel_scope.cancel()


def ended_child(how: str) -> int:
    """A child that has ended and shows how, until it is waited for."""
    child = subprocess.Popen(["sh", "-c", how], stderr=subprocess.DEVNULL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    child.returncode = 0  # so that it is not waited for
    return child.pid


@pytest.fixture
def zombie() -> Iterator[Callable[[str], int]]:
    made: list[int] = []

    def make(how: str) -> int:
        made.append(ended_child(how))
        return made[-1]

    yield make
    for pid in made:
        os.waitpid(pid, 0)


@pytest.mark.parametrize(
    ("how", "fate"),
    [
        ("exit 0", EXITS),
        ("exit 9", EXITS),
        ("kill -9 $$", WAS_KILLED),
        ("kill -15 $$", WAS_KILLED),
        ("kill -11 $$", WAS_KILLED),
    ],
)
def test_how_a_process_ended_shows_until_it_is_gone(
    zombie: Callable[[str], int], how: str, fate: int
) -> None:
    assert callers.fate(zombie(how)) == fate


def test_a_process_that_runs_lives_and_one_that_is_not_there_is_not_known() -> None:
    assert callers.fate(os.getpid()) == LIVES
    gone = subprocess.Popen(["true"])
    gone.wait()
    assert {callers.fate(pid) for pid in (gone.pid, 0, 1 << 60)} == {UNKNOWN}


async def test_the_keeper_looks_where_this_process_sees_nothing() -> None:
    keeper = Onlooker(callers.namespace(), WAS_KILLED)
    seen = Callers(keeper)
    assert await seen.find_fate(os.getpid()) == LIVES
    assert await seen.find_fate(0) == UNKNOWN
    assert keeper.requested == []
    assert await seen.find_fate(1 << 60) == WAS_KILLED
    # Numbers of another namespace are other processes' here.
    keeper = Onlooker(callers.namespace() + 1, IS_KILLED)
    seen = Callers(keeper)
    assert seen.fate(os.getpid()) == UNKNOWN
    assert await seen.find_fate(os.getpid()) == IS_KILLED
    assert keeper.requested == [os.getpid()]


async def test_a_keeper_that_does_not_say_that_it_looks_gets_no_request() -> None:
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    keeper = KeeperClient(ours)
    with its:
        keeper.serving(has_resend=True)
        reported = protocol.receive(its, protocol.FROM_DAEMON)
        assert reported.a == 1
        assert await keeper.look_at_process(PID) == UNKNOWN
        with pytest.raises(BlockingIOError):
            its.recv(1, socket.MSG_DONTWAIT)
    ours.close()


@pytest.mark.parametrize("makes_sense", [True, False])
async def test_what_the_keeper_answers_counts_as_far_as_it_makes_sense(makes_sense: bool) -> None:
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    keeper = KeeperClient(ours)

    def answer() -> None:
        while (message := protocol.receive(its, protocol.FROM_DAEMON)) is not None:
            if message.kind == protocol.LOOK and message.b == PID:
                fate = IS_KILLED if makes_sense else 99
                its.send(protocol.pack(protocol.LOOKED, message.a, fate))
                return

    with its:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(keeper.run, lambda: 0, 30.0)
            its.send(protocol.pack(protocol.ABLE, 0, 77))
            its.send(protocol.pack(protocol.QUIESCE))
            await keeper.quiesced.wait()
            assert keeper.namespace == 77
            nursery.start_soon(trio.to_thread.run_sync, answer)
            assert await keeper.look_at_process(PID) == (IS_KILLED if makes_sense else UNKNOWN)
            nursery.cancel_scope.cancel()
    ours.close()


@needs_root
@needs_fuse
def test_a_keeper_tells_a_daemon_of_an_ordinary_user_what_that_cannot_see(
    kept: Kept, zombie: Callable[[str], int]
) -> None:
    pids = [zombie("kill -11 $$"), zombie("exit 1"), os.getpid(), 0, (1 << 64) - 1]
    with public_python() as program:
        kept.start(
            {"attack": "look"},
            command=[program, str(STANDIN)],
            uid=NOBODY,
            gid=NOBODY,
            more_settings={"looked_at": pids},
        )
        reported = kept.attack_facts()["attack"]
        assert reported["namespace"] == callers.namespace()
        assert reported["own"][0] == EXITS  # an ordinary user may not see the exit code
        assert reported["fates"] == [WAS_KILLED, EXITS, LIVES, UNKNOWN, UNKNOWN]
        assert (kept.mountpoint / "plain").read_bytes() == b"plain content"
        kept.clean_up()


def test_programs_without_a_number_are_distinguished_by_their_users() -> None:
    first, second = Caller(1, 1000, 1000, 0), Caller(2, 1001, 1000, 0)
    assert first.program != second.program
    assert first.program == Caller(3, 1000, 5, 0).program
    assert Caller(4, 1000, 1000, PID).program == PID
    # The journal has 32 bits for it, whatever the user.
    assert Caller(5, 0xFFFFFFFF, 0, 0).program <= 0xFFFFFFFF
