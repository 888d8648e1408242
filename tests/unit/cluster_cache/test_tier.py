"""Downloads through the cluster cache: who writes, when, and what is learned from it."""

import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import pytest
import trio
from trio.testing import MockClock

from fusefs.cluster_cache import policy
from fusefs.cluster_cache.block import BLOCK, FRAME, BlockId, Domain
from fusefs.cluster_cache.policy import BreakerState
from fusefs.cluster_cache.tier import PROBE_S, ClusterTier, LookupOutcome, StoredState
from fusefs.store.errors import StaleVersionError, StoreError, UnreachableError, from_status
from fusefs.store.interface import ObjectVersion, Sink, Urgency, demanded

SIZE = 2 * BLOCK + 3 * FRAME + 17
VERSION = ObjectVersion("a/key", '"etag"', SIZE)
CONTENT = os.urandom(SIZE)
DOMAIN = Domain("http://store", "bucket", b"secret")
CHUNK = 1 << 20


class FakeSource:
    """S3: it takes `delay_s` to the first byte, and fails if there is an `error`."""

    def __init__(self) -> None:
        self.ranges: list[tuple[int, int]] = []
        self.delay_s = 0.03
        self.error: Exception | None = None
        self.ended = 0

    def hurry(self) -> None: ...

    async def download(
        self,
        version: ObjectVersion,
        start: int,
        stop: int,
        sink: Sink,
        *,
        priority: Urgency = demanded,
    ) -> None:
        self.ranges.append((start, stop))
        await trio.sleep(self.delay_s)
        if self.error is not None:
            raise self.error
        for at in range(start, stop, CHUNK):
            await sink.write(at, memoryview(CONTENT)[at : min(at + CHUNK, stop)])
            await trio.lowlevel.checkpoint()
        self.ended += 1


async def at_once() -> None:
    await trio.lowlevel.checkpoint()


@dataclass
class FakeBlocks:
    """The bucket of blocks; `before` comes before an answer, `within` after each of its chunks."""

    stored: dict[str, bytes] = field(default_factory=dict)
    before: Callable[[], Awaitable[None]] = at_once
    within: Callable[[], Awaitable[None]] = at_once
    connecting: Callable[[], Awaitable[None]] = at_once
    gets: int = 0
    opening: Exception | None = None

    def fill(self, *numbers: int) -> None:
        for number in numbers:
            block = DOMAIN.block(VERSION, number * BLOCK)
            data = CONTENT[block.start : block.stop]
            self.stored[block.name] = DOMAIN.stored(block, data)

    async def open(self) -> None:
        await trio.lowlevel.checkpoint()
        if self.opening is not None:
            raise self.opening

    def hurry(self) -> None: ...

    async def get(
        self,
        name: str,
        start: int,
        stop: int,
        take: Callable[[memoryview], Awaitable[None]],
        *,
        sent: Callable[[], None],
        priority: Urgency,
    ) -> None:
        self.gets += 1
        await self.connecting()
        sent()
        await self.before()
        if name not in self.stored:
            raise from_status(404, "NoSuchKey", "")
        data = self.stored[name][start:stop]
        for at in range(0, len(data), CHUNK):
            await take(memoryview(data)[at : at + CHUNK])
            await self.within()


class Target:
    """What a download writes into: each byte once, in order."""

    def __init__(self, start: int) -> None:
        self.start = start
        self.data = bytearray()
        self.error: OSError | None = None

    async def open(self) -> int:
        raise AssertionError("nobody writes into a file")

    async def write(self, offset: int, data: memoryview) -> None:
        await trio.lowlevel.checkpoint()
        assert offset == self.start + len(self.data)
        if self.error is not None:
            raise self.error
        self.data += data

    def arrived(self, stop: int, sums: Sequence[tuple[int, int, int]]) -> None:
        raise AssertionError("nothing is written into a file")


@dataclass
class Case:
    source: FakeSource
    blocks: FakeBlocks
    tier: ClusterTier

    async def read(self, start: int = 0, stop: int = SIZE) -> float:
        """Download a range, and return how many seconds it took."""
        target, began = Target(start), trio.current_time()
        await self.tier.download(VERSION, start, stop, target)
        assert target.data == CONTENT[start:stop]
        return trio.current_time() - began

    def counted(self, name: str) -> int:
        return self.tier.counted[name]


