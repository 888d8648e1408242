"""`fusefs warm`: what is fetched ahead of its first read, and what is reported of the rest."""

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.mounting import FUSEFS, Mount, Mounter, fetched, fusefs
from tests.support.semantics import states
from tests.support.servers.buckets import Bucket
from tests.support.servers.faulty_s3 import FaultyS3
from tests.support.sharing import read_all, stamped
from tests.support.survival.surviving import replace_daemon
from tests.support.waiting import until

MIB = 1 << 20
SMALL = {f"tree/d{number % 3}/f{number}": stamped(number, 5_000) for number in range(40)}
LARGE = stamped(99, 20 * MIB + 7)


@pytest.fixture(scope="module")
def tree(shared: Bucket) -> Bucket:
    for key, data in SMALL.items():
        shared.put(key, data)
    shared.put("large", LARGE)
    shared.put("tree/empty", b"")
    shared.put(".fusefs/volumes/v.json", b"not shown")
    return shared


def warm(*arguments: str | bytes | Path) -> subprocess.CompletedProcess[str]:
    return fusefs("warm", *map(os.fsdecode, arguments), check=False)


def jobs(mount: Mount) -> list[dict[str, Any]]:
    return list(mount.status()["warming"])


@states(
    "What `fusefs warm` has fetched is read without asking the bucket for its bytes, "
    "until it is evicted."
)
def test_a_warmed_directory_is_read_without_the_bucket(here: Mount, faulty: FaultyS3) -> None:
    result = warm(here.path / "tree", "--wait")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == f"{here.path}/tree: 41 files, 195 KiB in the cache\n"
    faulty.add("GET", code="AccessDenied")
    for key, data in SMALL.items():
        assert read_all(here.path / key) == data


@states("Warming passes over what is in the cache.")
def test_what_is_in_the_cache_is_passed_over(here: Mount) -> None:
    nothing = fetched(here)
    assert warm(here.path / "tree/d0", "--wait").returncode == 0
    before = fetched(here)
    assert warm(here.path / "tree/d0", "--wait").returncode == 0
    assert fetched(here) == before
    assert warm(here.path, "--wait").returncode == 0
    assert fetched(here) - nothing == len(LARGE) + sum(map(len, SMALL.values()))


@states("What can't be read while warming is counted and named, and `--wait` fails.")
def test_what_cannot_be_read_is_counted_and_named(here: Mount, faulty: FaultyS3) -> None:
    faulty.add("GET", key="tree/d0/*", code="AccessDenied")
    result = warm(here.path / "tree", "--wait")
    assert result.returncode == 1
    assert "27 files" in result.stdout
    assert "14 files can't be read" in result.stdout
    assert " tree/d0/f" in result.stdout
    assert "access denied" in result.stdout
    assert "and 4 more" in result.stdout


@states(
    "Warming evicts nothing that it fetched itself or that was used since it began; what "
    "has no room is reported."
)
def test_what_has_no_room_is_left_out_and_evicts_nothing_that_was_fetched(
    mounter: Mounter, bucket: Bucket
) -> None:
    for number in range(6):
        bucket.put(f"f{number}", stamped(number, 2 * MIB))
    bucket.put("huge", bytes(12 * MIB))
    here = mounter("--cache-size", "9MiB")
    result = warm(here.path, "--wait")
    assert result.returncode == 1
    assert "4 files, 8.0 MiB in the cache" in result.stdout
    assert "no room for 16.0 MiB of 3 files in the cache (9.0 MiB)" in result.stdout
    status = here.status()
    assert status["cache"]["evicted_files"] == 0
    assert status["cache"]["warning"] is None
    before = fetched(here)
    assert warm(here.path, "--wait").returncode == 1
    assert fetched(here) == before


def test_a_cache_that_takes_nothing_is_reported(mounter: Mounter, tree: Bucket) -> None:
    here = mounter(bucket=tree)
    [objects] = here.cache.glob("*/objects")
    objects.rename(objects.with_name("away"))
    objects.write_text("in its place")
    result = warm(here.path / "tree/d0", "--wait")
    assert result.returncode == 1
    assert "14 files can't be read" in result.stdout
    assert "does not work" in result.stdout


def test_without_wait_the_daemon_does_it_and_shows_how_far_it_is(
    here: Mount, faulty: FaultyS3
) -> None:
    stalled = faulty.add("GET", key="tree/d1/*", stall=True)
    assert warm(here.path / "tree").returncode == 0
    until(lambda: jobs(here)[-1]["done_files"] == 28, "all but what stalls")
    assert "tree: 67%, 132 of 195 KiB" in fusefs("status", here.path).stdout
    faulty.remove(stalled)
    until(lambda: jobs(here)[-1]["state"] == "ended", "its end")
    assert jobs(here)[-1]["done_files"] == 41


