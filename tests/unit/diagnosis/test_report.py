"""What a report keeps and leaves out, without any mount."""

from __future__ import annotations

import errno
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from fusefs.diagnosis import report, subject
from fusefs.diagnosis.redaction import NameHashes, Secrets
from fusefs.diagnosis.subject import MountSubject
from fusefs.launch import registry
from fusefs.launch.control import CommandError
from fusefs.settings.mount import MountSettings, RawValue, build
from tests.support.commands import run


def archived(path: Path) -> dict[str, str]:
    with tarfile.open(path) as tar:
        files = {member.name: tar.extractfile(member) for member in tar}
        return {name: file.read().decode() for name, file in files.items() if file is not None}


def test_why_a_mount_has_no_stacks_has_no_names(tmp_path: Path) -> None:
    mounted = MountSubject(
        Path("/mnt/zzyzx"), "s3://zzyzx", why_silent="/mnt/zzyzx does not answer"
    )
    path = tmp_path / "report.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        archive = report.Archive(tar, "report", Secrets([]), NameHashes())
        report._add_mount(archive, "mount-1", mounted)
    texts = archived(path)
    assert "not_answering" in texts["report/mount-1/stacks-tasks.txt"]
    for name, text in texts.items():
        assert "zzyzx" not in text, name


def test_the_kernels_command_line_loses_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "_read", lambda path: "zzyzx" if path.name == "cmdline" else "")
    monkeypatch.setattr(report.machine, "check", lambda *_, **__: [])
    monkeypatch.setattr(report.cache_disk, "check", lambda *_: [])
    path = tmp_path / "report.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        settings: Any = None
        report._add_machine(report.Archive(tar, "report", Secrets([]), NameHashes()), settings)
    assert "zzyzx" not in archived(path)["report/machine/proc-cmdline"]


def test_keys_that_look_like_secrets_leave_json(tmp_path: Path) -> None:
    path = tmp_path / "report.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        archive = report.Archive(tar, "report", Secrets([]), None)
        archive.add_plain("status.json", {"key": 'runs/token="x"/b', "path": Path("/a")})
    found = json.loads(archived(path)["report/status.json"])
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
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(report, "_add_machine", fail)
    monkeypatch.setattr(subject, "find_all", list)
    settings = build({"source": RawValue("s3://b-1", ""), "mountpoint": RawValue("/x", "")})
    with pytest.raises(OSError, match=r"No space left on device: .*a\.tar\.gz"):
        report.write(tmp_path / "a.tar.gz", None, settings, redacts=False)
    assert not list(tmp_path.iterdir())


def test_a_report_is_made_whatever_the_environment_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written: list[MountSettings] = []
    monkeypatch.setenv("FUSEFS_CACHE_SIZE", "3G")
    monkeypatch.setattr(report, "write", lambda *given, **_: written.append(given[2]))
    assert run("report", "--output", tmp_path / "a.tar.gz") == 0
    assert written[0].cache_size is None
    assert "FUSEFS_CACHE_SIZE: '3G' is ambiguous" in capsys.readouterr().err


@pytest.mark.parametrize("name", [".report.tar.gz", "..report"])
def test_a_report_has_a_folder_of_its_own_whatever_its_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subject, "find_all", list)
    monkeypatch.setattr(report, "_add_machine", lambda archive, _: archive.add_text("a", "b"))
    settings: Any = None
    report.write(tmp_path / name, None, settings, redacts=False)
    assert list(archived(tmp_path / name)) == ["report/a"]
