"""What a namespace shows of the machine's connections."""

from __future__ import annotations

from pathlib import Path

import pytest

from fusefs.daemon import takeover
from fusefs.linux import fuse_connection


@pytest.mark.parametrize("has_fusectl", [True, False])
def test_journals_of_mounts_that_have_ended_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, has_fusectl: bool
) -> None:
    """Also where fusectl is not mounted, as in most containers."""
    shown = tmp_path / "shown"
    for name in ("41", "52") if has_fusectl else ("0:41", "0:52", "7:0", "253:7"):
        (shown / name).mkdir(parents=True)
    nothing = str(tmp_path / "nothing")
    monkeypatch.setattr(fuse_connection, "FUSECTL", str(shown) if has_fusectl else nothing)
    monkeypatch.setattr(fuse_connection, "BDI", nothing if has_fusectl else str(shown))
    directory = tmp_path / "state"
    directory.mkdir()
    for number in (7, 41, 52):
        (directory / f"journal.{number}").touch()
    takeover._remove_leftovers(directory, 41)
    assert sorted(path.name for path in directory.iterdir()) == ["journal.41", "journal.52"]
