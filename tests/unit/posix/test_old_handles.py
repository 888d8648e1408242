"""Files that are open, or are just being opened, while their name gets something else."""

import errno
import os
import stat
from typing import Any

import pytest
import trio

from fusefs.posix.nodes.handles import FileHandle
from fusefs.posix.nodes.inode_table import Inode
from fusefs.store.interface import ObjectVersion
from tests.support.memory_store import Stop
from tests.support.semantics import states
from tests.support.survival.mortal_mount import MortalMount, Process

CHANGES = {"mode": 0o600, "uid": 7, "gid": 8, "mtime_ns": 9 * 10**9}
CHANGED = {"mode": str(stat.S_IFREG | 0o600), "uid": "7", "gid": "8", "mtime": "9.000000000"}


@pytest.fixture
def mount(mount: MortalMount) -> MortalMount:
    mount.store.put("file", b"content", mode=str(stat.S_IFREG | 0o640), note="kept")
    return mount


async def opened(process: Process, path: str) -> Inode:
    """The node of a file that is open for reading."""
    await process.open(path)
    return await process.node(path)


async def change(process: Process, inode: Inode) -> tuple[int, int, int]:
    """Change everything of a node; return what it shows."""
    await process.set_attributes(inode, **CHANGES)
    await process.set_xattr(inode, b"user.a", b"1")
    assert dict(process.operations.head_cache.meta(inode).xattrs) == {"user.a": b"1"}
    shown = process.operations.attributes(inode)
    return stat.S_IMODE(shown.mode), shown.uid, shown.mtime_ns


async def test_what_was_edited_meanwhile_is_still_that_file(
    process: Process, mount: MortalMount
) -> None:
    inode = await opened(process, "file")
    # As where the kernel reads by passthrough: to be written to, the name gets a new node.
    process.operations.inodes.mark_replaced(inode)
    await process.overwrite("file", b"another")
    await process.save("other", b"x")
    assert await change(process, inode) == (0o600, 7, 9 * 10**9)
    assert await process.node("file") is not inode
    await process.writer.deferred.drain()
    assert mount.store.contents()["file"] == b"another"
    assert CHANGED.items() <= mount.store.metadata("file").items()
    assert "xattr" in mount.store.metadata("file")


async def test_the_attributes_that_the_name_got_meanwhile_stay(
    process: Process, mount: MortalMount
) -> None:
    inode = await opened(process, "file")
    process.operations.inodes.mark_replaced(inode)
    await process.set_attributes("file", uid=5, mtime_ns=10**9)
    await process.set_attributes(inode, mode=0o600)
    await process.writer.deferred.drain()
    expected = {"uid": "5", "mtime": "1.000000000", "mode": CHANGED["mode"], "note": "kept"}
    assert expected.items() <= mount.store.metadata("file").items()


@states(
    "Attributes that are changed through an open file are that file's, also when it was "
    "written to or renamed meanwhile."
)
async def test_what_was_edited_and_renamed_is_changed_under_its_new_name(
    mount: MortalMount,
) -> None:
    async with mount.serving() as process:
        inode = await opened(process, "file")
        process.operations.inodes.mark_replaced(inode)
        await process.overwrite("file", b"another")
        await process.rename("file", "new")
    async with mount.serving() as process:
        inode = process.operations.inodes.get(inode.nodeid)
        assert await change(process, inode) == (0o600, 7, 9 * 10**9)
        await process.writer.deferred.drain()
    assert CHANGED.items() <= mount.store.metadata("new").items()


@pytest.mark.parametrize("is_renamed", [True, False])
async def test_what_was_edited_and_then_removed_is_no_name_any_more(
    process: Process, mount: MortalMount, *, is_renamed: bool
) -> None:
    inode = await opened(process, "file")
    process.operations.inodes.mark_replaced(inode)
    await process.overwrite("file", b"another")
    await process.save("tmp", b"another file")
    if not is_renamed:
        await process.unlink("file")
    await process.rename("tmp", "file")
    before = mount.store.metadata("file")
    assert await change(process, inode) == (0o600, 7, 9 * 10**9)
    assert mount.store.metadata("file") == before


@pytest.mark.parametrize("content", [b"content", b"other"])
@states(
    "Attributes that are changed through an open file which was removed or replaced here "
    "are seen through all that had it open then, and by no name."
)
async def test_what_was_replaced_by_a_rename_is_left_alone(
    process: Process, mount: MortalMount, content: bytes
) -> None:
    inode = await opened(process, "file")
    await process.save("tmp", content)
    await process.rename("tmp", "file")
    before = mount.store.metadata("file")
    assert await change(process, inode) == (0o600, 7, 9 * 10**9)
    assert mount.store.metadata("file") == before
    assert mount.store.contents() == {"file": content}


