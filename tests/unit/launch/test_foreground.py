"""What a mount's command in the foreground follows."""

import subprocess
from pathlib import Path
from typing import NoReturn

import pytest

from fusefs.launch import foreground, registry
from fusefs.launch.control import ControlError
from fusefs.launch.foreground import Foreground
from tests.support.commands import runtime as runtime
from tests.support.commands import sleeper as sleeper

MOUNTPOINT = Path("/mnt/data")


def test_a_daemon_whose_keeper_cannot_be_reached_is_followed_itself(
    runtime: Path, sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_answer(*_: object) -> NoReturn:
        raise ControlError("no answer")

    monkeypatch.setattr(foreground, "SUCCESSOR_S", 0.0)
    monkeypatch.setattr(foreground, "keeper_status", no_answer)
    monkeypatch.setattr(foreground, "keeper_pid", lambda _path: None)
    monkeypatch.setattr(foreground.mountinfo, "is_mountpoint", lambda _path: True)
    monkeypatch.setattr(foreground, "daemon_request", lambda *_: {})
    registry.register(MOUNTPOINT, "s3://bucket/", sleeper.pid)
    with subprocess.Popen(["true"]) as keeper:
        keeper.wait()
        command = Foreground(keeper, MOUNTPOINT, has_keeper=True)
        assert command._works()
        with monkeypatch.context() as hanging:
            hanging.setattr(foreground, "daemon_request", no_answer)
            assert not command._works()
            assert not command._has_successor()
        assert command._has_successor()
        unmounted: list[Path] = []
        monkeypatch.setattr(
            foreground.unmount, "umount_path", lambda path, is_lazy: unmounted.append(path)
        )
        command._end(15, None)  # what it follows may not unmount
        assert (unmounted, sleeper.poll()) == ([MOUNTPOINT], None)
        sleeper.kill()
        assert command._follow() == 1  # once it has ended
        sleeper.wait()
        assert not command._has_successor()
