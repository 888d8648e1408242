"""When the daemons of a node count as moved."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from csi.daemons.migration import Migration
from fusefs.keeper import supervisor_protocol
from fusefs.launch import control


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
