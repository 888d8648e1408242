"""The keeper by itself: a stand-in serves a tiny file system, and things go wrong around it."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fusefs.kernel.keeper_system import CAP_SYS_ADMIN
from fusefs.kernel.keeper_wire import FRESH, PREPARE
from tests.support.keeping import (
    LIMIT_S,
    STANDIN,
    Kept,
    needs_fuse,
    needs_passthrough,
    needs_root,
    public_python,
    until,
)  # fmt: skip

pytestmark = [needs_root, needs_fuse]

NOBODY = 65534
HELD = b"held content"
PREPARE_HANGS = {"prepare": "hang"}
ROLES = ["pid", "clerk", "daemon"]
MOST_MEMORY_KIB = 15 * 1024


@pytest.fixture
def kept() -> Iterator[Kept]:
    # Not below pytest's own directory, which only root may enter.
    directory = Path(tempfile.mkdtemp(prefix="kept-"))
    directory.chmod(0o755)
    one = Kept(directory)
    yield one
    one.clean_up()
    shutil.rmtree(directory)


@contextlib.contextmanager
def blocked_reader(kept: Kept) -> Iterator[subprocess.Popen[bytes]]:
    """A process that waits for the answer to a READ."""
    kept.hold.touch()
    reader = subprocess.Popen(
        ["cat", str(kept.mountpoint / "held")], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        until(lambda: kept.status()["in_flight"] == 1)
        yield reader
    finally:
        kept.hold.unlink(missing_ok=True)
        reader.kill()
        reader.wait(LIMIT_S)


def put_through(kept: Kept, size: int = 300_000) -> bytes:
    """Make the file that is passed through; returns its content."""
    content = os.urandom(size)
    path = kept.cache / "through"
    path.write_bytes(content)
    return content


def error_of(path: Path) -> int | None:
    try:
        path.read_bytes()
    except OSError as error:
        return error.errno
    return None


# --- daemons that die -----------------------------------------------------------


def test_a_killed_daemon_is_replaced_and_its_readers_never_notice(kept: Kept) -> None:
    kept.start()
    with blocked_reader(kept) as reader:
        old = kept.kill_daemon()
        status = kept.served_by_another_than(old)
        assert reader.poll() is None
        kept.hold.unlink()
        assert reader.communicate(timeout=LIMIT_S) == (HELD, b"")
    assert status["restarts"] == 1
    assert status["last_reason"] == "killed by signal 9"
    assert status["longest_pause_s"] > 0
    facts = kept.facts(status["daemon"])
    assert facts["restarts"] == 1
    assert facts["is_lingering"] is False
    assert abs(facts["last_death_ns"] - time.time_ns()) < LIMIT_S * 1e9


def test_a_storm_of_kills_is_no_reason_to_give_up(kept: Kept) -> None:
    kept.start()
    for _ in range(15):
        kept.served_by_another_than(kept.kill_daemon())
    assert (kept.mountpoint / "plain").read_bytes() == b"plain content"
    assert kept.status()["restarts"] == 15


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
    kept.start({"after_serving": "hang"}, hang_s=1)
    old = kept.process_of(FRESH)
    status = kept.served_by_another_than(old)
    assert status["last_reason"] == "silent for 1 s"
    assert status["longest_pause_s"] >= 1
    assert "most recent call first" in kept.said()
    assert (kept.mountpoint / "plain").read_bytes() == b"plain content"


def test_a_stopped_daemon_is_replaced(kept: Kept) -> None:
    kept.start(hang_s=1)
    with blocked_reader(kept) as reader:
        old = kept.status()["daemon"]
        os.kill(old, signal.SIGSTOP)
        kept.served_by_another_than(old)
        kept.hold.unlink()
        assert reader.communicate(timeout=LIMIT_S) == (HELD, b"")


def test_daemons_that_die_one_after_the_other_end_the_mount_with_an_error(kept: Kept) -> None:
    kept.start({"take_over": "exit"})
    with blocked_reader(kept) as reader:
        kept.kill_daemon()
        _, complaint = reader.communicate(timeout=LIMIT_S)
        assert complaint
    assert kept.wait() == 1
    assert "10 daemons in a row" in kept.said()
    assert error_of(kept.mountpoint / "plain") == errno.ENOTCONN
    assert kept.connection_now() is not None
    assert kept.processes() == []


def test_a_pause_ends_with_an_error_for_who_waits(kept: Kept) -> None:
    kept.start({"take_over": "hang"}, max_pause_s=1)
    with blocked_reader(kept) as reader:
        kept.kill_daemon()
        _, complaint = reader.communicate(timeout=LIMIT_S)
        assert complaint
    assert kept.wait() == 1
    assert error_of(kept.mountpoint / "plain") == errno.ENOTCONN
    assert kept.processes() == []


def test_without_resend_a_death_ends_the_mount_at_once(kept: Kept) -> None:
    kept.start({"has_resend": False})
    with blocked_reader(kept) as reader:
        kept.kill_daemon()
        assert reader.communicate(timeout=LIMIT_S)[1]
    assert kept.wait() == 1
    assert "cannot send requests again" in kept.said()
    assert error_of(kept.mountpoint / "plain") == errno.ENOTCONN


def test_a_daemon_that_cannot_take_over_is_the_last_one(kept: Kept) -> None:
    kept.start({"take_over": "cannot"})
    kept.kill_daemon()
    assert kept.wait() == 1
    assert kept.said().count("is gone") == 2
    assert error_of(kept.mountpoint / "plain") == errno.ENOTCONN


def test_a_daemon_that_closes_its_socket_is_replaced(kept: Kept) -> None:
    kept.start({"after_serving": "close"})
    old = kept.process_of(FRESH)
    kept.served_by_another_than(old)
    assert (kept.mountpoint / "plain").read_bytes() == b"plain content"


# --- the first daemon -----------------------------------------------------------


def test_a_first_daemon_that_fails_is_the_keepers_own_failure(kept: Kept) -> None:
    said = kept.start({"fresh": "exit"}, is_expected_to_serve=False)
    assert said == ""
    assert kept.wait() == 5
    assert kept.connection_now() is None
    assert not kept.control.exists()


def test_what_a_failed_first_daemon_mounted_is_taken_away(kept: Kept) -> None:
    kept.start({"mounted": "exit"}, is_expected_to_serve=False)
    assert kept.wait() == 5
    assert kept.connection_now() is None
    assert kept.processes() == []


def test_a_program_that_cannot_be_started_is_told(kept: Kept) -> None:
    said = kept.start(command=["/nonexistent"], is_expected_to_serve=False)
    assert "/nonexistent" in json.loads(said)["error"]
    assert kept.wait() == 1


def test_a_mount_that_is_refused_is_the_daemons_to_tell(kept: Kept) -> None:
    said = kept.start(mount_data="nonsense", is_expected_to_serve=False)
    assert json.loads(said) == {"error": "not mounted"}
    assert kept.wait() == 4


def test_a_program_that_is_missing_for_a_while_is_waited_for(kept: Kept) -> None:
    program = kept.directory / "program"
    program.symlink_to(kept.command[0])
    kept.start(command=[str(program), *kept.command[1:]])
    program.unlink()
    old = kept.kill_daemon()
    until(lambda: "no daemon can be started" in kept.said())
    program.symlink_to(kept.command[0])
    kept.served_by_another_than(old)
    assert (kept.mountpoint / "plain").read_bytes() == b"plain content"


# --- keepers that die -----------------------------------------------------------


def kill_keeper(kept: Kept) -> dict[str, Any]:
    """Kill it; returns the status by its successor."""
    before = kept.status()
    handle = os.pidfd_open(before["pid"])
    signal.pidfd_send_signal(handle, signal.SIGKILL)
    os.close(handle)

    def succeeded() -> dict[str, Any] | None:
        with contextlib.suppress(OSError, ValueError):
            status = kept.status()
            if status["pid"] == before["clerk"] and status["clerk"]:
                return status
        return None

    status: dict[str, Any] = until(succeeded)
    assert status["daemon"] == before["daemon"]
    return status


@needs_passthrough
def test_a_killed_keeper_is_succeeded_by_its_clerk(kept: Kept) -> None:
    content = put_through(kept)
    kept.start()
    with blocked_reader(kept) as reader:
        assert (kept.mountpoint / "through").read_bytes() == content
        kill_keeper(kept)
        assert (kept.mountpoint / "plain").read_bytes() == b"plain content"
        kept.hold.unlink()
        assert reader.communicate(timeout=LIMIT_S) == (HELD, b"")
    old = kept.kill_daemon()
    status = kept.served_by_another_than(old)
    assert status["backing_ids"] == 1
    assert (kept.mountpoint / "through").read_bytes() == content
    assert kept.facts(status["daemon"])["registered"] == []
    kept.umount()
    until(lambda: kept.processes() == [])


def test_keepers_can_be_killed_again_and_again(kept: Kept) -> None:
    kept.start()
    for _ in range(5):
        kill_keeper(kept)
    status = kept.served_by_another_than(kept.kill_daemon())
    assert status["restarts"] == 1
    assert (kept.mountpoint / "plain").read_bytes() == b"plain content"


@needs_passthrough
def test_a_successor_registers_files_with_no_more_privilege_than_before(kept: Kept) -> None:
    put_through(kept)
    kept.start()
    status = kill_keeper(kept)
    assert error_of(kept.mountpoint / "through") is None
    assert capabilities(status["clerk"]) == 1 << CAP_SYS_ADMIN
    assert capabilities(status["pid"]) == capabilities(os.getpid())


def capabilities(pid: int) -> int:
    [line] = [
        line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if "CapEff" in line
    ]
    return int(line.split()[1], 16)


def kill_keeper_and_clerk(kept: Kept) -> dict[str, Any]:
    """Returns the status once the daemon has started another keeper."""
    before = kept.status()
    os.kill(before["clerk"], signal.SIGSTOP)
    os.kill(before["pid"], signal.SIGKILL)
    os.kill(before["clerk"], signal.SIGKILL)

    def adopted() -> dict[str, Any] | None:
        with contextlib.suppress(OSError, ValueError):
            status = kept.status()
            return status if status["is_serving"] else None
        return None

    status: dict[str, Any] = until(adopted)
    assert status["daemon"] == before["daemon"]
    return status


@needs_passthrough
def test_a_daemon_whose_keeper_and_clerk_are_dead_starts_a_keeper(kept: Kept) -> None:
    content = put_through(kept)
    kept.start()
    assert (kept.mountpoint / "through").read_bytes() == content
    assert kill_keeper_and_clerk(kept)["backing_ids"] == 1
    new = kept.served_by_another_than(kept.kill_daemon())
    assert (kept.mountpoint / "through").read_bytes() == content
    assert kept.facts(new["daemon"])["registered"] == []
    kept.umount()
    until(lambda: kept.processes() == [])


@needs_passthrough
def test_a_keeper_that_an_ordinary_users_daemon_starts_registers_no_files(kept: Kept) -> None:
    put_through(kept)
    os.chown(kept.cache / "through", NOBODY, NOBODY)
    kept.directory.chmod(0o777)  # for the control socket
    with public_python() as python:
        kept.start(command=[python, str(STANDIN)], uid=NOBODY, gid=NOBODY)
        assert kill_keeper_and_clerk(kept)["is_privileged"] is False
        assert error_of(kept.mountpoint / "through") == errno.EPERM
        kept.served_by_another_than(kept.kill_daemon())
        assert (kept.mountpoint / "plain").read_bytes() == b"plain content"
        kept.umount()
        until(lambda: kept.processes() == [])


def test_readers_notice_nothing_of_any_two_processes_killed_at_once(kept: Kept) -> None:
    kept.start()
    is_over = threading.Event()
    failures: list[int] = []

    def read() -> None:
        while not is_over.is_set():
            error = error_of(kept.mountpoint / "plain")
            if error is not None:
                failures.append(error)
                return

    def whole() -> dict[str, Any] | None:
        with contextlib.suppress(OSError, ValueError):
            status = kept.status()
            if {status[role] for role in ROLES} <= set(kept.processes()) and status["is_serving"]:
                return status
        return None

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    dice = random.Random(7)
    try:
        for _ in range(60):
            status = until(whole)
            victims = [status[role] for role in dice.sample(ROLES, dice.choice([1, 2]))]
            for number in (signal.SIGSTOP, signal.SIGKILL):
                for pid in victims:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, number)
            time.sleep(dice.choice([0, 0.01, 0.1]))
        until(whole)
    finally:
        is_over.set()
    for reader in readers:
        reader.join(LIMIT_S)
    assert failures == []


def test_a_clerk_that_dies_takes_its_daemon_with_it(kept: Kept) -> None:
    kept.start()
    status = kept.status()
    os.kill(status["clerk"], signal.SIGKILL)
    new = kept.served_by_another_than(status["daemon"])
    assert new["last_reason"] == "lost its clerk"
    assert (kept.mountpoint / "plain").read_bytes() == b"plain content"


# --- the end --------------------------------------------------------------------


def test_unmounting_ends_everything(kept: Kept) -> None:
    kept.start()
    kept.umount()
    assert kept.wait() == 0
    until(lambda: kept.processes() == [])
    assert not kept.control.exists()


def test_a_keeper_that_is_told_to_end_unmounts(kept: Kept) -> None:
    kept.start()
    kept.process.terminate()
    assert kept.wait() == 0
    assert kept.connection_now() is None
    assert kept.processes() == []


def test_a_mount_in_use_ends_with_errors_when_its_daemon_has_left(kept: Kept) -> None:
    kept.start({"on_sigterm": "exit"})
    with blocked_reader(kept) as reader:
        kept.process.terminate()
        assert reader.communicate(timeout=LIMIT_S)[1]
    assert kept.wait() == 0
    assert kept.connection_now() is None
    assert kept.processes() == []


def test_a_mount_that_is_aborted_is_over(kept: Kept) -> None:
    kept.start()
    assert kept.connection is not None
    kept.abort()
    assert kept.wait() == 0
    assert kept.processes() == []


def test_a_daemon_that_goes_for_no_reason_is_replaced(kept: Kept) -> None:
    kept.start({"on_sigterm": "exit"})
    old = kept.status()["daemon"]
    os.kill(old, signal.SIGTERM)
    assert kept.served_by_another_than(old)["last_reason"] == "exited with 0"


# --- upgrades -------------------------------------------------------------------


def upgrade(kept: Kept, behaviour: dict[str, Any], command: list[str] | None = None) -> Any:
    settings = kept.settings | {"behaviour": behaviour}
    return kept.ask(
        {
            "do": "upgrade",
            "command": command or kept.configuration["command"],
            "settings": json.dumps(settings),
        }
    )


@needs_passthrough
def test_an_upgrade_hands_everything_to_the_new_daemon(kept: Kept) -> None:
    content = put_through(kept)
    kept.start()
    assert (kept.mountpoint / "through").read_bytes() == content
    old = kept.status()["daemon"]
    with blocked_reader(kept) as reader:
        answer = upgrade(kept, {"fresh": "exit"})
        # The old one has answered what it had begun.
        assert reader.stdout is not None
        assert os.read(reader.stdout.fileno(), 100) == HELD
        kept.hold.unlink()
        assert reader.communicate(timeout=LIMIT_S) == (b"", b"")
    status = kept.status()
    assert answer["ok"] is True
    assert answer["pid"] == status["daemon"] != old
    assert answer["pause_s"] == status["longest_pause_s"] > 0
    assert status["last_reason"] == "upgrade"
    facts = kept.facts(answer["pid"])
    assert facts["state"] == 2
    assert len(facts["table"]) == 1
    assert (kept.mountpoint / "through").read_bytes() == content
    # Later ones are started the new way as well.
    assert json.loads(kept.ask({"do": "settings"})["settings"])["behaviour"] == {"fresh": "exit"}
    kept.served_by_another_than(kept.kill_daemon())


def test_an_upgrade_is_succeeded_like_any_other_daemon(kept: Kept) -> None:
    kept.start()
    answer = upgrade(kept, {})
    kill_keeper(kept)
    assert kept.status()["daemon"] == answer["pid"]
    kept.served_by_another_than(kept.kill_daemon())


@pytest.mark.parametrize(("how", "why"), [("exit", "exited with 5"), ("hang", "not ready")])
def test_an_upgrade_that_cannot_prepare_leaves_the_old_daemon(
    kept: Kept, how: str, why: str
) -> None:
    kept.start(hang_s=1)
    old = kept.status()["daemon"]
    answer = upgrade(kept, {"prepare": how})
    assert why in answer["error"]
    assert kept.status()["daemon"] == old
    assert kept.status()["restarts"] == 0
    assert (kept.mountpoint / "plain").read_bytes() == b"plain content"
    assert upgrade(kept, {})["ok"] is True


def test_an_upgrade_to_a_program_that_is_not_there_leaves_the_old_daemon(kept: Kept) -> None:
    kept.start()
    old = kept.status()["daemon"]
    assert "/nonexistent" in upgrade(kept, {}, ["/nonexistent"])["error"]
    assert kept.status()["daemon"] == old


@pytest.mark.parametrize("how", ["exit", "cannot"])
def test_an_upgrade_that_fails_when_it_takes_over_brings_the_old_program_back(
    kept: Kept, how: str
) -> None:
    kept.start()
    with blocked_reader(kept):
        answer = upgrade(kept, {"taken": how})
    assert "the old is started" in answer["error"]
    status = kept.served_by_another_than(0)
    assert json.loads(kept.ask({"do": "settings"})["settings"])["behaviour"] == {}
    assert kept.facts(status["daemon"])["state"] == 1
    assert (kept.mountpoint / "plain").read_bytes() == b"plain content"


def test_a_daemon_that_will_not_end_is_killed_for_the_new_one(kept: Kept) -> None:
    kept.start({"quiesced": "hang"})
    assert upgrade(kept, {})["ok"] is True
    assert (kept.mountpoint / "plain").read_bytes() == b"plain content"


def test_an_upgrade_whose_keeper_dies_has_not_happened(kept: Kept) -> None:
    kept.start()
    old = kept.status()["daemon"]

    def ask_in_vain() -> None:
        with contextlib.suppress(ValueError):  # the connection ends without an answer
            upgrade(kept, PREPARE_HANGS)

    asking = threading.Thread(target=ask_in_vain)
    asking.start()
    new = kept.process_of(PREPARE)
    kill_keeper(kept)
    asking.join(LIMIT_S)
    until(lambda: new not in kept.processes())
    assert kept.status()["daemon"] == old
    assert upgrade(kept, {})["ok"] is True


def test_a_daemon_that_dies_ends_the_upgrade_that_is_under_way(kept: Kept) -> None:
    kept.start()
    answers: list[dict[str, Any]] = []
    asking = threading.Thread(target=lambda: answers.append(upgrade(kept, PREPARE_HANGS)))
    asking.start()
    new = kept.process_of(PREPARE)
    status = kept.served_by_another_than(kept.kill_daemon())
    asking.join(LIMIT_S)
    [answer] = answers
    assert "died meanwhile" in answer["error"]
    assert status["daemon"] != new
    assert (kept.mountpoint / "plain").read_bytes() == b"plain content"


# --- other users ----------------------------------------------------------------


@needs_passthrough
def test_a_daemon_without_any_privilege_passes_files_through(kept: Kept) -> None:
    content = put_through(kept)
    os.chown(kept.cache / "through", NOBODY, NOBODY)
    with public_python() as python:
        program = [python, str(STANDIN)]
        kept.start(command=program, uid=NOBODY, gid=NOBODY)
        assert (kept.mountpoint / "through").read_bytes() == content
        status = kept.served_by_another_than(kept.kill_daemon())
        assert status["backing_ids"] == 1
        assert kept.facts(status["daemon"])["uid"] == NOBODY
        assert capabilities(status["daemon"]) == 0
        assert "NoNewPrivs:\t1" in Path(f"/proc/{status['daemon']}/status").read_text()
        assert (kept.mountpoint / "through").read_bytes() == content
        # It may not unmount; the keeper does that for it.
        kept.process.terminate()
        assert kept.wait() == 0
        assert kept.connection_now() is None


def test_a_keeper_without_privilege_gets_the_mount_from_the_daemon(kept: Kept) -> None:
    put_through(kept)
    kept.start(privileged=False)
    assert error_of(kept.mountpoint / "through") == errno.EPERM
    status = kept.served_by_another_than(kept.kill_daemon())
    assert status["connection"]
    assert (kept.mountpoint / "plain").read_bytes() == b"plain content"
    kill_keeper(kept)
    kept.served_by_another_than(kept.kill_daemon())
    kept.umount()
    until(lambda: kept.processes() == [])


def test_an_ordinary_users_mount_is_kept_as_well(kept: Kept) -> None:
    if shutil.which("fusermount3") is None:
        pytest.skip("fusermount3 is not installed")
    if os.stat("/dev/fuse").st_mode & 0o006 != 0o006:
        pytest.skip("/dev/fuse is not open to ordinary users")

    def read() -> bytes:
        command = ["cat", str(kept.mountpoint / "plain")]
        return subprocess.run(
            command, user=NOBODY, group=NOBODY, stdout=subprocess.PIPE, check=True, timeout=LIMIT_S
        ).stdout

    kept.directory.chmod(0o777)
    os.chown(kept.mountpoint, NOBODY, NOBODY)
    with public_python() as python:
        kept.start(
            command=[python, str(STANDIN)],
            user=NOBODY,
            privileged=False,
            uid=NOBODY,
            gid=NOBODY,
        )
        assert read() == b"plain content"
        kept.served_by_another_than(kept.kill_daemon())
        assert read() == b"plain content"
        kill_keeper(kept)
        kept.served_by_another_than(kept.kill_daemon())
        assert read() == b"plain content"
        os.kill(kept.status()["pid"], signal.SIGTERM)
        until(lambda: kept.processes() == [])
        assert kept.connection_now() is None


# --- size, and the control socket -------------------------------------------------


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


def test_the_descriptor_can_be_handed_to_somebody_else(kept: Kept) -> None:
    kept.start()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.connect(str(kept.control))
        sock.sendall(b'{"do": "hand"}\n')
        _, fds, _, _ = socket.recv_fds(sock, 1000, 1)
    [fd] = fds
    try:
        assert stat.S_ISCHR(os.fstat(fd).st_mode)
        assert os.fstat(fd).st_rdev == os.makedev(10, 229)
    finally:
        os.close(fd)


@pytest.mark.parametrize("line", [b"nonsense\n", b"[]\n", b"{}\n", b'{"do": "dance"}\n', b"\xff\n"])
def test_nonsense_on_the_control_socket_gets_an_error(kept: Kept, line: bytes) -> None:
    kept.start()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.connect(str(kept.control))
        sock.sendall(line)
        assert "error" in json.loads(sock.makefile().readline())
    assert kept.status()["is_serving"]


def test_clients_that_say_nothing_hold_nobody_up(kept: Kept) -> None:
    kept.start()
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(10)]
        for sock in silent:
            sock.connect(str(kept.control))
        assert kept.status()["is_serving"]
        kept.served_by_another_than(kept.kill_daemon())
        silent[0].settimeout(LIMIT_S)
        assert silent[0].recv(1) == b""


def test_only_root_is_answered(kept: Kept) -> None:
    kept.start()
    kept.control.chmod(0o666)
    result: list[bytes] = []

    def ask_as_nobody() -> None:
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
            result.append(answer.read())
        os.waitpid(pid, 0)

    ask_as_nobody()
    assert result == [b"connected;"]


def test_nobody_but_the_mounts_own_processes_has_its_descriptor(kept: Kept) -> None:
    kept.start()
    kept.served_by_another_than(kept.kill_daemon())
    status = kept.status()
    holders = {
        int(path.parts[2])
        for pid in kept.processes()
        for path in Path(f"/proc/{pid}/fd").iterdir()
        if os.readlink(path) == "/dev/fuse"
    }
    assert holders == {status["pid"], status["clerk"], status["daemon"]}
    kept_by_daemon = os.listdir(f"/proc/{status['daemon']}/fd")
    assert len(kept_by_daemon) <= 5  # the standard three, the keeper's and the mount's


def test_waiting_threads_of_a_mount_that_is_given_up_are_all_freed(kept: Kept) -> None:
    kept.start({"take_over": "exit"})
    kept.hold.touch()
    errors: list[int | None] = []
    threads = [
        threading.Thread(target=lambda: errors.append(error_of(kept.mountpoint / "held")))
        for _ in range(5)
    ]
    for thread in threads:
        thread.start()
    until(lambda: kept.status()["in_flight"] == 5)
    kept.kill_daemon()
    for thread in threads:
        thread.join(LIMIT_S)
    assert len(errors) == 5
    assert set(errors) <= {errno.ENOTCONN, errno.ECONNABORTED}
