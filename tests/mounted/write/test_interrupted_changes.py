"""A program that is killed while it changes something: it goes at once, the change is whole."""

import os
from pathlib import Path

import pytest

from tests.support.mounting import WRITABLE, Mount, Mounter, status
from tests.support.semantics import states
from tests.support.servers.buckets import Bucket, keys, stored
from tests.support.servers.faulty_s3 import FaultyS3
from tests.support.sharing import PATIENCE_S, python
from tests.support.waiting import until


@pytest.fixture(scope="module")
def mount(shared: Bucket, faulty: FaultyS3, module_mounter: Mounter) -> Mount:
    for number in range(3):
        shared.put(f"old/{number}", b"x")
    shared.put("file", b"content")
    return module_mounter(WRITABLE, endpoint_url=faulty.endpoint_url)


def killed_in(call: str, path: Path, faulty: FaultyS3, operation: str) -> None:
    """Have a process killed while its call waits for the bucket, and then let that answer."""
    rule = faulty.add(operation, times=1, stall=True)
    program = python(f"import os, sys; path = sys.argv[1]; {call}", path)
    until(lambda: rule.used, f"a {operation} is under way")
    program.kill()
    program.communicate(timeout=PATIENCE_S)
    faulty.remove(rule)


def test_a_directory_is_made(mount: Mount, shared: Bucket, faulty: FaultyS3) -> None:
    killed_in("os.mkdir(path)", mount.path / "made", faulty, "PUT")
    until(lambda: "made/" in keys(shared), "the marker is there")
    until((mount.path / "made").is_dir, "the mount shows it")


def test_a_file_is_shortened(mount: Mount, shared: Bucket, faulty: FaultyS3) -> None:
    killed_in("os.truncate(path, 2)", mount.path / "file", faulty, "PUT")
    until(lambda: stored(shared, "file") == b"co", "the bucket has it")
    until(lambda: (mount.path / "file").read_bytes() == b"co", "the mount shows it")


@states(
    "A program that is killed in a change of names does not wait, and the change is done whole."
)
def test_a_directory_is_renamed(mount: Mount, shared: Bucket, faulty: FaultyS3) -> None:
    call = "os.rename(path, os.path.join(os.path.dirname(path), 'new'))"
    killed_in(call, mount.path / "old", faulty, "COPY")
    expected = ["new/0", "new/1", "new/2"]
    until(lambda: [key for key in keys(shared) if key[:3] in ("old", "new")] == expected, "renamed")
    until((mount.path / "new").is_dir, "the mount shows it")
    assert sorted(os.listdir(mount.path / "new")) == ["0", "1", "2"]
    assert not (mount.path / "old").exists()


def test_a_file_that_was_created_is_not_held_open(
    mount: Mount, shared: Bucket, faulty: FaultyS3
) -> None:
    flags = "os.O_CREAT | os.O_EXCL | os.O_WRONLY"
    killed_in(f"os.open(path, {flags})", mount.path / "lock", faulty, "PUT")
    until(lambda: "lock" in keys(shared), "the file is created")
    until(lambda: status(mount)["writing"]["staged"] == 0, "no program has it open")
    (mount.path / "lock").write_bytes(b"used")
    assert (mount.path / "lock").read_bytes() == b"used"
