"""Objects that are replaced while programs have them open: one version, or ESTALE."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import mmap
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.mounting import Mounter
from tests.support.semantics import states
from tests.support.servers.buckets import Bucket
from tests.support.servers.faulty_s3 import FaultyS3
from tests.support.sharing import KINDS, read_all, read_or_stale, stamped, version_of

MIB = 1 << 20
SMALL = 300_000
LARGE = 24 * MIB
# The files of a mount that relies on its listings; each test has a folder of them.
HOURLY = {
    "outdated/file": LARGE,
    "listed/large": LARGE,
    "listed/small": SMALL,
    "deleted/gone": SMALL,
    "deleted/stays": 0,
}


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def root(kind: str, faulty: FaultyS3, module_mounter: Mounter) -> Path:
    """A mount that asks the bucket at each open."""
    options = (*KINDS[kind], "--metadata-ttl", "0s")
    return module_mounter(*options, endpoint_url=faulty.endpoint_url, cache=kind).path


@pytest.fixture
def at_once(root: Path, folder: Bucket) -> Path:
    """The test's folder on that mount."""
    return root / folder.prefix


@pytest.fixture(scope="module")
def hourly(kind: str, module_mounter: Mounter, shared: Bucket) -> tuple[Path, Bucket]:
    """A folder of files on a mount that relies on its listings."""
    folder = dataclasses.replace(shared, prefix=f"{kind}/")
    for key, size in HOURLY.items():
        folder.put(key, stamped(1, size))
    mount = module_mounter(*KINDS[kind], "--metadata-ttl", "1h", cache=f"hourly-{kind}")
    return mount.path / kind, folder


