"""How many readers wait, now and of late."""

from __future__ import annotations

from fusefs.cache.readahead.demand import PERIOD_S, Demand


def test_readers_that_have_just_been_answered_count_for_a_while() -> None:
    now = 0.0
    demand = Demand(lambda: now)
    for by in (1, 1, 1, -1, -1, -1):
        demand.change(by)
    assert (demand.count, demand.peak) == (0, 3)
    now = 1.5 * PERIOD_S
    demand.change(1)
    assert (demand.count, demand.peak) == (1, 3), "the most of the period before"
    now = 3 * PERIOD_S
    assert demand.peak == 1
    demand.change(-1)
    assert demand.peak == 1
    now = 6 * PERIOD_S
    assert demand.peak == 0
