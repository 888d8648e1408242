"""Files that stay open where a process may have few descriptors."""

import contextlib
import os
import resource

import pytest

from tests.support.mounting import WRITABLE, Mounter, fusefs
from tests.support.semantics import states
from tests.support.servers.buckets import Bucket, keys, stored

pytestmark = pytest.mark.root

LIMIT = 400


@states(
    "Each file that is open for writing takes a descriptor of the daemon. Opens fail with EMFILE"
    " while some of those that the system allows it are left, so that uploads and commands go on."
)
def test_opens_fail_before_the_daemon_has_no_descriptor_for_a_connection(
    mounter: Mounter, bucket: Bucket
) -> None:
    mount = mounter(WRITABLE)
    resource.prlimit(mount.pid, resource.RLIMIT_NOFILE, (LIMIT, LIMIT))
    (mount.path / "read").write_bytes(b"to be read")
    with contextlib.ExitStack() as files:
        opened: list[int] = []

        def open_until_refused() -> None:
            for number in range(LIMIT):
                fd = os.open(mount.path / f"{number}", os.O_WRONLY | os.O_CREAT)
                files.callback(os.close, fd)
                opened.append(fd)

        with pytest.raises(OSError, match="Too many open files"):
            open_until_refused()
        with pytest.raises(OSError, match="Too many open files"):
            os.open(mount.path / "read", os.O_WRONLY)
        assert len(opened) > LIMIT // 4
        for fd in opened:
            os.write(fd, b"content")
        assert fusefs("status", mount.path).stdout
        fusefs("sync", mount.path)
        assert (mount.path / "read").read_bytes() == b"to be read"
    assert len(keys(bucket)) == len(opened) + 1
    assert stored(bucket, f"{len(opened) - 1}") == b"content"
    (mount.path / "again").write_bytes(b"more")
    assert stored(bucket, "again") == b"more"
