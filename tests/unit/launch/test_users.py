"""Whom a daemon may run as."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from fusefs.launch import users
from fusefs.settings.mount import MountSettings
from fusefs.settings.types import MountSource

pytestmark = pytest.mark.root


def refusal_of_nobody(cache: Path) -> str:
    settings = MountSettings(source=MountSource("bucket"), mountpoint=Path("/mnt"))
    with pytest.raises(users.UserError) as error:
        users.choose(replace(settings, user="65534", cache_dir=cache))
    return str(error.value)


def test_no_user_runs_an_interpreter_behind_a_link_that_he_cannot_follow(
    public_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    private = public_path / "private"
    private.mkdir(mode=0o700)
    (private / "python").symlink_to("/usr/bin/env")
    (public_path / "python").symlink_to(private / "python")
    monkeypatch.setattr(sys, "executable", str(public_path / "python"))
    assert refusal_of_nobody(public_path / "cache").endswith(f"cannot use {private}")


@pytest.mark.parametrize("user", ["9" * 10, "9" * 5000, "no such user"])
def test_a_user_that_no_machine_has_is_refused(user: str) -> None:
    settings = MountSettings(source=MountSource("bucket"), mountpoint=Path("/mnt"), user=user)
    with pytest.raises(users.UserError, match="there is no user"):
        users.choose(settings)
