"""`python -m bench.eviction`: orders of eviction, compared on traces of reads.

Files are read whole, one after the other, by name. A policy sees each read and answers if it had
the file. The result is the share of bytes that it had: from the second epoch on, or in the third
epoch after the files were replaced by others.

The policies are those of their papers, by bytes where the papers count pages: LRU; SIEVE (Zhang et
al., NSDI 2024); S3-FIFO (Yang et al., SOSP 2023); MinIO, which never evicts, of CoorDL (Mohan et
al., VLDB 2021); ARC (Megiddo and Modha, FAST 2003). `fusefs` is fusefs's own code
(fusefs/cache/eviction_order.py).
"""

from __future__ import annotations

import argparse
import itertools
import random
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from fusefs.cache.cached_file import CacheFile
from fusefs.cache.eviction_order import EvictionOrder

# (name, size)
Read = tuple[str, int]


class Policy(Protocol):
    """A cache with a limit in bytes."""

    def read(self, name: str, size: int) -> bool:
        """Read a file; True if the cache had it."""
        ...


class LRU:
    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._files: OrderedDict[str, int] = OrderedDict()
        self._used = 0

    def read(self, name: str, size: int) -> bool:
        if name in self._files:
            self._files.move_to_end(name)
            return True
        if size <= self._limit:
            while self._used + size > self._limit:
                self._used -= self._files.popitem(last=False)[1]
            self._files[name] = size
            self._used += size
        return False


class MinIO:
    def __init__(self, limit: int) -> None:
        self._room = limit
        self._files: set[str] = set()

    def read(self, name: str, size: int) -> bool:
        if name in self._files:
            return True
        if size <= self._room:
            self._room -= size
            self._files.add(name)
        return False


class Sieve:
    """New files go in front; a hand moves from the oldest file on and spares visited files."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._used = 0
        self._sizes: dict[str, int] = {}
        self._visited: set[str] = set()
        # The newest last, and the hand's place by name: shrinking a list would be slow.
        self._older: dict[str, str | None] = {}
        self._newer: dict[str, str | None] = {}
        self._oldest: str | None = None
        self._newest: str | None = None
        self._hand: str | None = None

    def read(self, name: str, size: int) -> bool:
        if name in self._sizes:
            self._visited.add(name)
            return True
        if size > self._limit:
            return False
        while self._used + size > self._limit:
            self._evict()
        self._sizes[name] = size
        self._used += size
        self._older[name], self._newer[name] = self._newest, None
        if self._newest is not None:
            self._newer[self._newest] = name
        self._newest = name
        self._oldest = self._oldest or name
        return False

    def _evict(self) -> None:
        at = self._hand or self._oldest
        assert at is not None
        while at in self._visited:
            self._visited.remove(at)
            at = self._newer[at] or self._oldest
            assert at is not None
        older, newer = self._older.pop(at), self._newer.pop(at)
        if older is not None:
            self._newer[older] = newer
        else:
            self._oldest = newer
        if newer is not None:
            self._older[newer] = older
        else:
            self._newest = older
        self._hand = newer
        self._used -= self._sizes.pop(at)


class S3Fifo:
    """A small queue (a tenth), a main queue, and the names of files that left the small queue."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._sizes: dict[str, int] = {}
        self._uses: dict[str, int] = {}
        self._small: OrderedDict[str, None] = OrderedDict()
        self._main: OrderedDict[str, None] = OrderedDict()
        self._ghosts: OrderedDict[str, int] = OrderedDict()
        self._small_used = self._main_used = self._ghost_bytes = 0

    def read(self, name: str, size: int) -> bool:
        if name in self._sizes:
            self._uses[name] = min(3, self._uses[name] + 1)
            return True
        if size > self._limit:
            return False
        while self._small_used + self._main_used + size > self._limit:
            if self._small_used >= self._limit // 10 or not self._main:
                self._evict_small()
            else:
                self._evict_main()
        self._sizes[name], self._uses[name] = size, 0
        if name in self._ghosts:
            self._ghost_bytes -= self._ghosts.pop(name)
            self._into_main(name)
        else:
            self._small[name] = None
            self._small_used += size
        return False

    def _into_main(self, name: str) -> None:
        self._main[name] = None
        self._main_used += self._sizes[name]

    def _evict_small(self) -> None:
        name, _ = self._small.popitem(last=False)
        size = self._sizes[name]
        self._small_used -= size
        if self._uses[name] > 1:
            self._uses[name] = 0
            self._into_main(name)
            return
        del self._sizes[name], self._uses[name]
        self._ghosts[name] = size
        self._ghost_bytes += size
        while self._ghost_bytes > self._limit * 9 // 10:
            self._ghost_bytes -= self._ghosts.popitem(last=False)[1]

    def _evict_main(self) -> None:
        while True:
            name, _ = self._main.popitem(last=False)
            if not self._uses[name]:
                self._main_used -= self._sizes.pop(name)
                del self._uses[name]
                return
            self._uses[name] -= 1
            self._main[name] = None


