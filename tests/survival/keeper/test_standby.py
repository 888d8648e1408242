"""The keeper's standby: when there is one, how it takes over, and how it ends."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fusefs.keeper import template
from tests.support.machine.ordinary_user import NOBODY, public_python
from tests.support.survival.keeping import LIMIT_S, PROJECT, STANDIN, Kept, needs_fuse, needs_root
from tests.support.waiting import until

pytestmark = [needs_root, needs_fuse]


def die_quickly(kept: Kept) -> dict[str, Any]:
    """Kill daemons one soon after the other; return the status when a standby waits."""
    until(lambda: kept.served_by_another_than(kept.kill_daemon())["template"], "it is expected")
    return with_standby(kept)


def with_standby(kept: Kept) -> dict[str, Any]:
    def look() -> dict[str, Any] | None:
        status = kept.status()
        return status if status["is_serving"] and status["standby"] else None

    found: dict[str, Any] = until(look, "a standby is there")
    return found


def serves(kept: Kept) -> bool:
    return (kept.mountpoint / "plain").read_bytes() == b"plain content"


def was_standby(kept: Kept, pid: int) -> bool:
    return bool(kept.facts(pid)["was_standby"])


def is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def test_one_death_is_no_reason_for_a_standby(kept: Kept) -> None:
    kept.start()
    status = kept.served_by_another_than(kept.kill_daemon())
    assert (status["standby"], status["template"]) == (None, None)
    assert not was_standby(kept, status["daemon"])


def test_after_quick_deaths_a_standby_takes_over_and_another_is_there(kept: Kept) -> None:
    kept.start()
    before = die_quickly(kept)
    for _ in range(5):
        kill(before["daemon"])
        status = kept.served_by_another_than(before["daemon"])
        assert status["daemon"] == before["standby"]
        assert was_standby(kept, status["daemon"])
        assert serves(kept)
        before = with_standby(kept)
        assert before["template"] == status["template"]
    # It is a child like any other: its end is known.
    os.kill(before["daemon"], signal.SIGABRT)
    assert kept.served_by_another_than(before["daemon"])["last_reason"] == "killed by signal 6"


def test_a_standby_has_nothing_of_a_mount_before_it_takes_over(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush")
    kept.start()
    status = die_quickly(kept)
    for role in ("standby", "template"):
        process = Path(f"/proc/{status[role]}")
        assert b"hush" not in (process / "environ").read_bytes()
        files = [os.readlink(one) for one in (process / "fd").iterdir()]
        assert [one for one in files if "/dev/fuse" in one or "memfd" in one] == []
    kill(status["daemon"])
    facts = kept.facts(kept.served_by_another_than(status["daemon"])["daemon"])
    assert facts["environment"]["AWS_SECRET_ACCESS_KEY"] == "hush"


@pytest.mark.parametrize("victims", [["standby"], ["template"], ["standby", "template"]])
def test_a_standby_that_is_killed_changes_nothing(kept: Kept, victims: list[str]) -> None:
    kept.start()
    for _ in range(3):
        before = die_quickly(kept)
        for victim in victims:
            kill(before[victim])
        until(lambda status=before: all(is_gone(status[victim]) for victim in victims))
        assert kept.status()["daemon"] == before["daemon"]
        kill(before["daemon"])
        kept.served_by_another_than(before["daemon"])
        assert serves(kept)


def test_whatever_is_killed_with_the_daemon_it_is_followed_by_another(kept: Kept) -> None:
    kept.start()
    for _ in range(5):
        status = die_quickly(kept)
        for role in ("template", "standby", "daemon"):
            kill(status[role])
        kept.served_by_another_than(status["daemon"])
        assert serves(kept)


def test_a_standby_ends_when_no_daemon_has_died_for_long(kept: Kept) -> None:
    kept.start(standby_s=8)
    before = die_quickly(kept)
    until(lambda: is_gone(before["standby"]) and is_gone(before["template"]))
    status = kept.status()
    assert (status["standby"], status["template"]) == (None, None)
    assert status["daemon"] == before["daemon"]
    assert serves(kept)
    kill(status["daemon"])
    kept.served_by_another_than(status["daemon"])
    assert serves(kept)


@pytest.mark.parametrize("together", [False, True])
def test_a_standby_ends_with_its_keeper(kept: Kept, *, together: bool) -> None:
    kept.start()
    before = die_quickly(kept)
    status = kept.kill_keeper_and_broker() if together else kept.kill_keeper()
    until(lambda: is_gone(before["standby"]) and is_gone(before["template"]))
    assert status["daemon"] == before["daemon"]
    assert serves(kept)
    kept.served_by_another_than(kept.kill_daemon())
    if not together:  # the broker knew what had happened
        after = with_standby(kept)
        kill(after["daemon"])
        assert kept.served_by_another_than(after["daemon"])["daemon"] == after["standby"]
    assert serves(kept)


def test_nothing_is_left_of_a_mount_that_ends_with_a_standby(kept: Kept) -> None:
    kept.start()
    die_quickly(kept)
    kept.umount()
    assert kept.wait() == 0
    until(lambda: kept.processes() == [])


def test_a_template_ends_when_its_program_is_replaced(tmp_path: Path) -> None:
    with running_template(tmp_path) as one:
        (tmp_path / "changed").touch()
        one.fork()
        assert one.process.wait(LIMIT_S) == 0
        assert one.lines() == ["begun"]


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_standby_whose_program_is_replaced_begins_with_the_new_one(
    tmp_path: Path, *, is_replaced: bool
) -> None:
    with running_template(tmp_path) as one, one.fork() as standby:
        assert template.PID.unpack(one.keeper.recv(64))[0] > 0
        if is_replaced:
            (tmp_path / "changed").touch()
        standby.sendall(b"the input")
        standby.shutdown(socket.SHUT_WR)
        until(lambda: "read: the input" in one.lines())
        assert one.lines().count("begun") == 1 + is_replaced


PRELOADING = """
import sys
sys.path.insert(0, {project!r})
from fusefs.daemon import preloading
from fusefs.keeper import template
preloading.serve(template.purpose())
"""


@needs_root
def test_a_standby_has_all_rights_of_the_daemon_that_it_becomes() -> None:
    keeper, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with keeper, its:
        process = subprocess.Popen(
            [sys.executable, "-c", PRELOADING.format(project=os.fspath(PROJECT))],
            stdin=its,
            env={**os.environ, template.VARIABLE: template.FOR_STANDBYS},
        )
        its.close()
        assert keeper.recv(64) == template.READY
        rights = [
            re.findall(r"CapEff:\s+(\w+)", Path(f"/proc/{pid}/status").read_text())
            for pid in (os.getpid(), process.pid)
        ]
    assert rights[0] == rights[1]
    assert process.wait(LIMIT_S) == 0


def test_a_standby_without_its_keeper_ends(tmp_path: Path) -> None:
    with running_template(tmp_path) as one:
        standby = one.fork()
        [pid] = template.PID.unpack(one.keeper.recv(64))
        standby.close()
        until(lambda: is_gone(pid))
        one.keeper.close()
        assert one.process.wait(LIMIT_S) == 0
        assert one.lines() == ["begun"]


PROGRAM = """
import os, sys
sys.path.insert(0, {project!r})
from fusefs.keeper import template
print("begun", flush=True)
if template.purpose():
    template.serve(lambda: os.path.exists("changed"))
