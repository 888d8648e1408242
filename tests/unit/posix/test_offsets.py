"""Offsets of directory entries: made of a mark and a name, and found again in any listing."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import trio

from fusefs.posix.journal.records import MARK, Kind, node_payload
from fusefs.posix.journal.replay import KernelState
from fusefs.posix.nodes.inode import Inode
from fusefs.posix.nodes.offsets import base_of, code_of
from tests.support.survival.mortal_mount import MortalMount, Names

FILES = [f"file-{number:02}" for number in range(20)]


@pytest.mark.parametrize("pattern", ["object-%07d.bin", "%06d", "a/long/prefix-%08d-and-a-tail"])
def test_numbered_names_have_different_codes(pattern: str) -> None:
    assert len({code_of((pattern % number).encode()) for number in range(100_000)}) == 100_000


async def test_a_stream_goes_on_behind_a_name_that_was_removed_meanwhile(tmp_path: Path) -> None:
    mount = MortalMount(tmp_path)
    async with mount.serving() as process:
        for name in FILES:
            await process.save(name, b"1")
        fh = await process.opendir()
        offsets = await process.readdir(fh)
        assert list(offsets) == FILES
        # Of an entry in the last reply, and of one of an earlier reply.
        for name in FILES[3:5]:
            await process.unlink(name)
            assert list(await process.readdir(fh, offsets[name])) == FILES[FILES.index(name) + 1 :]
            assert not await process.readdir(fh, offsets[FILES[-1]])
        process.operations.releasedir(fh)


async def test_no_name_is_passed_over_by_a_daemon_that_cannot_find_the_place(
    tmp_path: Path,
) -> None:
    mount = MortalMount(tmp_path)
    async with mount.serving() as process:
        for name in FILES:
            await process.save(name, b"1")
        fh = await process.opendir()
        offsets = await process.readdir(fh)
    del mount.store.objects[FILES[7]]
    async with mount.serving() as process:
        assert list(await process.readdir(fh, offsets[FILES[6]])) == FILES[8:]
        behind_the_gone = list(await process.readdir(fh, offsets[FILES[7]]))
        assert behind_the_gone[-12:] == FILES[8:]
        for unknown in (4711, base_of(3) | code_of(b"file-01")):
            with pytest.raises(OSError, match="unknown directory offset") as raised:
                await process.readdir(fh, unknown)
            assert raised.value.errno == errno.EINVAL
        process.operations.releasedir(fh)


async def test_where_there_are_too_many_nodes_names_come_alone(tmp_path: Path) -> None:
    mount = MortalMount(tmp_path)
    for name in FILES:  # without attributes, which would take a HEAD for each
        mount.store.put(name, b"1")
    async with mount.serving() as process:
        inodes = process.operations.inodes
        crossed: list[int] = []
        inodes.limit(5, lambda: crossed.append(len(inodes)))
        assert await process.listing() == FILES
        # The root is one, and one more is there before they are too many.
        assert len(inodes) <= 6
        assert crossed[0] == 6


def test_marks_are_on_record_until_their_directory_goes() -> None:
    state = KernelState()
    directory = Inode(20, 20, None, "d", None)
    state.apply(Kind.NODE, node_payload(directory))
    for number, position in ((1, "a"), (2, "b/")):
        state.apply(Kind.MARK, MARK.pack(20, number) + position.encode())
    assert state.marks == {20: {"a": 1, "b/": 2}}
    state.apply(Kind.MARK, MARK.pack(20, 0))
    assert state.marks == {}


async def test_what_was_learned_of_an_entry_lasts_until_it_is_shown(tmp_path: Path) -> None:
    """Under pyfuse3 no entry is shown before its attributes are known, directories included."""
    mount = MortalMount(tmp_path)
    async with mount.serving() as process:
        await process.mkdir("d")
        await process.save("file", b"1")
    mount.reboot()
    async with mount.serving() as process:
        fh = await process.opendir()
        entries = Names(takes_names=False)
        answer = process.operations.readdir(fh, 0, entries)
        with trio.fail_after(30):
            while answer is not None:
                answer = await answer
                if len(entries.names) < 2:
                    last = entries.offsets[entries.names[-1]]
                    answer = process.operations.readdir(fh, last, entries)
        assert entries.names == ["d", "file"]
        process.operations.releasedir(fh)


async def test_a_stream_goes_on_in_a_directory_that_was_made_here_and_is_many_pages(
    tmp_path: Path,
) -> None:
    mount = MortalMount(tmp_path)
    mount.store.page_size = 2  # to the next daemon: to this one it is one segment
    async with mount.serving() as process:
        for name in FILES:
            await process.save(name, b"1")
        fh = await process.opendir()
        offsets = await process.readdir(fh)
    async with mount.serving() as process:
        assert list(await process.readdir(fh, offsets[FILES[14]])) == FILES[15:]
        process.operations.releasedir(fh)