async def test_a_removed_directory_that_is_open_is_not_made_again(process: Process) -> None:
    await process.mkdir("directory")
    inode = await process.node("directory")
    process.operations.opendir(inode.nodeid, process.caller())
    await process.rmdir("directory")
    await process.set_attributes(inode, mode=0o700)
    assert process.operations.attributes(inode).mode == stat.S_IFDIR | 0o700
    assert list(process.store.objects) == ["file"]


@pytest.mark.parametrize("is_replaced", [True, False])
async def test_what_somebody_else_has_replaced_or_removed_is_looked_up_again(
    process: Process, mount: MortalMount, *, is_replaced: bool
) -> None:
    inode = await opened(process, "file")
    del mount.store.objects["file"]
    if is_replaced:
        mount.store.put("file", b"theirs")
    await process.set_attributes(inode, mode=0o600)
    await process.writer.deferred.drain()
    if not is_replaced:
        with pytest.raises(FileNotFoundError):
            await process.node("file")
        return
    await process.set_attributes("file", mode=0o600)
    await process.writer.deferred.drain()
    assert mount.store.metadata("file")["mode"] == CHANGED["mode"]


async def test_a_name_that_another_node_has_by_now_is_not_truncated_through_the_old_one(
    process: Process,
) -> None:
    inode = await opened(process, "file")
    await process.save("tmp", b"new")
    await process.rename("tmp", "file")
    with pytest.raises(OSError, match="another node") as caught:
        await process.set_attributes(inode, size=0)
    assert caught.value.errno == errno.ESTALE
    assert process.store.contents() == {"file": b"new"}


def shown(process: Process, inode: Inode) -> tuple[int, int, int, int, int]:
    one = process.operations.attributes(inode)
    return one.ino, stat.S_IMODE(one.mode), one.uid, one.mtime_ns, one.nlink


class Unscanned(dict[int, FileHandle]):
    """The open files of a mount that must not go through all of them."""

    values = None  # type: ignore[assignment]


@pytest.mark.parametrize("end", ["unlinked", "replaced"])
async def test_all_nodes_of_a_removed_file_show_the_same(mount: MortalMount, end: str) -> None:
    async with mount.serving() as process:
        process.operations.handles.files = Unscanned()
        first = await opened(process, "file")
        process.operations.inodes.mark_replaced(first)
        second = await opened(process, "file")
        process.operations.inodes.mark_replaced(second)
        writing = await process.open("file", os.O_RDWR)
        third = await process.node("file")
        await process.write(writing, 0, b"new")
        invalidated: list[int] = []
        process.operations.notifier.invalidate_attributes = invalidated.append
        if end == "replaced":
            await process.save("tmp", b"another file")
            await process.rename("tmp", "file")
        else:
            await process.unlink("file")
        assert {first.nodeid, second.nodeid} <= set(invalidated)
        nodes = (first, second, third)
        assert len({shown(process, one) for one in nodes}) == 1
        assert shown(process, first)[4] == 0
        for number, node in enumerate(nodes):
            await process.set_attributes(
                node, mode=0o600 + number, uid=number, mtime_ns=10**9 * number
            )
            assert {shown(process, one)[1:4] for one in nodes} == {
                (0o600 + number, number, 10**9 * number)
            }
            name = f"user.{number}"
            await process.set_xattr(node, name.encode(), b"1")
            for one in nodes:
                assert name in dict(process.operations.head_cache.meta(one).xattrs)
        await process.close(writing)
        # What the writer leaves is what the others go on with.
        assert {shown(process, one)[1:4] for one in (first, second)} == {(0o602, 2, 2 * 10**9)}
        ino = shown(process, first)[0]
        process.operations.log_table(process.operations.inodes._log)
    async with mount.serving() as process:
        again = [process.operations.inodes.get(one.nodeid) for one in (first, second)]
        assert {shown(process, one)[0] for one in again} == {ino}
        await process.set_attributes(again[0], mode=0o640)
        assert {shown(process, one)[1] for one in again} == {0o640}
        assert {shown(process, one)[4] for one in again} == {0}
    assert mount.store.contents() == ({"file": b"another file"} if end == "replaced" else {})


def slow_download(
    mount: MortalMount, monkeypatch: pytest.MonkeyPatch
) -> tuple[trio.Event, trio.Event]:
    """Set when the bytes of a download have come, and what it goes on at."""
    come, goes_on = trio.Event(), trio.Event()
    download = mount.store.download

    async def slowly(version: ObjectVersion, *arguments: Any, **options: Any) -> None:
        await download(version, *arguments, **options)
        come.set()
        await goes_on.wait()

    monkeypatch.setattr(mount.store, "download", slowly)
    return come, goes_on


