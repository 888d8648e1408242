"""Linux's own tables and services: mounts, files, processes, journals of ended mounts, systemd."""

import contextlib
import multiprocessing
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from fusefs.daemon import takeover
from fusefs.linux import callers, files, fuse_connection, mountinfo, processes, service_manager
from fusefs.linux.callers import LIVES
from tests.support.commands import MOUNTINFO


def test_mountinfo_has_escapes_and_topmost_mounts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mountinfo, "kernel_mounts", lambda: mountinfo.parse(MOUNTINFO))
    blank = mountinfo.parse(MOUNTINFO)[1]
    assert blank.mountpoint == Path("/mnt/with blank")
    assert blank.source == "s3://bucket/a b/"
    assert blank.is_fusefs
    assert blank.connection == 30
    assert blank.owner == 4242
    found = mountinfo.find_mount(Path("/mnt/a"))
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
        assert found.number == number
    assert mountinfo.reached("/dev", []) is None


@pytest.mark.parametrize("is_durable", [False, True])
def test_a_file_has_the_new_content_and_only_its_owner_reads_it(
    tmp_path: Path, *, is_durable: bool
) -> None:
    path = tmp_path / "record"
    for content in ("earlier", "new"):
        files.replace(path, content, is_durable=is_durable)
        assert path.read_text() == content
    assert path.stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == ["record"]


def test_a_link_in_the_place_of_the_unfinished_file_is_not_followed(tmp_path: Path) -> None:
    path, victim = tmp_path / "record", tmp_path / "victim"
    victim.write_text("untouched")
    (tmp_path / "record.new").symlink_to(victim)
    files.replace(path, b"new")
    assert (path.read_bytes(), victim.read_text()) == (b"new", "untouched")
    assert not path.is_symlink()


@pytest.mark.root
@pytest.mark.parametrize(("name", "flags"), [("link", os.O_DIRECTORY), ("link/log", os.O_CREAT)])
def test_root_follows_no_link_of_a_user(tmp_path: Path, name: str, flags: int) -> None:
    os.chown(tmp_path, 12345, -1)
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(OSError, match=r"symbolic link|Not a directory"):
        files.open_in_place(tmp_path / name, flags)
    assert os.listdir(tmp_path) == ["link"]
    for by_link_of_root in ("/dev/fd", f"/proc/self/root{tmp_path}"):
        os.close(files.open_in_place(Path(by_link_of_root), os.O_DIRECTORY))


def test_a_file_that_cannot_be_replaced_keeps_its_content_and_leaves_nothing(
    tmp_path: Path,
) -> None:
    path = tmp_path / "record"
    path.mkdir()
    with pytest.raises(IsADirectoryError):
        files.replace(path, "new")
    assert os.listdir(tmp_path) == ["record"]


def test_a_name_that_the_kernel_cuts_inside_a_character_hides_no_process() -> None:
    own_name = Path(f"/proc/self/task/{threading.get_native_id()}/comm")
    before = own_name.read_bytes()
    own_name.write_bytes("загрузка данных".encode())
    with pytest.raises(UnicodeDecodeError):
        own_name.read_text()
    assert callers.fate(threading.get_native_id()) == LIVES
    own_name.write_bytes(before)


@pytest.mark.parametrize("has_fusectl", [True, False])
def test_journals_of_mounts_that_have_ended_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, has_fusectl: bool
) -> None:
    """Also where fusectl is not mounted, as in most containers."""
    shown = tmp_path / "shown"
    for name in ("41", "52") if has_fusectl else ("0:41", "0:52", "7:0", "253:7"):
        (shown / name).mkdir(parents=True)
    nothing = str(tmp_path / "nothing")
    monkeypatch.setattr(fuse_connection, "FUSECTL", str(shown) if has_fusectl else nothing)
    monkeypatch.setattr(fuse_connection, "BDI", nothing if has_fusectl else str(shown))
    directory = tmp_path / "state"
    directory.mkdir()
    for number in (7, 41, 52):
        (directory / f"journal.{number}").touch()
    takeover._remove_leftovers(directory, 41)
    assert sorted(path.name for path in directory.iterdir()) == ["journal.41", "journal.52"]


def oom_score_adjustment() -> int:
    """That of a process that yields memory."""
    processes.yield_memory()
    return int(Path("/proc/self/oom_score_adj").read_text())


@pytest.mark.parametrize(
    ("own", "group", "yields"),
    [
        ("0::/pods/pod/container", "pods/pod/container", False),
        ("0::/pods/pod/container", "pods/pod", False),
        ("0::/", ".", False),  # a container with a namespace of its own
        ("0::/pods/pod", "pods/pod/container", True),
        ("4:memory:/pods\n1:cpu:/", "pods", True),
        ("", ".", False),
        (None, ".", True),
    ],
)
def test_a_process_that_takes_its_whole_group_along_yields_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str | None, group: str, yields: bool
) -> None:
    (tmp_path / "groups" / group).mkdir(parents=True)
    (tmp_path / "groups" / group / "memory.oom.group").write_text("1\n")
    if own is not None:
        (tmp_path / "cgroup").write_text(f"1:name=systemd:/\n{own}\n")
    monkeypatch.setattr(processes, "CGROUP_FILE", str(tmp_path / "cgroup"))
    monkeypatch.setattr(processes, "CGROUPS", str(tmp_path / "groups"))
    usual = int(Path("/proc/self/oom_score_adj").read_text())
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.apply(oom_score_adjustment) == (500 if yields else usual)


@pytest.fixture
def systemd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(tmp_path / "notify"))
        listening.settimeout(30)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        yield listening


def test_it_hears_that_the_service_is_ready_and_that_it_ends(systemd: socket.socket) -> None:
    with service_manager.ready(lambda: True):
        assert systemd.recv(99) == b"READY=1"
    assert systemd.recv(99) == b"STOPPING=1"


def test_it_gets_signs_of_life_while_the_mount_works(
    systemd: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "20000")
    answers = iter([False, True])
    with service_manager.ready(lambda: next(answers, True)):
        assert systemd.recv(99) == b"READY=1"
        assert systemd.recv(99) == b"WATCHDOG=1"


def test_nothing_is_sent_where_there_is_no_systemd() -> None:
    service_manager.notify("READY=1", {})
    service_manager.notify("READY=1", {"NOTIFY_SOCKET": "/nowhere"})


def test_a_watchdog_is_for_the_process_that_it_names() -> None:
    interval = service_manager.watchdog_interval_s
    assert interval({"WATCHDOG_USEC": "2000000"}) == 1.0
    assert interval({"WATCHDOG_USEC": "2000000", "WATCHDOG_PID": str(os.getpid())}) == 1.0
    assert interval({"WATCHDOG_USEC": "2000000", "WATCHDOG_PID": "1"}) is None
    assert interval({}) is None


def test_a_service_ends_though_its_messages_are_not_read(
    systemd: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_manager, "SEND_LIMIT_S", 0.1)
    other = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
    with service_manager.ready(lambda: True), other, contextlib.suppress(BlockingIOError):
        other.connect(systemd.getsockname())
        while True:
            other.send(b"WATCHDOG=1")
    assert systemd.recv(99) == b"READY=1"
