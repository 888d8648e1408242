"""Files that the kernel reads by itself, opened in every other way at the same time.

Never an EIO, always one version; ESTALE only where a program without a name
to look up holds a version that is gone.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import mmap
import os
import random
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import trio

from fusefs.cache.file import CacheFile
from fusefs.kernel.passthrough import Passthrough
from tests.conftest import Bucket, Mounter
from tests.support.libc import mapped
from tests.support.mounting import Mount
from tests.support.semantics import states
from tests.support.sharing import drop_caches, python, read_all, stamped, until, version_of

MIB = 1 << 20
SMALL = 300_000
LARGE = 24 * MIB


@pytest.fixture
def make(mounter: Mounter) -> Callable[..., Mount]:
    """Mounts under the kernel session, with passthrough on."""

    def mount(*options: str) -> Mount:
        made = mounter("--session", "kernel", *options)
        passthrough = made.status()["passthrough"]
        if not passthrough["on"]:
            pytest.skip(f"no passthrough: {passthrough['why']}")
        return made

    return mount


def requests(mount: Mount) -> int:
    total: int = mount.status()["requests"]["total"]
    return total


def is_passthrough(mount: Mount, fd: int) -> bool:
    """Whether reads through a descriptor don't reach the daemon: one page here, one there."""
    pages = os.fstat(fd).st_size // 4096
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    before = requests(mount)
    for page in range(0, pages, pages // 60):
        os.pread(fd, 1, page * 4096)
    return requests(mount) - before < 30


def make_complete(mount: Mount, path: Path) -> None:
    """Read a file and wait until the next open of it is passthrough."""
    read_all(path)
    size = path.stat().st_size

    def is_there() -> bool:
        with path.open("rb", buffering=0) as file:
            return is_passthrough(mount, file.fileno())

    until(is_there, f"{path} ({size} bytes) is passthrough")


@states("Reads of a file that is whole in the cache never reach the daemon (passthrough).")
@pytest.mark.parametrize("size", [SMALL, LARGE], ids=["small", "large"])
def test_a_cached_file_is_read_without_the_daemon(
    make: Callable[..., Mount], bucket: Bucket, size: int
) -> None:
    bucket.put("file", stamped(1, size))
    mount = make()
    path = mount.path / "file"
    make_complete(mount, path)
    with path.open("rb", buffering=0) as file:
        drop_caches()
        before = requests(mount)
        data = b"".join(os.pread(file.fileno(), 4096, at) for at in range(0, size, 4096))
        assert data == stamped(1, size)
        assert requests(mount) - before < size // 4096 // 4


def test_with_passthrough_off_the_daemon_answers(mounter: Mounter, bucket: Bucket) -> None:
    """Also shows that the tests here can tell."""
    bucket.put("file", stamped(1, SMALL))
    mount = mounter("--session", "kernel", "--passthrough", "off")
    assert mount.status()["passthrough"]["on"] is False
    read_all(mount.path / "file")
    with (mount.path / "file").open("rb", buffering=0) as file:
        assert not is_passthrough(mount, file.fileno())


def test_one_file_opened_in_every_way_at_once(make: Callable[..., Mount], bucket: Bucket) -> None:
    data = stamped(1, LARGE)
    bucket.put("file", data)
    mount = make()
    path = mount.path / "file"
    with contextlib.ExitStack() as stack:
        served = stack.enter_context(path.open("rb", buffering=0))
        os.pread(served.fileno(), 4096, 0)
        early = stack.enter_context(mapped(path))
        make_complete(mount, path)
        late = stack.enter_context(path.open("rb", buffering=0))
        late_map = stack.enter_context(mapped(path))
        direct = os.open(path, os.O_RDONLY | os.O_DIRECT)
        stack.callback(os.close, direct)
        nameless = os.open(path, os.O_PATH)
        stack.callback(os.close, nameless)
        again = [
            os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
            for fd in (served.fileno(), late.fileno(), direct, nameless)
        ]
        for fd in again:
            stack.callback(os.close, fd)
        code = "import os, sys; sys.stdout.buffer.write(open(sys.argv[1], 'rb').read()[-4096:])"
        process = subprocess.run(
            ["python3", "-c", code, str(path)], check=True, capture_output=True
        )
        assert process.stdout == data[-4096:]
        with mmap.mmap(-1, 8192) as memory, memoryview(memory) as view:
            for at in random.Random(5).sample(range(0, LARGE - 8192, 4096), 40):
                expected = data[at : at + 8192]
                assert early.read(at, at + 8192) == expected
                assert late_map.read(at, at + 8192) == expected
                assert os.preadv(direct, [view], at) == 8192
                assert bytes(view) == expected
                for fd in (served.fileno(), late.fileno(), *again):
                    assert os.pread(fd, 8192, at) == expected
        inos = {os.fstat(fd).st_ino for fd in (served.fileno(), late.fileno(), direct, *again)}
        assert inos == {path.stat().st_ino}


@states(
    "A file that was opened before it was whole in the cache is read through the daemon until it"
    " is closed; every later open of it is passthrough."
)
def test_a_handle_from_before_the_fetch_keeps_nobody_from_passthrough(
    make: Callable[..., Mount], bucket: Bucket
) -> None:
    data = stamped(1, LARGE)
    bucket.put("file", data)
    mount = make()
    path = mount.path / "file"
    with path.open("rb", buffering=0) as held:
        assert held.read(4096) == data[:4096]
        make_complete(mount, path)
        with path.open("rb", buffering=0) as later:
            assert is_passthrough(mount, later.fileno())
            assert not is_passthrough(mount, held.fileno())
            assert os.fstat(later.fileno()).st_ino == os.fstat(held.fileno()).st_ino
            assert os.fstat(held.fileno()) == os.fstat(later.fileno())
            drop_caches()
            assert os.pread(held.fileno(), LARGE, 0) == data
            assert os.pread(later.fileno(), LARGE, 0) == data


def test_opens_while_a_file_becomes_complete_all_read_the_right_bytes(
    make: Callable[..., Mount], bucket: Bucket
) -> None:
    data = stamped(1, LARGE)
    bucket.put("file", data)
    mount = make("--metadata-ttl", "0s")
    path = mount.path / "file"
    done = threading.Event()

    def reopen(seed: int) -> int:
        numbers = random.Random(seed)
        opens = 0
        while not done.is_set() or not opens:
            fd = os.open(path, os.O_RDONLY)
            try:
                at = numbers.randrange(0, LARGE - 4096)
                assert os.pread(fd, 4096, at) == data[at : at + 4096]
                opens += 1
            finally:
                os.close(fd)
        return opens

    with ThreadPoolExecutor(6) as threads:
        openers = [threads.submit(reopen, seed) for seed in range(6)]
        try:
            assert read_all(path, 64 << 10) == data
            assert read_all(path, 64 << 10) == data
        finally:
            done.set()
        assert all(opener.result() for opener in openers)


# Eviction


@states("A file that is open or mapped stays readable when it is evicted.")
def test_files_that_are_open_or_mapped_stay_readable_when_evicted(
    make: Callable[..., Mount], bucket: Bucket
) -> None:
    contents = {f"f{n}": stamped(n, 6 * MIB) for n in range(10)}
    for name, data in contents.items():
        bucket.put(name, data)
    mount = make("--cache-size", "32MiB")
    root = mount.path
    with contextlib.ExitStack() as stack:
        make_complete(mount, root / "f0")
        opened = stack.enter_context((root / "f0").open("rb", buffering=0))
        make_complete(mount, root / "f1")
        mapping = stack.enter_context(mapped(root / "f1"))
        for _ in range(2):
            for name in list(contents)[2:]:
                assert read_all(root / name) == contents[name]
        assert mount.status()["cache"]["evicted_files"] > 0
        drop_caches()
        mapping.forget_pages()
        assert os.pread(opened.fileno(), 6 * MIB, 0) == contents["f0"]
        assert mapping.read(0, 6 * MIB) == contents["f1"]
        # Also when somebody opens it again.
        assert read_all(root / "f0") == contents["f0"]
        assert read_all(root / "f1") == contents["f1"]


def test_readers_of_more_than_fits_never_see_an_error(
    make: Callable[..., Mount], bucket: Bucket
) -> None:
    contents = {f"f{n}": stamped(n, 3 * MIB) for n in range(12)}
    for name, data in contents.items():
        bucket.put(name, data)
    mount = make("--cache-size", "16MiB")

    def work(seed: int) -> None:
        numbers = random.Random(seed)
        for _ in range(8):
            name = f"f{numbers.randrange(12)}"
            if numbers.random() < 0.5:
                assert read_all(mount.path / name, 256 << 10) == contents[name]
            else:
                with mapped(mount.path / name) as mapping:
                    assert mapping.read(0, 3 * MIB) == contents[name]

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(work, range(6)))


