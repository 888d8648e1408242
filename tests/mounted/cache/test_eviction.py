"""Mounts whose cache is too small for what is read: what goes, what stays, and that it shows."""

import itertools
import mmap
import os
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bench.eviction import files, shuffled
from tests.support.machine.disks import taken_by
from tests.support.machine.libc import mapped
from tests.support.mounting import WRITABLE, Mount, Mounter, fetched, fusefs
from tests.support.semantics import states
from tests.support.servers.buckets import Bucket
from tests.support.sharing import read_all, stamped
from tests.support.waiting import until

MIB = 1 << 20


def put_stamped(bucket: Bucket, count: int, size: int) -> dict[str, bytes]:
    """Put the files f0, f1 and so on."""
    contents = {f"f{number}": stamped(number, size) for number in range(count)}
    for name, data in contents.items():
        bucket.put(name, data)
    return contents


def cache_files(mount: Mount) -> set[Path]:
    return set(mount.cache.glob("*/objects/*/*"))


@states("The cache stays within `--cache-size`.")
def test_the_cache_stays_within_its_size(mounter: Mounter, bucket: Bucket) -> None:
    contents = put_stamped(bucket, 8, 4 * MIB)
    here = mounter("--cache-size", "18MiB")
    for name, data in contents.items():
        # One file is used again and again, and so is never the one to go.
        assert read_all(here.path / "f0") == contents["f0"]
        assert read_all(here.path / name) == data
        assert here.status()["cache"]["used_bytes"] <= 18 * MIB
        assert taken_by(here.cache) <= 18 * MIB
    assert fetched(here) == sum(map(len, contents.values()))
    for name in ("f0", "f1", "f2"):
        assert read_all(here.path / name) == contents[name]
    assert fetched(here) == sum(map(len, contents.values()))
    for name in ("f3", "f4", "f5", "f6"):
        before = fetched(here)
        assert read_all(here.path / name) == contents[name]
        assert fetched(here) > before


@states(
    "Of a data set that is larger than the cache and is read again and again, in any order, a"
    " share is read from the cache that is nearly the cache's share of the data set. When"
    " programs read other files instead, these have replaced the ones before after two passes.",
    "What is fetched ahead of its first read takes a small share of a full cache, and replaces"
    " nothing that is still used.",
    "`fusefs status` shows the share of bytes that was read from the cache; the first read of"
    " what was fetched ahead does not count as such.",
)
def test_epochs_of_twice_the_cache_fetch_half_of_it(mounter: Mounter, bucket: Bucket) -> None:
    size = 64 << 10
    sets = [files(name, 120) for name in ("before/f", "after/f")]
    for name, _ in itertools.chain.from_iterable(sets):
        bucket.put(name, stamped(1, size))
    here = mounter("--cache-size", f"{60 * size}", "--read-only")
    shares = []
    for names, epochs in zip(sets, (3, 4), strict=True):
        for epoch in shuffled(names, epochs, 1):
            before = fetched(here)
            for name, _ in epoch:
                (here.path / name).read_bytes()
            shares.append(1 - (fetched(here) - before) / (120 * size))
    # The first epoch fetches everything, and next to nothing twice.
    assert shares[0] >= -0.05
    assert min(shares[1:3]) >= 0.4
    assert min(shares[5:]) >= 0.4
    cache = here.status()["cache"]
    assert cache["hit_bytes"] + cache["miss_bytes"] == 7 * 120 * size
    assert cache["local_share"] == pytest.approx(1 - fetched(here) / (7 * 120 * size), abs=0.03)
    assert "were served locally (" in fusefs("status", here.path).stdout


@states(
    "A file that is open is not evicted; one that is mapped, its descriptor closed, may be, and"
    " stays readable."
)
def test_an_open_file_stays_in_the_cache_and_a_mapped_one_stays_readable(
    passthrough: Mounter, bucket: Bucket
) -> None:
    contents = put_stamped(bucket, 10, 6 * MIB)
    mount = passthrough("--cache-size", "32MiB")
    root = mount.path
    assert read_all(root / "f0") == contents["f0"]
    (of_opened,) = cache_files(mount)
    for name in ("f2", "f3", "f4"):
        assert read_all(root / name) == contents[name]
    others = cache_files(mount)
    # The cache is full with this one: it is the next to go.
    assert read_all(root / "f1") == contents["f1"]
    (of_mapped,) = cache_files(mount) - others
    with (root / "f0").open("rb", buffering=0) as opened, mapped(root / "f1") as mapping:
        for name in list(contents)[5:]:
            assert read_all(root / name) == contents[name]
        until(lambda: not of_mapped.exists(), "the mapped file is evicted")
        assert of_opened.exists()
        mount.forget()
        mapping.forget_pages()
        assert mapping.read(0, 6 * MIB) == contents["f1"]
        before = fetched(mount)
        assert os.pread(opened.fileno(), 6 * MIB, 0) == contents["f0"]
        # Also when somebody opens it again.
        assert read_all(root / "f0") == contents["f0"]
        assert fetched(mount) == before
        assert read_all(root / "f1") == contents["f1"]
        assert fetched(mount) > before


def test_readers_of_more_than_fits_never_see_an_error(passthrough: Mounter, bucket: Bucket) -> None:
    contents = put_stamped(bucket, 12, 3 * MIB)
    mount = passthrough("--cache-size", "16MiB")

    def work(seed: int) -> None:
        numbers = random.Random(seed)
        for _ in range(8):
            name = f"f{numbers.randrange(12)}"
            if numbers.random() < 0.5:
                assert read_all(mount.path / name, 256 << 10) == contents[name]
            else:
                with mapped(mount.path / name) as mapping:
                    assert mapping.read(0, 3 * MIB) == contents[name]
            assert mount.status()["cache"]["used_bytes"] <= 16 * MIB

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(work, range(6)))
    until(lambda: taken_by(mount.cache) <= 16 * MIB, "the files take no more than that")


@states("A cache directory that can't take more is read past: programs see no error.")
def test_files_that_do_not_fit_into_the_cache_are_read_all_the_same(
    mounter: Mounter, bucket: Bucket
) -> None:
    data = stamped(1, 20 * MIB)
    bucket.put("file", data)
    here = mounter("--cache-size", "4MiB")
    assert read_all(here.path / "file") == data
    with (
        (here.path / "file").open("rb") as file,
        mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as view,
    ):
        assert view[15 * MIB : 16 * MIB] == data[15 * MIB : 16 * MIB]
    until(lambda: here.status()["cache"]["used_bytes"] <= 4 * MIB, "within the limit")


@states(
    "The cached copy of what this mount removes or replaces is removed within seconds, or with its"
    " last user."
)
def test_what_is_removed_or_replaced_leaves_no_cached_copy(
    bucket: Bucket, mounter: Mounter
) -> None:
    contents = put_stamped(bucket, 6, 100_000)
    here = mounter(WRITABLE)
    for name, data in contents.items():
        assert read_all(here.path / name) == data
    assert len(cache_files(here)) == 6
    (here.path / "f0").unlink()
    (here.path / "f1").rename(here.path / "f2")
    (here.path / "f3").write_bytes(b"another")
    with (here.path / "f4").open("rb", buffering=0) as held:
        (here.path / "f4").unlink()
        until(lambda: len(cache_files(here)) == 4, "the copies of f0, f2 and f3 gone")
        assert held.read() == contents["f4"]
    until(lambda: len(cache_files(here)) == 3, "the copy of f4 gone")
    assert read_all(here.path / "f2") == contents["f1"]
