"""What the kernel says of mounts."""

from __future__ import annotations

from pathlib import Path

import pytest

from fusefs.linux import mountinfo
from tests.support.commands import MOUNTINFO


def test_mountinfo_is_read_with_its_escapes() -> None:
    blank = mountinfo.parse(MOUNTINFO)[1]
    assert blank.mountpoint == Path("/mnt/with blank")
    assert blank.source == "s3://bucket/a b/"
    assert blank.is_fusefs
    assert blank.connection == 30
    assert blank.owner == 4242


def test_the_topmost_of_several_mounts_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mountinfo, "kernel_mounts", lambda: mountinfo.parse(MOUNTINFO))
    found = mountinfo.find_mount(Path("/mnt/a"))
    assert found is not None
    assert found.device == "0:32"
    assert not mountinfo.is_mountpoint(Path("/mnt"))


def test_an_automounter_is_no_mount_but_waits_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["40 25 0:40 / /data rw - autofs systemd-1 rw,fd=52,pgrp=1,direct"]
    monkeypatch.setattr(mountinfo, "kernel_mounts", lambda: mountinfo.parse("\n".join(lines)))
    assert mountinfo.find_mount(Path("/data")) is None
    assert mountinfo.has_automount(Path("/data"))
    assert not mountinfo.has_automount(Path("/"))
    lines.append("41 40 0:41 / /data rw - fuse.fusefs s3://bucket/ rw")
    found = mountinfo.find_mount(Path("/data"))
    assert found is not None
    assert found.is_fusefs
    assert mountinfo.has_automount(Path("/data"))


def test_a_path_is_on_the_mount_that_the_kernel_comes_to() -> None:
    # /dev and /mnt/a/moved were moved; /srv/x hides what was mounted below it before.
    table = mountinfo.parse(r"""
30 27 0:30 / /mnt/a/moved rw - tmpfs tmpfs rw
24 25 0:6 / /dev rw - devtmpfs devtmpfs rw
25 1 254:0 / / rw - ext4 /dev/vda rw
27 25 0:31 / /mnt/a rw - fuse.fusefs s3://bucket/ rw
31 30 0:32 / /mnt/a/moved/deep rw - tmpfs tmpfs rw
32 25 0:33 / /srv/x/y rw - tmpfs tmpfs rw
33 25 0:34 / /srv/x rw - tmpfs tmpfs rw
""")
    for path, number in {
        "/": 25,
        "/device": 25,
        "/dev/null": 24,
        "/mnt/a/b": 27,
        "/mnt/a/moved/file": 30,
        "/mnt/a/moved/deep": 31,
        "/srv/x/y/z": 33,
    }.items():
        found = mountinfo.reached(path, table)
        assert found is not None
        assert found.number == number
    assert mountinfo.reached("/dev", []) is None