# Programs that have no name to look up, while the object changes


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
    make: Callable[..., Mount], bucket: Bucket, tmp_path: Path
) -> None:
    bucket.put("file", stamped(1, SMALL))
    mount = make("--metadata-ttl", "0s")
    path = mount.path / "file"
    with path.open("rb", buffering=0) as held, bound(path, tmp_path / "bound") as alone:
        nameless = os.open(path, os.O_PATH)
        try:
            bucket.put("file", stamped(2, SMALL))
            assert read_all(path) == stamped(2, SMALL)
            for way in (f"/proc/self/fd/{held.fileno()}", f"/proc/self/fd/{nameless}", alone):
                assert read_all(way) == stamped(1, SMALL)
            assert os.pread(held.fileno(), SMALL, 0) == stamped(1, SMALL)
        finally:
            os.close(nameless)


@states("Otherwise it gets the current version, if nobody has the old one open.")
@pytest.mark.parametrize("new_size", [LARGE, 10_000, LARGE + MIB], ids=["same", "less", "more"])
def test_nameless_opens_get_the_current_version_if_the_old_is_gone(
    make: Callable[..., Mount], bucket: Bucket, tmp_path: Path, new_size: int
) -> None:
    bucket.put("file", stamped(1, LARGE))
    mount = make("--metadata-ttl", "0s")
    path = mount.path / "file"
    path.stat()
    with bound(path, tmp_path / "bound") as alone:
        nameless = os.open(path, os.O_PATH)
        try:
            bucket.put("file", stamped(2, new_size))
            assert read_all(path) == stamped(2, new_size)
            for way in (alone, f"/proc/self/fd/{nameless}"):
                assert read_all(way) == stamped(2, new_size)
                assert os.stat(way).st_size == new_size
        finally:
            os.close(nameless)


