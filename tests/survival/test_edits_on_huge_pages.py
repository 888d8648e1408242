"""An edit of a large object on a cache disk that tells of no small holes, over a kill."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from fusefs.posix.write import upload_steps
from tests.support.survival.mortal_mount import MortalMount

MIB = 1 << 20
CONTENT = b"0123456789abcdef" * MIB

pytestmark = pytest.mark.root


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "huge=always", "none", disk], check=True)
    try:
        yield disk
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


async def test_what_no_program_wrote_to_is_the_objects_after_a_kill(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload_steps, "IN_PARTS", len(CONTENT))
    mount = MortalMount(disk)
    mount.store.put("file", CONTENT)
    async with mount.serving() as process:
        fh = await process.open("file", os.O_RDWR)
        await process.write(fh, 8 * MIB, b"edited")
    async with mount.serving() as process:
        await process.close(fh)
    expected = CONTENT[: 8 * MIB] + b"edited" + CONTENT[8 * MIB + 6 :]
    assert mount.store.contents() == {"file": expected}
