"""What `fusefs profile` makes of the requests that it has seen."""

from __future__ import annotations

import pytest

from fusefs.telemetry import access_summary
from fusefs.telemetry.access_summary import Access, AccessSummary, MountContext

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def opened(key: str, size: int, source: str = "served", seconds: float = 0.0) -> Access:
    return Access(0.0, "open", key, handle=1, size=size, source=source, seconds=seconds)


def read(key: str, offset: int, size: int, source: str = "cache", handle: int = 1) -> Access:
    return Access(0.0, "read", key, handle, offset, size, 0.001, source)


def summary_of(*requests: Access) -> AccessSummary:
    summary = AccessSummary()
    for access in requests:
        summary.add(access)
    return summary


def test_reads_in_sequence_are_distinguished_from_those_that_jump() -> None:
    in_order = [read("a", number * 128 * KIB, 128 * KIB) for number in range(80)]
    assert summary_of(*in_order).sequential_reads == 80
    jumping = [read("a", number * 7919 % 80 * 128 * KIB, 128 * KIB) for number in range(80)]
    assert summary_of(*jumping).sequential_reads == 1


def test_what_is_read_again_is_counted_and_the_working_set_is_not_twice_as_large() -> None:
    once = [read("a", number * MIB, MIB) for number in range(4)]
    summary = summary_of(opened("a", 4 * MIB), *once, *once)
    assert summary.again_bytes == 4 * MIB
    assert summary.working_set == 4 * MIB
    assert sum(summary.read_bytes.values()) == 8 * MIB


def test_a_reader_in_small_pieces_reads_nothing_again() -> None:
    pieces = [read("a", number * 128 * KIB, 128 * KIB) for number in range(32)]
    assert summary_of(*pieces).again_bytes == 0


def test_of_what_the_kernel_reads_the_whole_file_belongs_to_the_working_set() -> None:
    summary = summary_of(opened("a", 5 * GIB, "passthrough"), opened("a", 5 * GIB, "passthrough"))
    assert summary.working_set == 5 * GIB
    assert (summary.opens, summary.reopened_files, summary.passthrough_opens) == (2, 1, 2)


def test_a_cache_that_is_too_small_is_named_with_the_size_that_would_do() -> None:
    summary = summary_of(opened("a", 5 * GIB, "passthrough"))
    [advice] = summary.advice(MountContext(cache_limit=4 * GIB))
    assert "--cache-size of 5GiB" in advice
    assert list(summary.advice(MountContext(cache_limit=6 * GIB))) == []


def test_reads_that_wait_for_s3_call_for_warming() -> None:
    summary = summary_of(*(read("a", number * MIB, MIB, "s3") for number in range(10)))
    assert any("fusefs warm" in advice for advice in summary.advice(MountContext()))


def test_look_ups_that_wait_for_s3_call_for_a_longer_ttl() -> None:
    waits = [Access(0.0, "lookup", f"{number}", source="s3", seconds=0.1) for number in range(50)]
    [advice] = summary_of(*waits).advice(MountContext(metadata_ttl_s=60.0))
    assert "--metadata-ttl longer than 60 s" in advice
    assert list(summary_of(*waits).advice(MountContext(metadata_ttl_s=None))) == []


def test_many_small_files_that_wait_for_s3_call_for_shards() -> None:
    waits = [
        Access(0.0, "open", f"{number}", number, size=100 * KIB, source="s3", seconds=0.03)
        for number in range(200)
    ]
    assert any("shards" in advice for advice in summary_of(*waits).advice(MountContext()))


def test_handles_whose_releases_were_lost_take_bounded_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(access_summary, "MOST_HANDLES", 10)
    summary = summary_of(*(read("a", 0, MIB, handle=number) for number in range(50)))
    assert len(summary._ends) == 10
    summary.add(read("a", MIB, MIB, handle=49))  # the latest are known
    assert summary.sequential_reads == 51
