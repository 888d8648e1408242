"""Reading files in every way that programs know, compared with the objects' bytes.

Each test runs on a mount whose reads are passthrough once a file is cached, and
on one whose reads the daemon answers.
"""

import mmap
import os
import random
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.machine.libc import mapped
from tests.support.mounting import Mount, Mounter
from tests.support.programs import digest
from tests.support.semantics import states
from tests.support.servers.buckets import Bucket
from tests.support.sharing import KINDS, content, python, read_all

MIB = 1 << 20
BIG = "big.bin"
SIZES = {
    "empty": 0,
    "one-byte": 1,
    "small.bin": 100_003,
    "edge-mib": MIB,
    "edge-mib-and-one": MIB + 1,
    BIG: 24 * MIB + 123,
    **{f"mixed/small-{n:03d}": 1 + n * 5_003 for n in range(48)},
    **{f"mixed/large-{n}": 5 * MIB + n * 7_777 for n in range(4)},
    **{f"cold/{n}": 3 * MIB + n for n in range(12)},
    # Read by one test alone, so that they are not in the cache before.
    **{f"shared-{kind}": 8 * MIB + 5 for kind in KINDS},
    **{f"mapped-cold-{kind}": 12 * MIB for kind in KINDS},
    **{f"two-ends-{kind}": 16 * MIB for kind in KINDS},
}


@dataclass
class World:
    """A mount, and the bytes that have to be in it."""

    mount: Mount
    kind: str

    @property
    def path(self) -> Path:
        return self.mount.path

    @property
    def big(self) -> Path:
        return self.path / BIG

    def expected(self, name: str) -> bytes:
        return content(name, SIZES[name])

    def counter(self, *names: str) -> Any:
        value: Any = self.mount.status()
        for name in names:
            value = value[name]
        return value


@pytest.fixture(scope="module")
def objects(shared: Bucket) -> Bucket:
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda name: shared.put(name, content(name, SIZES[name])), SIZES))
    return shared


@pytest.fixture(scope="module", params=KINDS)
def world(request: pytest.FixtureRequest, objects: Bucket, module_mounter: Mounter) -> World:
    mount = module_mounter(*KINDS[request.param], bucket=objects, cache=request.param)
    return World(mount, request.param)


def test_many_readers_of_small_and_large_files_get_the_objects_bytes(world: World) -> None:
    """First, so that everything is still to be fetched."""
    names = [name for name in SIZES if name.startswith(("mixed/", "cold/"))] * 2
    random.Random(1).shuffle(names)

    def read(name: str) -> tuple[str, str]:
        return name, digest(read_all(world.path / name, 128 << 10))

    with ThreadPoolExecutor(32) as threads:
        got = list(threads.map(read, names))
    assert got == [(name, digest(world.expected(name))) for name in names]


def test_many_processes_read_one_cold_file_at_once(world: World) -> None:
    name = f"shared-{world.kind}"
    data = world.expected(name)
    code = "import hashlib, sys; print(hashlib.sha256(open(sys.argv[1], 'rb').read()).hexdigest())"
    readers = [python(code, world.path / name) for _ in range(6)]
    assert {reader.communicate()[0].strip() for reader in readers} == {digest(data)}


@pytest.mark.parametrize("name", ["empty", "one-byte", "small.bin", "edge-mib", "edge-mib-and-one"])
def test_a_file_reads_whole(world: World, name: str) -> None:
    assert (world.path / name).read_bytes() == world.expected(name)


def test_a_read_across_the_end_returns_what_is_there(world: World) -> None:
    with world.big.open("rb", buffering=0) as file:
        got = os.pread(file.fileno(), 4096, SIZES[BIG] - 100)
    assert got == world.expected(BIG)[-100:]


@states(
    "A read returns all bytes that it requests, fewer only at the end of the file, and none"
    " behind it."
)
def test_a_read_far_past_the_end_returns_nothing(world: World) -> None:
    with world.big.open("rb", buffering=0) as file:
        assert file.seek(SIZES[BIG] + (1 << 40)) == SIZES[BIG] + (1 << 40)
        assert file.read(100) == b""
        assert os.pread(file.fileno(), 100, SIZES[BIG] + 1) == b""


def test_threads_pread_random_ranges_of_one_descriptor(world: World) -> None:
    data = world.expected(BIG)
    fd = os.open(world.big, os.O_RDONLY)

    def work(seed: int) -> None:
        numbers = random.Random(seed)
        for _ in range(40):
            start, size = numbers.randrange(len(data)), numbers.randrange(1, 300_000)
            assert os.pread(fd, size, start) == data[start : start + size]

    try:
        with ThreadPoolExecutor(16) as threads:
            list(threads.map(work, range(16)))
    finally:
        os.close(fd)


