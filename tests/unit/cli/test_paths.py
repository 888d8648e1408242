"""Which mount a path of the command line is in, and what it is there."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from fusefs.cli import manifest, sync
from fusefs.launch import registry
from fusefs.launch.control import CommandError
from fusefs.linux import mountinfo
from tests.support.commands import runtime as runtime
from tests.support.commands import sleeper as sleeper

NESTED = """
25 1 254:0 / / rw - ext4 /dev/vda rw
36 25 0:30 / /mnt/a rw - fuse.fusefs s3://outer/ rw,user_id=0
37 36 0:31 / /mnt/a/b/c rw - fuse.fusefs s3://inner/ rw,user_id=0
38 36 0:32 / /mnt/a/scratch rw - tmpfs tmpfs rw
39 36 0:33 / /mnt/a/hidden/x rw - fuse.fusefs s3://hidden/ rw,user_id=0
40 36 0:34 / /mnt/a/hidden rw - fuse.fusefs s3://above/ rw,user_id=0
"""


@pytest.fixture
def nested(
    runtime: Path, sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    table = mountinfo.parse(NESTED)
    monkeypatch.setattr(mountinfo, "kernel_mounts", lambda: table)
    for mount in table:
        if mount.is_fusefs:
            registry.register(mount.mountpoint, mount.source, sleeper.pid)


@pytest.mark.parametrize(
    ("path", "mountpoint", "below"),
    [
        ("/mnt/a", "/mnt/a", ""),
        ("/mnt/a/b", "/mnt/a", "b"),
        ("/mnt/a/b/cc", "/mnt/a", "b/cc"),
        ("/mnt/a/b/c", "/mnt/a/b/c", ""),
        ("/mnt/a/b/c/d/e", "/mnt/a/b/c", "d/e"),
        ("/mnt/a/hidden/x/y", "/mnt/a/hidden", "x/y"),
    ],
)
@pytest.mark.usefixtures("nested")
def test_of_mounts_in_each_other_the_innermost_has_a_path(
    path: str, mountpoint: str, below: str
) -> None:
    assert sync.find(Path(path)) == (Path(mountpoint), below)


@pytest.mark.usefixtures("nested")
def test_what_something_else_in_a_mount_has_is_not_in_the_mount() -> None:
    with pytest.raises(CommandError, match="is not in a mount of fusefs"):
        sync.find(Path("/mnt/a/scratch/file"))


@pytest.mark.parametrize("base", ["two\nlines", "no text \udcff"])
@pytest.mark.usefixtures("nested")
def test_a_line_below_a_directory_that_no_line_can_name_is_refused(base: str) -> None:
    refused = []
    reader = manifest.Manifest(Path("/mnt/a"), base)
    lines = [b"file", b"../file", b"s3://outer/file"]
    found = list(reader.paths(lines, lambda number, why: refused.append((number, why))))
    assert found == ["", "file", "file"]
    ((number, why),) = refused
    assert number == 1
    assert why == f"file is in {base!r}, which a line of a list cannot name"


@pytest.mark.usefixtures("nested")
def test_lines_of_a_mount_in_the_mount_are_refused() -> None:
    refused = []
    reader = manifest.Manifest(Path("/mnt/a"), "b")
    lines = [b"c/x", b"/mnt/a/b/c", b"/mnt/a/scratch/x", b"cc/x", b"/mnt/a/d", b"s3://outer/b/c/x"]
    found = list(reader.paths(lines, lambda number, why: refused.append((number, why))))
    assert found == ["", "", "", "b/cc/x", "d", "b/c/x"]
    assert refused[0] == (1, "c/x is in the mount /mnt/a/b/c, not in /mnt/a")
    assert [number for number, _ in refused] == [1, 2, 3]
    inner = manifest.Manifest(Path("/mnt/a/b/c"), "")
    assert list(inner.paths([b"x", b"/mnt/a/b/c/y"], pytest.fail)) == ["x", "y"]
