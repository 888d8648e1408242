"""The template from which a node's daemons are forked: what they share, and what they do not.

A stand-in for a daemon reads its input, as a daemon reads its settings, and waits.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from csi.daemons.template import DaemonTemplate
from fusefs.keeper import protocol, supervisor_protocol, template
from fusefs.linux.processes import has_ended
from tests.support.survival.keeping import LIMIT_S, needs_root
from tests.support.survival.memory_search import is_in_memory
from tests.support.waiting import until

pytestmark = needs_root

STAND_IN = """
import json, os, sys
from fusefs.keeper import template
from fusefs.linux.libc import forbid_inspection
forbid_inspection()
assert template.purpose() == template.FOR_DAEMONS
template.keep_users_alone()
template.serve(lambda: False)
read = sys.stdin.read()
print(json.dumps(dict(os.environ)), flush=True)
os.read(int(os.environ["FUSEFS_SUPERVISOR_FD"]), 1)
"""
COMMON = {"PATH": os.environ["PATH"], "COMMON": "1"}


@dataclass
class Forked:
    pid: int
    pidfd: int
    keeper: socket.socket
    supervisor: socket.socket
    output: int
    environment: dict[str, str]

    def go(self) -> None:
        self.supervisor.send(template.GO)

    def printed(self) -> str:
        return os.read(self.output, 1 << 16).decode()

    def status(self) -> dict[str, str]:
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return dict(line.split(":\t", 1) for line in lines)


class Node:
    """What stands for the supervisor."""

    def __init__(self) -> None:
        self.template = DaemonTemplate([sys.executable, "-c", STAND_IN], COMMON)
        self.template.check_process()
        self._stack = contextlib.ExitStack()

    def fork(self, uid: int, secret: str) -> Forked:
        """A process for an identity, with a secret on its standard input and in its environment."""
        environment = {**COMMON, "AWS_SECRET": secret}
        files = [_file(secret), _file(json.dumps(environment))]
        ours, keeper = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        our_end, supervisor = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        output, stdout = os.pipe()
        with keeper, supervisor:
            fds = keeper.fileno(), supervisor.fileno(), files[0], stdout, files[1]
            pid = self.template.fork(uid, uid, *fds)
        for fd in (*files, stdout):
            os.close(fd)
        assert pid, "the template makes one"
        forked = Forked(pid, os.pidfd_open(pid), ours, our_end, output, environment)
        self._stack.callback(self._end, forked)
        return forked

    def _end(self, forked: Forked) -> None:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            signal.pidfd_send_signal(forked.pidfd, signal.SIGKILL)
            os.waitpid(forked.pid, 0)
        os.close(forked.pidfd)
        os.close(forked.output)
        forked.keeper.close()
        forked.supervisor.close()

    def clean_up(self) -> None:
        self._stack.close()
        self.template.end()


def _file(text: str) -> int:
    fd = os.memfd_create("input")
    os.write(fd, text.encode())
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


@pytest.fixture
def node() -> Iterator[Node]:
    node = Node()
    yield node
    node.clean_up()


def test_a_daemon_has_nothing_of_another_identity_in_its_memory(node: Node) -> None:
    first = node.fork(40001, "the-secret-of-the-" + "first")
    first.go()
    assert "AWS_SECRET" in first.printed()
    second = node.fork(40002, "the-secret-of-the-" + "second")
    second.go()
    second.printed()
    own, other = b"the-secret-of-the-" + b"second", b"the-secret-of-the-" + b"first"
    assert is_in_memory(first.pid, other)
    assert is_in_memory(second.pid, own)
    assert not is_in_memory(second.pid, other)
    assert not is_in_memory(first.pid, own)
    for secret in (own, other):
        assert not is_in_memory(node.template.pid, secret)


def test_a_daemon_has_its_own_environment_and_descriptors_alone(node: Node) -> None:
    first = node.fork(40001, "one")
    first.go()
    first.printed()
    second = node.fork(40002, "two")
    second.go()
    environment = json.loads(second.printed())
    numbers = [
        environment.pop(name) for name in (protocol.ENVIRONMENT, supervisor_protocol.ENVIRONMENT)
    ]
    assert environment == second.environment
    open_now = {int(name) for name in os.listdir(f"/proc/{second.pid}/fd")}
    assert open_now == {0, 1, 2, *map(int, numbers)}
    held = os.listdir(f"/proc/{node.template.pid}/fd")
    assert len(held) == 4  # the standard ones, and the socket to the supervisor


def test_a_daemon_has_no_rights_and_cannot_be_looked_into(node: Node) -> None:
    forked = node.fork(40001, "one")
    forked.go()
    forked.printed()
    status = forked.status()
    assert set(status["Uid"].split()) == set(status["Gid"].split()) == {"40001"}
    assert not status["Groups"].split()
    sets = ("CapInh", "CapPrm", "CapEff", "CapAmb")
    assert {int(status[name], 16) for name in sets} == {0}
    assert status["NoNewPrivs"] == "1"
    # The files in /proc of a process that may not be inspected are root's.
    assert os.stat(f"/proc/{forked.pid}/mem").st_uid == 0
    assert os.getsid(forked.pid) == forked.pid


def test_a_daemon_outlives_whom_it_answers(node: Node) -> None:
    """What leaves before its answer is an error of a write, as in a daemon that is executed."""
    forked = node.fork(40001, "one")
    forked.go()
    forked.printed()
    ignored = int(forked.status()["SigIgn"], 16)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        assert ignored & 1 << (number - 1), number


def test_the_template_may_change_users_and_nothing_else(node: Node) -> None:
    node.fork(40001, "one")
    lines = Path(f"/proc/{node.template.pid}/status").read_text().splitlines()
    status = dict(line.split(":\t", 1) for line in lines)
    assert {int(status[name], 16) for name in ("CapPrm", "CapEff")} == {1 << 6 | 1 << 7}
    assert status["NoNewPrivs"] == "1"


def test_a_daemon_that_the_supervisor_does_not_know_ends_unused(node: Node) -> None:
    forked = node.fork(40001, "one")
    forked.supervisor.close()
    assert has_ended(forked.pidfd, LIMIT_S)
    assert os.waitpid(forked.pid, 0)[1] == 0
    assert forked.printed() == ""  # it has read nothing


REAPS = """
import os, sys
from pathlib import Path
from csi.daemons.supervisor import Supervisor
stray, known = (os.posix_spawnp("true", ["true"], os.environ) for _ in range(2))
for pid in (stray, known):
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
others = {known, os.getpid()}
supervisor = Supervisor(Path(sys.argv[1]), other_children=lambda: others)
for _ in range(2):
    supervisor._reap_stray(0)
assert os.waitpid(known, os.WNOHANG)[0] == known
supervisor._reap_stray(0)
try:
    os.waitpid(stray, os.WNOHANG)
    sys.exit("it is still there")
except ChildProcessError:
    pass
"""


def test_a_stray_process_is_waited_for(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", REAPS, tmp_path / "socket"], check=True)


def test_another_template_comes_up_when_one_is_killed(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("csi.daemons.template.AGAIN_S", 0.0)
    first = node.fork(40001, "one")
    killed = node.template.pid
    os.kill(killed, signal.SIGKILL)
    until(
        lambda: node.template.check_process() or node.template.pid not in (0, killed),
        "another is there",
    )
    assert not has_ended(first.pidfd)  # what it has forked goes on
    node.fork(40002, "two").go()
