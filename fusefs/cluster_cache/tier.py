"""Downloads through the cluster cache, which sends the blocks that it has; S3 sends the rest.

The order is local disk (cache/), cluster cache, S3. Failures of the cluster cache never fail a
download. If its answer does not begin in time, S3 is requested as well. If its answer breaks off or
is wrong, S3 continues at that point. After the first block that is not there, the rest of the
download comes from S3 (policy.py bounds the cost).
"""

from __future__ import annotations

import enum
import logging
import math
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import trio

from fusefs.cluster_cache.block import (
    FRAME,
    TAG,
    BadBlockError,
    Block,
    BlockId,
    Domain,
    FrameReader,
    block_ids,
)
from fusefs.cluster_cache.policy import (
    LEAST_S,
    MOST_S,
    OPEN_S,
    USELESS,
    Breaker,
    BreakerState,
    Deadline,
    Sampling,
)
from fusefs.cluster_cache.remote import BlockBucket
from fusefs.store.errors import NotFoundError, StoreError
from fusefs.store.interface import (
    NewFile,
    ObjectVersion,
    Priority,
    Sink,
    Source,
    Urgency,
    WholeFileSink,
    demanded,
)

logger = logging.getLogger("fusefs.cluster_cache")

# Most remembered blocks of which a part came from S3, each until a file has the whole block.
MOST_MISSED = 4096
# Time limit of a probe, for which no reader waits.
PROBE_S = 2.0
# Interval of attempts to open the bucket while it can't be listed and reads go on.
OPEN_EVERY_S = 30.0
# Slowest rate (bytes a second) of an answer that has begun; S3 sends the rest of a slower one.
LEAST_RATE = 8 << 20
# Interval of log lines about wrong blocks.
LINE_EVERY_S = 60.0


class LookupOutcome(enum.StrEnum):
    """The result of a lookup in the cluster cache, as `status` and metrics count it."""

    HIT = "hits"
    MISS = "misses"
    LATE = "late"  # the first bytes came from S3
    FAILED = "failed"  # no answer, or an incomplete one
    REFUSED = "refused"  # the server answered with an error
    BAD = "bad"  # other bytes than those that were stored
    CANCELLED = "cancelled"


# Outcomes whose duration predicts the duration of other lookups.
_TIMED = (LookupOutcome.HIT, LookupOutcome.MISS, LookupOutcome.LATE)
# Outcomes after which the stored block may be useless.
_DOUBTFUL = (LookupOutcome.LATE, LookupOutcome.FAILED, LookupOutcome.REFUSED)


class StoredState(enum.IntEnum):
    """The state of a stored block after a lookup, when S3 had to send the block.

    `UNKNOWN`: the block was not there, or no request was sent. `DOUBTFUL`: no answer in time, or an
    incomplete one, because of the block or the server's load. `CORRUPT`: other bytes than those
    that were stored.
    """

    UNKNOWN = 0
    DOUBTFUL = 1
    CORRUPT = 2


class _LostError(Exception):
    """This side of the race has lost: the other side had bytes first."""


class _Race:
    """Decides whether S3 or the cluster cache writes a range: the first side that has bytes."""

    def __init__(self) -> None:
        self.winner = ""
        self._scopes: dict[str, trio.CancelScope] = {}

    @contextmanager
    def entered(self, name: str) -> Iterator[None]:
        """Enter one side into the race; the `with` body is cancelled if the other side wins."""
        with trio.CancelScope() as scope:
            self._scopes[name] = scope
            if self.winner not in ("", name):
                scope.cancel()
            yield

    def leave(self, name: str) -> None:
        """Cancel the `with` body of the side `name`."""
        self._scopes[name].cancel()

    def has(self, name: str) -> bool:
        """Note that the side `name`, "s3" or "cluster", has bytes; True if it is the first."""
        if not self.winner:
            self.winner = name
            for other, scope in self._scopes.items():
                if other != name:
                    scope.cancel()
        return self.winner == name


class _SinkOfS3:
    """Passes bytes from S3 on to the download's sink, unless the cluster cache had bytes first."""

    def __init__(self, race: _Race, sink: Sink) -> None:
        self._race = race
        self._sink = sink

    async def open(self) -> int | NewFile:
        # The cluster cache may write to the file at the same time: both have the same bytes.
        return await self._sink.open()

    async def write(self, offset: int, data: memoryview) -> None:
        if not self._race.has("s3"):
            raise _LostError
        await self._sink.write(offset, data)

    def arrived(self, stop: int, sums: Sequence[tuple[int, int, int]]) -> None:
        if self._race.has("s3"):
            self._sink.arrived(stop, sums)


