"""The budget of connections: who goes first, how it shrinks and grows."""

import statistics
from collections.abc import Callable
from typing import cast

import pytest
import trio
import trio.testing

from fusefs.store.admission import connection_budget
from fusefs.store.admission.connection_budget import ConnectionBudget
from fusefs.store.interface import Priority
from tests.support.semantics import states

# Of budgets that limit no rate.
NO_TASKS = cast(trio.Nursery, None)


def demand() -> Priority:
    return Priority.DEMAND


def upload() -> Priority:
    return Priority.WRITE


def prefetch() -> Priority:
    return Priority.PREFETCH


async def limited(nursery: trio.Nursery, connections: int, per_s: float) -> ConnectionBudget:
    """A budget with a rate limit, whose next turn is a turn's time away."""
    budget = ConnectionBudget(connections, nursery)
    budget.rate.limit = per_s
    budget.rate._since = budget.rate._grown = trio.current_time()
    async with budget.lease(demand):
        pass
    return budget


class Holders:
    """Tasks that take a connection each, in a known order, and hold it until released."""

    def __init__(self, budget: ConnectionBudget, nursery: trio.Nursery) -> None:
        self._budget = budget
        self._nursery = nursery
        self._scopes: dict[str, trio.CancelScope] = {}
        self._ends: dict[str, trio.Event] = {}
        self.holding: list[str] = []

    async def start(
        self, name: str, priority: Callable[[], Priority] = demand, key: str = ""
    ) -> None:
        self._scopes[name] = trio.CancelScope()
        self._ends[name] = trio.Event()
        self._nursery.start_soon(self._hold, name, priority, key)
        await trio.testing.wait_all_tasks_blocked()

    async def _hold(self, name: str, priority: Callable[[], Priority], key: str) -> None:
        with self._scopes[name]:
            async with self._budget.lease(priority, key):
                self.holding.append(name)
                try:
                    await self._ends[name].wait()
                finally:
                    self.holding.remove(name)

    async def end(self, name: str) -> None:
        self._ends[name].set()
        await trio.testing.wait_all_tasks_blocked()

    async def cancel(self, name: str) -> None:
        self._scopes[name].cancel()
        await trio.testing.wait_all_tasks_blocked()


async def test_a_prefetch_that_a_reader_has_joined_goes_as_a_demand(nursery: trio.Nursery) -> None:
    priority = Priority.PREFETCH
    budget = ConnectionBudget(1, nursery)
    holders = Holders(budget, nursery)
    await holders.start("running", demand)
    await holders.start("other prefetch", prefetch)
    await holders.start("joined", lambda: priority)
    priority = Priority.DEMAND
    budget.reprioritize()
    await holders.end("running")
    assert holders.holding == ["joined"]


async def test_a_prefetch_that_its_reader_has_left_goes_as_a_prefetch(
    nursery: trio.Nursery,
) -> None:
    priority = Priority.DEMAND
    holders = Holders(ConnectionBudget(1, nursery), nursery)
    await holders.start("running", demand)
    await holders.start("left", lambda: priority)
    await holders.start("demand", demand)
    priority = Priority.PREFETCH
    await holders.end("running")
    assert holders.holding == ["demand"]
    await holders.end("demand")
    assert holders.holding == ["left"]


async def test_prefetches_leave_connections_for_the_next_demand(nursery: trio.Nursery) -> None:
    holders = Holders(ConnectionBudget(8, nursery), nursery)
    for number in range(8):
        await holders.start(f"prefetch {number}", prefetch)
    assert len(holders.holding) == 6
    await holders.start("demand", demand)
    assert "demand" in holders.holding


async def test_cancelling_a_waiter_costs_no_other_a_turn(nursery: trio.Nursery) -> None:
    budget = ConnectionBudget(1, nursery)
    holders = Holders(budget, nursery)
    for name in "abc":
        await holders.start(name, demand)
    await holders.cancel("b")
    await holders.end("a")
    assert holders.holding == ["c"]
    await holders.end("c")
    assert budget.in_use == 0


async def test_a_turn_that_comes_with_the_cancellation_is_passed_on(nursery: trio.Nursery) -> None:
    budget = ConnectionBudget(1, nursery)
    holders = Holders(budget, nursery)
    for name in "abc":
        await holders.start(name, demand)
    holders._ends["a"].set()
    holders._scopes["b"].cancel()
    await trio.testing.wait_all_tasks_blocked()
    assert holders.holding == ["c"]
    assert budget.in_use == 1


async def test_many_throttled_answers_at_once_count_as_one(
    mock_clock: trio.testing.MockClock,
) -> None:
    budget = ConnectionBudget(32, NO_TASKS)
    for _ in range(20):
        budget.note_throttled()
    assert budget.allowed == 16
    mock_clock.jump(connection_budget.BACK_OFF_EVERY_S)
    budget.note_throttled()
    assert budget.allowed == 8


async def test_a_store_that_refuses_everything_is_soon_sent_little(
    autojump_clock: trio.testing.MockClock,
) -> None:
    budget = ConnectionBudget(64, NO_TASKS)
    sent: list[float] = []

    async def send() -> None:
        while True:
            async with budget.lease(demand):
                sent.append(trio.current_time())
                await trio.sleep(0.03)
            budget.note_throttled()

    with trio.move_on_after(2.0):
        async with trio.open_nursery() as nursery:
            for _ in range(64):
                nursery.start_soon(send)
    began = sent[0]
    # One at a time after a second; 64 at a time are 2,133 requests a second.
    assert sum(at - began < 1.0 for at in sent) < 400
    assert sum(at - began >= 1.0 for at in sent) <= 40


