"""Programs that open, read, cancel and close at random, while the room for it changes."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fusefs.cache.cached_file import CacheFile
from fusefs.cache.downloader import NotKeptError
from tests.support.local_cache import Parts, cache_in, content, version
from tests.support.machine.disks import small_disk

MIB = 1 << 20
SIZES = [300_000, MIB, 3 * MIB + 17]
OBJECTS = [version(f"o{number}", SIZES[number % 3]) for number in range(6)]
STEP = st.one_of(
    st.tuples(st.just("open"), st.integers(0, 5)),
    st.tuples(st.just("close"), st.integers(0, 5)),
    st.tuples(
        st.just("read"),
        st.integers(0, 5),
        st.integers(0, 2**31),
        st.integers(1, 800_000),
        st.integers(0, 60),
    ),
    st.tuples(st.just("limit"), st.integers(0, 8 * MIB)),
    st.tuples(st.just("record")),
    st.tuples(st.just("tend")),
)


class Model:
    """Programs that open, read, cancel and close, while the limit changes."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.open: dict[int, list[CacheFile]] = {}

    async def step(self, action: str, *values: int) -> None:
        await getattr(self, "_" + action)(*values)

    async def _open(self, index: int) -> None:
        file = self.parts.cache.pin(OBJECTS[index])
        await self.parts.cache.ensure_open(file)
        self.open.setdefault(index, []).append(file)

    async def _close(self, index: int) -> None:
        for file in self.open.pop(index, []):
            self.parts.cache.unpin(file)

    async def _read(self, index: int, start: int, size: int, patience: int) -> None:
        one = OBJECTS[index]
        start %= one.size
        stop = min(one.size, start + size)

        async def give_up(scope: trio.CancelScope) -> None:
            for _ in range(patience):
                await trio.lowlevel.checkpoint()
            if patience < 30:
                scope.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(give_up, nursery.cancel_scope)
            try:
                found = await self.parts.read(one, start, stop)
            except NotKeptError:
                found = bytes(await self.parts.downloader.read_unkept(one, start, stop))
            assert found == content(one)[start:stop]

    async def _limit(self, limit: int) -> None:
        self.parts.quota._limit = limit

    async def _record(self) -> None:
        await self.parts.cache.record()

    async def _tend(self) -> None:
        await self.parts.evictor.tend()

    async def check(self) -> None:
        """What must hold when nothing is under way."""
        parts = self.parts
        await parts.quiet()
        await parts.evictor.tend()
        assert parts.quota.reserved == 0
        assert all(not file.downloads for file in parts.cache.by_name.values())
        await parts.cache.residency.unload(lambda _file: None)
        present = 0
        async for files in parts.cache.residency.pages(-1):
            present += sum(file.present.total for file in files)
        assert parts.quota.used == present
        assert parts.bytes_on_disk() <= present + 4096 * 4 * len(OBJECTS)
        held = sum(files[0].present.total for files in self.open.values())
        assert parts.quota.used <= max(parts.quota._limit or 0, held)


@given(st.lists(st.lists(STEP, min_size=1, max_size=4), max_size=12), st.sampled_from([1, 1000]))
@settings(suppress_health_check=[HealthCheck.too_slow])
def test_whatever_programs_do_bytes_are_right_and_room_is_accounted_for(
    rounds: list[list[tuple]], most_in_memory: int
) -> None:
    async def run(directory: Path) -> None:
        async with cache_in(directory, limit=4 * MIB, most_in_memory=most_in_memory) as parts:
            model = Model(parts)
            for steps in rounds:
                # The steps of a round happen at once.
                async with trio.open_nursery() as nursery:
                    for step in steps:
                        nursery.start_soon(model.step, *step)
                await model.check()
            for index in range(len(OBJECTS)):
                await model.step("close", index)
            await model.check()
            used = parts.quota.used
        async with cache_in(directory) as parts:
            assert parts.quota.used == used
            for one in OBJECTS:
                await parts.fetch(one)

    with tempfile.TemporaryDirectory() as directory:
        trio.run(run, Path(directory))


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", 8) as path:
        yield path


async def test_a_disk_that_fills_up_is_no_error(disk: Path) -> None:
    async with cache_in(disk) as parts:
        model = Model(parts)
        for index in list(range(6)) * 2:
            await model.step("open", index)
            await model.step("read", index, 0, 4 * MIB, 99)
        for index in range(6):
            await model.step("close", index)
        await parts.quiet()
        assert parts.quota.reserved == 0
