"""When a GET is sent again: after how long, how often, and when not."""

from __future__ import annotations

import math
from collections import Counter

import pytest

from fusefs.store.admission import hedging as hedging_module
from fusefs.store.admission.connection_budget import ConnectionBudget
from fusefs.store.admission.hedging import LEAST_SAMPLES, MOST_AT_ONCE, SHARE, Hedging
from fusefs.store.interface import demanded


def warmed(connections: ConnectionBudget | None = None) -> Hedging:
    """It has seen many GETs, of which each took 30 ms."""
    hedging = Hedging(connections or ConnectionBudget(8), Counter())
    for _ in range(2 * LEAST_SAMPLES):
        hedging.note_sent()
        hedging.note_first_byte(0.03)
    return hedging


def test_nothing_is_slow_before_many_were_seen() -> None:
    hedging = Hedging(ConnectionBudget(8), Counter())
    for _ in range(LEAST_SAMPLES - 1):
        hedging.note_first_byte(0.03)
    assert hedging.wait_s == math.inf
    hedging.note_first_byte(0.03)
    assert hedging.wait_s == pytest.approx(0.06)


def test_slow_is_what_nearly_all_were_not() -> None:
    hedging = Hedging(ConnectionBudget(8), Counter())
    for number in range(1000):
        slow = number % 100
        hedging.note_first_byte(0.03 if slow >= 10 else 0.1 if slow >= 2 else 0.3)
    assert hedging.wait_s == 0.1


def test_a_server_nearby_is_given_some_time() -> None:
    hedging = Hedging(ConnectionBudget(8), Counter())
    for _ in range(LEAST_SAMPLES):
        hedging.note_first_byte(0.0005)
    assert hedging.wait_s == hedging_module.LEAST_S


def test_the_share_of_second_requests_is_bounded() -> None:
    hedging = Hedging(ConnectionBudget(8), Counter())
    sent = again = at_once = 0
    for _ in range(10_000):
        hedging.note_sent()
        sent += 1
        if hedging.take():
            hedging.give_back(has_won=False)
            again += 1
        assert again <= SHARE * sent
    assert again >= 0.99 * SHARE * sent
    for _ in range(10_000):
        hedging.note_sent()
    while hedging.take():
        hedging.give_back(has_won=True)
        at_once += 1
    assert at_once == MOST_AT_ONCE


async def test_nothing_is_sent_again_over_connections_that_others_need() -> None:
    connections = ConnectionBudget(8)
    hedging = warmed(connections)
    # Two of the eight are kept for demands.
    leases = [connections.lease(demanded) for _ in range(6)]
    for lease in leases:
        await lease.__aenter__()
    assert not hedging.take()
    await leases.pop().__aexit__()
    assert hedging.take()
    assert not hedging.take()
    hedging.give_back(has_won=False)
    for lease in leases:
        await lease.__aexit__()
    assert connections.in_use == 0


async def test_nothing_is_sent_again_while_the_store_asks_to_slow_down() -> None:
    connections = ConnectionBudget(8)
    hedging = warmed(connections)
    connections.note_throttled()
    assert not hedging.take()
    for _ in range(100):
        connections.note_success()
    assert hedging.take()
    connections.rate.limit = 1000.0
    assert not hedging.take()
