"""A cluster cache whose answers are late: S3 has the bytes first, and it may stay in use."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import trio
from trio.testing import MockClock

from fusefs.cluster_cache.block import Domain
from fusefs.cluster_cache.tier import ClusterTier
from fusefs.store.http.async_exchange import Late
from fusefs.store.interface import ChunkWriter, ObjectVersion, Urgency, demanded

SIZE = 1000
S3_S, SLOW_S = 0.03, 2.0


class Slow:
    """Blocks that all begin to arrive after SLOW_S, which is later than anybody waits."""

    async def open(self) -> None:
        pass

    def hurry(self) -> None:
        pass

    async def get(
        self,
        name: str,
        start: int,
        stop: int,
        take: Callable[[memoryview], None],
        *,
        sent: Callable[[], None],
        priority: Urgency,
    ) -> None:
        sent()
        await trio.sleep(SLOW_S)

    async def get_now(
        self, name: str, start: int, stop: int, *, late: Late, priority: Urgency
    ) -> None:
        return None


class Near:
    """S3, which has everything."""

    def hurry(self) -> None:
        pass

    async def download(
        self,
        version: ObjectVersion,
        start: int,
        stop: int,
        write: ChunkWriter,
        *,
        priority: Urgency = demanded,
        in_loop: bool = False,
    ) -> None:
        await trio.sleep(S3_S)
        write(start, memoryview(bytes(stop - start)))


def append(got: bytearray, _offset: int, chunk: memoryview) -> None:
    got += chunk


async def late_until_open(usual_s: float | None, most: int) -> int:
    """After how many late answers a cluster cache is not used, which usually took `usual_s`."""
    async with trio.open_nursery() as nursery:
        tier = ClusterTier(Near(), Slow(), Domain("", "bucket", b"0123456789abcdef"), nursery)
        await tier.run()
        if usual_s is not None:
            tier.deadline.note_first_byte(usual_s)
        number = 0
        while tier.breaker.is_closed and number < most:
            got = bytearray()
            version = ObjectVersion(f"key{number}", "etag", SIZE)
            await tier.download(version, 0, SIZE, partial(append, got))
            assert got == bytes(SIZE)
            number += 1
        assert tier.counted["late"] == number
        nursery.cancel_scope.cancel()
    return number


@pytest.mark.parametrize(
    ("usual_s", "late"),
    [
        pytest.param(None, 3, id="it was waited for as long as it may be"),
        pytest.param(0.05, 10, id="it was waited for for a while"),
        pytest.param(0.001, 30, id="it was hardly waited for"),
    ],
)
async def test_a_late_answer_is_as_much_of_a_failure_as_it_has_cost(
    usual_s: float | None, late: int, autojump_clock: MockClock
) -> None:
    assert await late_until_open(usual_s, 100) == pytest.approx(late, abs=1)
