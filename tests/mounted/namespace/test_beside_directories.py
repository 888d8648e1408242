"""Objects whose keys are a directory's name, with its slash and without."""

import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.mounting import WRITABLE, Mounter
from tests.support.programs import need
from tests.support.semantics import states
from tests.support.servers.flat_s3 import FlatS3

MARKED = ("changed", "copied", "deleted", "listed", "gone")
CONTENT = b"content of an object whose key ends in a slash"
FOLDERS = ("removed", "emptied", "renamed", "replaced", "moved")


@pytest.fixture(scope="module")
def server() -> Iterator[FlatS3]:
    with FlatS3() as server:
        for folder in FOLDERS:
            for key in ("a", "b", "b/x", "b-c"):
                server.put(f"{folder}/{key}", key.encode())
        for folder in MARKED:
            server.put(f"{folder}/", CONTENT)
            server.put(f"{folder}/x", b"x")
        yield server


@pytest.fixture(scope="module")
def root(server: FlatS3, module_mounter: Mounter) -> Path:
    return module_mounter(WRITABLE, endpoint_url=server.endpoint_url).path


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


def kept(server: FlatS3, folder: str) -> dict[str, str]:
    """The metadata of an object `folder/`, which has its content."""
    found = server.objects[f"{folder}/"]
    assert found.data == CONTENT
    return {name.lower(): value for name, value in found.headers.items()}


STAYS = states(
    "An object `dir/` that has content counts as a hidden key of the directory `dir`, and "
    "keeps its content whatever is done to the directory: attributes are added to it, "
    "`rmdir` and `rm -r` leave it (ENOTEMPTY), and a rename takes it along."
)


@STAYS
def test_a_directorys_object_keeps_its_content_when_attributes_change(
    root: Path, server: FlatS3, tmp_path: Path
) -> None:
    path = root / "changed"
    path.chmod(0o711)
    assert kept(server, "changed")["x-amz-meta-mode"] == str(0o40711)
    os.utime(path, (1, 2))
    os.setxattr(path, "user.a", b"1")
    assert (path.stat().st_mode & 0o777, path.stat().st_mtime) == (0o711, 2)
    assert "x-amz-meta-xattr" in kept(server, "changed")
    (tmp_path / "copied").mkdir(0o750)
    (tmp_path / "copied/y").write_bytes(b"y")
    subprocess.run([need("rsync"), "-a", tmp_path / "copied", root], check=True)
    assert kept(server, "copied")["x-amz-meta-mode"] == str(0o40750)
    assert sorted(os.listdir(root / "copied")) == ["x", "y"]


@STAYS
def test_a_directorys_object_stays_when_the_directory_is_to_go(root: Path, server: FlatS3) -> None:
    """Also where it came after the directory was looked at, and where it was made here."""
    assert os.listdir(root / "listed") == ["x"]
    (root / "made").mkdir()
    server.put("made/", CONTENT)
    for folder in ("deleted", "listed"):
        assert subprocess.run(["rm", "-r", root / folder], capture_output=True).returncode
    for folder in ("deleted", "listed", "made"):
        with pytest.raises(OSError, match=os.strerror(errno.ENOTEMPTY)):
            (root / folder).rmdir()
        kept(server, folder)
    (root / "made").chmod(0o700)
    assert kept(server, "made")["x-amz-meta-mode"] == str(0o40700)
    (root / "empty").mkdir()
    os.rename(root / "gone", root / "empty")
    assert kept(server, "empty")
    assert not (root / "gone").exists()
    assert "gone/" not in server.objects
