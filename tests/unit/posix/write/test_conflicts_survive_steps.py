"""Another node replaces the object of a closed file that is not uploaded yet; the process dies.

It dies at each step in turn: at requests to the bucket, before and after the bucket has executed
them, at records on the disk, and where one content takes the place of another.
"""

import os
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest

from fusefs.posix.nodes import edit_base
from fusefs.posix.restore.leftovers import adopt
from fusefs.posix.write import sparse_edit, upload_steps, uploader, writer
from fusefs.posix.write.staging import Staging
from tests.support.memory_uploads import UploadingStore
from tests.support.survival.fate import Fate, fate_of_records
from tests.support.survival.mortal_mount import LOCAL, Process

PART = 16 << 10
SMALL, LARGE = b"old\n" * 10, b"old\n" * PART
APPENDED, EDITED, THEIRS = b"ours\n", b"OURS", b"theirs\n"


@pytest.fixture
def fate(monkeypatch: pytest.MonkeyPatch) -> Fate:
    for module in (edit_base, sparse_edit, upload_steps, uploader, writer):
        monkeypatch.setattr(module, "IN_PARTS", PART)
    fate, replace = fate_of_records(monkeypatch), Staging.replace_content

    def replace_or_die(self: Staging, *arguments: Any) -> None:
        fate.step()
        replace(self, *arguments)
        fate.step()

    monkeypatch.setattr(Staging, "replace_content", replace_or_die)
    return fate


async def append(process: Process) -> None:
    fh = await process.open("file", os.O_WRONLY | os.O_APPEND)
    size = process.operations.handles.files[fh].inode.staged.size()  # type: ignore[union-attr]
    await process.write(fh, size, APPENDED, is_appended=True)
    await process.close(fh)


async def edit(process: Process) -> None:
    fh = await process.open("file", os.O_RDWR)
    await process.write(fh, 0, EDITED)
    await process.close(fh)


async def uploaded(process: Process) -> None:
    for staged in process.writer.staging:
        with suppress(OSError):  # an edit is told
            await process.writer.uploads.wait(staged)


@pytest.mark.parametrize("old", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("change", [append, edit])
@pytest.mark.parametrize("is_same_mount", [True, False], ids=["daemon", "mount"])
async def test_nothing_of_both_nodes_is_lost_wherever_the_process_dies(
    tmp_path: Path, fate: Fate, old: bytes, change: Any, is_same_mount: bool
) -> None:
    for mount in fate.mounts(tmp_path, partial(UploadingStore, PART)):
        store = cast(UploadingStore, mount.store)
        store.put("file", old)
        with fate.process():
            async with mount.serving(durability=LOCAL) as process:
                await change(process)
                store.put("file", old + THEIRS)
                fate.count()
                await uploaded(process)
        if not is_same_mount:
            mount.reboot()
        async with mount.serving(durability=LOCAL) as process:
            adopt(process.writer)
            await uploaded(process)
            assert not [staged for staged in process.writer.staging if staged.is_dirty]
        contents = store.contents()
        if change is append:
            assert contents == {"file": old + THEIRS + APPENDED}
        else:
            assert contents.pop("file") == old + THEIRS
            kept = {EDITED + old[len(EDITED) :]}
            # Of a large object the rest was in the bucket alone.
            has_edits = any(mount.directory.glob("staging/*/edited-*"))
            assert set(contents.values()) == kept or (old is LARGE and has_edits)
        assert store.uploads == {}
