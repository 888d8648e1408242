"""What a program sees of a mount whose server fails: an honest error or the right bytes."""

import errno
import hashlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.mounting import Mount, Mounter
from tests.support.semantics import states
from tests.support.servers.buckets import Bucket
from tests.support.servers.faulty_s3 import REQUEST_ID, FaultyS3
from tests.support.waiting import until

# Larger than what is fetched in one request, and not the same anywhere.
BIG = hashlib.shake_128(b"big").digest(12 << 20)
OTHER = hashlib.shake_128(b"other").digest(12 << 20)
SMALL = b"a small file\n" * 100
LIMIT_S = 30
RETRY_TIME = "1s"


@pytest.fixture(scope="module")
def whole(faulty: FaultyS3, module_mounter: Mounter) -> Mount:
    """One mount for all tests here, of which each has a directory of its own."""
    options = ("--session", "kernel", "--retry-time", RETRY_TIME, "--metadata-ttl", "0s")
    return module_mounter(*options, endpoint_url=faulty.endpoint_url)


class Folder:
    """A test's own directory: in the bucket, and as the mount shows it."""

    def __init__(self, bucket: Bucket, mount: Mount, name: str) -> None:
        self._bucket = bucket
        self._name = name
        self.path = mount.path / name
        self.log = mount.log

    def key(self, name: str) -> str:
        return f"{self._name}/{name}"

    def put(self, name: str, data: bytes) -> Path:
        self._bucket.put(self.key(name), data)
        return self.path / name

    def logged(self) -> list[str]:
        """The log's lines about this directory."""
        return [line for line in self.log.read_text().splitlines() if f"/{self._name}/" in line]


@pytest.fixture
def folder(
    shared: Bucket, whole: Mount, faulty: FaultyS3, request: pytest.FixtureRequest
) -> Iterator[Folder]:
    faulty.clear()
    yield Folder(shared, whole, hashlib.sha1(request.node.name.encode()).hexdigest()[:12])
    faulty.clear()


def outcome(action: Callable[[], Any]) -> str | None:
    """The name of the errno with which an action fails; None if it does not."""
    try:
        action()
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    return None


@states(
    "A server that can't be reached, fails or throttles for longer than `--retry-time` is EIO; it"
    " is never taken for a missing object."
)
@pytest.mark.parametrize(
    "fault", [{"code": "InternalError"}, {"code": "SlowDown"}, {"status": 504}, {"cut_after": 0}]
)
def test_a_lookup_that_cannot_be_answered_is_never_a_missing_file(
    folder: Folder, faulty: FaultyS3, fault: dict[str, Any]
) -> None:
    path = folder.put("a", b"")
    faulty.add(**fault)
    assert outcome(path.stat) == "EIO"
    faulty.clear()
    assert outcome(path.stat) is None


def test_an_unreachable_server_is_an_error_until_it_is_back(
    folder: Folder, faulty: FaultyS3
) -> None:
    path = folder.put("a", SMALL)
    faulty.add(before=faulty.drop_connections, code="InternalError")
    assert outcome(path.read_bytes) == "EIO"
    faulty.clear()
    assert path.read_bytes() == SMALL


def test_a_big_file_is_read_on_after_the_server_was_away(folder: Folder, faulty: FaultyS3) -> None:
    path = folder.put("big", BIG)
    with path.open("rb", buffering=0) as file:
        first = file.read(1000)
        faulty.add("GET", code="InternalError")
        assert outcome(lambda: os.pread(file.fileno(), 4096, 11 << 20)) == "EIO"
        faulty.clear()
        assert os.pread(file.fileno(), 4096, 11 << 20) == BIG[11 << 20 :][:4096]
    assert first == BIG[:1000]


@states("An object in an archive class is EIO, and the log says to restore it.")
def test_an_archived_object_is_an_error_and_the_log_says_to_restore_it(
    folder: Folder, faulty: FaultyS3
) -> None:
    path = folder.put("a", SMALL)
    faulty.add("GET", code="InvalidObjectState")
    assert outcome(path.read_bytes) == "EIO"
    (line,) = [line for line in folder.logged() if "WARNING" in line]
    assert "it is archived: restore it before it can be read" in line
    assert REQUEST_ID in line


def test_other_files_are_read_while_one_download_stalls(folder: Folder, faulty: FaultyS3) -> None:
    slow, quick = folder.put("slow", SMALL), folder.put("quick", SMALL)
    rule = faulty.add("GET", folder.key("slow"), stall=True)
    with subprocess.Popen(["cat", str(slow)], stdout=subprocess.PIPE) as reader:
        until(lambda: rule.used > 0, "the request that stalls")
        assert quick.read_bytes() == SMALL
        assert reader.poll() is None
        rule.release()
        assert reader.communicate(timeout=LIMIT_S)[0] == SMALL


READ_PAGES = """
import os, sys, threading
fd = os.open(sys.argv[1], os.O_RDONLY)
os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
for at in range(int(sys.argv[2]), int(sys.argv[3]), 4096):
    threading.Thread(target=os.pread, args=(fd, 1, at)).start()
"""


def test_what_is_cached_is_read_while_many_reads_wait_for_the_server(
    folder: Folder, faulty: FaultyS3, whole: Mount
) -> None:
    """Also by a handle that the daemon serves: it is from before the file was cached."""
    slow, quick, count = folder.put("slow", 4 * BIG), folder.put("quick", OTHER), 100
    with quick.open("rb", buffering=0) as served, slow.open("rb"):
        assert hashlib.file_digest(served, "sha1").digest() == hashlib.sha1(OTHER).digest()
        os.posix_fadvise(served.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        faulty.add("GET", folder.key("slow"), stall=True)
        start = 40 << 20  # behind all that an open has fetched ahead
        pages = [str(start), str(start + count * 4096)]
        with subprocess.Popen([sys.executable, "-c", READ_PAGES, str(slow), *pages]) as readers:
            until(lambda: whole.status()["requests"]["waiting"] >= 64, "reads that wait")
            # By another process: one that waits could not be ended.
            reading = ["dd", f"if=/proc/{os.getpid()}/fd/{served.fileno()}", "bs=4k", "count=1"]
            try:
                found = subprocess.run(reading, capture_output=True, timeout=LIMIT_S)
            finally:
                faulty.clear()
            assert found.stdout == OTHER[:4096]
            assert readers.wait(LIMIT_S) == 0


def test_a_failed_read_is_one_line_in_the_log(folder: Folder, faulty: FaultyS3) -> None:
    path = folder.put("a", SMALL)
    faulty.add("GET", code="AccessDenied")
    assert outcome(path.read_bytes) == "EACCES"
    lines = [line for line in folder.logged() if "WARNING" in line]
    assert len(lines) == 1
    for part in ("GET", folder.key("a"), "403", "AccessDenied", REQUEST_ID):
        assert part in lines[0]
