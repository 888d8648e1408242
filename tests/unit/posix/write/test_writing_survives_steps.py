"""A program makes, writes, renames and deletes a file; the process dies at each step in turn.

The steps are those of tests/support/survival/fate.py and the requests to the bucket.
What was not answered is sent again, as the kernel does.
"""

import os
import stat
from pathlib import Path

import pytest
import trio
import trio.testing

from fusefs.posix.write import backlog, flush
from fusefs.settings.types import EVERYWHERE_AUTO
from tests.support.survival.fate import Fate, fate_of_records
from tests.support.survival.mortal_mount import LOCAL, DiedError, MortalMount, Process, answered

LIMIT_S = 30


class Program:
    """The calls of a program in order, as a kernel sends them; `fh` is the file that is open."""

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls
        self.done = 0
        self.fh = 0
        self._unique = 0

    async def go_on(self, mount: MortalMount, process: Process) -> None:
        """Make the rest of the calls; the first is the one that was not answered, if any was."""
        while self.done < len(self.calls):
            call, _, name = self.calls[self.done].partition(" ")
            self._unique = self._unique or mount.new_unique()
            await self._call(process, call, name.encode())
            self._unique = 0
            self.done += 1

    async def _call(self, process: Process, call: str, name: bytes) -> None:
        operations, caller = process.operations, process.caller(self._unique)
        mutations = operations.mutations
        root = operations.inodes.root.nodeid
        if call in ("create", "exclusive"):
            flags = os.O_WRONLY | (os.O_EXCL if call == "exclusive" else os.O_TRUNC)
            mode = stat.S_IFREG | 0o644
            made = await answered(mutations.create(root, name, mode, flags, caller))
            self.fh = made[1].fh
        elif call == "write":
            await process.write(self.fh, 0, name)
        elif call == "close":
            await process.close(self.fh)
        elif call == "unlink":
            await answered(mutations.unlink(root, name, caller))
        else:
            assert call == "rename"
            old, new = name.split(b" ")
            await answered(mutations.rename(root, old, root, new, 0, caller))


PROGRAMS: dict[str, tuple[list[str], dict[str, bytes]]] = {
    "a file is made": (["create a", "write new", "close"], {"a": b"new", "b": b"old"}),
    "a lock comes and goes": (["exclusive a", "write new", "close", "unlink a"] * 2, {"b": b"old"}),
    "an open file is unlinked, and another made": (
        ["exclusive a", "unlink a", "write x", "close", "create a", "write new", "close"],
        {"a": b"new", "b": b"old"},
    ),
    "a file is made and replaces another, and that goes": (
        ["create a", "write new", "close", "rename a b", "create a", "close", "unlink b"],
        {"a": b""},
    ),
}


@pytest.fixture
def fate(monkeypatch: pytest.MonkeyPatch) -> Fate:
    return fate_of_records(monkeypatch)


@pytest.mark.parametrize(
    ("name", "is_local"),
    [*((name, False) for name in PROGRAMS), ("an open file is unlinked, and another made", True)],
)
async def test_a_program_finds_what_it_has_left_wherever_the_process_dies(
    tmp_path: Path, fate: Fate, monkeypatch: pytest.MonkeyPatch, name: str, *, is_local: bool
) -> None:
    monkeypatch.setattr(backlog, "RETRY_S", 0.001)
    monkeypatch.setattr(flush, "LATER_S", 0.0)
    calls, expected = PROGRAMS[name]
    durability = LOCAL if is_local else EVERYWHERE_AUTO
    for mount in fate.mounts(tmp_path):
        mount.store.put("b", b"old")
        program = Program(calls)
        with fate.process():
            async with mount.serving(durability=durability) as process:
                fate.count()
                await program.go_on(mount, process)
        async with mount.serving(durability=durability) as process:
            await program.go_on(mount, process)
            await check(process, mount, expected)


async def check(process: Process, mount: MortalMount, expected: dict[str, bytes]) -> None:
    assert sorted(await process.listing()) == sorted(expected)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(process.writer.backlog.run)
        with trio.fail_after(LIMIT_S):
            while process.writer.staging.pending:  # noqa: ASYNC110 - there is no event
                await trio.sleep(0.001)
        nursery.cancel_scope.cancel()
    assert mount.store.contents() == expected
    assert sorted(await process.listing()) == sorted(expected)
    assert all(not staged.is_unlinked for staged in process.writer.staging)


@pytest.mark.parametrize("daemons", [1, 2])
async def test_a_content_with_the_size_and_time_of_an_uploaded_one_is_uploaded_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, daemons: int
) -> None:
    """The process dies when the file has that time, and before anything else is done."""
    mount, time_ns = MortalMount(tmp_path / "mount"), 10**18 + 7
    utime = os.utime

    async def set_time(process: Process) -> None:
        await process.set_attributes("file", mtime_ns=time_ns)

    def die(fd: int, *, ns: tuple[int, int]) -> None:
        utime(fd, ns=ns)
        raise DiedError

    async with mount.serving() as process:
        fh = await process.create("file", b"first")
        await set_time(process)
        await answered(process.writer.flusher.fsync(fh))
    try:
        async with mount.serving() as process:
            await process.write(fh, 0, b"again")
            if daemons == 1:
                monkeypatch.setattr(os, "utime", die)
                await set_time(process)
        async with mount.serving() as process:
            monkeypatch.setattr(os, "utime", die)
            await set_time(process)
    except* DiedError:
        pass
    monkeypatch.setattr(os, "utime", utime)
    async with mount.serving() as process:
        await process.close(fh)
    assert mount.store.contents() == {"file": b"again"}