@pytest.fixture
async def case(nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch) -> Case:
    async def run_here(work: Callable[[], object]) -> object:
        await trio.lowlevel.checkpoint()
        return work()

    # The clock of these tests does not wait for threads.
    monkeypatch.setattr(trio.to_thread, "run_sync", run_here)
    source, blocks = FakeSource(), FakeBlocks()
    tier = ClusterTier(source, blocks, DOMAIN, nursery)
    await tier.run()
    return Case(source, blocks, tier)


def failing(failure: StoreError) -> Callable[[], Awaitable[None]]:
    async def fail() -> None:
        await trio.lowlevel.checkpoint()
        raise failure

    return fail


def slow(seconds: float) -> Callable[[], Awaitable[None]]:
    async def wait() -> None:
        await trio.sleep(seconds)

    return wait


NO_ANSWER = UnreachableError("no answer", is_retryable=True)
BROKEN = from_status(500, "InternalError", "")


async def test_from_the_first_block_that_is_missing_on_s3_is_read(
    case: Case, autojump_clock: MockClock
) -> None:
    case.blocks.fill(0, 2)
    await case.read()
    assert case.source.ranges == [(BLOCK, SIZE)]
    assert (case.counted("hits"), case.counted("misses")) == (1, 1)
    missed = [BlockId(VERSION, 1), BlockId(VERSION, 2)]
    assert dict(case.tier.missed) == dict.fromkeys(missed, StoredState.UNKNOWN)


@pytest.mark.parametrize("is_late", [False, True], ids=["missing", "late"])
async def test_what_a_cancelled_download_got_from_s3_is_known_to_be_missing(
    case: Case, autojump_clock: MockClock, is_late: bool
) -> None:
    if is_late:
        case.blocks.before = slow(60)
    with trio.CancelScope() as scope:

        class Cancelling(Target):
            async def write(self, offset: int, data: memoryview) -> None:
                await super().write(offset, data)
                if offset + len(data) == BLOCK:
                    scope.cancel()

        target = Cancelling(0)
        await case.tier.download(VERSION, 0, BLOCK, target)
    assert scope.cancelled_caught
    assert target.data == CONTENT[:BLOCK]
    assert list(case.tier.missed) == [BlockId(VERSION, 0)]


async def test_a_late_answer_is_raced_by_s3_after_the_deadline(
    case: Case, autojump_clock: MockClock
) -> None:
    case.blocks.fill(0)
    await case.read(0, 1000)
    for _ in range(200):
        case.tier.deadline.note_first_byte(0.001)
    case.blocks.before = slow(60)
    assert await case.read(0, BLOCK) == pytest.approx(policy.LEAST_S + case.source.delay_s)
    assert case.counted("late") == 1
    assert case.tier.missed[BlockId(VERSION, 0)] is StoredState.DOUBTFUL


async def test_the_late_one_wins_if_it_is_still_the_first(
    case: Case, autojump_clock: MockClock
) -> None:
    case.blocks.fill(0)
    case.source.delay_s = 1.0
    case.blocks.before = slow(0.7)
    assert await case.read(0, BLOCK) == pytest.approx(0.7)
    assert case.source.ended == 0, "the request to S3 was given up"
    assert (case.counted("hits"), case.counted("late")) == (1, 0)
    assert case.tier.deadline.wait_s == policy.MOST_S


@pytest.mark.parametrize(
    ("usual_s", "most"),
    [
        pytest.param(None, 3, id="it was waited for as long as it may be"),
        pytest.param(0.05, 10, id="it was waited for for a while"),
        pytest.param(0.001, 30, id="it was hardly waited for"),
    ],
)
async def test_a_late_answer_is_as_much_of_a_failure_as_it_has_cost(
    case: Case, autojump_clock: MockClock, usual_s: float | None, most: int
) -> None:
    case.blocks.before = slow(60)
    if usual_s is not None:
        case.tier.deadline.note_first_byte(usual_s)
    while case.tier.breaker.is_closed:
        await case.read(0, 1000)
    assert case.counted("late") == pytest.approx(most, abs=1)


async def test_waiting_for_a_connection_counts_to_the_deadline_but_not_as_a_failure(
    case: Case, autojump_clock: MockClock
) -> None:
    case.blocks.connecting = slow(60)
    for _ in range(5):
        assert await case.read(0, 1000) == pytest.approx(policy.MOST_S + case.source.delay_s)
    assert case.tier.breaker.is_closed
    assert case.tier.missed[BlockId(VERSION, 0)] is StoredState.UNKNOWN, "it was not looked at"


