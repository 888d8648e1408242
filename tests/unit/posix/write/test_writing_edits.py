"""Large objects that are edited and that somebody else replaces meanwhile, without a kernel."""

import errno
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import trio
import trio.testing

from fusefs.cache.cached_file import MOST_RANGES, CacheFile
from fusefs.linux.libc import KEEP_SIZE, PUNCH_HOLE
from fusefs.posix.nodes.edit_base import EditBase
from fusefs.posix.nodes.inode import StagedFile
from fusefs.posix.write import upload_steps
from fusefs.posix.write.sparse_edit import BaseLostError
from fusefs.store.errors import UnreachableError
from tests.support.memory_store import failing
from tests.support.survival.mortal_mount import MortalMount, Process

MIB = 1 << 20
CONTENT = b"0123456789abcdef" * MIB
THEIRS = b"theirs"


@pytest.fixture
def mount(mount: MortalMount) -> MortalMount:
    mount.store.put("file", CONTENT)
    return mount


def test_scattered_writes_are_noted_as_few_changed_ranges() -> None:
    base = EditBase(CacheFile("", 512 * MIB), 512 * MIB)
    for at in range(0, 256 * MIB, 8192):
        base.wrote(at, at + 10)
    assert len(list(base.changed)) <= MOST_RANGES + 1
    assert base.keeps(256 * MIB, 512 * MIB)


async def test_attributes_of_an_object_that_was_replaced_put_no_holes_in_its_place(
    process: Process,
) -> None:
    fh = await process.open("file", os.O_RDWR)
    await process.set_attributes("file", mode=0o600)
    process.store.put("file", THEIRS)
    answer = process.writer.flusher.fsync(fh)
    assert answer is not None
    with pytest.raises(OSError, match="replaced"):
        await answer
    assert process.store.contents() == {"file": THEIRS}


async def test_a_hole_whose_page_cannot_be_fetched(process: Process) -> None:
    fh = await process.open("file", os.O_RDWR)
    process.store.before = failing(UnreachableError("no answer"), "GET")
    with pytest.raises(UnreachableError, match="no answer"):
        await process.writer.allocate(fh, 9 * MIB + 100, 5000, PUNCH_HOLE | KEEP_SIZE)


async def test_a_large_file_that_is_open_for_writing_is_not_younger_for_being_read(
    process: Process,
) -> None:
    fh = await process.open("file", os.O_RDWR)
    inode = await process.node("file")
    before_ns = (await process.stat(inode)).mtime_ns
    assert await process.read(fh, 8 * MIB, 16) == CONTENT[:16]
    assert (await process.stat(inode)).mtime_ns == before_ns
    await process.close(fh)
    assert (await process.stat(inode)).mtime_ns == before_ns


async def test_what_waits_for_an_edit_that_is_set_aside_touches_no_other_file(
    process: Process, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fh = await process.open("file", os.O_RDWR)
    await process.write(fh, 0, b"edited")
    staged = (await process.node("file")).staged
    assert staged is not None
    monkeypatch.setattr(upload_steps, "IN_PARTS", len(CONTENT))
    may_fail, is_filling = trio.Event(), trio.Event()
    fill = process.writer.editor.fill
    other = -1

    async def lose(*arguments: object) -> None:
        is_filling.set()
        await may_fail.wait()
        raise BaseLostError("replaced")

    set_aside = process.writer.staging.set_aside

    def reuse(file: StagedFile) -> Path:
        nonlocal other
        number = file.fd
        kept = set_aside(file)
        other = os.open(tmp_path / "other", os.O_RDWR | os.O_CREAT)
        os.write(other, b"another file")
        assert other == number
        return kept

    monkeypatch.setattr(process.writer.editor, "fill", lose)
    monkeypatch.setattr(process.writer.staging, "set_aside", reuse)
    errors: list[int | None] = []

    async def fails(call: Callable[..., Awaitable[object]], *arguments: object) -> None:
        try:
            await call(*arguments)
        except OSError as error:
            errors.append(error.errno)

    async def sync() -> None:
        await process.writer.flusher.fsync(fh)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(fails, sync)
        await is_filling.wait()
        nursery.start_soon(fails, process.write, fh, 0, b"EDITED")
        nursery.start_soon(fails, process.writer.allocate, fh, 0, 4096, 3)
        nursery.start_soon(fails, process.read, fh, 8 * MIB, 10)
        await trio.testing.wait_all_tasks_blocked()
        monkeypatch.setattr(process.writer.editor, "fill", fill)
        process.store.put("file", THEIRS)
        may_fail.set()
    assert os.pread(other, 100, 0) == b"another file"
    os.close(other)
    assert errors == [errno.ESTALE] * 4
    assert process.writer.staging.charged == 0