class _Nowhere(WholeFileSink):
    """A sink that drops the bytes of a lookup for which no reader waits."""

    async def write(self, offset: int, data: memoryview) -> None:
        pass


class _Lookup:
    """One GET of the bytes that a download needs of one block, with its result."""

    def __init__(self, domain: Domain, block: Block, start: int, stop: int, sink: Sink) -> None:
        self.block = block
        self.position = start
        self.race = _Race()
        self.is_sent = False
        # Set once the first bytes have arrived, or never will.
        self.begun = trio.Event()
        self._is_on_its_way = trio.Event()  # set once the GET has a connection, or has ended
        self._ended = trio.Event()
        self.outcome = LookupOutcome.CANCELLED
        self.why = ""
        # Seconds to the first bytes.
        self.took_s: float | None = None
        # Seconds of waiting before S3 was requested.
        self.waited_s = 0.0
        self.error: Exception | None = None
        self._stop = stop
        self._start = start
        self._is_given_up = False
        self._is_writing = False
        self._sink = sink
        self._frames = FrameReader(domain, block, start, stop)
        self._began = trio.current_time()

    async def run(self, blocks: BlockBucket, priority: Urgency) -> None:
        """Get the block from the cluster cache, write it to the sink, and set `outcome`."""
        first, last = self.block.stored_range(self._start, self._stop)
        try:
            with self.race.entered("cluster"):
                await blocks.get(
                    self.block.name,
                    first,
                    last,
                    self._take,
                    sent=self._note_sent,
                    priority=priority,
                )
                if not self._frames.is_complete:
                    raise BadBlockError(f"{self.block.name} is too short")
                self.outcome = LookupOutcome.HIT
            if self._is_given_up or self.race.winner == "s3":
                self._note_lost()
        except Exception as error:
            self._judge(error)
        finally:
            self._end()

    def _note_lost(self) -> None:
        self.outcome = LookupOutcome.LATE
        if self._is_given_up:
            self.outcome, self.why = LookupOutcome.FAILED, "its answer is too slow"

    def _judge(self, error: Exception) -> None:
        """Set the outcome of a lookup that ended with an error."""
        if isinstance(error, _LostError):
            self._note_lost()
        elif isinstance(error, BadBlockError):
            self.outcome, self.why = LookupOutcome.BAD, str(error)
        elif isinstance(error, StoreError):
            self.outcome, self.why = _classify(error), error.in_full
        elif self.error is None:  # unforeseen: it fails only this lookup
            self.outcome, self.why = LookupOutcome.FAILED, repr(error)
            logger.warning("an answer of the cluster cache can't be read", exc_info=error)

    def _end(self) -> None:
        if self.took_s is None and self.outcome in _TIMED:
            self.took_s = trio.current_time() - self._began
        self._is_on_its_way.set()
        self.begun.set()
        self._ended.set()

    def _note_sent(self) -> None:
        self._began = trio.current_time()
        self.is_sent = True
        self._is_on_its_way.set()

    async def _take(self, chunk: memoryview) -> None:
        """Check bytes that arrived, and write them to the sink."""
        is_small = len(chunk) <= FRAME + TAG
        check = partial(self._check, chunk)
        found, bad = check() if is_small else await trio.to_thread.run_sync(check)
        for offset, data in found:
            if not self.begun.is_set():
                if not self.race.has("cluster"):
                    raise _LostError
                self.took_s = trio.current_time() - self._began
                self.begun.set()
            self._is_writing = True
            try:
                await self._sink.write(offset, data)
            except Exception as error:
                self.error = error  # an error of the local disk: the caller handles it
                raise
            finally:
                self._is_writing = False
            self.position = offset + len(data)
        if bad is not None:
            raise bad

    def _check(
        self, chunk: memoryview
    ) -> tuple[list[tuple[int, memoryview]], BadBlockError | None]:
        """Return (frames completed by `chunk`, a bad frame's error or None); < 1 ms for a frame."""
        found = []
        try:
            for frame in self._frames.feed(chunk):
                found.append(frame)
        except BadBlockError as error:
            return found, error
        return found, None

    async def begins_within(self, seconds: float) -> bool:
        """Wait for the first bytes or the end; return False if neither came in time."""
        deadline = trio.current_time() + seconds
        with trio.move_on_at(deadline):
            await self._is_on_its_way.wait()
        if self.is_sent:
            with trio.move_on_at(max(deadline, self._began + LEAST_S)):
                await self.begun.wait()
        return self.begun.is_set()

    async def ends_in_time(self) -> None:
        """Wait for the end; give up an answer that has begun but is too slow."""
        limit = trio.current_time() + MOST_S + (self._stop - self.position) / LEAST_RATE
        while not self._ended.is_set():
            before = self.position
            with trio.move_on_after(MOST_S):
                await self._ended.wait()
            is_slow = self.position == before or trio.current_time() >= limit
            if is_slow and not self._is_writing:  # not while the local disk is slow
                self.give_up()
                await self._ended.wait()

    @property
    def written(self) -> int:
        """The number of bytes written by this lookup."""
        return self.position - self._start

    @property
    def stored_state(self) -> StoredState:
        """The state of the stored block, known from this lookup's outcome; valid after its end."""
        if self.outcome is LookupOutcome.BAD:
            return StoredState.CORRUPT
        is_doubtful = self.is_sent and self.outcome in _DOUBTFUL
        return StoredState.DOUBTFUL if is_doubtful else StoredState.UNKNOWN

    def give_up(self) -> None:
        """End the lookup; the bytes that it has written remain."""
        if not self._ended.is_set():
            self._is_given_up = True
            self.race.leave("cluster")


