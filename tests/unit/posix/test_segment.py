"""A listing's pages, and places in them by which a stream goes on."""

import errno

import pytest
import trio

from fusefs.posix.directory.pending_changes import put
from fusefs.posix.directory.segment import (
    UNCOVERED,
    Carried,
    Entry,
    HiddenKeys,
    Segment,
    segment_from,
)
from fusefs.posix.journal.records import MARK, KernelState, Kind, node_payload
from fusefs.posix.nodes.offsets import base_of, code_of
from fusefs.store.interface import ListPage, ObjectInfo
from tests.support.survival.mortal_mount import MortalMount, Names, Process

FILE = ObjectInfo("d/b", 3, '"1"', 0)


@pytest.mark.parametrize("name", ["x" * 256, "a\0b", ".", ".."])
def test_a_key_that_no_name_can_express_is_in_doubt_nowhere(name: str) -> None:
    page = ListPage([], [], None, "")
    found = segment_from(page, "d/", name, None, HiddenKeys())
    assert name not in found.doubtful
    assert name not in found.entries


def test_the_file_at_a_position_is_in_doubt() -> None:
    page = ListPage([], [], None, "")
    assert segment_from(page, "d/", "ab", None, HiddenKeys()).doubtful == {"ab"}


def page_of(*, is_directory: bool, has_file: bool, carried: Carried | None) -> Segment:
    """`d/b` on the last page of `d/`, as a directory, as a file or as both."""
    page = ListPage([FILE] if has_file else [], ["d/b/"] if is_directory else [], None, "")
    return segment_from(page, "d/", "a/", carried, HiddenKeys())


@pytest.mark.parametrize("carried", [{}, {"b": FILE}, {"b": None}])
@pytest.mark.parametrize("has_file", [True, False])
@pytest.mark.parametrize("is_directory", [True, False])
def test_what_a_directory_hid_is_known_when_that_is_removed(
    carried: Carried, *, is_directory: bool, has_file: bool
) -> None:
    """Also where it is the next page that has the directory, or which may be older."""
    found = page_of(is_directory=is_directory, has_file=has_file, carried=carried)
    put(found, "b", UNCOVERED)
    beneath: Entry = FILE if has_file else carried.get("b")
    assert found.entries == ({} if beneath is None else {"b": FILE})
    assert found.ordered == list(found.entries)
    assert found.doubtful == ({"b"} if beneath is None and "b" in carried else set())
    put(found, "b", None)
    assert found.entries == {"b": None}
    put(found, "b", UNCOVERED)
    assert found.entries == ({} if beneath is None else {"b": FILE})


FILES = [f"file-{number:02}" for number in range(20)]


@pytest.mark.parametrize("pattern", ["object-%07d.bin", "%06d", "a/long/prefix-%08d-and-a-tail"])
def test_numbered_names_have_different_codes(pattern: str) -> None:
    assert len({code_of((pattern % number).encode()) for number in range(100_000)}) == 100_000


async def test_a_stream_goes_on_behind_a_name_that_was_removed_meanwhile(process: Process) -> None:
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
    mount: MortalMount,
) -> None:
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


async def test_where_there_are_too_many_nodes_names_come_alone(mount: MortalMount) -> None:
    for name in FILES:  # without attributes, which would take a HEAD for each
        mount.store.put(name, b"1")
    mount.most_nodes = 5
    async with mount.serving() as process:
        inodes = process.operations.inodes
        assert await process.listing() == FILES
        # The root is one, and one more is there before they are too many.
        assert len(inodes) <= 6
        assert inodes.crossed.is_set()


def test_marks_are_on_record_until_their_directory_goes() -> None:
    state = KernelState()
    state.apply(Kind.NODE, node_payload(20, 0, 20, "d", 0, None, 0))
    for number, position in ((1, "a"), (2, "b/")):
        state.apply(Kind.MARK, MARK.pack(20, number) + position.encode())
    assert state.marks == {20: {"a": 1, "b/": 2}}
    state.apply(Kind.MARK, MARK.pack(20, 0))
    assert state.marks == {}


async def test_what_was_learned_of_an_entry_lasts_until_it_is_shown(mount: MortalMount) -> None:
    """Under pyfuse3 no entry is shown before its attributes are known, directories included."""
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
    mount: MortalMount,
) -> None:
    mount.store.page_size = 2  # to the next daemon: to this one it is one segment
    async with mount.serving() as process:
        for name in FILES:
            await process.save(name, b"1")
        fh = await process.opendir()
        offsets = await process.readdir(fh)
    async with mount.serving() as process:
        assert list(await process.readdir(fh, offsets[FILES[14]])) == FILES[15:]
        process.operations.releasedir(fh)
