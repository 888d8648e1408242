"""What was acknowledged with local durability is there after a power cut, also a moment after
the mount."""

import os
from pathlib import Path

from tests.support.machine.failing_disk import CutDisk, cut_disk
from tests.support.mounting import Mount, Mounter, fusefs
from tests.support.programs import WRITABLE
from tests.support.semantics import states
from tests.support.servers.buckets import Bucket
from tests.support.servers.faulty_s3 import FaultyS3
from tests.support.survival.surviving import kill_everything
from tests.support.waiting import until
from tests.survival.test_writing_survives import Objects


def save(path: Path) -> None:
    path.write_bytes(path.name.encode() * 300)


def one_file(root: Path) -> None:
    save(root / "file-first")


def each_kind_of_change(root: Path) -> None:
    """Among files that stay as they are."""
    directory = root / "made"
    directory.mkdir()
    for number in range(12):
        save(directory / f"file-{number}")
    os.rename(directory / "file-1", directory / "file-renamed")
    os.rename(directory / "file-2", directory / "file-3")
    os.symlink("moved/file-5", root / "link")
    os.chmod(directory / "file-5", 0o640)
    sync(directory / "file-5", os.O_RDWR)
    os.setxattr(directory / "file-6", "user.long", b"x" * 1250)
    os.rename(directory / "file-6", directory / "file-with-a-long-record")
    (directory / "file-4").unlink()
    os.rename(directory, root / "moved")
    (root / "moved" / "file-7").unlink()
    sync(root / "moved", os.O_RDONLY)


def sync(path: Path, flags: int) -> None:
    fd = os.open(path, flags)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def shown(root: Path) -> dict[str, object]:
    """Names below a directory, with types and modes, and contents."""
    found: dict[str, object] = {}
    for path in sorted(root.rglob("*")):
        mode = path.lstat().st_mode
        content = None if path.is_dir() else path.read_bytes()
        found[str(path.relative_to(root))] = (mode, content)
    return found


@states(
    "With `--durability local`, a closed file outlives a power cut, and so does"
    " its rename; what else is changed of it, or its removal, does after an `fsync` of the file or"
    " of its directory, as on a disk."
)
def test_what_was_acknowledged_outlives_a_power_cut(
    mounter: Mounter, bucket: Bucket, faulty: FaultyS3, as_owner: None, tmp_path: Path
) -> None:
    """A first file right after the mount, and what the next mount has found of it."""
    with cut_disk(tmp_path) as disk:
        mount = mounter(
            "--durability", "local", *WRITABLE, endpoint_url=faulty.endpoint_url, cache="disk/cache"
        )
        refused = faulty.add("PUT", "*file-*", code="AccessDenied")
        for change in (one_file, each_kind_of_change):
            change(mount.path)
            expected = shown(mount.path)
            cut(mount, disk)
            assert shown(mount.path) == expected
        faulty.remove(refused)
        fusefs("sync", mount.path)
        assert shown(mount.path) == expected
        contents = Objects(bucket).digests()
        assert len(contents) == sum(isinstance(one[1], bytes) for one in expected.values())
        mount.end()


@states(
    "An upload that S3 has executed without an answer is no other client's: the next daemon, and"
    " the next mount at the same place, know it as their own and upload over it what was written"
    " since."
)
def test_an_older_version_of_ones_own_is_no_conflict_after_a_power_cut(
    mounter: Mounter, bucket: Bucket, faulty: FaultyS3, as_owner: None, tmp_path: Path
) -> None:
    with cut_disk(tmp_path) as disk:
        options = (*WRITABLE, "--durability", "local", "--retry-time", "1s")
        mount = mounter(*options, endpoint_url=faulty.endpoint_url, cache="disk/cache")
        faulty.add("PUT", "file", lose_answer=True, times=1)
        lost = faulty.add("*", "file", code="InternalError")
        (mount.path / "file").write_bytes(b"first")
        until(lambda: mount.status()["writing"]["pending"][0]["error"], "no upload fails")
        assert Objects(bucket).content("file") == b"first"
        (mount.path / "file").write_bytes(b"second")
        cut(mount, disk)
        faulty.remove(lost)
        fusefs("sync", mount.path)
        assert os.listdir(mount.path) == ["file"]
        assert Objects(bucket).content("file") == b"second"
        mount.end()


def cut(mount: Mount, disk: CutDisk) -> None:
    """Have the machine go down and come up again, with the bucket mounted."""
    kill_everything(mount)
    mount.force()
    disk.cut_power()
    mount.start()
