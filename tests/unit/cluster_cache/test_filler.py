"""What is stored in the cluster cache: whole blocks, checked, in the background or for a job."""

from collections import OrderedDict
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from fusefs.cache.cached_file import CacheFile
from fusefs.cache.downloader import Downloader
from fusefs.cluster_cache import filler
from fusefs.cluster_cache.block import BLOCK, Block, BlockId, Domain
from fusefs.cluster_cache.filler import Filler
from fusefs.cluster_cache.tier import ClusterTier, LookupOutcome, StoredState
from fusefs.store.errors import from_status
from fusefs.store.interface import ObjectVersion
from tests.support.local_cache import Parts, cache_in
from tests.support.waiting import eventually

DOMAIN = Domain("http://store", "bucket", b"secret")
VERSION = ObjectVersion("object", '"etag"', BLOCK + 300_000)


@dataclass
class FakeTier:
    missed: OrderedDict[BlockId, StoredState] = field(default_factory=OrderedDict)
    is_open: bool = True
    tried: trio.Event = field(default_factory=trio.Event)
    outcome: LookupOutcome | None = None

    async def retry_lookup(self, _block: Block) -> LookupOutcome | None:
        await trio.lowlevel.checkpoint()
        return self.outcome


@dataclass
class FakeStore:
    """Where blocks are stored; puts wait for `gate`, and fail with `error`."""

    blocks: dict[str, bytes] = field(default_factory=dict)
    replaced: list[str] = field(default_factory=list)
    error: Exception | None = None
    gate: trio.Event = field(default_factory=trio.Event)
    most: int = 0
    under_way: int = 0
    attempts: int = 0

    async def put(self, name: str, body: bytes, *, overwrites: bool) -> bool:
        self.under_way += 1
        self.attempts += 1
        self.most = max(self.most, self.under_way)
        await self.gate.wait()
        self.under_way -= 1
        if self.error is not None:
            raise self.error
        if name in self.blocks and not overwrites:
            return False
        if overwrites:
            self.replaced.append(name)
        self.blocks[name] = body
        return True


