"""Time that programs wait, by its cause, and the histograms of requests."""

import errno
import random
import time
from collections.abc import Callable

import pytest
import trio

from fusefs.telemetry import metrics, stalls
from fusefs.telemetry.histogram import REQUEST_BOUNDS, Histogram
from fusefs.telemetry.requests import RequestTimes
from fusefs.telemetry.s3_requests import RequestClock, S3Requests
from fusefs.telemetry.stalls import Stalls, WaitCause, Work, current, served, unattended
from tests.support.clock import Clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock)
    return clock


def test_time_counts_while_something_is_done_and_waited_for(clock: Clock) -> None:
    counted = Stalls()
    work = Work(counted)
    work.enter(WaitCause.S3_FIRST_BYTE)
    clock.pass_s(5)  # nothing waits for it yet
    with work.awaited():
        clock.pass_s(2)
        work.leave(WaitCause.S3_FIRST_BYTE)
        clock.pass_s(7)  # at nothing that is known
    totals = counted.totals()
    assert totals.stalled[WaitCause.S3_FIRST_BYTE] == totals.wait[WaitCause.S3_FIRST_BYTE] == 2
    assert totals.stalled[WaitCause.ANY] == 2


def test_two_that_wait_stall_once_and_wait_twice(clock: Clock) -> None:
    counted = Stalls()
    work = Work(counted)
    work.enter(WaitCause.CACHE_DISK)
    with work.awaited():
        clock.pass_s(1)
        with work.awaited():
            clock.pass_s(3)
    work.leave(WaitCause.CACHE_DISK)
    totals = counted.totals()
    assert totals.stalled[WaitCause.CACHE_DISK] == 4
    assert totals.wait[WaitCause.CACHE_DISK] == 7


def test_the_union_does_not_add_causes_that_overlap(clock: Clock) -> None:
    counted = Stalls()
    first, second = Work(counted), Work(counted)
    with first.awaited(), second.awaited():
        first.enter(WaitCause.CONNECTION)
        clock.pass_s(2)
        second.enter(WaitCause.METADATA)
        clock.pass_s(2)
        first.move(WaitCause.CONNECTION, WaitCause.S3_TRANSFER)
        clock.pass_s(2)
        second.leave(WaitCause.METADATA)
        first.leave(WaitCause.S3_TRANSFER)
        clock.pass_s(10)
    stalled = counted.totals().stalled
    assert stalled[WaitCause.CONNECTION] == 4
    assert stalled[WaitCause.METADATA] == 4
    assert stalled[WaitCause.S3_TRANSFER] == 2
    assert stalled[WaitCause.ANY] == 6


def test_a_wait_that_goes_on_counts_already(clock: Clock) -> None:
    counted = Stalls()
    work = Work(counted)
    with work.awaited():
        work.enter(WaitCause.THROTTLED)
        clock.pass_s(3)
        assert counted.totals().stalled[WaitCause.THROTTLED] == 3
        work.leave(WaitCause.THROTTLED)


def test_a_request_waits_for_its_first_byte_and_then_for_the_rest(clock: Clock) -> None:
    counted, requests = Stalls(), S3Requests("test")
    work = Work(counted)
    with work.doing(), work.awaited():
        request = RequestClock("GET", requests)
        clock.pass_s(3)
        request.first_byte(clock() - 2)  # the engine tells later when it was
        clock.pass_s(1)
        request.end("cancelled")
        request.first_byte()
        clock.pass_s(4)
    wait = counted.totals().wait
    causes = WaitCause.S3_FIRST_BYTE, WaitCause.S3_TRANSFER, WaitCause.ANY
    assert [wait[cause] for cause in causes] == [1, 3, 4]
    samples = requests.samples()
    names = "test_first_byte_seconds", "test_request_duration_seconds"
    assert [samples[name][0]["sum"] for name in names] == [1, 4]


@pytest.mark.parametrize(("seconds", "share"), [(10, 1.0), (60, 0.5), (300, 0.1)])
def test_shares_are_those_of_the_last_seconds(clock: Clock, seconds: int, share: float) -> None:
    counted = Stalls()
    clock.pass_s(1000)  # nothing happens, and nothing is noted
    work = Work(counted)
    with work.awaited():
        work.enter(WaitCause.S3_TRANSFER)
        clock.pass_s(30)
        shares = counted.shares(seconds)
        work.leave(WaitCause.S3_TRANSFER)
    assert shares[WaitCause.S3_TRANSFER] == pytest.approx(share)
    assert shares[WaitCause.ANY] == pytest.approx(share)
    assert shares[WaitCause.CONNECTION] == 0


