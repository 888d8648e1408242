"""The range map against a plain set of byte numbers."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from fusefs.cache.ranges import RangeMap

RANGE = st.tuples(st.integers(0, 60), st.integers(0, 60)).map(lambda pair: tuple(sorted(pair)))


@given(st.lists(RANGE), RANGE)
def test_a_range_map_is_a_set_of_bytes(
    added: list[tuple[int, int]], wanted_range: tuple[int, int]
) -> None:
    present = RangeMap()
    model: set[int] = set()
    for start, stop in added:
        new = set(range(start, stop)) - model
        assert present.add(start, stop) == len(new)
        model |= new
    assert present.total == len(model)
    assert {byte for start, stop in present for byte in range(start, stop)} == model

    wanted = range(*wanted_range)
    assert present.covers(*wanted_range) == model.issuperset(wanted)
    missing = present.first_missing(*wanted_range)
    absent = [byte for byte in wanted if byte not in model]
    if missing is None:
        assert not absent
    else:
        start, stop = missing
        assert start == absent[0]
        assert not model.intersection(range(start, stop))
        assert stop == wanted_range[1] or stop in model


@given(st.lists(RANGE))
def test_ranges_are_disjoint_and_never_touch(added: list[tuple[int, int]]) -> None:
    present = RangeMap(iter(added))
    ranges = list(present)
    assert all(start < stop for start, stop in ranges)
    assert all(one[1] < other[0] for one, other in itertools.pairwise(ranges))


@given(st.lists(RANGE))
def test_packing_keeps_the_ranges(added: list[tuple[int, int]]) -> None:
    present = RangeMap(iter(added))
    again = RangeMap.unpack(present.pack())
    assert list(again) == list(present)
    assert again.total == present.total
