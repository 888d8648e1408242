"""What stays in a cache that is smaller than the data: epochs, and a set of files that changes.

The ratios are counts of bytes: the files are tiny, and so is the cache.
"""

import math
import random
from unittest.mock import Mock

import pytest

from bench.eviction import ORDERS, Fusefs, files, first_ahead, shares, shuffled
from fusefs.cache.cached_file import CacheFile, Rank
from fusefs.cache.eviction_order import MOST_REMEMBERED, EvictedFiles, EvictionOrder

MIB = 1 << 20
CACHE = 300 * MIB
LEAST = {"shuffled": 0.47, "fixed": 0.45, "sequential": 0.45}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("seed", range(3))
def test_of_twice_the_cache_nearly_half_is_there(order: str, seed: int) -> None:
    of_epochs = shares(Fusefs(CACHE), ORDERS[order](files("a", 600), 6, seed))
    assert min(of_epochs[1:]) >= LEAST[order]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("sizes", [(600, 600), (200, 200), (300, 300), (600, 200), (200, 600)])
def test_other_files_replace_those_before_within_two_passes(
    order: str, sizes: tuple[int, int]
) -> None:
    cache = Fusefs(CACHE)
    shares(cache, ORDERS[order](files("before", sizes[0]), 4, 1))
    after = shares(cache, ORDERS[order](files("after", sizes[1]), 5, 2))
    assert after[2] >= min(1, 300 / sizes[1]) - 0.05


def test_files_of_many_sizes_take_turns_as_well() -> None:
    of_epochs = shares(Fusefs(CACHE), shuffled(files("a", 600, seed=1), 4, 1))
    assert min(of_epochs[1:]) >= 0.4


@pytest.mark.parametrize("seed", range(4))
def test_nearly_half_is_there_as_well_after_an_epoch_that_was_fetched_ahead(seed: int) -> None:
    # What stays was used late in it, so the first intervals of the next are short.
    assert first_ahead(Fusefs(CACHE), seed) >= 0.45


class Room:
    """A cache of a hundred bytes."""

    used = 0
    limit = 100


def placed(order: EvictionOrder, name: str, size: int, *, is_ahead: bool = False) -> CacheFile:
    """A file that was fetched, and used unless it is ahead."""
    file = CacheFile(name, size)
    file.pins = 1
    assert not is_ahead or order.fetch_ahead(file)
    if not is_ahead:
        order.use(file)
    file.arrived(0, size)
    order.fetched += size
    file.pins = 0
    order.insert(file)
    return file


def test_what_is_ahead_evicts_nothing_that_is_kept() -> None:
    order = EvictionOrder(Room())
    kept = placed(order, "kept", 50)
    Room.used = 100
    try:
        passing = placed(order, "passing", 49)
        assert (kept.rank, passing.rank) == (Rank.KEPT, Rank.PASSING)
        assert order.next(is_ahead=True) is passing
        order.forget(passing)
        assert order.next(is_ahead=True) is None
        assert order.next() is kept
    finally:
        Room.used = 0


@pytest.mark.parametrize("next_use", [0.0, 6.0])
def test_what_a_plan_uses_next_makes_no_room_for_what_it_uses_later(next_use: float) -> None:
    order = EvictionOrder(Room())
    order.forecast = Mock(since=-math.inf, frontier=5.0, next_use=lambda _file: next_use)
    planned = placed(order, "planned", 50)
    assert order.next(is_ahead=True) is (planned if next_use > 5.0 else None)


def test_what_is_ahead_has_a_bounded_share_of_a_full_cache() -> None:
    room = Room()
    room.limit, room.used = 6400, 6400
    order = EvictionOrder(room)
    one, other = CacheFile("one", 100), CacheFile("other", 1)
    assert order.fetch_ahead(one)
    assert not order.fetch_ahead(other)
    order.use(one)
    assert order.fetch_ahead(other)
    order.forget(other)
    assert order.fetch_ahead(CacheFile("third", 100))


def test_what_is_ahead_goes_when_a_whole_cache_was_fetched_since() -> None:
    order = EvictionOrder(Room())
    ahead = placed(order, "ahead", 1, is_ahead=True)
    placed(order, "kept", 10)
    order.fetched += 90
    assert order.next(is_ahead=True) is None
    order.fetched += 1
    assert order.next(is_ahead=True) is ahead


def test_of_many_evicted_files_a_random_sample_is_remembered() -> None:
    evicted = EvictedFiles()
    names = [f"f{number}" for number in range(4 * MOST_REMEMBERED)]
    random.Random(1).shuffle(names)
    for at, name in enumerate(names):
        evicted.add(name, at, 0)
    known = sum(evicted.pop(name) == at for at, name in enumerate(names))
    assert MOST_REMEMBERED // 4 < known <= MOST_REMEMBERED
