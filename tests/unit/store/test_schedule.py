"""How uploads are cut into parts, whatever the size."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusefs.store.s3.multipart import LARGEST, MOST_PARTS, Schedule

MIB = 1 << 20
# The largest object of S3, and the smallest and largest part.
OBJECT = 5 << 40
SMALLEST_PART, LARGEST_PART = 5 * MIB, 5 << 30

firsts = st.sampled_from([8 * MIB, 12 * MIB, 64 * MIB, 1 << 30, LARGEST])
sizes = st.integers(1, OBJECT)


@given(firsts, sizes)
def test_an_object_of_any_size_fits_into_the_parts_that_s3_takes(first: int, size: int) -> None:
    schedule = Schedule(first)
    count = schedule.count(size)
    assert 1 <= count <= MOST_PARTS
    assert schedule.range_of(count, size)[1] == size
    for number in {1, (count + 1) // 2, count}:
        assert SMALLEST_PART < schedule.size_of(number) < LARGEST_PART


@given(firsts, sizes, st.data())
def test_each_part_begins_where_the_one_before_it_ends(
    first: int, size: int, data: st.DataObject
) -> None:
    schedule = Schedule(first)
    assert schedule.range_of(1, size)[0] == 0
    number = data.draw(st.integers(1, schedule.count(size)))
    start, stop = schedule.range_of(number, size)
    assert 0 < stop - start <= schedule.size_of(number)
    if number < schedule.count(size):
        assert stop - start == schedule.size_of(number)
        assert schedule.range_of(number + 1, size)[0] == stop


@given(firsts, sizes, st.data())
def test_each_byte_is_in_its_part(first: int, size: int, data: st.DataObject) -> None:
    schedule = Schedule(first)
    offset = data.draw(st.integers(0, size - 1))
    start, stop = schedule.range_of(schedule.part_at(offset), size)
    assert start <= offset < stop


@given(firsts, sizes, sizes)
def test_a_file_that_grows_keeps_where_its_parts_begin(first: int, one: int, other: int) -> None:
    schedule = Schedule(first)
    number = schedule.count(min(one, other))
    assert schedule.range_of(number, one)[0] == schedule.range_of(number, other)[0]


def test_nothing_has_no_part() -> None:
    assert Schedule(8 * MIB).count(0) == 0


def test_what_is_in_no_part_is_refused() -> None:
    schedule = Schedule(8 * MIB)
    for refused in (
        lambda: schedule.part_at(8 << 40),
        lambda: schedule.range_of(2, 8 * MIB),
        lambda: schedule.size_of(0),
        lambda: schedule.size_of(MOST_PARTS + 1),
    ):
        with pytest.raises(ValueError, match=r"too large|no part"):
            refused()
