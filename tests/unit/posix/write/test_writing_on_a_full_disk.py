"""New files for which the local disk has no room, without a kernel."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from fusefs.posix.write import staging_record
from tests.support.survival.mortal_mount import MortalMount


async def test_a_file_that_could_not_be_created_is_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mount = MortalMount(tmp_path)
    async with mount.serving() as process:
        root = process.operations.inodes.root
        known = set(process.operations.inodes.by_id)

        def fail(_inode: object) -> int:
            raise OSError(errno.ENOSPC, "the disk is full")

        monkeypatch.setattr(process.writer.staging, "prepare", fail)

        async def create(flags: int) -> None:
            mode = stat.S_IFREG | 0o644
            answer = process.writer.create(root, f"{flags}.lock", mode, flags, process.caller())
            assert not isinstance(answer, tuple)
            await answer

        for flags in (os.O_RDWR, os.O_RDWR | os.O_EXCL):
            with pytest.raises(OSError, match="full"):
                await create(flags)
        assert set(process.operations.inodes.by_id) == known
    assert mount.store.contents() == {}


def test_a_record_that_the_disk_does_not_take_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "write", lambda _fd, _data: 1)
    with pytest.raises(OSError, match="space"):
        staging_record.write(str(tmp_path / "16"), b"record")
    assert os.listdir(tmp_path) == []