async def test_a_block_that_was_late_is_looked_for_again_while_the_others_come(
    case: Case, autojump_clock: MockClock
) -> None:
    block = DOMAIN.block(VERSION, 0)
    assert await case.tier.retry_lookup(block) is LookupOutcome.MISS
    case.blocks.fill(0)
    assert await case.tier.retry_lookup(block) is LookupOutcome.HIT
    case.blocks.before = trio.sleep_forever
    assert await case.tier.retry_lookup(block) is LookupOutcome.FAILED
    assert case.tier.breaker.is_closed
    for _ in range(3):
        await case.read(0, 1000)
    gets = case.blocks.gets
    assert await case.tier.retry_lookup(block) is None
    assert case.blocks.gets == gets


@pytest.mark.parametrize("failure", [NO_ANSWER, BROKEN], ids=["silent", "broken"])
async def test_an_answer_that_breaks_off_goes_on_from_s3_where_it_stopped(
    case: Case, autojump_clock: MockClock, failure: StoreError
) -> None:
    case.blocks.fill(0)
    case.blocks.within = failing(failure)
    await case.read(0, BLOCK)
    assert case.source.ranges == [(3 * FRAME, BLOCK)], "of a chunk of 1 MiB three frames are whole"
    assert case.counted("bytes_read") == 3 * FRAME
    assert case.tier.missed[BlockId(VERSION, 0)] is StoredState.DOUBTFUL


async def test_a_block_that_is_too_short_is_a_bad_one(
    case: Case, autojump_clock: MockClock
) -> None:
    case.blocks.fill(0)
    name = DOMAIN.block(VERSION, 0).name
    case.blocks.stored[name] = case.blocks.stored[name][: FRAME + 20]
    await case.read(0, BLOCK)
    assert case.source.ranges == [(FRAME, BLOCK)]
    assert case.counted("bad") == 1


async def test_what_does_not_answer_is_left_alone_until_a_probe_finds_it(
    case: Case, autojump_clock: MockClock
) -> None:
    case.blocks.before = failing(NO_ANSWER)
    for _ in range(3):
        await case.read(0, 1000)
    assert case.tier.breaker.state is BreakerState.OPEN
    gets = case.blocks.gets
    assert await case.read(0, 1000) == pytest.approx(case.source.delay_s)
    assert case.blocks.gets == gets
    case.blocks.before = at_once
    case.blocks.fill(0)
    await trio.sleep(policy.OPEN_S)
    assert await case.read(0, 1000) == pytest.approx(case.source.delay_s), "no reader waits"
    await trio.sleep(1)
    assert case.tier.breaker.is_closed
    await case.read(0, 1000)
    assert (case.counted("hits"), case.counted("bytes_read")) == (2, 1000), "none read the probe"


async def test_a_bucket_that_is_gone_is_no_miss(case: Case, autojump_clock: MockClock) -> None:
    case.blocks.before = failing(from_status(404, "NoSuchBucket", ""))
    await case.read(0, 1000)
    assert case.counted("misses") == 0
    assert case.counted("refused") == 1


async def test_a_probe_that_hangs_ends(case: Case, autojump_clock: MockClock) -> None:
    case.blocks.before = failing(NO_ANSWER)
    for _ in range(3):
        await case.read(0, 1000)
    case.blocks.before = trio.sleep_forever
    for _ in range(3):
        await trio.sleep(policy.OPEN_S + PROBE_S)
        await case.read(0, 1000)
    assert case.blocks.gets == 6
    assert case.tier.breaker.state is not BreakerState.CLOSED


async def test_it_serves_what_it_has_while_s3_does_not_answer(
    case: Case, autojump_clock: MockClock
) -> None:
    case.blocks.fill(0)
    case.source.error = StoreError("S3 is gone")
    case.source.delay_s = 60
    case.blocks.before = slow(0.7)
    await case.read(0, BLOCK)
    with pytest.raises(StoreError, match="S3 is gone"):
        await case.read(BLOCK, BLOCK + 1000)


