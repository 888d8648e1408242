"""A mount that nothing uses: its processes sleep."""

from __future__ import annotations

import os
import time
from pathlib import Path

from fusefs.telemetry.activity import IDLE_AFTER_S
from tests.support.mounting import Mounter
from tests.support.semantics import states
from tests.support.servers.buckets import Bucket
from tests.support.survival.surviving import children_of, keeper_pid
from tests.support.waiting import until

# Two ticks through three processes, and looks of the daemon in threads; with a timer of one
# second in any of them there are more.
MOST_SWITCHES = 60
WATCHED_S = 11.0


def switches(pids: list[int]) -> int:
    """How often the threads of these processes have gone to sleep."""
    count = 0
    for pid in pids:
        for thread in os.listdir(f"/proc/{pid}/task"):
            lines = Path(f"/proc/{pid}/task/{thread}/status").read_text().splitlines()
            count += sum(int(one.split()[1]) for one in lines if one.startswith("voluntary"))
    return count


@states(
    "The processes of a mount that is not in use wake up every ten seconds (every third of"
    " `--hang-timeout`, if that is less), and no more often."
)
def test_the_processes_of_an_idle_mount_sleep(bucket: Bucket, mounter: Mounter) -> None:
    bucket.put("a", b"a")
    mount = mounter()
    assert (mount.path / "a").read_bytes() == b"a"
    keeper = keeper_pid(mount)
    assert keeper is not None
    pids = [keeper, *children_of(keeper)]

    time.sleep(IDLE_AFTER_S)

    def are_asleep() -> bool:
        before = switches(pids)
        time.sleep(WATCHED_S)
        return switches(pids) - before <= MOST_SWITCHES

    until(are_asleep, "there are few")
