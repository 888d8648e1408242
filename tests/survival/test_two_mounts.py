"""Two mounts at one mountpoint: one was detached while programs used it, the next one is there."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.mounting import Mount, Mounter, fusefs
from tests.support.servers.buckets import Bucket
from tests.support.survival.surviving import keeper_status
from tests.support.waiting import until

pytestmark = pytest.mark.root

NAMES = [f"file-{number:02}" for number in range(20)]

Read = Callable[[str], bytes]


def content(name: str) -> bytes:
    return name.encode() * 50


@contextmanager
def detached(mount: Mount) -> Iterator[tuple[Read, dict[str, int]]]:
    """A mount that a program goes on to read by its directory; and its processes."""
    held = os.open(mount.path, os.O_RDONLY | os.O_DIRECTORY)

    def read(name: str) -> bytes:
        fd = os.open(name, os.O_RDONLY, dir_fd=held)
        with open(fd, "rb") as file:
            return file.read()

    for name in NAMES:
        os.stat(name, dir_fd=held)
    processes = keeper_status(mount)
    try:
        fusefs("umount", "--lazy", mount.path)
        yield read, processes
    finally:
        os.close(held)
        try:
            until(lambda: not Path(f"/proc/{processes['daemon']}").exists(), "it does not end")
        finally:
            kill(processes)


def kill(processes: dict[str, int]) -> None:
    """End what may be left of a mount that is out of sight."""
    for what in ("pid", "broker", "daemon"):
        with suppress(FileNotFoundError, ProcessLookupError):
            if b"fusefs" in Path(f"/proc/{processes[what]}/cmdline").read_bytes():
                os.kill(processes[what], signal.SIGKILL)


@contextmanager
def another(mount: Mount) -> Iterator[Mount]:
    """The next mount at the same place."""
    young = replace(mount, log=mount.log.with_suffix(".young"), _pids=[])
    young.start()
    try:
        yield young
    finally:
        young.clean_up()


@pytest.fixture
def mount(mounter: Mounter, bucket: Bucket) -> Mount:
    for name in NAMES:
        bucket.put(name, content(name))
    return mounter("--session", "kernel", "--metadata-ttl", "1h")


def test_daemons_of_both_are_replaced_and_the_bytes_are_right(mount: Mount) -> None:
    with detached(mount) as (read, old), another(mount) as young:
        for name in reversed(NAMES):
            assert (young.path / name).read_bytes() == content(name)
        for daemon in (old["daemon"], keeper_status(young)["daemon"]):
            os.kill(daemon, signal.SIGKILL)
            assert [read(name) for name in NAMES] == list(map(content, NAMES))
        assert [(young.path / name).read_bytes() for name in NAMES] == list(map(content, NAMES))


def test_the_end_of_the_older_one_takes_nothing_from_the_younger(mount: Mount) -> None:
    with ExitStack() as stack:
        with detached(mount):
            young = stack.enter_context(another(mount))
        assert young.status()["mountpoint"] == str(young.path)
        os.kill(keeper_status(young)["daemon"], signal.SIGKILL)
        assert [(young.path / name).read_bytes() for name in NAMES] == list(map(content, NAMES))