def test_what_is_long_past_has_no_share(clock: Clock) -> None:
    counted = Stalls()
    work = Work(counted)
    for _ in range(500):
        with work.awaited():
            work.enter(WaitCause.METADATA)
            clock.pass_s(1)
            work.leave(WaitCause.METADATA)
        clock.pass_s(1)
    assert counted.shares(60)[WaitCause.METADATA] == pytest.approx(0.5, abs=0.02)
    clock.pass_s(200)
    assert counted.shares(60)[WaitCause.METADATA] == 0
    assert counted.shares(300)[WaitCause.METADATA] == pytest.approx(1 / 6, abs=0.02)


async def test_tasks_have_the_work_of_the_task_that_starts_them() -> None:
    found: dict[str, Work] = {}

    async def note(name: str) -> None:
        found[name] = current()

    async def note_unattended() -> None:
        with unattended():
            await note("ahead")

    nothing = current()
    async with trio.open_nursery() as nursery:
        with served():
            found["request"] = current()
            nursery.start_soon(note, "child")
            nursery.start_soon(note_unattended)
    assert found["child"] is found["request"] is not nothing
    assert found["ahead"] is nothing is current()


@pytest.mark.parametrize("use", [stalls.served, lambda: stalls.stage(WaitCause.METADATA)])
async def test_a_wait_ends_with_its_cancellation(use: Callable[[], served]) -> None:
    before = stalls.STALLS.totals().wait[WaitCause.METADATA]
    with trio.move_on_after(0), served(), use():
        await trio.sleep_forever()
    after = stalls.STALLS.totals().wait[WaitCause.METADATA]
    await trio.sleep(0.01)
    assert stalls.STALLS.totals().wait[WaitCause.METADATA] == after >= before


def test_buckets_are_cumulative_and_include_their_bounds() -> None:
    histogram = Histogram((0.001, 1.0))
    for seconds in (0.0005, 0.001, 0.5, 2.0):
        histogram.observe(seconds)
    assert histogram.sample({"operation": "read"}) == {
        "labels": {"operation": "read"},
        "buckets": [["0.001", 2], ["1.0", 3], ["+Inf", 4]],
        "sum": 2.5015,
        "count": 4,
    }


def test_observations_that_are_sorted_later_are_in_the_same_buckets() -> None:
    chance = random.Random(1)
    seconds = [chance.choice(REQUEST_BOUNDS) * chance.choice((0.9, 1, 2)) for _ in range(1000)]
    histogram = Histogram(REQUEST_BOUNDS)
    for number, each in enumerate(seconds):
        histogram.observe(each)
        histogram.weigh(each, 17 if number < 500 else 3)
    weights = [18] * 500 + [4] * 500
    below = [
        [
            repr(bound),
            sum(weight for each, weight in zip(seconds, weights, strict=True) if each <= bound),
        ]
        for bound in REQUEST_BOUNDS
    ]
    sample = histogram.sample({})
    assert sample["buckets"] == [*below, ["+Inf", sum(weights)]]
    total = sum(each * weight for each, weight in zip(seconds, weights, strict=True))
    assert sample["sum"] == pytest.approx(total)
    assert sample["count"] == histogram.count == sum(weights)


def test_requests_are_counted_by_operation_and_outcome() -> None:
    times = RequestTimes({1: "lookup", 15: "read"})
    began = time.monotonic()
    times.answered(15, began)
    for number in (errno.ENOENT, errno.EACCES, errno.EIO, errno.EINTR, None):
        times.failed(1, began, number)
    times.failed(99, began, errno.ENOSYS)
    totals, durations = times.samples()
    counts = {tuple(one["labels"].values()): one["value"] for one in totals}
    assert counts == {
        ("read", "ok"): 1,
        ("lookup", "refused"): 2,
        ("lookup", "error"): 2,
        ("lookup", "interrupted"): 1,
        ("99", "refused"): 1,
    }
    assert [one["count"] for one in durations] == [one["value"] for one in totals]


def test_of_requests_that_are_answered_at_once_some_stand_for_the_others() -> None:
    times = RequestTimes({14: "open", 15: "read"})
    for number in range(100_000):
        opcode = 14 + number % 2
        if not number % times.period:
            times.sampled(opcode, time.monotonic())
        times.counts[opcode] += 1
    totals, durations = times.samples()
    assert [one["value"] for one in totals] == [50_000, 50_000]
    assert all(49_000 < one["count"] < 51_000 for one in durations)


def test_each_metric_is_reported_though_it_has_no_samples() -> None:
    reported = metrics.answer({"cache_files": [metrics.value(3)]})["metrics"]
    assert list(reported) == list(metrics.METRICS)
    assert reported["cache_files"]["samples"] == [{"labels": {}, "value": 3}]
    assert reported["cache_bytes"]["samples"] == []