@pytest.mark.parametrize("call", ["open", "truncate"])
@pytest.mark.parametrize("end", ["unlinked", "replaced"])
async def test_what_is_removed_while_it_is_opened_to_be_written_stays_so(
    mount: MortalMount, monkeypatch: pytest.MonkeyPatch, call: str, end: str
) -> None:
    mount.store.put("tmp", b"another file")
    come, goes_on = slow_download(mount, monkeypatch)
    handles: list[int] = []

    async def change_file() -> None:
        if call == "open":
            handles.append(await process.open("file", os.O_RDWR))
        else:
            await process.set_attributes("file", size=2)

    async with mount.serving() as process:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(change_file)
            await come.wait()
            if end == "unlinked":
                nursery.start_soon(process.unlink, "file")
            else:
                nursery.start_soon(process.rename, "tmp", "file")
            await trio.testing.wait_all_tasks_blocked()
            goes_on.set()
        left = {"tmp" if end == "unlinked" else "file": b"another file"}
        assert mount.store.contents() == left
        for fh in handles:
            await process.write(fh, 0, b"C")
    async with mount.serving() as process:
        for fh in handles:
            assert await process.read(fh) == b"Content"
            await process.close(fh)
        assert await process.listing() == list(left)
    assert mount.store.contents() == left


async def test_what_somebody_else_has_replaced_while_it_is_opened_to_be_written_is_opened_anew(
    mount: MortalMount, monkeypatch: pytest.MonkeyPatch
) -> None:
    come, goes_on = slow_download(mount, monkeypatch)

    async def open_file() -> None:
        with pytest.raises(OSError, match="something else now") as caught:
            await process.open("file", os.O_RDWR)
        assert caught.value.errno == errno.ESTALE

    async with mount.serving() as process, trio.open_nursery() as nursery:
        nursery.start_soon(open_file)
        await come.wait()
        inode = await process.node("file")
        mount.store.put("file", b"theirs")
        process.operations.inodes.mark_replaced(inode)
        goes_on.set()
    assert mount.store.contents()["file"] == b"theirs"


@pytest.mark.parametrize("at", [("COPY", "new"), ("DELETE", "file")])
async def test_what_is_opened_to_be_written_while_it_is_renamed_is_written_under_the_new_name(
    process: Process, at: tuple[str, str]
) -> None:
    stop = Stop(process.store, *at)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(process.rename, "file", "new")
        await stop.reached.wait()
        nursery.start_soon(process.overwrite, "file", b"written")
        await trio.testing.wait_all_tasks_blocked()
        stop.go_on.set()
    assert await process.load("new") == b"written"
    assert await process.listing() == ["new"]
    assert process.store.contents() == {"new": b"written"}


@pytest.mark.parametrize(
    ("end", "at"),
    [
        ("replaced", ("COPY", "file")),
        ("replaced", ("DELETE", "tmp")),
        ("removed", ("DELETE", "file")),
    ],
)
@pytest.mark.parametrize("is_closed_first", [True, False])
async def test_what_is_opened_to_be_written_while_its_name_goes_takes_no_name(
    process: Process, end: str, at: tuple[str, str], *, is_closed_first: bool
) -> None:
    """The name is that of the file that replaces it, or gone."""
    process.store.put("tmp", b"another file")
    stop, is_closed = Stop(process.store, *at), trio.Event()

    async def save() -> None:
        try:
            fh = await process.open("file", os.O_RDWR)
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
        else:
            await process.write(fh, 0, b"W")
            if not is_closed_first:
                await done.wait()
            await process.close(fh)
        is_closed.set()

    async def end_name() -> None:
        if end == "replaced":
            await process.rename("tmp", "file")
        else:
            await process.unlink("file")
        done.set()

    done = trio.Event()
    await process.load("file")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(end_name)
        await stop.reached.wait()
        nursery.start_soon(save)
        await trio.testing.wait_all_tasks_blocked(0.01)
        stop.go_on.set()
    assert is_closed.is_set()
    left = "file" if end == "replaced" else "tmp"
    assert process.store.contents() == {left: b"another file"}


async def test_a_file_that_a_reader_keeps_open_hides_no_other(mount: MortalMount) -> None:
    mount.ttl_s = 0.0
    async with mount.serving() as process:
        fh, reader = [await process.open("file", flags) for flags in (os.O_RDWR, os.O_RDONLY)]
        await process.write(fh, 0, b"changed")
        await process.close(fh)
        mount.store.put("file", b"theirs")
        with pytest.raises(OSError, match="replaced"):
            await process.open("file", os.O_RDWR)
        assert await process.load("file") == b"theirs"
        await process.unlink("file")
        await process.create("file", b"new")
        assert await process.read(reader) == b"changed"
        process.operations.release(reader)
        assert await process.load("file") == b"new"