async def test_what_s3_says_first_counts(case: Case, autojump_clock: MockClock) -> None:
    case.blocks.fill(0)
    case.source.error = StaleVersionError("the object has been replaced")
    case.blocks.before = slow(5)
    with pytest.raises(StaleVersionError):
        await case.read(0, BLOCK)
    assert trio.current_time() < 1


@pytest.mark.parametrize("pause_s", [60.0, 0.4])
async def test_an_answer_that_stalls_or_crawls_is_given_up(
    case: Case, autojump_clock: MockClock, pause_s: float
) -> None:
    case.blocks.fill(0)
    case.blocks.within = slow(pause_s)
    assert await case.read(0, BLOCK) < 2.1
    [(start, stop)] = case.source.ranges
    assert (start > 0, stop) == (True, BLOCK), "the rest alone"
    assert case.counted("failed") == 1
    assert case.tier.missed[BlockId(VERSION, 0)]


async def test_what_a_library_makes_of_an_answer_ends_that_look_alone(
    case: Case, autojump_clock: MockClock
) -> None:
    async def fail() -> None:
        raise ValueError("invalid literal for int()")

    case.blocks.before = fail
    for _ in range(3):
        await case.read(0, 1000)
    assert case.counted("failed") == 3
    await trio.sleep(policy.OPEN_S)
    await case.read(0, 1000)
    await trio.sleep(1)
    assert case.tier.breaker.state is BreakerState.OPEN, "the probe has failed as well"


async def test_small_answers_and_misses_shorten_the_deadline(
    case: Case, autojump_clock: MockClock
) -> None:
    case.blocks.fill(0)
    case.blocks.before = slow(0.02)
    await case.read(0, 1000)
    assert case.tier.deadline.wait_s == pytest.approx(3 * 0.02)
    case.blocks.before = slow(0.03)
    for _ in range(100):
        await case.read(BLOCK, BLOCK + 1000)
    assert case.tier.deadline.wait_s > 3 * 0.025


@pytest.mark.parametrize("delay_s", [0.0, 60.0])
async def test_an_error_of_the_local_disk_is_the_callers(
    case: Case, autojump_clock: MockClock, delay_s: float
) -> None:
    case.blocks.fill(0)
    case.blocks.before = slow(delay_s)
    target = Target(0)
    target.error = OSError(28, "no space")
    with pytest.raises(OSError, match="no space"):
        await case.tier.download(VERSION, 0, 1000, target)
    assert case.tier.breaker.is_closed


async def test_a_cancelled_download_writes_no_more(case: Case, autojump_clock: MockClock) -> None:
    case.blocks.fill(0)
    case.blocks.within = slow(0.01)
    target = Target(0)
    with trio.move_on_after(0.035):
        await case.tier.download(VERSION, 0, BLOCK, target)
    written = len(target.data)
    assert 0 < written < BLOCK
    await trio.sleep(10)
    assert len(target.data) == written
    assert case.counted("cancelled") == 0, "it tells nothing of the cluster cache"


async def test_before_it_has_answered_nothing_waits_for_it(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    source, blocks = FakeSource(), FakeBlocks(opening=BROKEN)
    tier = ClusterTier(source, blocks, DOMAIN, nursery)
    nursery.start_soon(tier.run)
    await tier.tried.wait()
    case = Case(source, blocks, tier)
    assert await case.read() == pytest.approx(source.delay_s)
    assert (tier.state, blocks.gets) == ("opening", 0)
    blocks.opening = None
    await trio.sleep(600)
    assert tier.state == "opening", "an idle mount does not try"
    await case.read()
    await trio.sleep(1)
    assert tier.state == "closed"


async def test_a_late_miss_leaves_the_request_to_s3_alone(
    case: Case, autojump_clock: MockClock
) -> None:
    case.blocks.before, case.source.delay_s = slow(0.7), 1.0
    assert await case.read(0, 1000) == pytest.approx(policy.MOST_S + case.source.delay_s)
    assert case.source.ranges == [(0, 1000)]
    assert (case.counted("misses"), case.tier.missed[BlockId(VERSION, 0)]) == (
        1,
        StoredState.UNKNOWN,
    )


async def test_a_cancelled_download_that_is_raced_ends_both(
    case: Case, autojump_clock: MockClock
) -> None:
    case.blocks.before, case.source.delay_s = slow(60), 60
    with trio.move_on_after(1):
        await case.read(0, 1000)
    assert trio.current_time() < 2
    assert case.source.ended == 0
