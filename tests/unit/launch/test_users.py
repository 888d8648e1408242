"""Whom a daemon may run as."""

import os
import pwd
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from fusefs.launch import launcher, users
from fusefs.launch.preflight import LaunchError
from fusefs.settings.mount import MountSettings
from fusefs.settings.types import MountSource
from tests.support.commands import runtime as runtime

pytestmark = pytest.mark.root


SETTINGS = MountSettings(source=MountSource("bucket"), mountpoint=Path("/mnt"))


def test_no_user_runs_an_interpreter_behind_a_link_that_he_cannot_follow(
    public_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    private = public_path / "private"
    private.mkdir(mode=0o700)
    (private / "python").symlink_to("/usr/bin/env")
    (public_path / "python").symlink_to(private / "python")
    monkeypatch.setattr(sys, "executable", str(public_path / "python"))
    with pytest.raises(users.UserError, match=f"cannot use {private}$"):
        users.choose(replace(SETTINGS, user="65534", cache_dir=public_path / "cache"))


@pytest.mark.parametrize("user", ["9" * 10, "9" * 5000, "no such user"])
def test_a_user_that_no_machine_has_is_refused(user: str) -> None:
    with pytest.raises(users.UserError, match="there is no user"):
        users.choose(replace(SETTINGS, user=user))


@pytest.fixture
def without_fusefs(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no user `fusefs`, every user may run the program, and AWS's files say nothing."""

    def unknown(name: str) -> pwd.struct_passwd:
        raise KeyError(name)

    monkeypatch.setattr(pwd, "getpwnam", unknown)
    monkeypatch.setattr(users, "_program", lambda: iter(()))
    monkeypatch.setattr(users, "aws_files", lambda _environment: [])


def chosen(cache: Path) -> users.User:
    return users.choose(replace(SETTINGS, cache_dir=cache))


def test_each_cache_directory_has_a_user_of_its_own(
    without_fusefs: None, public_path: Path
) -> None:
    first, other = chosen(public_path / "first"), chosen(public_path / "other")
    assert first != other
    for user in (first, other):
        assert user.uid == user.gid
        assert user.uid in range(2_100_000_000, 2_140_000_000)
        with pytest.raises(KeyError):
            pwd.getpwuid(user.uid)


def test_a_cache_directory_that_was_renamed_keeps_its_user(
    without_fusefs: None, public_path: Path
) -> None:
    user = chosen(public_path / "cache")
    moved = public_path / "moved"
    (moved / "mounts").mkdir(parents=True)
    os.chown(moved, user.uid, user.gid)
    assert chosen(moved) == user


def test_a_small_user_namespace_has_a_number_for_a_cache_directory(
    without_fusefs: None, public_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = public_path / "map"
    ids.write_text("         0     100000      65536\n")
    monkeypatch.setattr(users, "_ID_MAPS", [str(ids)])
    assert chosen(public_path / "cache").uid in range(60_706, 61_184)
    ids.write_text("         0       1000          1\n")
    user = chosen(public_path / "cache")
    assert user.is_own
    assert user.why


def test_a_cache_of_nobody_s_is_used_and_its_danger_told(
    without_fusefs: None, public_path: Path
) -> None:
    """It may have files that wait for their upload."""
    (public_path / "cache" / "mounts").mkdir(parents=True)
    os.chown(public_path / "cache", 65534, 65534)
    user = chosen(public_path / "cache")
    assert user.uid == 65534
    assert "belongs to the user nobody" in user.why


def test_what_takes_the_place_of_an_empty_cache_directory_keeps_its_owner(
    without_fusefs: None, runtime: Path, public_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (public_path / "full").touch()
    monkeypatch.setattr(Path, "iterdir", lambda _path: iter(()))  # of the directory before
    monkeypatch.setattr(launcher, "_keeper_configuration", Mock(side_effect=LaunchError("end")))
    settings = replace(SETTINGS, user="65534", cache_dir=public_path)
    with pytest.raises(LaunchError, match="end"):
        launcher._spawn(settings, 0, sys.stderr.buffer, None, {})
    assert public_path.stat().st_uid == 0
