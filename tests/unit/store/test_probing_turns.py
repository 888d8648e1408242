"""Mounts that are made at the same time do not all probe their store at once."""

from __future__ import annotations

from typing import cast

import trio
import trio.testing

from fusefs.store.errors import StoreError
from fusefs.store.interface import ListPage, ObjectInfo, Store
from fusefs.store.probing import FEW, FIRST_S, LOOKS, NEXT_S, take_turn

PROBE_S = 2.0


class Bucket:
    """Shows an object for each probe that is under way."""

    def __init__(self) -> None:
        self.under_way = 0
        self.lists = 0
        self.error: StoreError | None = None

    async def list_page(self, prefix: str, *, delimiter: str) -> ListPage:
        assert (prefix, delimiter) == ("data/.fusefs-probe/", "")
        self.lists += 1
        await trio.sleep(0.03)
        if self.error is not None:
            raise self.error
        keys = [f"{prefix}{number:016x}/object" for number in range(min(1000, self.under_way))]
        return ListPage([ObjectInfo(key, 1, '"1"', 1) for key in keys], [], None, "")


async def test_a_thousand_mounts_probe_one_after_the_other(
    autojump_clock: trio.testing.MockClock,
) -> None:
    bucket, most, ends = Bucket(), 0, []

    async def mount() -> None:
        nonlocal most
        await take_turn(cast(Store, bucket), "data/")
        bucket.under_way += 1
        most = max(most, bucket.under_way)
        await trio.sleep(PROBE_S)
        bucket.under_way -= 1
        ends.append(trio.current_time())

    began = trio.current_time()
    async with trio.open_nursery() as nursery:
        for _ in range(1000):
            nursery.start_soon(mount)
    # All at once they would be a thousand, with 25,000 requests a second.
    assert most < 150
    assert max(ends) - began <= FIRST_S + LOOKS * (NEXT_S + 0.03) + PROBE_S


async def test_a_mount_alone_probes_at_once(autojump_clock: trio.testing.MockClock) -> None:
    bucket = Bucket()
    for error, under_way in ((None, FEW), (StoreError("denied"), 1000)):
        bucket.error, bucket.under_way = error, under_way
        began = trio.current_time()
        await take_turn(cast(Store, bucket), "data/")
        assert trio.current_time() - began <= FIRST_S + 0.1
    assert bucket.lists == 2