class Arc:
    """Lists of files read once (t1) and more often (t2), and of names that left them (b1, b2)."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._target = 0.0  # of t1
        self._t1, self._t2, self._b1, self._b2 = (_Sized() for _ in range(4))

    def read(self, name: str, size: int) -> bool:
        for there in (self._t1, self._t2):
            if name in there.files:
                there.remove(name)
                self._t2.add(name, size)
                return True
        if size > self._limit:
            return False
        if name in self._b1.files:
            step = size * max(1.0, self._b2.used / self._b1.used)
            self._target = min(float(self._limit), self._target + step)
            self._b1.remove(name)
            self._make_room(size, is_in_b2=False)
            self._t2.add(name, size)
        elif name in self._b2.files:
            step = size * max(1.0, self._b1.used / self._b2.used)
            self._target = max(0.0, self._target - step)
            self._b2.remove(name)
            self._make_room(size, is_in_b2=True)
            self._t2.add(name, size)
        else:
            self._make_room(size, is_in_b2=False)
            while self._b1.files and self._t1.used + self._b1.used + size > self._limit:
                self._b1.pop()
            while self._b2.files and self._total() + size > 2 * self._limit:
                self._b2.pop()
            self._t1.add(name, size)
        return False

    def _total(self) -> int:
        return sum(part.used for part in (self._t1, self._t2, self._b1, self._b2))

    def _make_room(self, size: int, *, is_in_b2: bool) -> None:
        while self._t1.used + self._t2.used + size > self._limit:
            is_large = self._t1.used > self._target or (is_in_b2 and self._t1.used >= self._target)
            if self._t1.files and (is_large or not self._t2.files):
                self._b1.add(*self._t1.pop())
            else:
                self._b2.add(*self._t2.pop())


class _Sized:
    def __init__(self) -> None:
        self.files: OrderedDict[str, int] = OrderedDict()
        self.used = 0

    def add(self, name: str, size: int) -> None:
        self.files[name] = size
        self.used += size

    def remove(self, name: str) -> None:
        self.used -= self.files.pop(name)

    def pop(self) -> tuple[str, int]:
        name, size = self.files.popitem(last=False)
        self.used -= size
        return name, size


class Fusefs:
    """fusefs's order of eviction."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self._order = EvictionOrder(self)
        self._files: dict[str, CacheFile] = {}

    def read(self, name: str, size: int) -> bool:
        file = self._files.get(name)
        is_there = file is not None
        if file is None:
            file = self._files[name] = CacheFile(name, size)
        else:
            self._order.leave(file)
        self._order.use(file)
        if not is_there:
            while self.used + size > self.limit and (victim := self._order.next()) is not None:
                self._order.forget(victim)
                del self._files[victim.name]
                self.used -= victim.size
            file.present.add(0, size)
            self.used += size
            self._order.fetched += size
        self._order.insert(file)
        return is_there

    def fetch_ahead(self, name: str, size: int) -> None:
        """Fetch a file ahead of its first use, while there is room for it."""
        if name not in self._files and self.used + size <= self.limit:
            file = self._files[name] = CacheFile(name, size)
            if self._order.fetch_ahead(file):
                file.present.add(0, size)
                self.used += size
                self._order.fetched += size
                self._order.insert(file)
            else:
                del self._files[name]


POLICIES: dict[str, Callable[[int], Policy]] = {
    "LRU": LRU,
    "SIEVE": Sieve,
    "S3-FIFO": S3Fifo,
    "ARC": Arc,
    "MinIO": MinIO,
    "fusefs": Fusefs,
}


# Traces: epochs of reads.


def files(prefix: str, size: int, *, seed: int | None = None) -> list[Read]:
    """Make `size` megabytes of files of one megabyte each, or with a `seed` of many sizes."""
    if seed is None:
        return [(f"{prefix}{number}", 1 << 20) for number in range(size)]
    sizes = random.Random(seed)
    found: list[Read] = []
    left = size << 20
    while left > 0:
        part = min(left, int(sizes.lognormvariate(12.5, 1.5)) + 1)
        found.append((f"{prefix}{len(found)}", part))
        left -= part
    return found


def shuffled(files: list[Read], epochs: int, seed: int) -> Iterator[list[Read]]:
    """Yield a new random order for each epoch."""
    order = random.Random(seed)
    for _ in range(epochs):
        yield order.sample(files, len(files))