print("read:", sys.stdin.read(), flush=True)
"""


class RunningTemplate:
    """A template by itself, whose keeper is the test."""

    def __init__(self, directory: Path) -> None:
        self.keeper, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._output = directory / "output"
        with its, open(self._output, "wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM.format(project=os.fspath(PROJECT))],
                stdin=its,
                stdout=output,
                cwd=directory,
                env={**os.environ, template.VARIABLE: template.FOR_STANDBYS},
            )
        assert self.keeper.recv(64) == template.READY

    def fork(self) -> socket.socket:
        """Have a standby forked; return the other end of its input."""
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with its, open(os.devnull) as channel:
            fds = [channel.fileno(), its.fileno()]
            socket.send_fds(self.keeper, [template.FORK], fds)
        return ours

    def lines(self) -> list[str]:
        return self._output.read_text().splitlines()


@contextmanager
def running_template(directory: Path) -> Iterator[RunningTemplate]:
    one = RunningTemplate(directory)
    try:
        yield one
    finally:
        one.keeper.close()
        one.process.kill()
        one.process.wait(LIMIT_S)


def test_a_mount_that_is_given_up_has_no_standby(kept: Kept) -> None:
    kept.start(max_pause_s=2)
    status = die_quickly(kept)
    kept.upgrade({"take_over": "hang"})
    kill(kept.status()["daemon"])
    assert kept.wait() == 1
    assert kept.processes() == []
    assert is_gone(status["standby"])


def test_an_upgrade_ends_the_standby_of_the_version_before(kept: Kept) -> None:
    kept.start()
    before = die_quickly(kept)
    command = [*kept.configuration["command"], "newer"]
    answer = kept.upgrade({"fresh": "exit"}, command)
    assert answer["ok"] is True
    assert answer["pid"] != before["standby"]
    until(lambda: is_gone(before["standby"]) and is_gone(before["template"]))
    after = with_standby(kept)
    assert b"newer" in Path(f"/proc/{after['standby']}/cmdline").read_bytes()
    kill(answer["pid"])
    status = kept.served_by_another_than(answer["pid"])
    assert status["daemon"] == after["standby"]
    assert json.loads(kept.ask({"do": "settings"})["settings"])["behaviour"] == {"fresh": "exit"}


def test_an_upgrade_that_fails_when_it_takes_over_is_no_standbys(kept: Kept) -> None:
    kept.start()
    before = die_quickly(kept)
    answer = kept.upgrade({"taken": "exit"}, [*kept.configuration["command"], "newer"])
    assert "the old is started" in answer["error"]
    status = kept.served_by_another_than(before["daemon"])
    assert b"newer" not in Path(f"/proc/{status['daemon']}/cmdline").read_bytes()
    assert b"newer" not in Path(f"/proc/{with_standby(kept)['standby']}/cmdline").read_bytes()
    assert serves(kept)


@pytest.mark.parametrize("how", ["template=exit", "template=silent"])
def test_a_program_that_makes_no_standby_is_started_as_ever(kept: Kept, how: str) -> None:
    kept.start(command=[*kept.command, how])
    for _ in range(3):
        status = kept.served_by_another_than(kept.kill_daemon())
        assert not was_standby(kept, status["daemon"])
        assert serves(kept)


def test_daemons_that_die_of_themselves_end_the_mount_with_standbys_too(kept: Kept) -> None:
    kept.start()
    die_quickly(kept)
    kept.upgrade({"take_over": "exit"})
    kept.kill_daemon()
    assert kept.wait() == 1
    assert "10 daemons in a row" in kept.log_text()
    assert kept.processes() == []


def test_a_standby_is_a_user_without_privilege_as_its_daemon_is(kept: Kept) -> None:
    with public_python() as python:
        kept.start(command=[python, str(STANDIN)], uid=NOBODY, gid=NOBODY)
        before = die_quickly(kept)
        for role in ("standby", "template"):
            assert os.stat(f"/proc/{before[role]}").st_uid == NOBODY
        kill(before["daemon"])
        status = kept.served_by_another_than(before["daemon"])
        assert status["daemon"] == before["standby"]
        assert kept.facts(status["daemon"])["uid"] == NOBODY
        assert serves(kept)
