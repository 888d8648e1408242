"""Mounts that don't move to the next `fusefs-csi daemons` at once: played keepers."""

import json
import os
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from csi.daemons import migration
from fusefs.keeper import supervisor_protocol
from fusefs.keeper.exchange import HOPELESS
from fusefs.keeper.protocol import receive
from tests.support.sharing import PATIENCE_S
from tests.support.waiting import until

OLD, NEW = 1, 2


class PlayedKeeper(threading.Thread):
    """Answers as a keeper whose daemon is with the old supervisor; `why` it can't be upgraded."""

    def __init__(
        self, path: Path, why: str, code: str = "", *, is_replaceable: bool = True
    ) -> None:
        super().__init__(daemon=True)
        self._why = why
        self._code = code
        self._is_replaceable = is_replaceable
        self.supervisor = OLD
        self.requests: list[str] = []
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(os.fspath(path))
        self._listening.listen()
        self.start()

    def run(self) -> None:
        while True:
            with self._listening.accept()[0] as client:
                request = json.loads(client.makefile().readline())
                client.sendall(json.dumps(self.answer(request["do"])).encode() + b"\n")

    def answer(self, what: str) -> dict[str, Any]:
        self.requests.append(what)
        if what == "status":
            return {"supervisor": self.supervisor, "is_serving": True, "mountpoint": "/mnt"}
        if what == "upgrade" and self._why:
            return {"error": self._why, "code": self._code}
        if what == "replace" and not self._is_replaceable:
            return {"error": "the mount would end"}
        if what in ("upgrade", "replace"):
            self.supervisor = NEW
        return {"settings": "{}", "command": []}


class PlayedSupervisor(threading.Thread):
    """The old one, on a connection: it has the daemons of keepers that have not moved."""

    def __init__(self, keepers: list[PlayedKeeper]) -> None:
        super().__init__(daemon=True)
        self.theirs, self._ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._keepers = keepers
        self.start()

    def run(self) -> None:
        while receive(self._ours, supervisor_protocol.KINDS):
            left = sum(keeper.supervisor == OLD for keeper in self._keepers)
            self._ours.send(supervisor_protocol.pack(supervisor_protocol.COUNTED, a=left))


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migration, "PATIENCE_S", 0.2)
    monkeypatch.setattr(migration, "EVERY_S", 0.05)


def move(directory: Path, keepers: list[PlayedKeeper], limit_s: float) -> bool:
    """True if all have moved in time."""
    old = PlayedSupervisor(keepers)
    moving = migration.Migration(old.theirs, directory, NEW)
    mover = threading.Thread(target=moving.run, daemon=True)
    mover.start()
    mover.join(limit_s)
    return not mover.is_alive()


def test_a_mount_whose_new_daemon_is_refused_for_long_is_replaced(tmp_path: Path) -> None:
    keepers = [
        PlayedKeeper(tmp_path / "0.keeper", ""),
        PlayedKeeper(tmp_path / "1.keeper", "the new daemon is gone: exited with 1"),
    ]
    assert move(tmp_path, keepers, PATIENCE_S)
    assert "replace" not in keepers[0].requests
    assert keepers[1].requests.count("upgrade") > 1
    assert keepers[1].requests.count("replace") == 1


def test_a_mount_that_cannot_be_taken_over_or_would_end_stays_and_the_others_move(
    tmp_path: Path,
) -> None:
    hopeless = PlayedKeeper(tmp_path / "0.keeper", "the new daemon is gone", HOPELESS)
    kept = PlayedKeeper(tmp_path / "1.keeper", "exited with 1", is_replaceable=False)
    other = PlayedKeeper(tmp_path / "2.keeper", "exited with 1")
    assert not move(tmp_path, [hopeless, kept, other], 2.0)
    until(lambda: other.supervisor == NEW and kept.requests.count("replace") > 1, "all are tried")
    assert kept.supervisor == OLD
    assert hopeless.requests.count("upgrade") > 1
    assert "replace" not in hopeless.requests
    hopeless.supervisor = kept.supervisor = NEW  # so that it ends