@dataclass
class Case:
    parts: Parts
    tier: FakeTier
    store: FakeStore
    filler: Filler

    async def fetch(
        self, version: ObjectVersion = VERSION, state: StoredState = StoredState.UNKNOWN
    ) -> None:
        """Have an object in the cache, of which everything came from S3."""
        for start in range(0, version.size, BLOCK):
            self.tier.missed[BlockId(version, start // BLOCK)] = state
        await self.parts.fetch(version)

    def names(self, version: ObjectVersion = VERSION) -> list[str]:
        return [DOMAIN.block(version, start).name for start in range(0, version.size, BLOCK)]

    def pinned(self, version: ObjectVersion = VERSION) -> CacheFile:
        return self.parts.cache.pin(version)


@pytest.fixture
async def case(tmp_path: Path) -> AsyncIterator[Case]:
    async with cache_in(tmp_path / "cache") as parts, trio.open_nursery() as nursery:
        tier, store = FakeTier(), FakeStore()
        tier.tried.set()
        store.gate.set()

        def is_busy() -> bool:
            return parts.downloader.under_way > 0

        made = Filler(cast("ClusterTier", tier), store, DOMAIN, parts.cache, is_busy)
        parts.downloader = Downloader(parts.bucket, parts.evictor, nursery, on_fetched=made.fetched)
        nursery.start_soon(made.run)
        yield Case(parts, tier, store, made)
        nursery.cancel_scope.cancel()


async def test_what_came_from_the_cluster_cache_is_not_stored(case: Case) -> None:
    await case.parts.fetch(VERSION)
    await wait_all_tasks_blocked()
    assert case.store.attempts == 0


async def test_part_of_a_block_is_not_stored(case: Case) -> None:
    case.tier.missed[BlockId(VERSION, 0)] = StoredState.UNKNOWN
    await case.parts.read(VERSION, BLOCK // 2, BLOCK // 2 + 1000)
    await case.parts.quiet()
    await wait_all_tasks_blocked()
    assert case.store.attempts == 0
    assert case.tier.missed, "it may become whole"


async def test_what_a_reader_left_between_the_last_byte_and_the_end_is_stored(case: Case) -> None:
    version = ObjectVersion("small", '"etag"', 300_000)
    [name] = case.names(version)
    case.tier.missed[BlockId(version, 0)] = StoredState.UNKNOWN
    file = case.pinned(version)
    [download] = case.parts.downloader.want(file, 0, version.size)
    case.parts.bucket.at_end = download.unwant
    await case.parts.quiet()
    assert download.error is not None, "it was cancelled"
    assert file.is_complete
    await eventually(lambda: case.store.blocks)
    assert list(case.store.blocks) == [name]
    case.parts.cache.unpin(file)


@pytest.mark.parametrize(
    ("outcome", "attempts", "replaced"),
    [
        pytest.param(LookupOutcome.HIT, 0, 0, id="it can be read"),
        pytest.param(None, 2, 0, id="all are late"),
        pytest.param(LookupOutcome.MISS, 2, 0, id="it has gone"),
        pytest.param(LookupOutcome.FAILED, 2, 2, id="it alone hangs"),
        pytest.param(LookupOutcome.REFUSED, 2, 2, id="its disk is lost"),
    ],
)
async def test_what_was_late_is_replaced_only_if_it_cannot_be_read(
    case: Case, outcome: LookupOutcome | None, attempts: int, replaced: int
) -> None:
    for name in case.names():
        case.store.blocks[name] = b"as it was stored"
    case.tier.outcome = outcome
    await case.fetch(state=StoredState.DOUBTFUL)
    ended = "stored" if replaced else "present"
    await eventually(lambda: case.filler.counted[ended] == 2)
    assert (case.store.attempts, len(case.store.replaced)) == (attempts, replaced)


async def test_two_blocks_are_stored_at_a_time(case: Case) -> None:
    case.store.gate = trio.Event()
    versions = [ObjectVersion(f"small{number}", '"etag"', 1000) for number in range(5)]
    for version in versions:
        await case.fetch(version)
    await eventually(lambda: case.store.under_way == 2)
    await wait_all_tasks_blocked()
    assert (case.store.most, case.filler.queued) == (2, 5)
    case.store.gate.set()
    await eventually(lambda: case.filler.counted["stored"] == 5)
    assert case.store.most == 2


def test_the_fewer_processors_there_are_the_longer_the_filler_rests() -> None:
    assert filler.rest_after(0.1, BLOCK, 2) == pytest.approx(0.1 * (2 / 0.06 - 1))
    assert filler.rest_after(0.1, BLOCK, 64) == pytest.approx(filler.REST_S)
    assert filler.rest_after(0.001, 1000, 64) == filler.SMALL_REST_S
    assert filler.rest_after(15.0, BLOCK, 2) == filler.MOST_REST_S


async def test_what_does_not_fit_into_the_queue_is_dropped(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filler, "MOST_QUEUED", 2)
    case.store.gate = trio.Event()
    for number in range(6):
        await case.fetch(ObjectVersion(f"small{number}", '"etag"', 1000))
        await wait_all_tasks_blocked()
    assert case.filler.counted["dropped"] == 2, "two are under way, two wait"
    case.store.gate.set()
    await eventually(lambda: case.filler.counted["stored"] == 4)


async def test_a_file_that_has_gone_is_passed_over(case: Case) -> None:
    case.store.gate = trio.Event()
    others = [ObjectVersion(f"small{number}", '"etag"', 1000) for number in range(2)]
    for version in others:
        await case.fetch(version)
    await eventually(lambda: case.store.under_way == 2)
    await case.fetch()
    gone = case.parts.cache.find(VERSION)
    assert gone is not None
    await case.parts.cache.evict(gone)
    await case.parts.fetch(VERSION)  # by a reader, into another file
    case.store.gate.set()
    await eventually(lambda: case.filler.counted["lost"] == 2)
    assert case.store.attempts == 2
    found = case.parts.cache.find(VERSION)
    assert found is not gone
    assert found.is_complete


async def test_after_a_failure_nothing_is_sent_for_a_while(case: Case) -> None:
    case.store.error = from_status(507, "InsufficientStorage", "")
    await case.fetch(ObjectVersion("one", '"etag"', 1000))
    await eventually(lambda: case.filler.counted["failed"] == 1)
    await case.fetch(ObjectVersion("other", '"etag"', 1000))
    await wait_all_tasks_blocked()
    assert (case.store.attempts, case.filler.queued) == (1, 1)


async def test_a_job_learns_what_was_not_taken_and_does_not_wait_for_the_next_time(
    case: Case,
) -> None:
    case.store.error = from_status(500, "InternalError", "")
    await case.fetch()
    file = case.pinned()
    await eventually(lambda: case.filler.counted["failed"] > 0)
    await case.fetch(ObjectVersion("other", '"etag"', 1000))
    other = case.pinned(ObjectVersion("other", '"etag"', 1000))
    assert await case.filler.finish(other, 0, 1000) == 1
    case.parts.cache.unpin(file)
    case.parts.cache.unpin(other)


class Job:
    """Has the only place of a job once `begun`, until `end` is called."""

    def __init__(self, case: Case, nursery: trio.Nursery) -> None:
        self._case = case
        self._slots = trio.Semaphore(0)
        case.filler._job_slots = self._slots
        self._nursery = nursery
        self.failed: int | None = None

    async def waits_for(self, version: ObjectVersion) -> None:
        file = self._case.pinned(version)

        async def run() -> None:
            self.failed = await self._case.filler.finish(file, 0, version.size)
            self._case.parts.cache.unpin(file)

        self._nursery.start_soon(run)
        await wait_all_tasks_blocked()

    async def gets_its_place(self) -> None:
        self._slots.release()
        await wait_all_tasks_blocked()


SMALL = [ObjectVersion(f"small{number}", '"etag"', 1000) for number in range(4)]


async def test_a_job_waits_for_a_block_that_the_filler_began_meanwhile(
    case: Case, nursery: trio.Nursery
) -> None:
    first = case.store.gate = trio.Event()
    for version in SMALL[:3]:
        await case.fetch(version)
    await eventually(lambda: case.store.under_way == 2)
    job = Job(case, nursery)
    await job.waits_for(SMALL[2])
    case.store.gate = trio.Event()
    first.set()
    await eventually(lambda: case.store.attempts == 3)
    await job.gets_its_place()
    assert job.failed is None, "it is being stored"
    case.store.error = from_status(500, "InternalError", "")
    case.store.gate.set()
    await eventually(lambda: job.failed == 1)


async def test_a_job_learns_that_its_block_was_dropped(
    case: Case, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filler, "MOST_QUEUED", 1)
    case.store.gate = trio.Event()
    for version in SMALL[:3]:
        await case.fetch(version)
    job = Job(case, nursery)
    await job.waits_for(SMALL[2])
    await case.fetch(SMALL[3])
    assert case.filler.counted["dropped"] == 1
    await job.gets_its_place()
    assert job.failed == 1


async def test_two_downloads_that_share_a_block_have_it_stored_once(case: Case) -> None:
    """The first to end finds the block whole, for the other has written all but not ended."""
    case.store.gate = trio.Event()
    for version in SMALL[:2]:
        await case.fetch(version)
    await case.parts.fetch(SMALL[2])
    file = case.pinned(SMALL[2])
    block = BlockId(SMALL[2], 0)
    for start, stop, state in ((0, 500, StoredState.UNKNOWN), (500, 1000, StoredState.CORRUPT)):
        case.tier.missed[block] = state
        case.filler.fetched(file, start, stop)
    assert (case.filler.queued, case.filler.counted["dropped"]) == (3, 0)
    case.store.gate.set()
    await eventually(lambda: case.filler.counted["stored"] == 3)
    assert case.store.replaced == case.names(SMALL[2]), "what either of them knows counts"
    case.parts.cache.unpin(file)