@states(
    "Mappings, shared and private, show the object's bytes, also after the descriptor has been"
    " closed."
)
@pytest.mark.parametrize("flags", [mmap.MAP_PRIVATE, mmap.MAP_SHARED], ids=["private", "shared"])
def test_a_mapping_shows_the_objects_bytes_in_random_pages(world: World, flags: int) -> None:
    data = world.expected(BIG)
    world.mount.forget()
    with (
        world.big.open("rb") as file,
        mmap.mmap(file.fileno(), 0, flags=flags, prot=mmap.PROT_READ) as view,
    ):
        for page in random.Random(3).sample(range(len(data) // 4096), 200):
            start = page * 4096
            assert view[start : start + 4096] == data[start : start + 4096]
        assert view[-200:] == data[-200:]


def test_a_mapping_outlives_its_descriptor_as_in_c(world: World) -> None:
    data = world.expected(BIG)
    with mapped(world.big) as mapping:
        world.mount.forget()
        for start in (0, 7 * MIB, len(data) - 5000):
            assert mapping.read(start, start + 5000) == data[start : start + 5000]


def test_a_mapping_of_a_cold_file_fetches_what_is_touched(world: World) -> None:
    name = f"mapped-cold-{world.kind}"
    data = world.expected(name)
    with mapped(world.path / name) as mapping:
        for start in (11 * MIB, 3 * MIB, 0):
            assert mapping.read(start, start + 10_000) == data[start : start + 10_000]


def test_splice_out_of_the_mount(world: World) -> None:
    data = world.expected("small.bin")
    read_end, write_end = os.pipe()
    got = b""
    try:
        with (world.path / "small.bin").open("rb") as source:
            while moved := os.splice(source.fileno(), write_end, 65_536):
                while moved:
                    part = os.read(read_end, moved)
                    moved -= len(part)
                    got += part
    finally:
        os.close(read_end)
        os.close(write_end)
    assert got == data


def test_copy_file_range_out_of_the_mount(world: World, tmp_path: Path) -> None:
    """The kernel may refuse it between file systems, as it does between two disks."""
    result = subprocess.run(
        ["cp", "--reflink=auto", str(world.big), str(tmp_path / "copy")],
        check=False,
        capture_output=True,
        text=True,
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert digest((tmp_path / "copy").read_bytes()) == digest(world.expected(BIG))


def _direct(path: Path, offset: int, size: int, memory_offset: int = 0) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        with (
            mmap.mmap(-1, size + memory_offset + 4096) as memory,
            memoryview(memory) as whole,
            whole[memory_offset : memory_offset + size] as view,
        ):
            return bytes(view[: os.preadv(fd, [view], offset)])
    finally:
        os.close(fd)


def test_aligned_direct_reads(world: World) -> None:
    data = world.expected(BIG)
    for offset, size in ((0, 4096), (8 * MIB, MIB), (8192, 3 * MIB)):
        assert _direct(world.big, offset, size) == data[offset : offset + size]


def test_a_direct_read_across_the_end_returns_what_is_there(world: World) -> None:
    start = SIZES[BIG] // 4096 * 4096
    assert _direct(world.big, start, 8192) == world.expected(BIG)[start:]


@states(
    "With O_DIRECT a passthrough file has the cache disk's rules of alignment; a file that the"
    " daemon reads has none."
)
def test_unaligned_direct_reads_are_free_unless_the_kernel_reads_the_cache_file(
    world: World,
) -> None:
    data = world.expected(BIG)[12_345 : 12_345 + 777]
    if world.kind != "passthrough":
        assert _direct(world.big, 12_345, 777, 3) == data
        return
    read_all(world.big)
    beside = world.mount.cache.parent / "on-the-same-disk"
    beside.write_bytes(world.expected(BIG))
    assert _outcome(world.big) == _outcome(beside)


def _outcome(path: Path) -> bytes | int | None:
    try:
        return _direct(path, 12_345, 777, 3)
    except OSError as error:
        return error.errno


def test_reading_does_not_wait_for_a_reader_elsewhere_in_the_file(world: World) -> None:
    """One descriptor at the start and one at the end of a file that is not there yet."""
    name = f"two-ends-{world.kind}"
    data = world.expected(name)
    with (
        (world.path / name).open("rb", buffering=0) as first,
        (world.path / name).open("rb", buffering=0) as last,
    ):
        assert os.pread(last.fileno(), 4096, 16 * MIB - 4096) == data[-4096:]
        assert os.pread(first.fileno(), 4096, 0) == data[:4096]
        assert os.pread(last.fileno(), 4096, 8 * MIB) == data[8 * MIB : 8 * MIB + 4096]
