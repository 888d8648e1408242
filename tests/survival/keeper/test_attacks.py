"""A daemon that has been taken over, and runs as nobody, against its keeper."""

import contextlib
import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fusefs.keeper import protocol as wire
from fusefs.keeper.protocol import FRESH
from fusefs.linux import libc
from tests.support.machine.ordinary_user import NOBODY, public_python
from tests.support.survival.keeping import (
    LIMIT_S,
    PROJECT,
    STANDIN,
    Kept,
    needs_fuse,
    needs_passthrough,
    needs_root,
)
from tests.support.waiting import until

pytestmark = [needs_root, needs_fuse, needs_passthrough]

HOSTILE = PROJECT / "tests" / "support" / "survival" / "hostile_fuse.py"


@pytest.fixture
def kept(kept: Kept) -> Iterator[Kept]:
    """What it starts runs as nobody."""
    for name, owner in (("through", NOBODY), ("roots", 0)):
        path = kept.cache / name
        path.write_bytes(b"content")
        path.chmod(0o666)
        os.chown(path, owner, owner)
    with public_python() as python:
        kept.command = [python, str(STANDIN)]
        yield kept
        kept.clean_up()


def attack(kept: Kept, name: str, **overrides: Any) -> Any:
    """Start a daemon that attacks; return what it got, once it is over."""
    start(kept, name, **overrides)
    return kept.attack_facts()["attack"]


def start(kept: Kept, name: str, **overrides: Any) -> None:
    kept.start({"attack": name}, uid=NOBODY, gid=NOBODY, **overrides)


def serves(kept: Kept) -> bool:
    return (kept.mountpoint / "plain").read_bytes() == b"plain content"


def test_only_so_many_files_are_registered(kept: Kept) -> None:
    assert attack(kept, "more_than_allowed", most_backing_ids=50) == [errno.ENOSPC, 50]
    assert kept.status()["backing_ids"] == 50


def test_several_files_come_in_one_message(kept: Kept) -> None:
    errors = attack(kept, "several_files")
    assert errors == [errno.EINVAL if number == 2 else 0 for number in range(wire.MOST_FILES)]
    assert kept.status()["backing_ids"] == wire.MOST_FILES - 1
    daemon = kept.served_by_another_than(kept.kill_daemon())["daemon"]
    assert len(kept.facts(daemon)["table"]) == wire.MOST_FILES - 1


def test_only_what_was_opened_is_closed(kept: Kept) -> None:
    assert attack(kept, "ids_of_nobody") == [errno.ENOENT] * 4 + [0, errno.ENOENT]
    assert kept.status()["backing_ids"] == 0
    assert kept.status()["restarts"] == 0


def test_a_registered_file_is_used_with_the_daemons_ids_and_no_capability(kept: Kept) -> None:
    assert attack(kept, "good_file") == 0
    status = Path(f"/proc/{kept.status()['broker']}/status").read_text()
    [uids] = [line.split() for line in status.splitlines() if line.startswith("Uid:")]
    [capabilities] = [line.split() for line in status.splitlines() if line.startswith("CapEff:")]
    assert uids == ["Uid:", "0", "0", "0", str(NOBODY)]
    assert int(capabilities[1], 16) == 1 << 21


def test_a_breach_of_the_protocol_ends_the_daemon(kept: Kept) -> None:
    start(kept, "two_descriptors")
    status = kept.served_by_another_than(kept.process_of(FRESH))
    assert status["last_reason"] == "broke the protocol"
    assert status["backing_ids"] == 0
    assert serves(kept)


def test_a_flood_of_messages_holds_no_other_up(kept: Kept) -> None:
    start(kept, "flood_of_everything")
    for _ in range(10):
        # A daemon that could not be heard for a moment counts as pausing until its next tick.
        until(lambda: kept.status()["is_serving"], "the daemon is heard")
    assert kept.attack_facts()["attack"] > 0
    assert serves(kept)
    kept.served_by_another_than(kept.kill_daemon())


def test_a_daemon_that_does_not_listen_is_not_listened_to(kept: Kept) -> None:
    start(kept, "flood_without_listening", hang_s=3)
    kept.served_by_another_than(kept.process_of(FRESH))
    assert serves(kept)


@contextlib.contextmanager
def hostile_mount(kept: Kept, attributes_valid_s: int) -> Iterator[Path]:
    mountpoint = kept.directory / "hostile"
    mountpoint.mkdir()
    command = [sys.executable, HOSTILE, mountpoint, str(NOBODY), str(attributes_valid_s)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        assert server.stdout.readline() == b"ready\n"
        yield mountpoint
    finally:
        server.kill()
        server.communicate(timeout=LIMIT_S)
        libc.umount(str(mountpoint), libc.MNT_DETACH)


@pytest.mark.parametrize(
    ("name", "attributes_valid_s"),  # fstat hangs at once, or else close
    [
        ("hostile_file", 0),
        ("hostile_file", 3600),
        ("hostile_files_in_one_message", 0),
        ("hostile_file_behind_others", 3600),
    ],
)
def test_a_descriptor_that_hangs_does_not_hang_the_keeper(
    kept: Kept, name: str, attributes_valid_s: int
) -> None:
    with hostile_mount(kept, attributes_valid_s) as hostile:
        start(kept, name, hang_s=3, more_settings={"hostile": str(hostile)})
        old = kept.process_of(FRESH)
        kept.served_by_another_than(old)
        assert serves(kept)
        # The daemon itself cannot close its descriptor either.
        assert os.path.exists(f"/proc/{old}")
        kept.served_by_another_than(kept.kill_daemon())
        assert serves(kept)
    until(lambda: not os.path.exists(f"/proc/{old}"))


def test_a_file_of_the_mount_itself_does_not_hang_the_keeper(kept: Kept) -> None:
    start(kept, "file_of_the_mount_itself")
    until(lambda: kept.status()["is_serving"])
    until(lambda: serves(kept))
    kept.served_by_another_than(kept.kill_daemon())
    assert kept.status()["backing_ids"] == 0


def test_a_child_that_goes_on_talking_is_not_heard(kept: Kept) -> None:
    start(kept, "child_that_keeps_the_socket")
    status = kept.served_by_another_than(kept.kill_daemon())
    assert status["restarts"] == 1
    assert serves(kept)


def test_the_daemon_can_neither_signal_nor_trace_nor_rob_keeper_and_broker(kept: Kept) -> None:
    results = attack(kept, "reach_for_the_keeper")
    assert len(results) == 12
    assert set(results.values()) <= {errno.EPERM, errno.EACCES}
