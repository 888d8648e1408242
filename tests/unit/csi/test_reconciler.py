"""The reconciler beside calls for the same mounts, and mounts that move to another daemon."""

import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from csi.daemons.migration import Migration
from csi.in_flight import Claims
from csi.node import reconciler
from csi.node.mount_record import MountRecord
from csi.node.reconciler import AT_ONCE, Reconciler
from csi.node.service import NodeService
from csi.node.warmup import Warmups
from csi.volume.options import WarmOption
from fusefs.keeper import supervisor_protocol
from fusefs.launch import control
from tests.support.sharing import PATIENCE_S
from tests.support.waiting import until

RECORD = MountRecord("key", "volume", "/mounts/key", "s3://b", "me", 1, "", "", 0.0)
VOLUMES = [f"volume-{number}" for number in range(20)]


class PlayedMounts:
    """Mounts that pods use, and that have no keeper. Those of `hanging` take for ever."""

    def __init__(self) -> None:
        self.records: Any = self
        self.by_key: dict[str, MountRecord] = {}
        self.hanging: list[str] = []
        self.ended: list[str] = []
        self.let_go = threading.Event()
        self.begun: Counter[str] = Counter()
        self.at_work = 0
        self.most_at_work = 0
        self._lock = threading.Lock()

    def add(self, *volumes: str) -> list[str]:
        for number, volume in enumerate(volumes):
            self.by_key[str(number)] = replace(RECORD, key=str(number), volume_id=volume)
        return list(volumes)

    def unknown(self) -> list[str]:
        return ["key"]

    def read(self, key: str) -> MountRecord | None:
        return self.by_key.get(key)

    def all(self) -> list[MountRecord]:
        return list(self.by_key.values())

    def end_key(self, key: str, _deadline: float) -> None:
        self.ended.append(key)

    def references(self, key: str, *_: object) -> list[Path]:
        return [Path("/pods/uid")] if key in self.by_key else []

    def ensure_held(self, record: MountRecord, _deadline: float) -> None:
        with self._lock:
            self.begun[record.volume_id] += 1
            self.at_work += 1
            self.most_at_work = max(self.at_work, self.most_at_work)
        if record.volume_id in self.hanging:
            self.let_go.wait(PATIENCE_S)
        else:
            time.sleep(0.01)
        with self._lock:
            self.at_work -= 1


@pytest.fixture
def mounts() -> Iterator[PlayedMounts]:
    played = PlayedMounts()
    yield played
    played.let_go.set()


@pytest.fixture
def made(mounts: PlayedMounts, monkeypatch: pytest.MonkeyPatch) -> Reconciler:
    played: Any = mounts
    monkeypatch.setattr(reconciler, "MountTable", lambda: None)
    warmups: Any = SimpleNamespace(is_awaited=lambda _key: False)
    drains: Any = None
    return Reconciler(played, Claims(), drains, warmups)


def test_mounts_that_hang_keep_no_other_from_its_turn(
    made: Reconciler, mounts: PlayedMounts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reconciler, "WORKING_S", 0.1)
    volumes = mounts.add(*VOLUMES)
    mounts.hanging = volumes[: 2 * AT_ONCE]
    for rounds in (1, 2):
        made.reconcile_all()
        wanted = {name: 1 if name in mounts.hanging else rounds for name in volumes}
        until(lambda wanted=wanted: mounts.begun == wanted, "all others have their turn")
        until(lambda: mounts.at_work == len(mounts.hanging), "they are done")


def test_no_more_are_gone_on_with_at_a_time_than_the_processors_bear(
    made: Reconciler, mounts: PlayedMounts
) -> None:
    mounts.hanging = mounts.add(*VOLUMES)
    threading.Thread(target=made.reconcile_all, daemon=True).start()
    until(lambda: mounts.at_work == AT_ONCE, "some are at work")
    time.sleep(0.1)
    assert mounts.begun.total() == AT_ONCE
    mounts.let_go.set()
    until(lambda: mounts.begun.total() == len(VOLUMES), "all have their turn")
    assert mounts.most_at_work == AT_ONCE


def test_all_mounts_of_one_volume_have_their_turn(made: Reconciler, mounts: PlayedMounts) -> None:
    mounts.add(*["volume"] * 5)
    made.reconcile_all()
    until(lambda: mounts.begun.total() == 5 and not mounts.at_work, "all are done")
    assert mounts.most_at_work == 1


def test_a_mount_that_a_call_makes_anew_is_no_leftover(
    made: Reconciler, mounts: PlayedMounts
) -> None:
    with made._claims.claim("key"):  # it has not written the record yet
        made._remove_leftovers()
    mounts.by_key["key"] = RECORD
    made._remove_leftovers()
    assert mounts.ended == []
    mounts.by_key.clear()
    made._remove_leftovers()
    assert mounts.ended == ["key"]


def test_a_volume_for_which_there_was_no_thread_is_reconciled_later(
    made: Reconciler, mounts: PlayedMounts, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts.by_key["key"] = RECORD

    def no_thread(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no_thread)
    with pytest.raises(RuntimeError):
        made.reconcile_all()
    monkeypatch.setattr(threading.Thread, "start", threading.Thread.run)
    made.reconcile_all()
    assert mounts.begun == {"volume": 1}


def test_a_mount_is_awaited_before_the_call_that_warms_it_releases_its_claim(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service: Any = NodeService.__new__(NodeService)
    warm = WarmOption(("a",), is_first=True)
    service._warmups = Warmups(tmp_path)
    service._mounts = SimpleNamespace(is_alive=lambda *_: True)
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
