"""A thousand nodes that start at once: discrete events, with the daemon's own policy.

Each node is the daemon's Requester (store/s3/requester.py) with everything that decides when a
request is sent: the budget of connections (AIMD), the probed request rate, pauses with jitter; and
the cluster cache's deadline, breaker and sampling (cluster_cache/policy.py). All nodes run in one
trio loop whose clock jumps from event to event, so the policy is the daemon's code, and only the
network and the stores are simulated:

- S3 accepts `RATE` GETs a second for each prefix, at most a second's worth at once, and
  refuses more (503 SlowDown). The first byte takes 30 ms, for one request in a hundred 300 ms;
  a connection carries 90 MB/s: the distant server of bench/cloud.
- A node has a link of 10 Gbit/s.
- A server of the cluster cache has a link of 25 Gbit/s, which serves one answer after the
  other, and stores all blocks that it is given. Each server has the same share of the blocks.

The data set is 1.6 GB, of 192 parts of 8 MiB in four prefixes; a real one has a terabyte. Rates and
sizes of parts are real, so with a terabyte the steady state lasts 600 times longer, and the cost of
finding the rate, in the first seconds, stays the same.

    python -m bench.scale.nodes [--nodes N] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import random
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

import trio
import trio.testing

from fusefs.cluster_cache.policy import Breaker, Deadline, Sampling
from fusefs.settings.memory import MemoryBudget
from fusefs.settings.types import MIB
from fusefs.store.engine.engine import Completion, Engine, Request
from fusefs.store.s3.access import Access
from fusefs.store.s3.address import Call
from fusefs.store.s3.requester import Requester
from fusefs.store.s3.settings import S3Settings

NOWHERE = "http://127.0.0.1:9"
PART = 8 * MIB
PREFIXES = 4
PARTS = 192
RATE = 5500.0
FIRST_BYTE_S, SLOW_FIRST_BYTE_S, SLOW_SHARE = 0.03, 0.3, 0.01
CONNECTION = 90e6
NODE_LINK, CACHE_LINK = 10e9 / 8, 25e9 / 8
# The time of a request on a cache server's processors, and the time to its first byte.
CACHE_REQUEST_S, CACHE_FIRST_BYTE_S = 1e-4, 0.002
# Blocks that a node uploads to the cluster cache at the same time.
FILLS = 2
# Servers of the cluster cache: a volume server on each tenth node.
SERVERS = 100


class Link:
    """A network link of `rate` bytes a second, which carries one transfer after the other."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._free_at = 0.0

    def carry(self, size: int, longest_s: float = 0.0) -> float:
        """Return the end of a transfer of `size` bytes that takes at least `longest_s`."""
        now = trio.current_time()
        self._free_at = max(now, self._free_at) + size / self._rate
        return max(self._free_at, now + longest_s)


class S3:
    """The store: counts requests and refusals by the second."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._taken: dict[int, tuple[float, float]] = {}
        self.sent: Counter[int] = Counter()
        self.refused: Counter[int] = Counter()

    def is_taken(self, prefix: int) -> bool:
        """Count a request; False if it exceeds the rate of its prefix."""
        now = trio.current_time()
        self.sent[int(now)] += 1
        tokens, then = self._taken.get(prefix, (self._rate, now))
        tokens = min(self._rate, tokens + (now - then) * self._rate)
        is_taken = tokens >= 1
        self._taken[prefix] = (tokens - is_taken, now)
        self.refused[int(now)] += not is_taken
        return is_taken


async def first_byte() -> None:
    is_slow = random.random() < SLOW_SHARE
    await trio.sleep((SLOW_FIRST_BYTE_S if is_slow else FIRST_BYTE_S) * random.uniform(0.9, 1.1))


class SimulatedEngine:
    """Spends the time of a node's requests for parts, and sends nothing."""

    def __init__(self, node: Node, nursery: trio.Nursery) -> None:
        self._node = node
        self.nursery = nursery

    async def send(self, request: Request, _on_progress: object) -> Completion:
        status = await self._node.answer(int(request.url.rpartition("/")[2]))
        fields = (status, {}, b"", 0, None, 0, 0, "", False, 0.0, 0.0, 0.0)
        return cast(Any, Completion)(*fields)


