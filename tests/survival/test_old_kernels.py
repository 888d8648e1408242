"""Kernels before 6.9, which send no request again: what an upgrade must not end, and a death does.

The mounts here negotiate neither that nor passthrough, as on such a kernel.
"""

import os
import sys
from pathlib import Path

import pytest

from tests.support.mounting import OLD_KERNEL, WRITABLE, Mount, Mounter, fusefs
from tests.support.semantics import states
from tests.support.servers.buckets import Bucket, stored
from tests.support.servers.faulty_s3 import FaultyS3
from tests.support.sharing import PATIENCE_S, content, python
from tests.support.survival.surviving import (
    expect_not_connected,
    keeper_status,
    kill_serving,
    serving_pid,
)
from tests.support.waiting import until

pytestmark = pytest.mark.root

SIZE = 3 << 20

# Holds a file open, tells how many bytes it has read, and reads on when a line comes.
READER = """
import sys
with open(sys.argv[1], "rb", buffering=0) as file:
    for line in sys.stdin:
        part = file.read(int(line))
        sys.stdout.write(part.hex() + "\\n")
        sys.stdout.flush()
"""


@pytest.fixture
def mount(behind: Mounter) -> Mount:
    return behind(WRITABLE, "--passthrough", "off", **OLD_KERNEL)


def upgrade(mount: Mount) -> None:
    before = serving_pid(mount)
    fusefs("upgrade", mount.path, environment=mount.environment)
    assert serving_pid(mount) != before
    assert keeper_status(mount)["last_reason"] == "upgrade"


@states(
    "An upgrade needs no such kernel: the old daemon first answers all that it has begun,"
    " for the longest pause at most."
)
def test_upgrades_go_unnoticed_by_who_reads_and_writes(mount: Mount, bucket: Bucket) -> None:
    data = content("held", SIZE)
    bucket.put("held", data)
    facts = mount.status()
    assert not facts["survival"]["on"]
    assert "outlives an upgrade" in facts["survival"]["why"]
    assert not facts["passthrough"]["on"]
    with python(READER, mount.path / "held") as reader, open(mount.path / "new", "wb") as new:
        for at in range(0, SIZE, SIZE // 3):
            size = SIZE // 3
            reader.stdin.write(f"{size}\n")
            reader.stdin.flush()
            assert bytes.fromhex(reader.stdout.readline()) == data[at : at + size]
            new.write(data[at : at + size])
            new.flush()
            upgrade(mount)
            assert sorted(os.listdir(mount.path)) == ["held", "new"]
    assert (mount.path / "new").read_bytes() == data
    assert stored(bucket, "new") == data


def test_a_read_that_is_under_way_is_answered_by_the_old_daemon(
    mount: Mount, bucket: Bucket, faulty: FaultyS3
) -> None:
    data = content("slow", SIZE)
    bucket.put("slow", data)
    rule = faulty.add("GET", "slow", stall=True)
    with python(READER, mount.path / "slow") as reader:
        reader.stdin.write(f"{1 << 16}\n")
        reader.stdin.flush()
        until(lambda: rule.used > 0, "the request that hangs")
        # What is begun is let go on when the upgrade waits for it.
        old = serving_pid(mount)
        with python(
            "import subprocess, sys; sys.exit(subprocess.run(sys.argv[1:]).returncode)",
            Path(sys.prefix) / "bin" / "fusefs",
            "upgrade",
            mount.path,
        ) as upgrading:
            until(lambda: keeper_status(mount)["pause_s"] > 0, "the old daemon is to finish")
            assert keeper_status(mount)["daemon"] == old
            faulty.clear()
            output = upgrading.communicate(timeout=PATIENCE_S)
        assert upgrading.returncode == 0, output
        assert bytes.fromhex(reader.stdout.readline()) == data[: 1 << 16]
    assert serving_pid(mount) != old


def test_the_death_of_a_daemon_that_an_upgrade_brought_ends_the_mount(
    mount: Mount, bucket: Bucket
) -> None:
    bucket.put("file", b"content")
    upgrade(mount)
    assert (mount.path / "file").read_bytes() == b"content"
    kill_serving(mount)
    expect_not_connected(mount)
    mount.start()
    assert (mount.path / "file").read_bytes() == b"content"
