"""Opens of files of which the cache has a part."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from fusefs.store.interface import ObjectVersion
from tests.support.survival.mortal_mount import MortalMount

CONTENT = bytes(range(256)) * (16 << 10)
OTHER = bytes(reversed(CONTENT))


@pytest.mark.parametrize("size", [0, 1000, 256 << 10, 1 << 20])
async def test_a_replaced_object_is_not_opened_as_it_was(tmp_path: Path, size: int) -> None:
    """However much of the old version is there: what is missing could not be read any more."""
    mount = MortalMount(tmp_path)
    mount.store.put("file", CONTENT)
    async with mount.serving() as process:
        inode = await process.node("file")
        assert inode.info is not None
        # As a download leaves it that was broken off, or whose process was killed.
        cache = process.operations.cache
        file = cache.pin(ObjectVersion("file", inode.info.etag, len(CONTENT)))
        await cache.ensure_open(file)
        cache.arrived(file, 0, size)
        mount.store.put("file", OTHER)
        with pytest.raises(OSError, match="stands for something else") as caught:
            await process.open("file")
        assert caught.value.errno == errno.ESTALE
        fh = await process.open("file")
        assert await process.read(fh, 2 << 20, 1000) == OTHER[2 << 20 :][:1000]
        cache.unpin(file)
