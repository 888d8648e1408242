"""What is on record of a staged file, without a mount."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from fusefs.posix.inodes import Inode, InodeTable
from fusefs.posix.journal import NoJournal
from fusefs.posix.meta import Meta
from fusefs.posix.staging import Staged, Staging
from fusefs.store.base import ObjectInfo

META = Meta(stat.S_IFREG | 0o640, 1000, 1001)


def staged_in(directory: Path, meta: Meta = META) -> tuple[Inode, Staged]:
    inodes = InodeTable("", NoJournal())
    inode = inodes.create(inodes.root, "file", ObjectInfo("file", 0, "", 0), "file")
    staging = Staging(directory, "bucket")
    return inode, staging.begin(inode, staging.prepare(inode), meta, None)


def taken_up(directory: Path, inode: Inode) -> Staged | None:
    inode.staged = None
    return Staging(directory, "bucket").restore(inode)


async def test_a_new_file_needs_no_record_beside_it(tmp_path: Path) -> None:
    inode, staged = staged_in(tmp_path)
    os.write(staged.fd, b"content")
    assert set(os.listdir(tmp_path)) == {"source", str(inode.nodeid)}
    found = taken_up(tmp_path, inode)
    assert found is not None
    assert (found.meta, found.etag, found.is_dirty, found.size()) == (META, None, True, 7)


async def test_what_the_bucket_has_of_an_open_file_is_on_record(tmp_path: Path) -> None:
    inode, staged = staged_in(tmp_path)
    os.utime(staged.fd, ns=(1, 1_700_000_000_000_000_001))
    staged.uploaded, staged.etag = staged.changes, '"0123456789abcdef0123456789abcdef"'
    Staging.record(Staging(tmp_path, "bucket"), staged)
    found = taken_up(tmp_path, inode)
    assert found is not None
    assert (found.etag, found.is_dirty) == (staged.etag, False)


@pytest.mark.parametrize("meta", [META.changed(xattrs=(("user.a", b"b"),)), META])
async def test_what_is_closed_or_has_more_to_say_has_a_record_file(
    tmp_path: Path, meta: Meta
) -> None:
    inode, staged = staged_in(tmp_path, meta)
    Staging(tmp_path, "bucket").close(staged)
    assert (tmp_path / f"{inode.nodeid}.json").exists()
    found = taken_up(tmp_path, inode)
    assert found is not None
    assert (found.meta, found.is_closed) == (meta, True)


async def test_a_file_that_nobody_was_told_of_goes(tmp_path: Path) -> None:
    inode, staged = staged_in(tmp_path)
    os.removexattr(staged.fd, "user.fusefs")
    assert taken_up(tmp_path, inode) is None
    assert not os.access(staged.path, os.F_OK)
