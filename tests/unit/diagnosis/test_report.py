"""What a report keeps and leaves out, without any mount."""

import errno
import json
import tarfile
from pathlib import Path

import pytest

from fusefs.diagnosis import report, subject
from fusefs.diagnosis.subject import MountSubject
from fusefs.launch import registry
from fusefs.launch.control import CommandError


def archived(path: Path) -> dict[str, str]:
    with tarfile.open(path) as tar:
        files = {member.name: tar.extractfile(member) for member in tar}
        return {name: file.read().decode() for name, file in files.items() if file is not None}


# A name that begins with a dot gives no hidden folder.
@pytest.mark.parametrize("name", ["report.tar.gz", ".report.tar.gz", "..report"])
def test_keys_that_look_like_secrets_leave_json(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = {"key": 'runs/token="x"/b', "path": Path("/a")}
    mounted = MountSubject(Path("/mnt/a"), "s3://b-1", status=status)
    monkeypatch.setattr(subject, "find_all", lambda: [mounted])
    report.write(tmp_path / name, None)
    found = json.loads(archived(tmp_path / name)["report/mount-1/status.json"])
    assert found == {"key": 'runs/token="[removed]"/b', "path": "/a"}


def test_a_mount_that_ends_meanwhile_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    paths = ["/mnt/ended", "/mnt/there"]
    registrations = [registry.Registration(path, "", 0, 0) for path in paths]

    def find(mountpoint: Path) -> MountSubject:
        if mountpoint.name == "ended":
            raise CommandError("is not a mount of fusefs")
        return MountSubject(mountpoint, "")

    monkeypatch.setattr(registry, "all_mounts", lambda: registrations)
    monkeypatch.setattr(subject, "find", find)
    assert [str(one.mountpoint) for one in subject.find_all()] == ["/mnt/there"]


def test_an_archive_that_finds_no_room_is_named_and_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(report, "versions", fail)
    monkeypatch.setattr(subject, "find_all", list)
    with pytest.raises(OSError, match=r"No space left on device: .*a\.tar\.gz"):
        report.write(tmp_path / "a.tar.gz", None)
    assert not list(tmp_path.iterdir())
