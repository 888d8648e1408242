"""Programs that open a file without its name, which nothing can send to the name's new node.

Through /proc/self/fd, an O_PATH descriptor, or a bind mount of the one file,
while the object is replaced or becomes whole in the cache: always one version,
and ESTALE only where the version is gone.
"""

import contextlib
import errno
import os
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.mounting import Mount
from tests.support.semantics import states
from tests.support.servers.buckets import Bucket
from tests.support.sharing import read_all, stamped, version_of

MIB = 1 << 20
SMALL = 300_000
LARGE = 24 * MIB


@contextlib.contextmanager
def bound(source: Path, target: Path) -> Iterator[Path]:
    """A bind mount of one file, as Kubernetes makes for a subPath."""
    target.touch()
    subprocess.run(["mount", "--bind", str(source), str(target)], check=True)
    try:
        yield target
    finally:
        subprocess.run(["umount", "-l", str(target)], check=True)


def reopen_or_stale(path: str | Path) -> bytes | None:
    try:
        return read_all(path)
    except OSError as error:
        if error.errno != errno.ESTALE:
            raise
        return None


@states(
    "A program that opens a file without its name (through `/proc/self/fd`, an `O_PATH`"
    " descriptor, or a bind mount of the one file) gets the version that it had, if that is whole"
    " in the cache."
)
def test_nameless_opens_get_the_old_version_if_it_is_cached(
    passing: Mount, folder: Bucket, tmp_path: Path
) -> None:
    folder.put("file", stamped(1, SMALL))
    path = passing.path / folder.prefix / "file"
    with path.open("rb", buffering=0) as held, bound(path, tmp_path / "bound") as alone:
        nameless = os.open(path, os.O_PATH)
        try:
            folder.put("file", stamped(2, SMALL))
            assert read_all(path) == stamped(2, SMALL)
            for way in (f"/proc/self/fd/{held.fileno()}", f"/proc/self/fd/{nameless}", alone):
                assert read_all(way) == stamped(1, SMALL)
            assert os.pread(held.fileno(), SMALL, 0) == stamped(1, SMALL)
        finally:
            os.close(nameless)


@states("Otherwise it gets the current version, if no program has the old one open.")
@pytest.mark.parametrize("new_size", [LARGE, 10_000, LARGE + MIB], ids=["same", "less", "more"])
def test_nameless_opens_get_the_current_version_if_the_old_is_gone(
    passing: Mount, folder: Bucket, tmp_path: Path, new_size: int
) -> None:
    folder.put("file", stamped(1, LARGE))
    path = passing.path / folder.prefix / "file"
    path.stat()
    with bound(path, tmp_path / "bound") as alone:
        nameless = os.open(path, os.O_PATH)
        try:
            folder.put("file", stamped(2, new_size))
            assert read_all(path) == stamped(2, new_size)
            for way in (alone, f"/proc/self/fd/{nameless}"):
                assert read_all(way) == stamped(2, new_size)
                assert os.stat(way).st_size == new_size
        finally:
            os.close(nameless)


@states("If neither is possible, that open fails with ESTALE, and opening by name goes on working.")
def test_nameless_opens_are_estale_while_an_uncached_old_version_is_open(
    passing: Mount, folder: Bucket
) -> None:
    folder.put("file", stamped(1, LARGE))
    path = passing.path / folder.prefix / "file"
    with path.open("rb", buffering=0) as held:
        os.pread(held.fileno(), 4096, 0)
        folder.put("file", stamped(2, LARGE))
        assert read_all(path) == stamped(2, LARGE)
        assert reopen_or_stale(f"/proc/self/fd/{held.fileno()}") is None
        assert read_all(path) == stamped(2, LARGE)


def test_a_bind_mounted_file_that_becomes_complete_goes_on_working(
    passing: Mount, folder: Bucket, tmp_path: Path
) -> None:
    data = stamped(1, LARGE)
    folder.put("file", data)
    path = passing.path / folder.prefix / "file"
    with bound(path, tmp_path / "bound") as alone, alone.open("rb", buffering=0) as held:
        os.pread(held.fileno(), 4096, 0)
        assert read_all(path) == data
        for _ in range(3):
            assert read_all(alone) == data
        assert os.pread(held.fileno(), LARGE, 0) == data


def test_opening_in_every_way_while_the_object_is_replaced_gives_whole_versions_or_estale(
    passing: Mount, folder: Bucket, tmp_path: Path
) -> None:
    folder.put("file", stamped(1, SMALL))
    path = passing.path / folder.prefix / "file"
    with bound(path, tmp_path / "bound") as alone, path.open("rb", buffering=0) as held:
        ways: list[str | Path] = [path, alone, f"/proc/self/fd/{held.fileno()}"]
        done = threading.Event()

        def work(way: str | Path) -> int:
            count = 0
            while not done.is_set():
                data = reopen_or_stale(way)
                if data is not None:
                    assert version_of(data) > 0
                    count += 1
            return count

        with ThreadPoolExecutor(6) as threads:
            readers = [threads.submit(work, way) for way in ways * 2]
            try:
                for version in range(2, 40):
                    folder.put("file", stamped(version, SMALL))
            finally:
                done.set()
            assert all(reader.result() for reader in readers[:1])
        assert os.pread(held.fileno(), SMALL, 0) == stamped(1, SMALL)
        assert read_all(path) == stamped(39, SMALL)
