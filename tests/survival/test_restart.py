"""Daemons that are killed, restarted, share a cache, or lose their disk: never wrong bytes."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import random
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fusefs.launch import registry
from tests.support.machine.disks import fill, small_disk
from tests.support.mounting import LIMIT_S, Mount, Mounter
from tests.support.semantics import states
from tests.support.servers.buckets import Bucket
from tests.support.waiting import until

MIB = 1 << 20
# What the catalog's own pages may take.
CATALOG = MIB


def put_many(bucket: Bucket, count: int, size: int) -> dict[str, bytes]:
    objects = {
        f"o{number:02}": random.Random(number).randbytes(size + number) for number in range(count)
    }
    for key, data in objects.items():
        bucket.put(key, data)
    return objects


def check_all(mount: Mount, objects: dict[str, bytes], workers: int = 4) -> None:
    """Read every object through the mount; each has to be right."""

    def check(key: str) -> None:
        assert (mount.path / key).read_bytes() == objects[key], key

    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        for result in [pool.submit(check, key) for key in objects]:
            result.result(LIMIT_S)


@pytest.mark.parametrize("passthrough", ["auto", "off"])
def test_what_was_on_record_is_used_after_a_kill(
    bucket: Bucket, mounter: Mounter, passthrough: str
) -> None:
    objects = put_many(bucket, 4, 3 * MIB)
    one = mounter("--passthrough", passthrough)
    check_all(one, objects)
    until(one.is_recorded, "what was read on record")
    one.kill()
    one.start()
    check_all(one, objects)
    assert one.status()["s3"]["gets"] == 0
    assert one.status()["cache"]["misses"] == 0


@states(
    "What has been read is kept, also across mounts, and not downloaded again while the object is"
    " the same."
)
def test_a_clean_restart_reuses_all_contents(bucket: Bucket, mounter: Mounter) -> None:
    objects = put_many(bucket, 6, MIB // 2) | put_many(bucket, 1, 5 * MIB)
    bucket.put("d/e", b"deep")
    one = mounter("--metadata-ttl", "indefinite")
    for is_restarted in (False, True):
        if is_restarted:
            until(one.is_recorded, "what was read on record")
            one.end()
            one.start()
        assert sorted(os.listdir(one.path)) == sorted([*objects, "d"])
        assert os.listdir(one.path / "d") == ["e"]
        check_all(one, objects)
        assert (one.path / "d" / "e").read_bytes() == b"deep"
    requests = one.status()["s3"]
    assert requests["gets"] == 0
    assert requests["heads"] <= 2 * 2  # of two files of a folder: listings tell no links
    one.end()
    objects["o01"] = b"changed meanwhile"
    bucket.put("o01", objects["o01"])
    one.start()
    check_all(one, objects)
    assert one.status()["s3"]["gets"] == 1


def test_a_daemon_killed_at_any_moment_leaves_no_wrong_bytes(
    bucket: Bucket, mounter: Mounter
) -> None:
    objects = put_many(bucket, 8, 5 * MIB)
    one = mounter("--cache-size", "30MiB")
    dice = random.Random(7)
    for _ in range(5):
        readers = [
            subprocess.Popen(
                ["sh", "-c", "cat * >/dev/null", "sh"], cwd=one.path, stderr=subprocess.DEVNULL
            )
            for _ in range(4)
        ]
        time.sleep(dice.uniform(0.05, 1.0))
        one.kill()
        for reader in readers:
            reader.wait(LIMIT_S)
        one.start()
        check_all(one, objects)


def test_two_mounts_share_a_cache(bucket: Bucket, mounter: Mounter) -> None:
    objects = put_many(bucket, 8, 4 * MIB)
    both = [mounter("--cache-size", "12MiB") for _ in range(2)]
    for _ in range(2):
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            for result in [pool.submit(check_all, one, objects) for one in both]:
                result.result(LIMIT_S)
    for one in both:
        assert one.status()["s3"]["errors"] == 0
        one.end()
    both[0].start()
    check_all(both[0], objects)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """The cache of `mounter`, on a small tmpfs; tests name it before, so that it goes after."""
    with small_disk(tmp_path / "disk", 64) as path:
        yield path


def test_the_floor_of_free_space_holds(bucket: Bucket, disk: Path, mounter: Mounter) -> None:
    objects = put_many(bucket, 12, 6 * MIB)
    one = mounter("--min-free", "20%", cache="disk/cache")
    for _ in range(2):
        check_all(one, objects)
    status = os.statvfs(disk)
    free, size = status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize
    assert free >= 0.2 * size - CATALOG
    assert one.status()["cache"]["evicted_files"] > 0


@states(
    "Where the cache disk has no room and nothing can be evicted, files are read from S3 each time,"
    " without an error; `fusefs status` and the log say so, once."
)
def test_a_disk_that_is_full_degrades_to_reading_without_a_cache(
    bucket: Bucket, disk: Path, mounter: Mounter
) -> None:
    objects = put_many(bucket, 4, 3 * MIB)
    one = mounter("--min-free", "0", cache="disk/cache")
    filler = fill(disk)
    for _ in range(2):
        check_all(one, objects)
    warning = one.status()["cache"]["warning"]
    # Which of the two it is depends on who notices first: statvfs, or a write.
    assert "does not work, reading without it" in warning or "is too small" in warning
    for sentence in warning.split("; "):
        assert one.log.read_text().count(sentence) == 1
    filler.unlink()
    check_all(one, objects)
    one.end()


@pytest.mark.parametrize("passthrough", ["auto", "off"])
def test_a_disk_that_turns_read_only_degrades_to_reading_without_a_cache(
    bucket: Bucket, disk: Path, mounter: Mounter, passthrough: str
) -> None:
    objects = put_many(bucket, 4, 3 * MIB)
    one = mounter("--passthrough", passthrough, cache="disk/cache")
    pid = one.pid
    (one.path / "o00").read_bytes()
    until(one.is_recorded, "what was read on record")
    # The journal is open for writing, so only the cache's own part can be turned.
    with turned_read_only(one):
        check_all(one, objects)
        check_all(one, objects)
        assert registry.start_time(pid) is not None


@contextlib.contextmanager
def turned_read_only(mount: Mount) -> Iterator[None]:
    """Make the cache's objects a read-only mount."""
    [objects] = mount.cache.glob("*/objects")
    subprocess.run(["mount", "--bind", objects, objects], check=True)
    subprocess.run(["mount", "-o", "remount,ro,bind", objects], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", objects], check=True)
