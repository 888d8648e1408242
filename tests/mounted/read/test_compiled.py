"""Warm files on a real mount, with compiled code that answers for them."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

from fusefs.fuse import fast_path
from tests.support.mounting import Mount, Mounter
from tests.support.servers.buckets import Bucket
from tests.support.sharing import read_all, stamped

FILES, SIZE = 40, 20_000

needs_compiled = pytest.mark.skipif(not fast_path.IS_BUILT, reason="no compiled code was built")


def compiled(mount: Mount) -> int | None:
    return mount.status()["requests"]["compiled"]


def filled(bucket: Bucket, mount: Mount) -> Callable[[int], str]:
    for number in range(FILES):
        bucket.put(str(number), stamped(number, SIZE))
    for number in range(FILES):
        read_all(mount.path / str(number))
    return lambda number: os.fspath(mount.path / str(number % FILES))


@needs_compiled
def test_warm_opens_are_answered_by_compiled_code(passthrough: Mounter, bucket: Bucket) -> None:
    mount = passthrough()
    path = filled(bucket, mount)
    before = compiled(mount)
    assert before is not None
    for number in range(3 * FILES):
        with open(path(number), "rb") as file:
            assert file.read() == stamped(number % FILES, SIZE)
    after = mount.status()
    assert after["requests"]["compiled"] > before + 3 * FILES
    assert after["cache"]["passthrough_opens"] >= 3 * FILES


@needs_compiled
def test_what_compiled_code_has_opened_the_next_daemon_goes_on_with(
    passthrough: Mounter, bucket: Bucket
) -> None:
    """Files that were open when the daemon was killed are read and closed under the next one."""
    mount = passthrough()
    path = filled(bucket, mount)
    files = [open(path(number), "rb", buffering=0) for number in range(FILES)]  # noqa: SIM115
    pid = mount.status()["daemon"]["pid"]
    os.kill(pid, signal.SIGKILL)
    for number, file in enumerate(files):
        assert file.read() == stamped(number, SIZE)
        file.close()
    for number in range(FILES):
        with open(path(number), "rb") as again:
            assert again.read() == stamped(number, SIZE)
    assert mount.status()["daemon"]["pid"] != pid