@states("If neither is possible, that open fails with ESTALE, and opening by name goes on working.")
def test_nameless_opens_are_estale_while_an_uncached_old_version_is_open(
    make: Callable[..., Mount], bucket: Bucket
) -> None:
    bucket.put("file", stamped(1, LARGE))
    mount = make("--metadata-ttl", "0s")
    path = mount.path / "file"
    with path.open("rb", buffering=0) as held:
        os.pread(held.fileno(), 4096, 0)
        bucket.put("file", stamped(2, LARGE))
        assert read_all(path) == stamped(2, LARGE)
        assert reopen_or_stale(f"/proc/self/fd/{held.fileno()}") is None
        assert read_all(path) == stamped(2, LARGE)


def test_a_bind_mounted_file_that_becomes_complete_goes_on_working(
    make: Callable[..., Mount], bucket: Bucket, tmp_path: Path
) -> None:
    data = stamped(1, LARGE)
    bucket.put("file", data)
    mount = make("--metadata-ttl", "0s")
    path = mount.path / "file"
    with bound(path, tmp_path / "bound") as alone, alone.open("rb", buffering=0) as held:
        os.pread(held.fileno(), 4096, 0)
        make_complete(mount, path)
        for _ in range(3):
            assert read_all(alone) == data
        assert os.pread(held.fileno(), LARGE, 0) == data


def test_opening_in_every_way_while_the_object_is_replaced_gives_whole_versions_or_estale(
    make: Callable[..., Mount], bucket: Bucket, tmp_path: Path
) -> None:
    bucket.put("file", stamped(1, SMALL))
    mount = make("--metadata-ttl", "0s")
    path = mount.path / "file"
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
                    bucket.put("file", stamped(version, SMALL))
            finally:
                done.set()
            assert all(reader.result() for reader in readers[:1])
        assert os.pread(held.fileno(), SMALL, 0) == stamped(1, SMALL)
        assert read_all(path) == stamped(39, SMALL)


