"""Objects whose keys are a directory's name, with its slash and without."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.semantics import states
from tests.support.servers.flat_s3 import FlatS3
from tests.support.servers.s3_server import S3Server
from tests.support.sharing import mounted
from tests.support.writing import WRITABLE

FOLDERS = ("removed", "emptied", "renamed", "replaced", "moved")


@pytest.fixture(scope="module")
def server() -> Iterator[FlatS3]:
    with FlatS3().serving() as server:
        for folder in FOLDERS:
            for key in ("a", "b", "b/x", "b-c"):
                server.put(f"{folder}/{key}", key.encode())
        yield server


@pytest.fixture(scope="module")
def root(server: FlatS3, s3: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    directory = tmp_path_factory.mktemp("beside")
    url = server.endpoint_url
    with mounted(s3, "s3://bucket/", directory, WRITABLE, endpoint_url=url) as mount:
        yield mount.path


@states(
    "A file that was hidden by a directory of its name is there as soon as this mount has "
    "removed or renamed the directory."
)
def test_a_hidden_file_is_there_when_its_directory_is_gone(root: Path, server: FlatS3) -> None:
    shown = [sorted(os.listdir(root / folder)) for folder in FOLDERS]
    assert shown == [["a", "b", "b-c"]] * len(FOLDERS)
    shutil.rmtree(root / "removed/b")
    (root / "emptied/b/x").rename(root / "emptied/x")
    (root / "emptied/b").rmdir()
    (root / "renamed/b").rename(root / "renamed/c")
    (root / "replaced/d").mkdir()
    (root / "replaced/b").rename(root / "replaced/d")
    (root / "moved").rename(root / "elsewhere")
    (root / "elsewhere/b").rename(root / "elsewhere/c")
    for folder in (*FOLDERS[:-1], "elsewhere"):
        path = root / folder / "b"
        with pytest.raises(FileExistsError):
            path.touch(exist_ok=False)
        assert path.read_bytes() == b"b"
        assert "b" in os.listdir(path.parent)
        path.write_bytes(b"new")
        assert server.contents()[f"{folder}/b"] == b"new"
