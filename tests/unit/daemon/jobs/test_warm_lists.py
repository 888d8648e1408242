"""The lists of warm jobs on the local disk."""

import os
from pathlib import Path

import trio
from trio.testing import wait_all_tasks_blocked

from fusefs.daemon.jobs.cache_warmer import JobSpec
from fusefs.daemon.jobs.selection import Shard
from tests.support.local_cache import (
    LIST,
    NEXT_DAEMON,
    NO_ATTRIBUTES,
    Bucket,
    cache_in,
    info,
    warmer_of,
)

KEYS = [f"key-{number}" for number in range(20)]


async def test_a_list_of_two_jobs_stays_until_both_have_ended(tmp_path: Path) -> None:
    """Of the one that is left the next daemon takes it up."""
    bucket = Bucket(KEYS)
    async with cache_in(tmp_path / "cache", bucket=bucket) as parts:
        for key in filter(Shard(0, 2).has, KEYS):
            await parts.fetch(info(key).version)
        async with trio.open_nursery() as nursery:
            first = warmer_of(parts, tmp_path)
            nursery.start_soon(first.run, None, NO_ATTRIBUTES)
            await first.append(LIST, 0, "\n".join(KEYS) + "\n")
            bucket.hold()
            # First what can't end: the other one may end, with the list, before this returns.
            left = await first.start(JobSpec("list", Shard(1, 2), list_name=LIST))
            done = await first.start(JobSpec("list", Shard(0, 2), list_name=LIST))
            await done.ended.wait()
            await wait_all_tasks_blocked()
            assert not left.has_ended
            nursery.cancel_scope.cancel()
        async with trio.open_nursery() as nursery:
            second = warmer_of(parts, tmp_path)
            nursery.start_soon(second.run, NEXT_DAEMON, NO_ATTRIBUTES)
            again = await second.start(JobSpec("list", Shard(1, 2), list_name=LIST))
            bucket.let_go()
            await again.ended.wait()
            await wait_all_tasks_blocked()
            assert again.why is None
            nursery.cancel_scope.cancel()
        assert all(parts.cache.find(info(key).version) for key in KEYS)
    left_over = [name for _, _, names in os.walk(tmp_path) for name in names if name == LIST]
    assert left_over == []
