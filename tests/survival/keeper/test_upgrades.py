"""A daemon that is replaced by a newer one while files are read."""

import contextlib
import errno
import json
import os
import signal
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from fusefs.keeper.protocol import PREPARE
from tests.support.survival.keeping import (
    HELD,
    LIMIT_S,
    Kept,
    blocked_reader,
    error_of,
    needs_fuse,
    needs_passthrough,
    needs_root,
    put_through,
)
from tests.support.survival.surviving import children_of, signal_all
from tests.support.waiting import until

pytestmark = [needs_root, needs_fuse]


@needs_passthrough
def test_an_upgrade_hands_everything_to_the_new_daemon(kept: Kept) -> None:
    content = put_through(kept)
    kept.start()
    assert (kept.mountpoint / "through").read_bytes() == content
    old = kept.status()["daemon"]
    with blocked_reader(kept) as reader:
        answer = kept.upgrade({"fresh": "exit"})
        # The old one has answered what it had begun.
        assert os.read(reader.stdout.fileno(), 100) == HELD
        kept.hold.unlink()
        assert reader.communicate(timeout=LIMIT_S) == (b"", b"")
    status = kept.status()
    assert answer["ok"] is True
    assert answer["pid"] == status["daemon"] != old
    assert answer["pause_s"] == status["longest_pause_s"] > 0
    assert status["last_reason"] == "upgrade"
    assert (status["restarts"], status["upgrades"]) == (0, 1)
    facts = kept.facts(answer["pid"])
    assert facts["state"] == 2
    assert len(facts["table"]) == 1
    assert (kept.mountpoint / "through").read_bytes() == content
    # Later ones are started the new way as well.
    assert json.loads(kept.ask({"do": "settings"})["settings"])["behaviour"] == {"fresh": "exit"}
    kept.served_by_another_than(kept.kill_daemon())


def test_an_upgrade_is_succeeded_like_any_other_daemon(kept: Kept) -> None:
    kept.start()
    answer = kept.upgrade({})
    kept.kill_keeper()
    assert kept.status()["daemon"] == answer["pid"]
    kept.served_by_another_than(kept.kill_daemon())


@pytest.mark.parametrize(("how", "why"), [("exit", "exited with 5"), ("hang", "not ready")])
def test_an_upgrade_that_cannot_prepare_leaves_the_old_daemon(
    kept: Kept, how: str, why: str
) -> None:
    kept.start(hang_s=3)
    old = kept.status()["daemon"]
    answer = kept.upgrade({"prepare": how})
    assert why in answer["error"]
    assert kept.status()["daemon"] == old
    assert kept.status()["restarts"] == 0
    assert (kept.mountpoint / "plain").read_bytes() == b"plain content"
    until(lambda: kept.upgrade({}).get("ok"))


def test_an_upgrade_to_a_program_that_is_not_there_leaves_the_old_daemon(kept: Kept) -> None:
    kept.start()
    old = kept.status()["daemon"]
    assert "/nonexistent" in kept.upgrade({}, ["/nonexistent"])["error"]
    assert kept.status()["daemon"] == old


# Before Linux 6.9: what has been read and not answered is lost with the daemon.
OLD_KERNEL = {"has_resend": False}


@pytest.mark.parametrize("how", ["exit", "cannot"])
@pytest.mark.parametrize("kernel", [{}, OLD_KERNEL], ids=["new kernel", "old kernel"])
def test_an_upgrade_that_fails_when_it_takes_over_brings_the_old_program_back(
    kept: Kept, kernel: dict[str, Any], how: str
) -> None:
    kept.start(kernel)
    with blocked_reader(kept):
        answer = kept.upgrade({**kernel, "taken": how})
    assert "the old is started" in answer["error"]
    status = kept.served_by_another_than(0)
    assert json.loads(kept.ask({"do": "settings"})["settings"])["behaviour"] == kernel
    facts = kept.facts(status["daemon"])
    assert (facts["state"], facts["is_all_answered"]) == (1, True)
    assert (kept.mountpoint / "plain").read_bytes() == b"plain content"