class Node:
    """One node: the daemon's requester, and a link."""

    def __init__(self, number: int, s3: S3, nursery: trio.Nursery) -> None:
        budget = MemoryBudget.of(256 * MIB)
        self.number = number
        self.link = Link(NODE_LINK)
        settings = S3Settings(
            "bucket", NOWHERE, anonymous=True, max_streams=budget.streams, retry_time_s=math.inf
        )
        self.requester = Requester(settings, cast(Engine, SimulatedEngine(self, nursery)))
        self.requester.source.access = Access(settings)
        self.streams = budget.streams
        self._s3 = s3
        self.warm_at = math.inf

    async def get(self, part: int) -> None:
        """Fetch a part from S3, with as many retries as that takes."""
        await self.requester.send(Call("GET", "GET", str(part)), lambda _: None)

    async def answer(self, part: int) -> int:
        """Return the status of S3's answer when its last byte has arrived."""
        is_taken = self._s3.is_taken(part * PREFIXES // PARTS)
        await first_byte()
        if not is_taken:
            return 503
        await trio.sleep_until(self.link.carry(PART, PART / CONNECTION))
        return 200

    async def read(self, parts: Sequence[int], fetch: Callable[[int], Any]) -> None:
        """Fetch all parts, as many at a time as a warm-up does."""
        left = iter(parts)

        async def work() -> None:
            for part in left:
                await fetch(part)

        async with trio.open_nursery() as nursery:
            for _ in range(self.streams):
                nursery.start_soon(work)
        self.warm_at = trio.current_time()


class Cache:
    """The cluster cache: its servers, and the blocks that it has."""

    def __init__(self, servers: int) -> None:
        self._links = [Link(CACHE_LINK) for _ in range(servers)]
        self._processors = [Link(1 / CACHE_REQUEST_S) for _ in range(servers)]
        self._kept: set[int] = set()
        self.hits = self.misses = self.fills = 0

    async def look_up(self, part: int) -> bool:
        """Return True if the block is there, at the time of the answer's first byte."""
        server = part % len(self._links)
        at = self._processors[server].carry(1, CACHE_FIRST_BYTE_S * random.uniform(0.9, 1.1))
        await trio.sleep_until(at)
        is_hit = part in self._kept
        self.hits += is_hit
        self.misses += not is_hit
        return is_hit

    async def carry(self, part: int, node: Link) -> None:
        """Carry a block from the cache to a node, or from a node to it."""
        server = part % len(self._links)
        through = self._links[server].carry(PART)
        await trio.sleep_until(max(node.carry(PART), through))

    async def fill(self, part: int, node: Link) -> None:
        await self.carry(part, node)
        self._kept.add(part)
        self.fills += 1


class CachedNode(Node):
    """A node that asks the cluster cache first, as fusefs/cluster_cache does."""

    def __init__(
        self, number: int, s3: S3, cache: Cache, nursery: trio.Nursery, *, looks_again: bool
    ) -> None:
        super().__init__(number, s3, nursery)
        self._cache = cache
        self._nursery = nursery
        self._deadline = Deadline()
        self._breaker = Breaker()
        self._sampling = Sampling()
        self._filling = 0
        # Parts that S3 has refused, if the cache is asked again before the next attempt; else None.
        self._refused: set[int] | None = set() if looks_again else None

    async def get(self, part: int) -> None:
        if not (self._breaker.is_closed and self._sampling.wants_lookup()):
            await self._get_and_fill(part)
            return
        answered = trio.Event()
        is_hit = False
        async with trio.open_nursery() as race:

            async def from_cache() -> None:
                nonlocal is_hit
                began = trio.current_time()
                is_hit = await self._cache.look_up(part)
                self._note_answer(is_hit, trio.current_time() - began)
                answered.set()
                if is_hit:
                    await self._cache.carry(part, self.link)
                    race.cancel_scope.cancel()

            race.start_soon(from_cache)
            with trio.move_on_after(self._deadline.wait_s):
                await answered.wait()
            if not answered.is_set():
                self._breaker.note_failure()
            if not is_hit:
                await self._get_and_fill(part)
                race.cancel_scope.cancel()

    def _note_answer(self, is_hit: bool, took_s: float) -> None:
        self._deadline.note_first_byte(took_s)
        self._breaker.note_success()
        if is_hit:
            self._sampling.note_hit()
        else:
            self._sampling.note_miss()

    async def answer(self, part: int) -> int:
        if self._refused is None:
            return await super().answer(part)
        if part in self._refused and self._breaker.is_closed and await self._cache.look_up(part):
            await self._cache.carry(part, self.link)
            return 200
        status = await super().answer(part)
        if status == 503:
            self._refused.add(part)
        return status

    async def _get_and_fill(self, part: int) -> None:
        if self._breaker.take_probe():
            self._nursery.start_soon(self._probe, part)
        await super().get(part)
        # A fill that would have to wait is left out: another node may fill the same part.
        if self._breaker.is_closed and self._filling < FILLS:
            self._filling += 1
            self._nursery.start_soon(self._fill, part)

    async def _fill(self, part: int) -> None:
        await self._cache.fill(part, self.link)
        self._filling -= 1

    async def _probe(self, part: int) -> None:
        with trio.move_on_after(self._deadline.wait_s) as scope:
            await self._cache.look_up(part)
        if scope.cancelled_caught:
            self._breaker.note_failure()
        else:
            self._breaker.note_success()


@dataclass
class Run:
    """The result of one start of all nodes; `series` has a value for each second."""

    name: str
    figures: dict[str, float] = field(default_factory=dict)
    series: dict[str, list[int]] = field(default_factory=dict)


Order = Callable[[int, int], list[int]]


def same(_node: int, _nodes: int) -> list[int]:
    """Return the same order for all nodes."""
    return list(range(PARTS))


def rotated(node: int, _nodes: int) -> list[int]:
    """Return an order that begins at the node's own place and goes round to it."""
    at = random.Random(node).randrange(PARTS)
    return [*range(at, PARTS), *range(at)]


def sharded(node: int, nodes: int) -> list[int]:
    """Return the parts that `fusefs warm --shard` gives a node: each part goes to one node."""
    return [part for part in range(PARTS) if part % nodes == node]


async def start(
    name: str,
    nodes: int,
    orders: Sequence[Order],
    servers: int,
    looks_again: bool = False,
    rate: float = RATE,
) -> Run:
    """Start all nodes; they read in one order after the other, each once all nodes have ended."""
    s3 = S3(rate)
    cache = Cache(servers) if servers else None
    ends: list[float] = []
    async with trio.open_nursery() as background:
        for order in orders:
            async with trio.open_nursery() as nursery:
                fleet = [
                    CachedNode(number, s3, cache, background, looks_again=looks_again)
                    if cache
                    else Node(number, s3, background)
                    for number in range(nodes)
                ]
                for node in fleet:
                    nursery.start_soon(node.read, order(node.number, nodes), node.get)
            ends = sorted(node.warm_at for node in fleet)
    return _run_of(name, s3, cache, ends)


def _run_of(name: str, s3: S3, cache: Cache | None, ends: list[float]) -> Run:
    seconds = range(int(max(ends[-1], max(s3.sent, default=0))) + 2)
    sent, refused = sum(s3.sent.values()), sum(s3.refused.values())
    return Run(
        name,
        {
            "first_warm_s": round(ends[0], 1),
            "half_warm_s": round(ends[len(ends) // 2], 1),
            "all_warm_s": round(ends[-1], 1),
            "requests": sent,
            "slowdowns": refused,
            "peak_requests_s": max(s3.sent.values()),
            "cache_hits": cache.hits if cache else 0,
            "cache_fills": cache.fills if cache else 0,
        },
        {
            "sent": [s3.sent[second] for second in seconds],
            "refused": [s3.refused[second] for second in seconds],
            "warm": [bisect_right(ends, second) for second in seconds],
        },
    )


RUNS: dict[str, tuple[tuple[Order, ...], int, bool]] = {
    "same order": ((same,), 0, False),
    "rotated order": ((rotated,), 0, False),
    "same order, cluster cache": ((same,), SERVERS, False),
    "rotated order, cluster cache": ((rotated,), SERVERS, False),
    "same order, cluster cache tried again": ((same,), SERVERS, True),
    "rotated, cluster cache tried again": ((rotated,), SERVERS, True),
    "warm --shard first, cluster cache": ((sharded, rotated), SERVERS, False),
}


def is_simulation(path: Path) -> bool:
    """True if bench.scale.nodes has written the file."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and "runs" in found and "nodes" in found


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    options.add_argument("--nodes", type=int, default=1000)
    options.add_argument("--only", default="", help="names of runs, separated by semicolons")
    options.add_argument("--out", type=Path, help="where to write what was found, as JSON")
    chosen = options.parse_args()
    logging.disable(logging.WARNING)
    found = []
    for name, plan in RUNS.items():
        if chosen.only and name not in chosen.only.split(";"):
            continue
        random.seed(name)
        began = time.perf_counter()
        clock = trio.testing.MockClock(autojump_threshold=0)
        run = trio.run(start, name, chosen.nodes, *plan, clock=clock)
        found.append(asdict(run))
        print(
            f"{name}: {json.dumps(run.figures)} ({time.perf_counter() - began:.0f} s)", flush=True
        )
    if chosen.out:
        result = {"nodes": chosen.nodes, "parts": PARTS, "prefixes": PREFIXES, "runs": found}
        chosen.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