def test_a_job_that_is_cancelled_fetches_no_more(here: Mount, faulty: FaultyS3) -> None:
    stalled = faulty.add("GET", stall=True)
    assert warm(here.path / "tree").returncode == 0
    assert warm("--cancel", here.path).returncode == 0
    until(lambda: jobs(here)[-1]["state"] == "cancelled", "its end")
    faulty.remove(stalled)
    until(lambda: here.status()["requests"]["downloads"] == 0, "nothing is fetched")
    result = warm("--cancel", here.path)
    assert "is not being warmed" in result.stderr


def test_interrupting_who_waits_leaves_it_going_on(here: Mount, faulty: FaultyS3) -> None:
    stalled = faulty.add("GET", stall=True)
    waiting = subprocess.Popen(
        [str(FUSEFS), "warm", "--wait", str(here.path / "tree")], stderr=subprocess.PIPE, text=True
    )
    until(lambda: jobs(here) and faulty.requests("GET"), "its beginning")
    waiting.send_signal(signal.SIGINT)
    _, output = waiting.communicate(timeout=90)
    assert waiting.returncode == 130
    assert "what has begun goes on" in output
    faulty.remove(stalled)
    until(lambda: jobs(here)[-1]["state"] == "ended", "its end")
    assert jobs(here)[-1]["done_files"] == 41


@states("A daemon that takes a mount over goes on with what was being warmed.")
def test_the_next_daemon_goes_on_with_what_a_killed_one_was_fetching(
    behind: Mounter, tree: Bucket, faulty: FaultyS3
) -> None:
    kept = behind("--session", "kernel", bucket=tree)
    stalled = faulty.add("GET", key="tree/d1/*", stall=True)
    waiting = subprocess.Popen(
        [str(FUSEFS), "warm", "--wait", str(kept.path / "tree")], stdout=subprocess.PIPE, text=True
    )
    until(lambda: jobs(kept) and jobs(kept)[-1]["done_files"] == 28, "all but what stalls")
    replace_daemon(kept)
    faulty.remove(stalled)
    output, _ = waiting.communicate(timeout=90)
    assert waiting.returncode == 0
    assert "41 files" in output
    faulty.add("GET", code="AccessDenied")
    assert read_all(kept.path / "tree/d1/f1") == SMALL["tree/d1/f1"]


@states("An object that changes while it is warmed is fetched as it is then.")
def test_an_object_that_changes_meanwhile_is_fetched_as_it_is_then(
    behind: Mounter, bucket: Bucket, faulty: FaultyS3
) -> None:
    bucket.put("changing", b"as it was")
    here = behind("--metadata-ttl", "0s")
    faulty.add("GET", key="changing", times=1, before=lambda: bucket.put("changing", b"as it is!"))
    result = warm(here.path, "--wait")
    assert result.returncode == 0, result.stdout
    assert "1 file," in result.stdout
    faulty.add("GET", code="AccessDenied")
    assert read_all(here.path / "changing") == b"as it is!"


def test_a_writable_mount_knows_the_attributes_of_what_is_warm(
    behind: Mounter, tree: Bucket, faulty: FaultyS3
) -> None:
    here = behind("--no-read-only", bucket=tree)
    # Objects of the last seconds may still change without showing it.
    youngest = tree.client.head_object(Bucket=tree.name, Key="tree/empty")["LastModified"]
    until(lambda: time.time() - youngest.timestamp() > 6, "objects that are old enough")
    assert warm(here.path / "tree", "--wait").returncode == 0
    heads = len(faulty.requests("HEAD", "tree/*/f*"))
    assert heads == len(SMALL)
    for key, data in SMALL.items():
        assert read_all(here.path / key) == data
    assert len(faulty.requests("HEAD", "tree/*/f*")) == heads


@states("What programs read goes before what is warmed.")
def test_what_programs_read_has_connections_while_a_job_takes_all_it_may(
    behind: Mounter, tree: Bucket, faulty: FaultyS3
) -> None:
    here = behind("--max-connections", "8", bucket=tree)
    faulty.add("GET", key="tree/*", stall=True)
    assert warm(here.path / "tree").returncode == 0
    until(lambda: len(faulty.requests("GET", "tree/*")) == 6, "as many as there may be")
    assert read_all(here.path / "large") == LARGE
    assert len(faulty.requests("GET", "tree/*")) == 6


def test_a_mount_ends_while_it_is_being_warmed(
    behind: Mounter, tree: Bucket, faulty: FaultyS3
) -> None:
    here = behind(bucket=tree)
    faulty.add("GET", stall=True)
    assert warm(here.path).returncode == 0
    here.end()
    result = warm(here.path)
    assert "is not in a mount of fusefs" in result.stderr