async def test_a_round_of_successes_allows_one_more() -> None:
    budget = ConnectionBudget(16, NO_TASKS)
    budget.note_throttled()
    for _ in range(9):
        budget.note_success()
    assert budget.allowed == 9


async def test_who_waits_goes_on_when_more_are_allowed(nursery: trio.Nursery) -> None:
    budget = ConnectionBudget(2, nursery)
    budget.note_throttled()
    holders = Holders(budget, nursery)
    await holders.start("a", demand)
    await holders.start("b", demand)
    assert holders.holding == ["a"]
    budget.note_success()
    await trio.testing.wait_all_tasks_blocked()
    assert holders.holding == ["a", "b"]


async def test_a_waiting_prefetch_that_a_reader_joins_takes_a_kept_connection(
    nursery: trio.Nursery,
) -> None:
    priority = Priority.PREFETCH
    budget = ConnectionBudget(8, nursery)
    holders = Holders(budget, nursery)
    for number in range(6):
        await holders.start(f"prefetch {number}", prefetch)
    await holders.start("joined", lambda: priority)
    assert "joined" not in holders.holding
    priority = Priority.DEMAND
    budget.reprioritize()
    await trio.testing.wait_all_tasks_blocked()
    assert "joined" in holders.holding


async def test_objects_take_turns(nursery: trio.Nursery) -> None:
    holders = Holders(ConnectionBudget(1, nursery), nursery)
    await holders.start("running")
    for name in ("large 1", "large 2", "large 3"):
        await holders.start(name, key="large")
    await holders.start("small", key="small")
    order = []
    for _ in range(5):
        (holder,) = holders.holding
        order.append(holder)
        await holders.end(holder)
    assert order == ["running", "large 1", "small", "large 2", "large 3"]


@pytest.mark.parametrize("others", [prefetch, upload])
async def test_a_load_of_demands_that_never_ends_holds_nothing_up_for_ever(
    nursery: trio.Nursery, others: Callable[[], Priority]
) -> None:
    most = connection_budget.PASSED_MOST
    budget = ConnectionBudget(8, nursery)
    holders = Holders(budget, nursery)
    for number in range(8 + 2 * most):
        await holders.start(f"{number}")
    await holders.start("other 1", others)
    await holders.start("other 2", others)
    for number in range(most):
        assert "other 1" not in holders.holding
        await holders.end(f"{number}")
    await holders.end(f"{most}")
    assert "other 1" in holders.holding
    for number in range(most + 1, 2 * most):
        await holders.end(f"{number}")
    # Of the connections that are kept for demands it has one alone.
    assert "other 2" not in holders.holding


async def test_a_turn_under_a_rate_limit_goes_to_the_most_urgent(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    order: list[str] = []
    budget = await limited(nursery, 64, 10.0)

    async def request(name: str, priority: Callable[[], Priority], key: str = "") -> None:
        async with budget.lease(priority, key):
            order.append(name)

    async with trio.open_nursery() as inner:
        for name, priority in (("prefetch", prefetch), ("upload", upload)):
            inner.start_soon(request, name, priority)
            await trio.sleep(0.001)
        for number in range(3):
            inner.start_soon(request, f"part {number}", demand, "large")
            await trio.sleep(0.001)
        inner.start_soon(request, "small", demand, "small")
    assert order == ["part 0", "small", "part 1", "part 2", "upload", "prefetch"]
    assert budget.in_use == 0


async def test_requests_under_a_rate_limit_are_evenly_spaced_whoever_is_cancelled(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    budget = await limited(nursery, 64, 10.0)
    began = trio.current_time()
    times: list[float] = []

    async def request(limit_s: float) -> None:
        with trio.move_on_after(limit_s):
            async with budget.lease(demand):
                times.append(trio.current_time() - began)

    async with trio.open_nursery() as inner:
        for limit_s in (0.05, 9.0, 0.15, 9.0, 9.0, 0.05):
            inner.start_soon(request, limit_s)
            await trio.testing.wait_all_tasks_blocked()
    assert times == pytest.approx([0.1, 0.2, 0.3], rel=0.01)
    assert budget.in_use == 0


@states(
    "While it does, what programs wait for goes first, and the files take turns: beside a reader"
    " of a large file, readers of small ones wait at most twice as long."
)
async def test_readers_of_small_files_wait_little_longer_beside_a_reader_of_a_large_one(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    async def median_s(parts: int) -> float:
        budget = await limited(nursery, 32, 100.0)
        waited: list[float] = []

        async def read(reader: int) -> None:
            for number in range(100):
                at = trio.current_time()
                async with budget.lease(demand, f"{reader} {number}"):
                    await trio.sleep(0.03)
                waited.append(trio.current_time() - at)

        async def read_part() -> None:
            while True:
                async with budget.lease(demand, "large"):
                    await trio.sleep(0.03)

        async with trio.open_nursery() as large:
            for _ in range(parts):
                large.start_soon(read_part)
            async with trio.open_nursery() as readers:
                for reader in range(4):
                    readers.start_soon(read, reader)
            large.cancel_scope.cancel()
        return statistics.median(waited)

    assert await median_s(64) <= 2 * await median_s(0)


async def test_a_turn_that_comes_before_its_timer_runs_is_not_missed(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    class Late:
        def start_soon(self, work: Callable[[], object]) -> None:
            autojump_clock.jump(5.0)
            nursery.start_soon(work)

    budget = await limited(cast(trio.Nursery, Late()), 1, 1.0)
    with trio.fail_after(60):
        async with budget.lease(demand):
            pass