# Without the daemon


@states("Reading a passthrough file or its mapping needs no daemon.")
def test_reads_go_on_while_the_daemon_is_stopped(
    make: Callable[..., Mount], bucket: Bucket
) -> None:
    data = stamped(1, LARGE)
    bucket.put("file", data)
    mount = make()
    path = mount.path / "file"
    make_complete(mount, path)
    # In a process of its own, which may be killed if it hangs.
    code = """
import mmap, os, sys, hashlib
fd = os.open(sys.argv[1], os.O_RDONLY)
view = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
print("open", flush=True)
sys.stdin.readline()
size = int(sys.argv[2])
print(hashlib.sha256(os.pread(fd, size, 0)).hexdigest(), flush=True)
print(hashlib.sha256(view[:]).hexdigest(), flush=True)
"""
    reader = python(code, path, LARGE)
    assert reader.stdin is not None
    assert reader.stdout is not None
    daemon = mount.pid
    try:
        assert reader.stdout.readline() == "open\n"
        drop_caches()
        os.kill(daemon, signal.SIGSTOP)
        reader.stdin.write("go\n")
        reader.stdin.flush()
        lines: list[str] = []
        listener = threading.Thread(
            target=lambda: lines.extend(reader.stdout.readline() for _ in range(2))
        )
        listener.start()
        listener.join(30)
    finally:
        os.kill(daemon, signal.SIGCONT)
        reader.kill()
        reader.communicate()
    assert lines == [hashlib.sha256(data).hexdigest() + "\n"] * 2


class CountingRegistrar:
    """Gives ids without a kernel behind them."""

    def __init__(self) -> None:
        self.given: set[int] = set()
        self._numbers = itertools.count(1)

    async def open_backing(self, fd: int) -> int:
        await trio.lowlevel.checkpoint()
        number = next(self._numbers)
        self.given.add(number)
        return number

    def close_backing(self, backing_id: int) -> None:
        self.given.remove(backing_id)


def counted_ids(most: int) -> tuple[Passthrough, set[int]]:
    registrar = CountingRegistrar()
    ids = Passthrough(registrar, most)
    ids.is_on = True
    return ids, registrar.given


async def test_backing_ids_are_bounded_and_given_back() -> None:
    ids, given = counted_ids(most=3)
    files = [CacheFile(f"file-{n}", 1) for n in range(8)]
    for file in files:
        await ids.register(file)
    assert len(given) == len(ids) == 3
    assert ids.find(files[0]) == 0
    kept = ids.find(files[7])
    assert kept == await ids.register(files[7]) != 0
    ids.drop(files[7])
    assert kept not in given


async def test_the_backing_id_of_an_open_file_is_not_given_back() -> None:
    ids, _ = counted_ids(most=2)
    files = [CacheFile(f"file-{n}", 1) for n in range(6)]
    for file in files[:3]:
        file.pins = 1
    for file in files:
        await ids.register(file)
    assert all(ids.find(file) for file in files[:3])


async def test_a_file_that_is_opened_by_two_at_once_gets_one_backing_id() -> None:
    ids, given = counted_ids(most=3)
    file = CacheFile("file", 1)
    got: list[int] = []

    async def register() -> None:
        got.append(await ids.register(file))

    async with trio.open_nursery() as nursery:
        for _ in range(5):
            nursery.start_soon(register)
    assert set(got) == given
    assert len(given) == 1


def test_many_handles_of_many_files_share_their_backing_ids(
    make: Callable[..., Mount], bucket: Bucket
) -> None:
    for n in range(40):
        bucket.put(f"d/f{n:02d}", stamped(n, 9_000))
    mount = make()
    directory = mount.path / "d"
    for _ in range(3):
        fds = [os.open(directory / f"f{n // 2:02d}", os.O_RDONLY) for n in range(80)]
        try:
            for index, fd in enumerate(fds):
                assert os.pread(fd, 9_000, 0) == stamped(index // 2, 9_000)
        finally:
            for fd in fds:
                os.close(fd)
    assert "refused" not in mount.log.read_text()