def _classify(error: StoreError) -> LookupOutcome:
    if isinstance(error, NotFoundError) and error.s3_code != "NoSuchBucket":
        return LookupOutcome.MISS
    if error.status == 416:  # the block is shorter than it should be
        return LookupOutcome.BAD
    return LookupOutcome.REFUSED if error.status else LookupOutcome.FAILED


async def _read_from_s3(
    lookup: _Lookup, from_source: Callable[[int, Sink], Awaitable[None]], sink: Sink
) -> Exception | None:
    """Read the rest of a download from S3 while its `lookup` still runs; return the error or None.

    Ends early if the lookup has bytes first. If S3 fails before that, the lookup is given up.
    """
    try:
        with lookup.race.entered("s3"):
            await from_source(lookup.position, _SinkOfS3(lookup.race, sink))
    except _LostError:
        pass
    except Exception as error:
        if lookup.race.winner != "cluster":
            lookup.give_up()
        return error
    return None


class ClusterTier:
    """A `Source` that looks in the cluster cache before `source`. Belongs to the event loop.

    `missed` has the blocks of which some bytes came from `source`, each with the state of the copy
    in the cluster cache.
    """

    def __init__(
        self, source: Source, blocks: BlockBucket, domain: Domain, nursery: trio.Nursery
    ) -> None:
        self._source = source
        self._blocks = blocks
        self._domain = domain
        self._nursery = nursery
        self.is_open = False
        self.tried = trio.Event()
        self.deadline = Deadline()
        self.breaker = Breaker()
        self.sampling = Sampling()
        self.counted: Counter[str] = Counter()
        self.missed: OrderedDict[BlockId, StoredState] = OrderedDict()
        self._next_line = -math.inf
        self._wanted = trio.Event()
        # The reason why the cluster cache can't be used now.
        self.why = "not tried yet"

    @property
    def state(self) -> str:
        """The state: `opening` until the bucket has been opened, then the breaker's state."""
        return self.breaker.state.value if self.is_open else "opening"

    def hurry(self) -> None:
        self._source.hurry()
        self._blocks.hurry()

    async def run(self) -> None:
        """Open the bucket of blocks; try again, while the mount reads, until the bucket answers."""
        while True:
            try:
                await self._blocks.open()
            except Exception as error:  # no exception may escape: S3 has everything
                why = error.in_full if isinstance(error, StoreError) else repr(error)
                if self.why != why:
                    logger.warning("the cluster cache can't be used: %s", why)
                self.why = why
            else:
                self.is_open, self.why = True, ""
                self.tried.set()
                return
            self.tried.set()
            await trio.sleep(OPEN_EVERY_S)
            self._wanted = trio.Event()  # an idle mount does not try
            await self._wanted.wait()

    async def download(
        self,
        version: ObjectVersion,
        start: int,
        stop: int,
        sink: Sink,
        *,
        priority: Urgency = demanded,
    ) -> None:
        """Download [start, stop) of a version, from the cluster cache where that has the blocks."""

        async def from_source(at: int, sink: Sink) -> None:
            await self._source.download(version, at, stop, sink, priority=priority)

        position, last, is_from_source = start, None, False
        try:
            while position < stop:
                if not self._wants(version, position):
                    break
                block = self._domain.block(version, position)
                end = min(block.stop, stop)
                lookup = last = _Lookup(self._domain, block, position, end, sink)
                await self._race(lookup, priority, from_source, sink)
                if lookup.race.winner == "s3":
                    return
                position = lookup.position
                if position < end:
                    break
            if position < stop:
                is_from_source = True
                await from_source(position, sink)
        finally:
            # Also after a cancelled download, as the bytes that arrived are kept.
            if is_from_source or (last is not None and last.race.winner == "s3"):
                self._note_missed(version, position, stop, last)

    async def _race(
        self,
        lookup: _Lookup,
        priority: Urgency,
        from_source: Callable[[int, Sink], Awaitable[None]],
        sink: Sink,
    ) -> None:
        """Look a block up, and if its answer is late, read from S3 as well.

        The side with bytes first goes on alone: S3 even beyond the block, to the download's end.

        Raises:
            StoreError: S3 failed before the cluster cache had any bytes.
            OSError: the local disk failed.
        """
        error: Exception | None = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lookup.run, self._blocks, priority)
            lookup.waited_s = self.deadline.wait_s
            if not await lookup.begins_within(lookup.waited_s):
                error = await _read_from_s3(lookup, from_source, sink)
            if lookup.race.winner == "cluster":
                await lookup.ends_in_time()
        self._note(lookup)
        if lookup.race.winner == "cluster":
            self.counted["bytes_read"] += lookup.written
        if lookup.error is not None:
            raise lookup.error
        if error is not None and lookup.race.winner != "cluster":
            raise error

    def _wants(self, version: ObjectVersion, position: int) -> bool:
        """True if a reader is to look up the block at `position`; may start a probe."""
        if not self.is_open:
            self._wanted.set()
            return False
        if not self.breaker.is_closed:
            if self.breaker.take_probe():
                self._nursery.start_soon(self._probe, self._domain.block(version, position))
            return False
        return self.sampling.wants_lookup()

    async def _probe(self, block: Block) -> None:
        """Look up the beginning of a block to see if the cluster cache answers; no reader waits."""
        self._note(await self._try(block))

    async def retry_lookup(self, block: Block) -> LookupOutcome | None:
        """Look a `DOUBTFUL` block up again; return the outcome, or None if the breaker is open."""
        return (await self._try(block)).outcome if self.breaker.is_closed else None

    async def _try(self, block: Block) -> _Lookup:
        """Look up the beginning of a block, drop the bytes, and return the ended lookup."""
        stop = min(block.start + FRAME, block.stop)
        lookup = _Lookup(self._domain, block, block.start, stop, _Nowhere(-1))
        with trio.move_on_after(PROBE_S):
            await lookup.run(self._blocks, lambda: Priority.PREFETCH)
        if lookup.outcome is LookupOutcome.CANCELLED:
            lookup.outcome = LookupOutcome.FAILED
        return lookup

    def _note(self, lookup: _Lookup) -> None:
        """Record the outcome of a lookup, which decides if later lookups are made."""
        outcome, was = lookup.outcome, self.breaker.state
        self.counted[outcome.value] += 1
        if lookup.took_s is not None and outcome is not LookupOutcome.LATE:
            self.deadline.note_first_byte(lookup.took_s)
        if outcome is LookupOutcome.HIT:
            self.sampling.note_hit()
            self.breaker.note_success()
        elif outcome is LookupOutcome.MISS:
            self.sampling.note_miss()
            self.breaker.note_success()
        elif outcome is LookupOutcome.FAILED:
            self.breaker.note_failure()
        elif outcome is LookupOutcome.LATE and lookup.is_sent:
            # A late answer is a failure in proportion to the wait: a busy cluster is still useful.
            assert lookup.took_s is not None
            self.deadline.note_late(lookup.took_s)
            self.breaker.note_failure(lookup.waited_s / MOST_S)
        elif outcome in (LookupOutcome.REFUSED, LookupOutcome.BAD):
            self.breaker.note_failure(USELESS)
        if outcome is LookupOutcome.BAD and trio.current_time() >= self._next_line:
            self._next_line = trio.current_time() + LINE_EVERY_S
            logger.warning("the cluster cache has other bytes than were stored: %s", lookup.why)
        if was is BreakerState.CLOSED and not self.breaker.is_closed:
            self.why = lookup.why or "its answers are late"
            logger.warning("the cluster cache is not used for %.0f s: %s", OPEN_S, self.why)
        elif was is not BreakerState.CLOSED and self.breaker.is_closed:
            self.why = ""
            logger.info("the cluster cache is in use again")

    def _note_missed(
        self, version: ObjectVersion, start: int, stop: int, last: _Lookup | None
    ) -> None:
        """Record that [start, stop) came from S3, after the `last` lookup (None: no lookup)."""
        for block in block_ids(version, start, stop):
            is_last = last is not None and last.block.start == block.start
            state = last.stored_state if last is not None and is_last else StoredState.UNKNOWN
            self.missed[block] = max(self.missed.pop(block, StoredState.UNKNOWN), state)
        while len(self.missed) > MOST_MISSED:
            self.missed.popitem(last=False)
