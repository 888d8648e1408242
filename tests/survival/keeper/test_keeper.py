"""The keeper by itself: how a mount that it keeps begins, and how it ends."""

from __future__ import annotations

import json

from tests.support.survival.keeping import LIMIT_S, Kept, blocked_reader, needs_fuse, needs_root
from tests.support.waiting import until

pytestmark = [needs_root, needs_fuse]


def test_a_first_daemon_that_fails_is_the_keepers_own_failure(kept: Kept) -> None:
    answer = kept.start({"fresh": "exit"}, is_expected_to_serve=False)
    assert answer == ""
    assert kept.wait() == 5
    assert kept.connection_now() is None
    assert not kept.control.exists()


def test_what_a_failed_first_daemon_mounted_is_taken_away(kept: Kept) -> None:
    kept.start({"mounted": "exit"}, is_expected_to_serve=False)
    assert kept.wait() == 5
    assert kept.connection_now() is None
    assert kept.processes() == []


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


def test_unmounting_ends_everything(kept: Kept) -> None:
    kept.start()
    kept.umount()
    assert kept.wait() == 0
    until(lambda: kept.processes() == [])
    assert not kept.control.exists()


def test_a_keeper_that_is_terminated_unmounts(kept: Kept) -> None:
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