def fixed(files: list[Read], epochs: int, seed: int) -> Iterator[list[Read]]:
    """Yield the same random order for each epoch."""
    again = random.Random(seed).sample(files, len(files))
    return iter([again] * epochs)


def sequential(files: list[Read], epochs: int, _seed: int) -> Iterator[list[Read]]:
    return iter([files] * epochs)


ORDERS = {"shuffled": shuffled, "fixed": fixed, "sequential": sequential}


def shares(policy: Policy, epochs: Iterable[list[Read]]) -> list[float]:
    """Return the share of bytes that the cache had, for each epoch."""
    answer = []
    for epoch in epochs:
        had = sum(size for name, size in epoch if policy.read(name, size))
        answer.append(had / sum(size for _, size in epoch))
    return answer


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


# The table.

CACHE = 300
SEEDS = (1, 2, 3)

Share = Callable[[Policy, int], float]


def epochs(order: str, size: int) -> Share:
    """Make a function that returns the share from the second epoch on, of `size` megabytes."""
    return lambda policy, seed: mean(shares(policy, ORDERS[order](files("a", size), 6, seed))[1:])


def first_ahead(policy: Policy, seed: int) -> float:
    """Return the share of the second epoch, after a first epoch with files fetched ahead by name.

    Three files are fetched ahead for each read, until the cache is full: it then keeps the files
    that were used late in the first epoch.
    """
    fetch = policy.fetch_ahead if isinstance(policy, Fusefs) else policy.read
    ahead = iter(files("a", 2 * CACHE))
    first, second = shuffled(files("a", 2 * CACHE), 2, seed)
    for name, size in first:
        policy.read(name, size)
        for sibling in itertools.islice(ahead, 3):
            fetch(*sibling)
    return shares(policy, [second])[0]


def many_sizes(policy: Policy, seed: int) -> float:
    return mean(shares(policy, shuffled(files("a", 2 * CACHE, seed=seed), 6, seed))[1:])


def moved(order: str, before: int, after: int) -> Share:
    """Make a function that returns the share of the third epoch after files were replaced."""

    def share(policy: Policy, seed: int) -> float:
        shares(policy, ORDERS[order](files("a", before), 4, seed))
        return shares(policy, ORDERS[order](files("b", after), 3, seed + 1))[2]

    return share


def hot_set(policy: Policy, seed: int) -> float:
    """Return the share of a hot set of half the cache; two of three reads are of one-time files."""
    order, had, once = random.Random(seed), [], 0
    hot = files("hot", CACHE // 2)
    for epoch in shuffled(hot, 8, order.randrange(100)):
        for name, size in epoch:
            had.append(float(policy.read(name, size)))
            for _ in range(2):
                policy.read(f"once{once}", 1 << 20)
                once += 1
    return mean(had[2 * len(hot) :])


def zipf(policy: Policy, seed: int) -> float:
    """Return the share of 3,000 files whose popularity follows Zipf's law, exponent 0.9."""
    popular = files("a", 3000)
    weights = [1 / (rank + 1) ** 0.9 for rank in range(len(popular))]
    reads = random.Random(seed).choices(popular, weights, k=30_000)
    return mean([float(policy.read(name, size)) for name, size in reads][15_000:])


ROWS: dict[str, Share] = {
    **{
        f"epochs, {order}, {factor} x the cache": epochs(order, factor * CACHE)
        for factor in (2, 3, 5)
        for order in ORDERS
    },
    "epochs, shuffled, 2 x, many sizes": many_sizes,
    "the second epoch, the first fetched ahead, 2 x": first_ahead,
    **{
        f"moved, {order}, {before / CACHE:.2g} x to {after / CACHE:.2g} x": moved(
            order, before, after
        )
        for before, after in ((600, 600), (200, 200), (600, 200))
        for order in ORDERS
    },
    "a hot set among files read once": hot_set,
    "Zipf's law": zipf,
}


def main() -> None:
    """Print the table of all rows and policies, as Markdown."""
    argparse.ArgumentParser(prog="python -m bench.eviction", description=__doc__).parse_args()
    print(f"| trace | {' | '.join(POLICIES)} |")
    print(f"| --- |{' ---: |' * len(POLICIES)}")
    for label, share in ROWS.items():
        found = [
            mean([share(policy(CACHE << 20), seed) for seed in SEEDS])
            for policy in POLICIES.values()
        ]
        print(f"| {label} | {' | '.join(f'{value:.2f}' for value in found)} |", flush=True)


if __name__ == "__main__":
    main()
