"""A program edits a large object; the process dies at each step in turn, before and after it.

The steps are the requests to the bucket, each before and after the bucket has executed it,
and the records on the disk. What was not answered is sent again, as the kernel does.
"""

import os
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest

from fusefs.posix.nodes.inode import StagedFile
from fusefs.posix.write import upload_steps, uploader, writer
from fusefs.posix.write.staging import Staging
from fusefs.store.fencing import without_token
from tests.support.memory_uploads import UploadingStore
from tests.support.survival.fate import Fate
from tests.support.survival.mortal_mount import Process, answered

PART = 16 << 10
SIZE = 5 * PART
PUNCH_A_HOLE = 3

OLD = bytes(range(1, 256)) * (SIZE // 255 + 1)
# An edit of the file that is open under a handle; the model's edit is beside it.
Step = Callable[[Process, int], Awaitable[object]]
Model = Callable[[bytearray], None]


def write(at: int, text: bytes) -> tuple[Step, Model]:
    def change(content: bytearray) -> None:
        content.extend(bytes(max(0, at + len(text) - len(content))))
        content[at : at + len(text)] = text

    return lambda process, fh: process.write(fh, at, text), change


def resize(size: int) -> tuple[Step, Model]:
    async def step(process: Process, fh: int) -> None:
        inode = process.operations.handles.files[fh].inode
        await process.writer.stage(inode, keep=size)

    def change(content: bytearray) -> None:
        content.extend(bytes(max(0, size - len(content))))
        del content[size:]

    return step, change


def hole(start: int, size: int) -> tuple[Step, Model]:
    def change(content: bytearray) -> None:
        content[start : start + size] = bytes(size)

    return lambda process, fh: process.writer.allocate(fh, start, size, PUNCH_A_HOLE), change


def sync() -> tuple[Step, Model]:
    return lambda process, fh: answered(process.writer.flusher.fsync(fh)), lambda _content: None


def read(at: int) -> tuple[Step, Model]:
    return lambda process, fh: process.read(fh, at, 10), lambda _content: None


EDIT = [write(PART + 10, b"edited"), write(3 * PART, b"too")]
# What is done with the file open, once for each time that it is opened.
PROGRAMS = {
    "append": [[write(SIZE, b"appended")]],
    "edit twice": [EDIT, [write(4 * PART + 7, b"again")]],
    "shrink and grow": [[resize(3 * PART + 100)], [resize(7 * PART)]],
    "punch a hole": [[hole(PART + 5000, 9000)]],
    # As msync of a mapping, whose pages are read anew by the next process.
    "sync and go on": [[*EDIT, sync(), read(2 * PART), write(2 * PART + 5, b"more"), sync()]],
}


@pytest.fixture
def fate(monkeypatch: pytest.MonkeyPatch) -> Fate:
    for module in (upload_steps, uploader, writer):
        monkeypatch.setattr(module, "IN_PARTS", PART)
    fate, record = Fate(monkeypatch), Staging.record

    def record_or_die(self: Staging, staged: StagedFile) -> None:
        record(self, staged)
        fate.step()

    monkeypatch.setattr(Staging, "record", record_or_die)
    return fate


class Editor:
    """The program; `fh` is its open file, and `done` counts what was answered."""

    def __init__(self, sessions: list[list[tuple[Step, Model]]]) -> None:
        self._sessions = sessions
        self._calls = [call for session in sessions for call in self._calls_of(session)]
        self._fh = 0
        self.done = 0

    def expected(self) -> bytes:
        content = bytearray(OLD[:SIZE])
        for session in self._sessions:
            for _, change in session:
                change(content)
        return bytes(content)

    def _calls_of(self, session: list[tuple[Step, Model]]) -> list[Callable[[Process], Any]]:
        async def open_it(process: Process) -> None:
            self._fh = await process.open("file", os.O_RDWR)

        async def flush(process: Process) -> None:
            await answered(process.writer.flusher.flush(self._fh))

        async def release(process: Process) -> None:
            await answered(process.operations.release(self._fh))

        steps = [partial(self._step, step) for step, _ in session]
        return [open_it, *steps, flush, release]

    async def _step(self, step: Step, process: Process) -> None:
        await step(process, self._fh)

    async def go_on(self, process: Process) -> None:
        while self.done < len(self._calls):
            await self._calls[self.done](process)
            self.done += 1


@pytest.mark.parametrize("name", PROGRAMS)
async def test_an_edit_is_whole_wherever_the_process_dies(
    tmp_path: Path, fate: Fate, name: str
) -> None:
    for mount in fate.mounts(tmp_path, partial(UploadingStore, PART)):
        store = cast(UploadingStore, mount.store)
        store.put("file", OLD[:SIZE])
        editor = Editor(PROGRAMS[name])
        with fate.process():
            async with mount.serving() as process:
                fate.count()
                await editor.go_on(process)
        async with mount.serving() as process:
            await editor.go_on(process)
            for staged in process.writer.staging:
                await process.writer.uploads.wait(staged)
            assert await process.load("file") == editor.expected()
        assert store.contents() == {"file": editor.expected()}
        assert "mtime" in without_token(store.metadata("file"))
        assert store.uploads == {}
