"""The reconciler beside calls for the same mounts, and mounts that move to another daemon."""

import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from csi.daemons.migration import Migration
from csi.in_flight import Claims
from csi.node import reconciler
from csi.node.mount_record import MountRecord
from csi.node.reconciler import Reconciler
from csi.node.service import NodeService
from csi.node.warmup import Warmups
from csi.volume.options import WarmOption
from fusefs.keeper import supervisor_protocol
from fusefs.launch import control

RECORD = MountRecord("key", "volume", "/mounts/key", "s3://b", "me", 1, "", "", 0.0)


class PlayedMounts:
    """One mount's directory, of which there may be a record."""

    def __init__(self) -> None:
        self.record: MountRecord | None = None
        self.ended: list[str] = []
        self.records: Any = self

    def unknown(self) -> list[str]:
        return ["key"]

    def read(self, _key: str) -> MountRecord | None:
        return self.record

    def all(self) -> list[MountRecord]:
        return [self.record] if self.record else []

    def end_key(self, key: str, _deadline: float) -> None:
        self.ended.append(key)

    def ensure_held(self, record: MountRecord, _deadline: float) -> None:
        self.ended.append(f"{record.key} is held")

    def references(self, *_: object) -> list[Path]:
        return [Path("/pods/uid")] if self.record else []


@pytest.fixture
def mounts() -> PlayedMounts:
    return PlayedMounts()


@pytest.fixture
def made(mounts: PlayedMounts, monkeypatch: pytest.MonkeyPatch) -> Reconciler:
    played: Any = mounts
    monkeypatch.setattr(reconciler, "MountTable", lambda: None)
    warmups: Any = SimpleNamespace(is_awaited=lambda _key: False)
    drains: Any = None
    return Reconciler(played, Claims(), drains, warmups)


def test_a_mount_that_a_call_makes_anew_is_no_leftover(
    made: Reconciler, mounts: PlayedMounts
) -> None:
    with made._claims.claim("key"):  # it has not written the record yet
        made._remove_leftovers()
    mounts.record = RECORD
    made._remove_leftovers()
    assert mounts.ended == []
    mounts.record = None
    made._remove_leftovers()
    assert mounts.ended == ["key"]


def test_a_volume_for_which_there_was_no_thread_is_reconciled_later(
    made: Reconciler, mounts: PlayedMounts, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts.record = RECORD

    def no_thread(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no_thread)
    with pytest.raises(RuntimeError):
        made.reconcile_all()
    monkeypatch.setattr(threading.Thread, "start", threading.Thread.run)
    made.reconcile_all()
    assert mounts.ended == ["key is held"]


def test_a_mount_is_awaited_before_the_call_that_warms_it_releases_its_claim(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service: Any = NodeService.__new__(NodeService)
    warm = WarmOption(("a",), is_first=True)
    service._warmups = Warmups(tmp_path)
    service._mounts = SimpleNamespace(
        is_alive=lambda *_: True, records=SimpleNamespace(write=lambda *_: None)
    )
    service._store_secrets = lambda _plan: None
    service._plan = lambda *_: SimpleNamespace(record=RECORD, warm=warm)
    monkeypatch.setattr("csi.node.service.MountTable", lambda: None)
    publish = SimpleNamespace(target=tmp_path / "mount")
    assert service._publish(None, publish, "pod", time.monotonic()) == (RECORD, warm)
    assert service._warmups.is_awaited("key")


def test_a_supervisor_that_is_slow_still_has_its_daemons(tmp_path: Path) -> None:
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        ours.settimeout(0.01)
        moving = Migration(ours, tmp_path, 1)
        with its:
            assert moving._left() == 1
            for count in (2, 0):
                its.send(supervisor_protocol.pack(supervisor_protocol.COUNTED, a=count))
                assert moving._left() == count
        assert moving._left() == 0


def test_a_keeper_of_another_version_keeps_no_other_mount_from_moving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = []

    def answer(keeper: Path, request: dict[str, Any], _timeout_s: float) -> dict[str, Any]:
        if keeper.name == "odd.keeper":
            return {"serving": True}
        if request["do"] == "upgrade":
            moved.append(keeper.name)
        return {"is_serving": True, "mountpoint": "/mnt/good"}

    monkeypatch.setattr(control, "exchange", answer)
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, its:
        moving = Migration(ours, tmp_path, 1)
        for name in ("odd.keeper", "good.keeper"):
            moving._move(tmp_path / name)
    assert moved == ["good.keeper"]
