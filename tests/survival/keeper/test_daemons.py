"""Daemons that die or hang, the keeper that replaces them, and its control socket."""

import contextlib
import errno
import json
import os
import signal
import socket
from pathlib import Path

import pytest

from fusefs.keeper.protocol import FRESH
from tests.support.machine.ordinary_user import NOBODY
from tests.support.survival.keeping import (
    LIMIT_S,
    Kept,
    blocked_reader,
    error_of,
    needs_fuse,
    needs_passthrough,
    needs_root,
    put_through,
)
from tests.support.waiting import until

pytestmark = [needs_root, needs_fuse]


def test_a_storm_of_kills_is_no_reason_to_give_up(kept: Kept) -> None:
    kept.start()
    for _ in range(12):
        kept.served_by_another_than(kept.kill_daemon())
    assert (kept.mountpoint / "plain").read_bytes() == b"plain content"
    assert kept.status()["restarts"] == 12


@needs_passthrough
def test_registered_files_are_handed_to_the_next_daemon(kept: Kept) -> None:
    content = put_through(kept)
    kept.start()
    with open(kept.mountpoint / "through", "rb", buffering=0) as file:
        assert file.read(1000) == content[:1000]
        registered = kept.facts(kept.status()["daemon"])["registered"]
        status = kept.served_by_another_than(kept.kill_daemon())
        assert os.pread(file.fileno(), 1000, 5000) == content[5000:6000]
        assert (kept.mountpoint / "through").read_bytes() == content
    where = os.stat(kept.cache / "through")
    [[error, backing_id]] = registered
    assert error == 0
    facts = kept.facts(status["daemon"])
    assert facts["table"] == [[backing_id, [where.st_dev, where.st_ino]]]
    assert facts["registered"] == []
    assert status["backing_ids"] == 1


def test_a_daemon_that_hangs_tells_where_and_is_replaced(kept: Kept) -> None:
    kept.start({"after_serving": "hang"}, hang_s=3)
    old = kept.process_of(FRESH)
    status = kept.served_by_another_than(old)
    assert status["last_reason"] == "silent for 3 s"
    assert status["longest_pause_s"] >= 3
    assert "most recent call first" in kept.log_text()
    assert (kept.mountpoint / "plain").read_bytes() == b"plain content"


@pytest.mark.parametrize(
    ("next_ones", "limits", "why"),
    [("exit", {}, "10 daemons in a row"), ("hang", {"max_pause_s": 1}, "")],
    ids=["die", "hang"],
)
def test_daemons_that_die_or_hang_one_after_the_other_end_the_mount_with_an_error(
    kept: Kept, next_ones: str, limits: dict[str, int], why: str
) -> None:
    kept.policy = {"LONGEST_DELAY_S": 0.1}
    kept.start({"take_over": next_ones}, **limits)
    with blocked_reader(kept) as reader:
        kept.kill_daemon()
        _, complaint = reader.communicate(timeout=LIMIT_S)
        assert complaint
    assert kept.wait() == 1
    assert why in kept.log_text()
    assert error_of(kept.mountpoint / "plain") == errno.ENOTCONN
    assert kept.connection_now() is not None
    until(lambda: kept.processes() == [])


def test_a_daemon_that_cannot_take_over_is_the_last_one(kept: Kept) -> None:
    kept.start({"take_over": "cannot"})
    kept.kill_daemon()
    assert kept.wait() == 1
    assert kept.log_text().count("is gone") == 2
    assert error_of(kept.mountpoint / "plain") == errno.ENOTCONN


def test_a_daemon_that_closes_its_socket_is_replaced(kept: Kept) -> None:
    kept.start({"after_serving": "close"})
    old = kept.process_of(FRESH)
    kept.served_by_another_than(old)
    assert (kept.mountpoint / "plain").read_bytes() == b"plain content"


def test_a_broker_is_killed_while_no_daemon_is_started(kept: Kept) -> None:
    """It is the last one's, which has been seen to end: the keeper makes do without it."""
    kept.start({"take_over": "exit"})
    keeper = kept.status()["pid"]
    kept.kill_daemon()
    until(lambda: kept.log_text().count("exited with 5") >= 6)
    until(lambda: kept.status()["daemon"] is None)
    (broker,) = brokers_of(keeper)
    os.kill(broker, signal.SIGKILL)
    until(lambda: not Path(f"/proc/{broker}").exists())
    assert kept.status()["pid"] == keeper


def brokers_of(keeper: int) -> list[int]:
    children = map(int, Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split())
    titles = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children}
    return [pid for pid, title in titles.items() if title.startswith(b"fusefs keeper-broker")]


MOST_MEMORY_KIB = 15 * 1024


@needs_passthrough
def test_the_keeper_is_small_with_every_file_registered(kept: Kept) -> None:
    put_through(kept)
    count = 20_000
    kept.start({"attack": "register_20000"}, most_backing_ids=count)
    assert kept.attack_facts()["attack"] == [0, count]
    for _ in range(2):
        status = kept.served_by_another_than(kept.kill_daemon())
    text = Path(f"/proc/{status['pid']}/status").read_text()
    [line] = [line for line in text.splitlines() if line.startswith("VmRSS")]
    assert int(line.split()[1]) < MOST_MEMORY_KIB


NONSENSE = (b"nonsense", b"[]", b"{}", b'{"do": "dance"}', b"\xff")


def test_nonsense_on_the_control_socket_gets_an_error(kept: Kept) -> None:
    kept.start()
    for line in NONSENSE:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.connect(str(kept.control))
            sock.sendall(line + b"\n")
            assert "error" in json.loads(sock.makefile().readline()), line
        # What it says of itself may reach the keeper after its first user.
        until(lambda: kept.status()["is_serving"])


def test_silent_clients_hold_no_other_up(kept: Kept) -> None:
    kept.start()
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(10)]
        for sock in silent:
            sock.connect(str(kept.control))
        until(lambda: kept.status()["is_serving"])
        kept.served_by_another_than(kept.kill_daemon())
        silent[0].settimeout(LIMIT_S)
        assert silent[0].recv(1) == b""


def test_only_root_is_answered(kept: Kept) -> None:
    kept.start()
    kept.control.chmod(0o666)
    receiver, sender = os.pipe()
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(OSError):
            os.setresuid(NOBODY, NOBODY, NOBODY)
            sock = socket.socket(socket.AF_UNIX)
            sock.connect(str(kept.control))
            os.write(sender, b"connected;")
            sock.sendall(b'{"do": "settings"}\n')
            os.write(sender, sock.recv(100))
        os._exit(0)
    os.close(sender)
    with open(receiver, "rb") as answer:
        assert answer.read() == b"connected;"
    os.waitpid(pid, 0)


def test_only_the_mounts_own_processes_have_its_descriptor(kept: Kept) -> None:
    kept.start()
    kept.served_by_another_than(kept.kill_daemon())
    status = kept.status()
    holders = {
        int(path.parts[2])
        for pid in kept.processes()
        for path in Path(f"/proc/{pid}/fd").iterdir()
        if os.path.realpath(path) == "/dev/fuse"
    }
    assert holders == {status["pid"], status["broker"], status["daemon"]}
    kept_by_daemon = os.listdir(f"/proc/{status['daemon']}/fd")
    assert len(kept_by_daemon) <= 5  # the standard three, the keeper's and the mount's
