"""The path's width: measured, and shared by the readers who wait."""

import random
from collections.abc import Callable
from contextlib import ExitStack

from fusefs.cache.downloader import DEMAND_PERIOD_S, Demand
from fusefs.cache.readahead.path_meter import GAIN, IDLE_S, LEAST_WIDTH, DownloadMeter, PathMeter
from tests.support.clock import Clock

MIB = 1 << 20
PART = 8 * MIB


class SimulatedPath:
    """A path of `bandwidth` bytes a second whose connections bring `rate` after `latency_s`."""

    def __init__(self, bandwidth: float, rate: float, latency_s: float, most: int = 64) -> None:
        self.clock = Clock()
        self.meter = PathMeter(most, PART, self.clock)
        self._bandwidth, self._rate, self._latency_s = bandwidth, rate, latency_s

    def keep_busy(self, seconds: float, width: Callable[[], int] | None = None) -> None:
        """Download parts, always as many at a time as `width` says."""
        width = width or (lambda: self.meter.width)
        until = self.clock.now + seconds
        # Each: (the meter, when its first byte comes, the bytes still to come).
        running: list[tuple[DownloadMeter, float, int]] = []
        step_s = 0.01
        while self.clock.now < until:
            while len(running) < width():
                meter = DownloadMeter(self.meter, PART).__enter__()
                running.append((meter, self.clock.now + self._latency_s, PART))
            self.clock.now += step_s
            flowing = [one for one in running if one[1] <= self.clock.now]
            each = min(self._rate, self._bandwidth / max(1, len(flowing))) * step_s
            going = []
            for meter, first_at, left in running:
                if first_at > self.clock.now:
                    going.append((meter, first_at, left))
                    continue
                brought = min(left, int(each * random.Random(left).uniform(0.95, 1.05)))
                meter.arrived(brought)
                if left > brought:
                    going.append((meter, first_at, left - brought))
                else:
                    meter.__exit__()
            running = going
        for meter, _, _ in running:
            meter.__exit__()


def test_latency_and_rate_of_a_connection_are_measured() -> None:
    path = SimulatedPath(bandwidth=1e9, rate=90e6, latency_s=0.05)
    path.keep_busy(3, lambda: 4)
    assert 0.03 < path.meter.latency_s < 0.08
    assert 70e6 < path.meter.rate < 100e6


def test_downloads_that_wait_for_each_other_say_little_of_the_latency() -> None:
    latencies = {}
    for under_way in (1, 8 * LEAST_WIDTH):
        meter = PathMeter(64, PART, Clock())
        meter.note_first(MIB, 0.01)
        with ExitStack() as downloads:
            for _ in range(under_way):
                downloads.enter_context(DownloadMeter(meter, PART))
            for _ in range(200):
                meter.note_first(MIB, 1.0)
        latencies[under_way] = meter.latency_s
    assert latencies[1] > 5 * 0.01
    assert latencies[8 * LEAST_WIDTH] < 2 * 0.01


def test_where_the_server_is_near_the_width_is_the_least() -> None:
    path = SimulatedPath(bandwidth=1.2e9, rate=1.2e9, latency_s=0.0)
    path.keep_busy(1, lambda: 2)
    assert path.meter.width == LEAST_WIDTH


def test_a_far_path_begins_wider() -> None:
    path = SimulatedPath(bandwidth=1e9, rate=90e6, latency_s=0.03)
    path.keep_busy(0.3, lambda: 2)
    assert path.meter.width > LEAST_WIDTH


def test_the_width_grows_until_the_path_is_full() -> None:
    path = SimulatedPath(bandwidth=3e9, rate=90e6, latency_s=0.03)
    path.keep_busy(10)
    carried = path.meter.width * 90e6 * (PART / 90e6) / (PART / 90e6 + 0.03)
    assert carried > 3e9 / GAIN / 1.2


def test_the_width_stays_where_more_brings_nothing() -> None:
    path = SimulatedPath(bandwidth=300e6, rate=90e6, latency_s=0.03)
    path.keep_busy(4)
    first = path.meter.width
    path.keep_busy(40)
    assert path.meter.width <= first * 1.5 + 1


def test_a_slow_reader_does_not_widen_the_path() -> None:
    path = SimulatedPath(bandwidth=3e9, rate=90e6, latency_s=0.03)
    path.keep_busy(2, lambda: 3)
    first = path.meter.width
    path.keep_busy(10, lambda: 3)
    assert path.meter.width <= first


def test_the_width_has_a_limit() -> None:
    path = SimulatedPath(bandwidth=100e9, rate=90e6, latency_s=0.03, most=20)
    path.keep_busy(10)
    assert path.meter.width == 20


def test_readers_share_the_width_while_they_read() -> None:
    clock = Clock()
    meter = PathMeter(64, PART, clock)
    readers = [object() for _ in range(4)]
    shares = [meter.share(reader) for reader in readers for _ in range(2)]
    assert shares[0] == LEAST_WIDTH
    assert shares[-1] == LEAST_WIDTH // 4
    meter.leaves(readers[0])
    assert meter.share(readers[1]) == LEAST_WIDTH // 3
    clock.now += IDLE_S + 1
    assert meter.share(readers[1]) == LEAST_WIDTH


def test_readers_that_have_just_been_answered_count_for_a_while() -> None:
    now = 0.0
    demand = Demand(lambda: now)
    for by in (1, 1, 1, -1, -1, -1):
        demand.change(by)
    assert (demand.count, demand.peak) == (0, 3)
    now = 1.5 * DEMAND_PERIOD_S
    demand.change(1)
    assert (demand.count, demand.peak) == (1, 3), "the most of the period before"
    now = 3 * DEMAND_PERIOD_S
    assert demand.peak == 1
    demand.change(-1)
    assert demand.peak == 1
    now = 6 * DEMAND_PERIOD_S
    assert demand.peak == 0
