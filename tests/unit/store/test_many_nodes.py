"""Nodes that start at once against a store that refuses most: simulated, with the real pacing."""

from __future__ import annotations

import random

import pytest
import trio.testing

from bench.scale import nodes

NODES = 60
RATE = 60.0


@pytest.mark.parametrize("servers", [0, 8])
async def test_nodes_that_start_at_once_find_a_rate_that_the_store_takes(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock, servers: int
) -> None:
    random.seed(1)
    monkeypatch.setattr(nodes, "PARTS", 24)
    run = await nodes.start("", NODES, (nodes.rotated,), servers, bool(servers), RATE)
    sent, refused = run.series["sent"], run.series["refused"]
    assert run.series["warm"][-1] == NODES
    # The store takes 240 a second of the 1,440, and a second's worth at once.
    least_s = NODES * 24 / (nodes.PREFIXES * RATE) - 1
    assert run.figures["all_warm_s"] < (5 if not servers else 2) * least_s
    # After three seconds nearly nothing is refused, and the store is not left idle.
    assert sum(refused[3:]) <= 0.2 * max(1, sum(sent[3:]))
