"""Checksums and ranges of cached bytes."""

import itertools
import os
import random
import zlib
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from fusefs.cache.catalog import SUMS_PART, Catalog, Row
from fusefs.cache.integrity import checksums
from fusefs.cache.integrity.checksums import BLOCK, Sum
from fusefs.cache.ranges import RangeMap
from fusefs.store.checksum import crc32

EVERYTHING = (0, 1 << 40)


def ranges(*pairs: tuple[int, int]) -> RangeMap:
    return RangeMap(iter(pairs))


def row(sums: list[Sum], *, size: int = 10 * SUMS_PART, generation: str = "g") -> Row:
    packed = ranges((0, size)).pack()
    return Row("name", generation, 7, size, packed, 1.0, sums=tuple(sums))


@given(st.binary(max_size=20_000), st.integers(0, 1 << 32).filter(lambda seed: seed < 1 << 32))
def test_a_sum_is_crc32_however_it_is_computed(data: bytes, before: int) -> None:
    assert crc32(memoryview(data), before) == zlib.crc32(data, before)


def test_large_data_has_the_same_sum_as_its_slices() -> None:
    data = random.Random(1).randbytes(600_000)
    assert crc32(memoryview(data)) == zlib.crc32(data)


@given(st.integers(0, 3 * BLOCK), st.integers(0, 3 * BLOCK))
def test_the_sums_of_a_download_cover_it_in_pieces_of_blocks(start: int, size: int) -> None:
    data = random.Random(start).randbytes(size)
    sums = checksums.sums_of_bytes(memoryview(data), start)
    assert [one.start for one in sums] == [start, *(one.stop for one in sums)][: len(sums)]
    assert sum(one.stop - one.start for one in sums) == size
    for one in sums:
        assert one.start // BLOCK == (one.stop - 1) // BLOCK
        assert one.crc == zlib.crc32(data[one.start - start : one.stop - start])


def test_of_two_sums_the_one_that_covers_the_other_is_kept() -> None:
    assert checksums.merged([Sum(0, 5, 1), Sum(0, 9, 2), Sum(3, 8, 3), Sum(8, 12, 4)]) == [
        Sum(0, 9, 2),
        Sum(8, 12, 4),
    ]


def test_sums_come_back_packed_and_unpacked_and_none_of_what_is_cut() -> None:
    sums = [Sum(0, BLOCK, 0xFFFFFFFF), Sum(1 << 42, (1 << 42) + 1, 0)]
    assert checksums.unpack(checksums.pack(sums)) == sums
    assert checksums.unpack(checksums.pack(sums)[:-1]) == []


def test_a_range_without_a_sum_is_found() -> None:
    present = ranges((0, 100), (200, 300))
    assert list(checksums.unsummed(present, [Sum(10, 90, 0), Sum(200, 250, 0)])) == [
        (0, 10),
        (90, 100),
        (250, 300),
    ]


def test_a_flipped_byte_is_found_where_it_is_known_to_be_there(tmp_path: Path) -> None:
    path = tmp_path / "file"
    data = bytearray(random.Random(2).randbytes(3 * BLOCK + 5))
    path.write_bytes(data)
    fd = os.open(path, os.O_RDWR)
    read = checksums.reader(fd)
    sums = checksums.sums_of(read, 0, len(data))
    assert checksums.first_wrong(read, sums, ranges((0, len(data)))) is None
    os.pwrite(fd, bytes([data[BLOCK + 7] ^ 1]), BLOCK + 7)
    assert checksums.first_wrong(read, sums, ranges((0, len(data)))) == sums[1]
    assert (
        checksums.first_wrong(
            checksums.reader(fd), sums, ranges((0, BLOCK), (2 * BLOCK, len(data)))
        )
        is None
    )
    os.ftruncate(fd, BLOCK)
    assert checksums.first_wrong(read, sums[2:], ranges((0, len(data)))) == sums[2]
    os.close(fd)


def test_the_catalog_keeps_the_sums_of_a_file(tmp_path: Path) -> None:
    table = Catalog(tmp_path / "catalog", "boot")
    sums = [Sum(0, BLOCK, 1), Sum(BLOCK, 2 * BLOCK, 2), Sum(SUMS_PART, SUMS_PART + 9, 3)]
    table.record([row(sums[:1])])
    table.record([row(sums[1:])])
    assert table.sums(7, "g", *EVERYTHING) == sums
    assert table.sums(7, "g", BLOCK + 5, SUMS_PART) == [sums[1]]
    table.close()
    assert Catalog(tmp_path / "catalog", "boot").sums(7, "g", *EVERYTHING) == sums


def test_sums_follow_a_rename_and_go_with_their_file(tmp_path: Path) -> None:
    table = Catalog(tmp_path / "catalog", "boot")
    table.record([row([Sum(0, 9, 1)])])
    table.rename("name", "g", 7, "other")
    assert table.sums(7, "g", *EVERYTHING) == [Sum(0, 9, 1)]
    table.remove("other", "another", 7)
    assert table.sums(7, "g", *EVERYTHING) == [Sum(0, 9, 1)]
    table.remove("other", "g", 7)
    assert table.sums(7, "g", *EVERYTHING) == []


def test_sums_of_what_may_be_lost_are_dropped_after_another_boot(tmp_path: Path) -> None:
    table = Catalog(tmp_path / "catalog", "boot")
    table.record([row([Sum(0, 9, 1)])])
    table.close()
    assert Catalog(tmp_path / "catalog", "next").sums(7, "g", *EVERYTHING) == []


def test_a_stranger_records_no_sums(tmp_path: Path) -> None:
    table = Catalog(tmp_path / "catalog", "boot")
    table.record([row([Sum(0, 9, 1)])])
    table.record([row([Sum(0, 9, 2)], generation="h")])
    assert table.sums(7, "g", *EVERYTHING) == [Sum(0, 9, 1)]
    assert table.sums(7, "h", *EVERYTHING) == []


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
    assert all(start < stop for start, stop in present)
    assert all(one[1] < other[0] for one, other in itertools.pairwise(present)), "they touch"
    assert list(RangeMap.unpack(present.pack())) == list(present)
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
