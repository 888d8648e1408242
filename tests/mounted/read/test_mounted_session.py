"""What the kernel session's mounts are set to, seen from outside."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from fusefs.linux import mountinfo
from fusefs.linux.mount import READ_AHEAD_KIB
from tests.support.mounting import Mount
from tests.support.page_reads import FEW, requests
from tests.support.servers.buckets import Bucket
from tests.support.sharing import mounted

# An object that is new would be looked up again before each open.
OPTIONS = ("--session", "kernel", "--metadata-ttl", "indefinite")


@pytest.fixture(scope="module")
def here(shared: Bucket, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mount]:
    shared.put("file", b"x" * 1000)
    directory = tmp_path_factory.mktemp("here")
    with mounted(shared.server, f"s3://{shared.name}", directory, *OPTIONS) as mount:
        yield mount


@pytest.mark.root
def test_the_kernel_reads_further_ahead_than_it_does_by_itself(here: Mount) -> None:
    mount = mountinfo.find_mount(here.path)
    assert mount is not None
    setting = Path(f"/sys/class/bdi/{mount.device}/read_ahead_kb")
    assert int(setting.read_text()) == READ_AHEAD_KIB == 1024


def test_closing_a_handle_that_cannot_write_asks_the_daemon_to_flush_nothing(here: Mount) -> None:
    path = here.path / "file"
    path.read_bytes()
    before = requests(here)
    for _ in range(100):
        os.close(os.open(path, os.O_RDONLY))
    # An OPEN and a RELEASE each.
    assert requests(here) - before <= 200 + FEW
