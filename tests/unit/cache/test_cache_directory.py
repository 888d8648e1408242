"""The cache directory itself: whose it is, and what is refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fusefs.cache.disk import FORMAT_MARK, CacheDirectoryError, prepare_directory


def test_a_new_directory_is_private(tmp_path: Path) -> None:
    prepare_directory(tmp_path / "new" / "cache")
    assert (tmp_path / "new" / "cache").stat().st_mode & 0o777 == 0o700
    prepare_directory(tmp_path / "new" / "cache")


def test_a_directory_of_somebody_else_is_refused(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("giving a directory away needs root")
    (tmp_path / "cache").mkdir()
    os.chown(tmp_path / "cache", 12345, 12345)
    with pytest.raises(CacheDirectoryError, match="another user"):
        prepare_directory(tmp_path / "cache")


def test_a_directory_with_other_things_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "precious").touch()
    with pytest.raises(CacheDirectoryError, match="not empty"):
        prepare_directory(tmp_path)


def test_a_directory_of_another_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "format").write_bytes(b"fusefs cache 99\n")
    with pytest.raises(CacheDirectoryError, match="remove it"):
        prepare_directory(tmp_path)


DAMAGED = [b"", b"fusefs", b"\xff\xfe"]


@pytest.mark.parametrize("mark", DAMAGED)
def test_a_damaged_mark_is_written_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mark: bytes
) -> None:
    prepare_directory(tmp_path)
    for name in ("mounts", "0123456789abcdef"):
        (tmp_path / name).mkdir()
    (tmp_path / "format").write_bytes(mark)
    prepare_directory(tmp_path)
    assert (tmp_path / "format").read_bytes() == FORMAT_MARK
    assert [record.message for record in caplog.records] == [
        f"{tmp_path}/format is damaged, and is written anew"
    ]


@pytest.mark.parametrize("mark", DAMAGED)
def test_a_file_of_the_marks_name_makes_no_cache(tmp_path: Path, mark: bytes) -> None:
    (tmp_path / "precious").touch()
    (tmp_path / "format").write_bytes(mark)
    with pytest.raises(CacheDirectoryError, match="not empty"):
        prepare_directory(tmp_path)
    assert (tmp_path / "format").read_bytes() == mark


@pytest.mark.parametrize("mark", [b"fusefs cache 99\n", *DAMAGED])
def test_a_mount_that_is_served_goes_on_whatever_the_mark_is(tmp_path: Path, mark: bytes) -> None:
    (tmp_path / "precious").touch()
    (tmp_path / "format").write_bytes(mark)
    prepare_directory(tmp_path, in_any_case=True)


def test_a_file_in_the_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cache").touch()
    with pytest.raises(CacheDirectoryError, match="can't use"):
        prepare_directory(tmp_path / "cache")
