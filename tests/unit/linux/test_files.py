"""Files that are replaced in one step."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fusefs.linux import files


@pytest.mark.parametrize("is_durable", [False, True])
def test_a_file_has_the_new_content_and_only_its_owner_reads_it(
    tmp_path: Path, *, is_durable: bool
) -> None:
    path = tmp_path / "record"
    for content in ("earlier", "new"):
        files.replace(path, content, is_durable=is_durable)
        assert path.read_text() == content
    assert path.stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == ["record"]


def test_a_link_in_the_place_of_the_unfinished_file_is_not_followed(tmp_path: Path) -> None:
    path, victim = tmp_path / "record", tmp_path / "victim"
    victim.write_text("untouched")
    (tmp_path / "record.new").symlink_to(victim)
    files.replace(path, b"new")
    assert (path.read_bytes(), victim.read_text()) == (b"new", "untouched")
    assert not path.is_symlink()


def test_a_file_that_cannot_be_replaced_keeps_its_content_and_leaves_nothing(
    tmp_path: Path,
) -> None:
    path = tmp_path / "record"
    path.mkdir()
    with pytest.raises(IsADirectoryError):
        files.replace(path, "new")
    assert os.listdir(tmp_path) == ["record"]
