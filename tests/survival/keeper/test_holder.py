"""The second descriptor store: descriptors that outlive keeper, broker and daemon."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from fusefs.keeper import supervisor_protocol
from fusefs.linux.sockets import send
from tests.support.survival.keeping import (
    LIMIT_S,
    PROJECT,
    Kept,
    device_of,
    listener_at,
    needs_fuse,
    needs_root,
)
from tests.support.waiting import until

pytestmark = [needs_root, needs_fuse]

NUMBER = 0x1122334455667788
# A supervisor that starts no daemon, so the keepers do.
SERVICE = """
import errno, sys
from pathlib import Path
from csi.daemons import main, supervisor

class Service(supervisor.Supervisor):
    def _launch(self, message):
        raise ConnectionRefusedError(errno.ECONNREFUSED, "none is started here")

path = Path(sys.argv[1])
Service(path, sys.exit, main.held_before(path)).run()
"""


@pytest.fixture
def service(kept: Kept) -> Iterator[str]:
    """The path of a running service's socket."""
    with serving(kept) as path:
        yield path


@contextmanager
def serving(kept: Kept) -> Iterator[str]:
    path = kept.directory / "daemons.sock"
    process = subprocess.Popen([sys.executable, "-c", SERVICE, path], cwd=PROJECT)
    try:
        until(lambda: listener_at(path) == process.pid, "it listens")
        yield str(path)
    finally:
        process.terminate()
    assert process.wait(LIMIT_S) == 0
    # Its name is gone, unless an earlier one listens there again.
    until(lambda: not path.exists() or listener_at(path), "no dead name is left")


def names(path: str) -> list[tuple[int, int]]:
    found = list(supervisor_protocol.held(path))
    for *_, fd in found:
        os.close(fd)
    return [(mount, connection) for mount, connection, _ in found]


def is_held(path: str, kept: Kept) -> Callable[[], bool]:
    assert kept.connection is not None
    name = NUMBER, kept.connection
    return lambda: names(path) == [name]


def test_a_mount_that_was_detached_is_no_longer_held(kept: Kept, service: str) -> None:
    kept.start({"on_sigterm": "exit"}, supervisor=service, number=NUMBER)
    until(is_held(service, kept))
    kept.process.terminate()
    assert kept.wait() == 0
    until(lambda: names(service) == [])


def test_a_copy_is_held_before_another_daemon_gets_the_mount(kept: Kept) -> None:
    with serving(kept) as path:
        kept.start({"take_over": "hang"}, supervisor=path, number=NUMBER)
        until(is_held(path, kept), "it is held")
    with serving(kept) as path:
        assert names(path) == []  # the first one was ended, and let it go
        kept.kill_daemon()
        until(is_held(path, kept), "it is held again")


def test_a_mount_goes_on_after_keeper_broker_and_daemon_were_killed(
    kept: Kept, service: str
) -> None:
    kept.start(supervisor=service, number=NUMBER)
    until(is_held(service, kept))
    assert kept.connection is not None
    status = kept.status()
    for role in ("daemon", "broker", "pid"):
        os.kill(status[role], signal.SIGSTOP)
    for role in ("daemon", "broker", "pid"):
        os.kill(status[role], signal.SIGKILL)
    kept.wait()
    kept.hold.touch()
    reader = subprocess.Popen(["cat", kept.mountpoint / "held"], stdout=subprocess.PIPE)
    fd = supervisor_protocol.fetch(service, NUMBER, kept.connection)
    assert fd is not None
    os.set_inheritable(fd, True)
    kept.resume(fuse_fd=fd)
    os.close(fd)
    kept.hold.unlink()
    assert reader.communicate(timeout=LIMIT_S)[0] == b"held content"
    kept.served_by_another_than(kept.kill_daemon())
    kept.umount()
    until(lambda: names(service) == [])


def test_a_keeper_does_without_its_descriptor_store(kept: Kept) -> None:
    kept.start(supervisor=str(kept.directory / "unused.sock"), number=NUMBER)
    assert (kept.mountpoint / "plain").read_bytes() == b"plain content"
    until(lambda: "the descriptor store: " in kept.log_text())


def test_a_copy_can_be_replaced_fetched_more_than_once_and_dropped(
    kept: Kept, service: str
) -> None:
    kept.start()
    with device_of(kept) as fd:
        for mount in (1, 1, 1, 2):
            supervisor_protocol.hold(service, mount, 7, fd)
    for _ in range(3):
        assert has(service, 1, 7)
    assert names(service) == [(1, 7), (2, 7)]
    supervisor_protocol.drop(service, 1, 7)
    assert names(service) == [(2, 7)]
    assert not has(service, 1, 7)
    assert has(service, 2, 7)


def has(path: str, mount: int, connection: int) -> bool:
    fd = supervisor_protocol.fetch(path, mount, connection)
    if fd is None:
        return False
    is_fuse = os.fstat(fd).st_rdev == os.makedev(10, 229)
    os.close(fd)
    return is_fuse


def test_a_keeper_brings_what_is_missing_when_it_is_told_to(kept: Kept, service: str) -> None:
    kept.start(supervisor=service, number=NUMBER)
    until(is_held(service, kept))
    assert kept.connection is not None
    for _ in range(20):  # also while the child that brought the last copy has not ended
        supervisor_protocol.drop(service, NUMBER, kept.connection)
        assert kept.ask({"do": "deposit"}) == {"ok": True}
        until(is_held(service, kept))


def test_the_next_one_begins_with_all_that_is_held(kept: Kept, service: str) -> None:
    kept.start()
    held = [(number, 7) for number in range(1, 300)]
    with device_of(kept) as fd:
        for name in held:
            supervisor_protocol.hold(service, *name, fd)
    with serving(kept) as path:
        assert names(path) == held


def test_what_a_client_brought_that_dies_is_held(kept: Kept, service: str) -> None:
    """The keeper is killed before it has its answer."""
    kept.start()
    with device_of(kept) as fd, supervisor_protocol.connect(service) as client:
        send(client, supervisor_protocol.pack(supervisor_protocol.HOLD, 1, 7), [fd])
    until(lambda: names(service) == [(1, 7)], "it is held")
    assert has(service, 1, 7)


def test_nothing_but_fuse_is_held(service: str) -> None:
    with open("/dev/null", "rb") as file, pytest.raises(OSError, match="Invalid argument"):
        supervisor_protocol.hold(service, 1, 7, file.fileno())
    assert names(service) == []


def test_a_request_without_a_descriptor_is_refused(service: str) -> None:
    with supervisor_protocol.connect(service) as sock, pytest.raises(OSError, match="refused"):
        supervisor_protocol.ask(sock, supervisor_protocol.pack(supervisor_protocol.HOLD, 1, 7))
    assert names(service) == []


def test_silent_visitors_hold_no_other_up(service: str) -> None:
    with supervisor_protocol.connect(service):
        assert names(service) == []