@states(
    "An open file shows one version of its object, from open to close, whatever happens in the"
    " bucket."
)
@pytest.mark.parametrize("new_size", [SMALL, SMALL // 3, SMALL * 2], ids=["same", "less", "more"])
def test_an_old_handle_of_a_cached_file_keeps_its_version(
    at_once: Path, folder: Bucket, new_size: int
) -> None:
    folder.put("file", stamped(1, SMALL))
    path = at_once / "file"
    with path.open("rb", buffering=0) as old:
        folder.put("file", stamped(2, new_size))
        assert read_all(path) == stamped(2, new_size)
        assert os.stat(path).st_size == new_size
        assert os.fstat(old.fileno()).st_size == SMALL
        assert os.pread(old.fileno(), SMALL + 1, 0) == stamped(1, SMALL)


@states("Both versions can be open at the same time, each with its own bytes and size.")
def test_handles_of_three_versions_live_side_by_side(at_once: Path, folder: Bucket) -> None:
    fds = []
    try:
        for version in (1, 2, 3):
            folder.put("file", stamped(version, SMALL + version))
            fds.append(os.open(at_once / "file", os.O_RDONLY))
        for version, fd in enumerate(fds, 1):
            assert os.fstat(fd).st_size == SMALL + version
            assert os.pread(fd, MIB, 0) == stamped(version, SMALL + version)
    finally:
        for fd in fds:
            os.close(fd)


@states(
    "A read of a range that is not in the cache fails with ESTALE if the object has been replaced"
    " or deleted since the file was opened."
)
@pytest.mark.parametrize("case", ["replaced", "deleted", "truncated", "grown"])
def test_an_old_handle_of_a_file_that_is_not_cached_gets_estale(
    at_once: Path, folder: Bucket, case: str
) -> None:
    folder.put("file", stamped(1, LARGE))
    with (at_once / "file").open("rb", buffering=0) as old:
        first = os.pread(old.fileno(), 4096, 0)
        if case == "deleted":
            folder.delete("file")
        else:
            size = {"replaced": LARGE, "truncated": 10_000, "grown": LARGE + 5 * MIB}[case]
            folder.put("file", stamped(2, size))
        assert read_or_stale(old.fileno(), 4096, LARGE - 4096) is None
        # What it has read once it can read again.
        assert os.pread(old.fileno(), 4096, 0) == first == stamped(1, 4096)
    if case == "deleted":
        with pytest.raises(FileNotFoundError):
            read_all(at_once / "file")
    else:
        assert read_all(at_once / "file") == stamped(2, size)


@states("After ESTALE a new open reads the new version, whatever the metadata TTL is.")
def test_a_version_that_proved_outdated_is_not_valid_until_the_ttl(
    hourly: tuple[Path, Bucket],
) -> None:
    root, bucket = hourly
    path = root / "outdated/file"
    with path.open("rb", buffering=0) as old:
        os.pread(old.fileno(), 4096, 0)
        bucket.put("outdated/file", stamped(2, LARGE))
        assert read_or_stale(old.fileno(), 4096, LARGE - 4096) is None
    assert read_all(path) == stamped(2, LARGE)


def test_an_outdated_listing_does_not_make_an_open_fail(hourly: tuple[Path, Bucket]) -> None:
    """The listing still tells the old version, of which nothing is cached."""
    root, bucket = hourly
    assert os.listdir(root / "listed") == ["large", "small"]
    for name in ("listed/small", "listed/large"):
        data = stamped(2, HOURLY[name] + 7)
        bucket.put(name, data)
        assert read_all(root / name) == data
        assert (root / name).stat().st_size == len(data)


@states(
    "An open by name finds the current version by itself; it fails with ESTALE only if the object"
    " is replaced twice during that one open."
)
@pytest.mark.parametrize("size", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("times", [1, 2])
def test_an_object_that_is_replaced_during_an_open(
    at_once: Path, folder: Bucket, faulty: FaultyS3, size: int, times: int
) -> None:
    """It is replaced just before the first bytes are requested, once or twice."""
    versions = itertools.count(1)

    def replace() -> None:
        folder.put("file", stamped(next(versions), size))

    replace()
    faulty.clear()
    faulty.add("GET", f"{folder.prefix}file", times=times, before=replace)
    path = at_once / "file"
    if times == 2:
        with pytest.raises(OSError, match="Stale file handle"):
            path.open("rb")
    assert read_all(path) == stamped(times + 1, size)


def test_a_deleted_object_that_is_still_listed_is_enoent_on_open(
    hourly: tuple[Path, Bucket],
) -> None:
    root, bucket = hourly
    assert os.listdir(root / "deleted") == ["gone", "stays"]
    bucket.delete("deleted/gone")
    with pytest.raises(FileNotFoundError):
        read_all(root / "deleted/gone")


def test_a_replaced_object_of_the_same_content_goes_on_as_one_version(
    at_once: Path, folder: Bucket
) -> None:
    folder.put("file", stamped(1, LARGE))
    with (at_once / "file").open("rb", buffering=0) as old:
        os.pread(old.fileno(), 4096, 0)
        folder.put("file", stamped(1, LARGE))
        assert os.pread(old.fileno(), 4096, LARGE - 4096) == stamped(1, LARGE)[-4096:]


# On a busy machine no reader would get a version that is replaced at once: one of so many stays
# for a moment.
STAYS = 8
STAY_S = 0.5


class Replacer:
    """Replaces an object over and over, with versions 1, 2, 3 and so on."""

    def __init__(self, folder: Bucket, key: str, sizes: tuple[int, ...]) -> None:
        self._folder = folder
        self._key = key
        self._sizes = sizes
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.version = 0
        self.replace()

    def replace(self) -> None:
        size = self._sizes[self.version % len(self._sizes)]
        self._folder.put(self._key, stamped(self.version + 1, size))
        self.version += 1

    def _run(self) -> None:
        while not self._done.wait(0 if self.version % STAYS else STAY_S):
            self.replace()

    def __enter__(self) -> Replacer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()


def read_through(path: Path, size: int) -> int | None:
    """Read a file once from end to end: its version, or None if that was gone too early."""
    try:
        fd = os.open(path, os.O_RDONLY)
    except OSError as error:
        # Replaced twice within one open.
        if error.errno != errno.ESTALE:
            raise
        return None
    try:
        expected = os.fstat(fd).st_size
        parts = []
        while True:
            part = os.read(fd, size)
            if not part:
                break
            parts.append(part)
        data = b"".join(parts)
        assert len(data) == expected, "the end came early or late"
        return version_of(data)
    except OSError as error:
        if error.errno != errno.ESTALE:
            raise
        return None
    finally:
        os.close(fd)


@pytest.mark.parametrize(
    ("sizes", "reads"),
    [((SMALL,), 25), ((SMALL, 9_000, 2 * SMALL), 25), ((5 * MIB, 3 * MIB, 6 * MIB), 6)],
    ids=["small", "of changing size", "large"],
)
def test_readers_of_an_object_that_is_being_replaced_see_whole_versions(
    at_once: Path, folder: Bucket, sizes: tuple[int, ...], reads: int
) -> None:
    with Replacer(folder, "file", sizes) as replacer:
        path = at_once / "file"

        def work(size: int) -> list[int | None]:
            return [read_through(path, size) for _ in range(reads)]

        with ThreadPoolExecutor(4) as threads:
            results = list(threads.map(work, (4096, 10_000, 128 << 10, MIB)))
    seen = [[version for version in result if version is not None] for result in results]
    assert all(versions == sorted(versions) for versions in seen), "back to an older version"
    # At rest, everybody sees the last one.
    assert read_through(path, MIB) == replacer.version
    if len(sizes) == 1:
        assert any(seen), "no reader got anything"


def test_a_mapping_of_a_cached_file_keeps_its_version(at_once: Path, folder: Bucket) -> None:

    folder.put("file", stamped(1, SMALL))
    with (
        (at_once / "file").open("rb") as file,
        mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as view,
    ):
        assert version_of(view[:8192]) == 1
        folder.put("file", stamped(2, 2 * SMALL))
        assert read_all(at_once / "file") == stamped(2, 2 * SMALL)
        assert view[:] == stamped(1, SMALL)
