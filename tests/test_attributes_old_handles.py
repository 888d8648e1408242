"""Attributes that are changed through a handle which reads what its name no longer has."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from fusefs.posix.answers import NewAttributes
from fusefs.posix.inodes import Inode
from fusefs.posix.mutations import Mutations
from tests.support.mortal_mount import MortalMount, Process
from tests.support.semantics import states

CHANGES = NewAttributes(mode=0o600, uid=7, gid=8, mtime_ns=9 * 10**9)
CHANGED = {"mode": str(stat.S_IFREG | 0o600), "uid": "7", "gid": "8", "mtime": "9.000000000"}


@pytest.fixture
def mount(tmp_path: Path) -> MortalMount:
    mount = MortalMount(tmp_path)
    mount.store.put("file", b"content", mode=str(stat.S_IFREG | 0o640), note="kept")
    return mount


def mutations(process: Process) -> Mutations:
    assert process.operations.mutations is not None
    return process.operations.mutations


async def opened(process: Process, path: str) -> Inode:
    """The node of a file that is open for reading."""
    await process.open(path)
    return await process.node(path)


async def change(process: Process, inode: Inode) -> tuple[int, int, int]:
    """Change everything of a node; return what it shows."""
    await mutations(process).setattr(inode.nodeid, CHANGES)
    await mutations(process).setxattr(inode.nodeid, b"user.a", b"1", 0, process.caller())
    assert dict(process.operations.learner.meta(inode).xattrs) == {"user.a": b"1"}
    shown = process.operations.attributes(inode)
    return stat.S_IMODE(shown.mode), shown.uid, shown.mtime_ns


def said(mount: MortalMount, key: str) -> dict[str, str]:
    return dict(mount.store.objects[key].info.metadata or {})


async def test_what_was_edited_meanwhile_is_still_that_file(mount: MortalMount) -> None:
    async with mount.serving() as process:
        inode = await opened(process, "file")
        # As where the kernel reads by passthrough: to be written to, the name gets a new node.
        process.operations.inodes.supersede(inode)
        await process.close(await process.open("file", os.O_WRONLY | os.O_TRUNC))
        await process.save("other", b"x")
        assert await change(process, inode) == (0o600, 7, 9 * 10**9)
        assert await process.node("file") is not inode
    assert mount.store.contents()["file"] == b""
    assert CHANGED.items() <= said(mount, "file").items()
    assert "xattr" in said(mount, "file")


async def test_the_attributes_that_the_name_got_meanwhile_stay(mount: MortalMount) -> None:
    async with mount.serving() as process:
        inode = await opened(process, "file")
        process.operations.inodes.supersede(inode)
        now = await process.node("file")
        await mutations(process).setattr(now.nodeid, NewAttributes(uid=5, mtime_ns=10**9))
        await mutations(process).setattr(inode.nodeid, NewAttributes(mode=0o600))
    expected = {"uid": "5", "mtime": "1.000000000", "mode": CHANGED["mode"], "note": "kept"}
    assert expected.items() <= said(mount, "file").items()


@states(
    "Attributes that are changed through an open file are that file's, also when it was "
    "written to or renamed meanwhile."
)
async def test_what_was_edited_and_renamed_is_changed_under_its_new_name(
    mount: MortalMount,
) -> None:
    async with mount.serving() as process:
        inode = await opened(process, "file")
        process.operations.inodes.supersede(inode)
        await process.close(await process.open("file", os.O_WRONLY | os.O_TRUNC))
        await process.rename("file", "new")
    async with mount.serving() as process:
        inode = process.operations.inodes.get(inode.nodeid)
        assert await change(process, inode) == (0o600, 7, 9 * 10**9)
    assert CHANGED.items() <= said(mount, "new").items()


@pytest.mark.parametrize("is_renamed", [True, False])
async def test_what_was_edited_and_then_removed_is_no_name_any_more(
    mount: MortalMount, *, is_renamed: bool
) -> None:
    async with mount.serving() as process:
        inode = await opened(process, "file")
        process.operations.inodes.supersede(inode)
        await process.close(await process.open("file", os.O_WRONLY | os.O_TRUNC))
        await process.save("tmp", b"another file")
        if not is_renamed:
            await process.unlink("file")
        await process.rename("tmp", "file")
        before = said(mount, "file")
        assert await change(process, inode) == (0o600, 7, 9 * 10**9)
    assert said(mount, "file") == before


@pytest.mark.parametrize("content", [b"content", b"other"])
@states(
    "Attributes that are changed through an open file which was removed or replaced here "
    "are seen through it alone; it is ESTALE if somebody else has replaced it."
)
async def test_what_was_replaced_by_a_rename_is_left_alone(
    mount: MortalMount, content: bytes
) -> None:
    async with mount.serving() as process:
        inode = await opened(process, "file")
        await process.save("tmp", content)
        await process.rename("tmp", "file")
        before = said(mount, "file")
        assert await change(process, inode) == (0o600, 7, 9 * 10**9)
    assert said(mount, "file") == before
    assert mount.store.contents() == {"file": content}


async def test_what_was_removed_and_made_again_is_left_alone(mount: MortalMount) -> None:
    async with mount.serving() as process:
        inode = await opened(process, "file")
        await process.unlink("file")
        await process.save("file", b"content")
        before = said(mount, "file")
        assert await change(process, inode) == (0o600, 7, 9 * 10**9)
    assert said(mount, "file") == before


async def test_a_removed_directory_that_is_open_is_not_made_again(mount: MortalMount) -> None:
    async with mount.serving() as process:
        await process.mkdir("directory")
        inode = await process.node("directory")
        process.operations.opendir(inode.nodeid, process.caller())
        await process.rmdir("directory")
        await mutations(process).setattr(inode.nodeid, NewAttributes(mode=0o700))
        assert process.operations.attributes(inode).mode == stat.S_IFDIR | 0o700
    assert list(mount.store.objects) == ["file"]


@pytest.mark.parametrize("is_replaced", [True, False])
@states(
    "Attributes that are changed through an open file which was removed or replaced here "
    "are seen through it alone; it is ESTALE if somebody else has replaced it."
)
async def test_what_somebody_else_has_replaced_or_removed_is_looked_up_again(
    mount: MortalMount, *, is_replaced: bool
) -> None:
    async with mount.serving() as process:
        inode = await opened(process, "file")
        del mount.store.objects["file"]
        if is_replaced:
            mount.store.put("file", b"theirs")
        with pytest.raises(OSError, match="file") as caught:
            await mutations(process).setattr(inode.nodeid, NewAttributes(mode=0o600))
        assert caught.value.errno == errno.ESTALE
        if not is_replaced:
            with pytest.raises(FileNotFoundError):
                await process.node("file")
            return
        now = await process.node("file")
        await mutations(process).setattr(now.nodeid, NewAttributes(mode=0o600))
    assert said(mount, "file")["mode"] == CHANGED["mode"]


async def test_a_name_that_another_node_has_by_now_is_not_truncated_through_the_old_one(
    mount: MortalMount,
) -> None:
    async with mount.serving() as process:
        inode = await opened(process, "file")
        await process.save("tmp", b"new")
        await process.rename("tmp", "file")
        with pytest.raises(OSError, match="another node") as caught:
            await mutations(process).setattr(inode.nodeid, NewAttributes(size=0))
        assert caught.value.errno == errno.ESTALE
    assert mount.store.contents() == {"file": b"new"}