def test_a_daemon_that_will_not_end_is_killed_for_the_new_one(kept: Kept) -> None:
    kept.policy = {"QUIESCE_S": 1.0}
    kept.start({"quiesced": "hang"})
    assert kept.upgrade({})["ok"] is True
    assert (kept.mountpoint / "plain").read_bytes() == b"plain content"


def begun(kept: Kept, behaviour: dict[str, Any]) -> tuple[int, Future[dict[str, Any]]]:
    """The new daemon of an upgrade that is under way, and its answer to come."""
    answer = ThreadPoolExecutor(1).submit(kept.upgrade, behaviour)
    return kept.process_of(PREPARE), answer


def test_an_upgrade_whose_keeper_dies_has_not_happened(kept: Kept) -> None:
    kept.start()
    old = kept.status()["daemon"]
    new, answer = begun(kept, {"prepare": "hang"})
    kept.kill_keeper()
    assert isinstance(answer.exception(LIMIT_S), ValueError | None)  # perhaps there is no answer
    until(lambda: new not in kept.processes())
    assert kept.status()["daemon"] == old
    assert kept.upgrade({})["ok"] is True


def test_a_daemon_that_dies_ends_the_upgrade_that_is_under_way(kept: Kept) -> None:
    kept.start()
    new, answer = begun(kept, {"prepare": "hang"})
    status = kept.served_by_another_than(kept.kill_daemon())
    assert "died meanwhile" in answer.result(LIMIT_S)["error"]
    assert status["daemon"] != new
    assert (kept.mountpoint / "plain").read_bytes() == b"plain content"


def test_a_new_daemon_whose_end_is_seen_before_its_last_message_ends_the_upgrade(
    kept: Kept,
) -> None:
    kept.start()
    old = kept.status()
    new, answer = begun(kept, {"prepare": "stop", "prepared": "exit"})
    [broker] = {*children_of(old["pid"])} - {old["daemon"], old["broker"], new}
    os.kill(broker, signal.SIGSTOP)
    until(lambda: signal_all([new], signal.SIGCONT) or not Path(f"/proc/{new}").exists())
    os.kill(broker, signal.SIGCONT)
    assert "the old one goes on" in answer.result(LIMIT_S)["error"]
    assert (kept.status()["daemon"], kept.status()["is_serving"]) == (old["daemon"], True)


def test_an_upgrade_on_an_old_kernel_waits_for_the_old_daemon_as_long_as_a_pause_may_be(
    kept: Kept,
) -> None:
    kept.start(OLD_KERNEL | {"quiesced": "hang"}, max_pause_s=2)
    with contextlib.suppress(ValueError):  # the keeper ends, perhaps without an answer
        assert "error" in kept.upgrade(OLD_KERNEL)
    assert kept.wait() == 1
    assert error_of(kept.mountpoint / "plain") == errno.ENOTCONN
    until(lambda: kept.processes() == [])


def test_a_daemon_on_an_old_kernel_is_not_replaced_by_force(kept: Kept) -> None:
    kept.start(OLD_KERNEL)
    old = kept.status()["daemon"]
    assert "the mount would end" in kept.ask({"do": "replace"})["error"]
    assert kept.status()["daemon"] == old


def test_where_requests_are_not_sent_again_the_old_daemon_may_be_the_last_to_answer(
    kept: Kept,
) -> None:
    """The new one dies while the old one, quiesced, finishes what it has begun."""
    kept.start(OLD_KERNEL)
    old = kept.status()["daemon"]
    os.kill(old, signal.SIGSTOP)
    new, answer = begun(kept, {**OLD_KERNEL, "prepared": "hang"})
    until(lambda: not kept.status()["is_serving"], "the old one is to end")
    os.kill(new, signal.SIGKILL)
    assert "error" in answer.result(LIMIT_S)
    again = {"do": "upgrade", "command": [], "settings": "{}"}
    assert "under way" in kept.ask(again)["error"]
    os.kill(old, signal.SIGCONT)
    kept.served_by_another_than(old)
    assert error_of(kept.mountpoint / "plain") is None
