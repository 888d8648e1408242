"""Directories with keys that are not shown."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from tests.support.semantics import states
from tests.support.survival.mortal_mount import MortalMount


@pytest.mark.parametrize("is_listed", [True, False])
@pytest.mark.parametrize("key", ["d//file", "d/../file", "d/" + "n" * 256, "d/file"])
@states(
    "A directory that has hidden keys alone is not empty: `rmdir` is ENOTEMPTY, also after it"
    " was listed."
)
async def test_a_directory_with_hidden_keys_is_not_removed(
    tmp_path: Path, key: str, *, is_listed: bool
) -> None:
    """It would come back with the next listing. `d/file` is beside `d/file/below`."""
    mount = MortalMount(tmp_path)
    for one in ("d/", key) + (("d/file/below",) if key == "d/file" else ()):
        mount.store.put(one, b"")
    async with mount.serving() as process:
        if is_listed:
            assert await process.listing("d") == (["file"] if key == "d/file" else [])
        if key == "d/file":
            await process.unlink("d/file/below")
            await process.rmdir("d/file")
        with pytest.raises(OSError, match="d") as caught:
            await process.rmdir("d")
        assert caught.value.errno == errno.ENOTEMPTY
    assert sorted(mount.store.objects) == ["d/", key]
