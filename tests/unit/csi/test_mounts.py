"""When the driver resumes a mount whose keeper is gone, when it waits, and when it replaces it."""

import errno
import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from csi.daemons import main
from csi.daemons.client import SupervisorClient
from csi.errors import CsiError, UnavailableError
from csi.node import mounts
from csi.node.mount_record import MountRecord, MountRecords
from csi.node.mounts import RESUME_S, Mounts
from csi.volume.options import anywhere
from fusefs.keeper import supervisor_protocol
from fusefs.launch.launcher import SupervisorAddress
from fusefs.launch.preflight import LaunchError
from fusefs.settings.mount import build

LATER_S = 1000.0


class PlayedNode:
    """One mount at its root, the descriptor store, and whether a daemon serves the mount."""

    def __init__(self) -> None:
        self.holds: bool | None = True  # None: it does not answer
        self.is_there = True
        self.has_daemon = False
        self.cannot_start = ""
        self.done: list[str] = []
        self.now = LATER_S

    def has(self, _root: object) -> bool:
        if self.holds is None:
            raise TimeoutError("timed out")
        return self.holds

    def drop(self, _root: object) -> None:
        self.done.append("drop")

    def check(self) -> None:
        if not self.is_there:
            raise UnavailableError("what is held is not known: nothing listens")

    def serves(self, _root: Path, **_: bool) -> bool:
        return self.has_daemon

    def monotonic(self) -> float:
        return self.now

    def start(self, *_: object, **__: object) -> Any:
        self.done.append("start")
        if self.cannot_start:
            raise LaunchError(self.cannot_start)
        return type("Keeper", (), {"poll": lambda _self: None})()


@pytest.fixture
def node() -> PlayedNode:
    return PlayedNode()


@pytest.fixture
def record(tmp_path: Path) -> MountRecord:
    root = str(tmp_path / "roots/key")
    settings = build({}, anywhere()).as_texts()
    return MountRecord("key", "volume", root, "s3://b", "me", 1, "", settings, 0.0)


@pytest.fixture
def made(node: PlayedNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Mounts:
    played: Any = node
    table: Any = type("Table", (), {"top": lambda _self, _path: object()})
    monkeypatch.setattr(mounts, "MountTable", table)
    monkeypatch.setattr(mounts, "time", node)
    monkeypatch.setattr(mounts.preflight, "check", lambda _settings: None)
    for begin in ("start", "resume"):
        monkeypatch.setattr(mounts, begin, node.start)
    monkeypatch.setattr(mounts.bind_mount, "pop_all", lambda _root: node.done.append("unmount"))
    monkeypatch.setattr(Mounts, "_end_processes", lambda _self, _root: node.done.append("kill"))
    played.address = None
    files: Any = None
    return Mounts(MountRecords(tmp_path / "records"), files, tmp_path / "roots", played)


def test_a_mount_that_nothing_holds_is_replaced_once_the_descriptor_store_says_so(
    made: Mounts, node: PlayedNode, record: MountRecord
) -> None:
    for node.holds, node.is_there in ((None, True), (False, False)):
        with pytest.raises(UnavailableError, match="not known"):
            made.start(record, 0.0)
        node.now += RESUME_S
    assert node.done == []
    node.is_there = True
    made.start(record, 0.0)
    assert node.done == ["kill", "unmount", "start"]


def test_a_held_mount_that_cannot_be_resumed_is_dropped_after_long(
    made: Mounts, node: PlayedNode, record: MountRecord
) -> None:
    node.cannot_start = "no"
    for waited_s, done in ((0.0, ["start"]), (RESUME_S / 2, ["start"]), (RESUME_S, ["start"])):
        node.now = LATER_S + waited_s
        node.done.clear()
        with pytest.raises(CsiError):
            made.start(record, 0.0)
        assert node.done == done + ["drop"] * (waited_s == RESUME_S)
    node.has_daemon = True  # programs read on
    node.done.clear()
    with pytest.raises(CsiError):
        made.start(record, 0.0)
    assert node.done == ["start"]


def test_a_supervisor_that_is_silent_may_hold_anything_and_have_daemons(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_protocol, "ANSWER_S", 0.1)
    client = SupervisorClient(SupervisorAddress(tmp_path / "store.sock", False))
    assert client.held() == set()
    client.end_daemons(tmp_path)  # nothing listens yet
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
        silent.bind(str(tmp_path / "store.sock"))
        silent.listen()
        with pytest.raises(OSError, match="timed out"):
            client.held()
        with pytest.raises(UnavailableError, match="not ended: timed out"):
            client.end_daemons(tmp_path)
        silent.listen(0)  # from now on it refuses at once
        monkeypatch.setattr(main, "HELD_S", 0.5)
        began = time.process_time()
        assert main.held_before(tmp_path / "store.sock") == {}
        assert time.process_time() - began < 0.05


def test_a_mount_that_cannot_be_unmounted_costs_no_descriptor(
    made: Mounts, record: MountRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_root: Path) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(mounts, "keeper_pid", lambda _root: os.getpid())
    monkeypatch.setattr(mounts.bind_mount, "pop_all", refuse)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(2):  # the reconciler comes every few seconds
        with pytest.raises(OSError, match="Invalid argument"):
            made.end(record, LATER_S)
    assert len(os.listdir("/proc/self/fd")) <= before
