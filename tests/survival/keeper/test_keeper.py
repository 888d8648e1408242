"""A keeper by itself: how a mount that it keeps begins and ends, and who it works for."""

import errno
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.machine.ordinary_user import NOBODY, public_python
from tests.support.survival.keeping import (
    LIMIT_S,
    STANDIN,
    Kept,
    blocked_reader,
    capabilities,
    error_of,
    kept_mount,
    needs_fuse,
    needs_passthrough,
    needs_root,
    put_through,
)
from tests.support.waiting import until

pytestmark = [needs_root, needs_fuse]


@pytest.mark.parametrize("step", ["fresh", "mounted"])
def test_a_first_daemon_that_fails_is_the_keepers_own_failure(kept: Kept, step: str) -> None:
    answer = kept.start({step: "exit"}, is_expected_to_serve=False)
    assert answer == ""
    assert kept.wait() == 5
    assert kept.connection_now() is None
    assert not kept.control.exists()
    until(lambda: kept.processes() == [])


def test_a_program_that_cannot_be_started_is_reported(kept: Kept) -> None:
    answer = kept.start(command=["/nonexistent"], is_expected_to_serve=False)
    assert "/nonexistent" in json.loads(answer)["error"]
    assert kept.wait() == 1


def test_a_mount_that_is_refused_is_the_daemons_to_tell(kept: Kept) -> None:
    answer = kept.start(mount_data="nonsense", is_expected_to_serve=False)
    assert json.loads(answer) == {"error": "not mounted"}
    assert kept.wait() == 4


def test_a_program_that_is_missing_for_a_while_is_waited_for(kept: Kept) -> None:
    program = kept.directory / "program"
    program.symlink_to(kept.command[0])
    kept.start(command=[str(program), *kept.command[1:]])
    program.unlink()
    old = kept.kill_daemon()
    until(lambda: "no daemon can be started" in kept.log_text())
    program.symlink_to(kept.command[0])
    kept.served_by_another_than(old)
    assert (kept.mountpoint / "plain").read_bytes() == b"plain content"


def test_a_daemon_that_goes_for_no_reason_is_replaced(kept: Kept) -> None:
    kept.start({"on_sigterm": "exit"})
    old = kept.status()["daemon"]
    os.kill(old, signal.SIGTERM)
    assert kept.served_by_another_than(old)["last_reason"] == "exited with 0"


@pytest.mark.parametrize("end", [Kept.umount, Kept.abort], ids=["unmounted", "aborted"])
def test_a_mount_that_is_unmounted_or_aborted_is_over(
    kept: Kept, end: Callable[[Kept], None]
) -> None:
    kept.start()
    end(kept)
    assert kept.wait() == 0
    until(lambda: kept.processes() == [])
    assert not kept.control.exists()


def test_a_mount_in_use_ends_with_errors_when_its_daemon_has_left(kept: Kept) -> None:
    kept.start({"on_sigterm": "exit"})
    with blocked_reader(kept) as reader:
        kept.process.terminate()
        assert reader.communicate(timeout=LIMIT_S)[1]
    assert kept.wait() == 0
    assert kept.connection_now() is None
    until(lambda: kept.processes() == [])


def test_a_keeper_aborts_no_other_mount() -> None:
    """Its own has gone, and another one has the number of its connection."""
    # A mount of another program may take the number first.
    assert any(aborts_its_own_alone() for _ in range(10))


def aborts_its_own_alone() -> bool:
    """Return False if no mount got the number of the first one's connection."""
    with ExitStack() as mounts:
        kept, *others = (mounts.enter_context(kept_mount()) for _ in range(10))
        kept.start()
        stopped = kept.status()["daemon"]
        os.kill(stopped, signal.SIGSTOP)
        try:
            kept.umount()
            has_met = any(meets(kept, other) for other in others)
        finally:
            os.kill(stopped, signal.SIGCONT)
        assert kept.wait() == 0
    return has_met


def meets(kept: Kept, other: Kept) -> bool:
    """Start another mount, which gets the lowest number that is free; False if it is not this."""
    other.start()
    if other.connection != kept.connection:
        return False
    assert kept.ask({"do": "abort"}) == {"ok": True}
    assert (other.mountpoint / "plain").read_bytes() == b"plain content"
    assert other.ask({"do": "abort"}) == {"ok": True}
    assert other.wait() == 0
    return True


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
    kept.kill_keeper()
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
            command=[python, str(STANDIN)], user=NOBODY, privileged=False, uid=NOBODY, gid=NOBODY
        )
        assert read() == b"plain content"
        kept.served_by_another_than(kept.kill_daemon())
        assert read() == b"plain content"
        kept.kill_keeper()
        kept.served_by_another_than(kept.kill_daemon())
        assert read() == b"plain content"
        os.kill(kept.status()["pid"], signal.SIGTERM)
        until(lambda: kept.processes() == [])
        assert kept.connection_now() is None
