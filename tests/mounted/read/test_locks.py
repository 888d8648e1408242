"""Advisory locks between processes: which handles they hold among, and which not."""

import errno
import fcntl
import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.support.mounting import Mount, Mounter
from tests.support.semantics import states
from tests.support.servers.buckets import Bucket
from tests.support.servers.faulty_s3 import FaultyS3
from tests.support.sharing import content, python, read_all, stamped
from tests.support.waiting import until

SMALL = 300_000
LARGE = 24 << 20
# Tries for an exclusive lock; then tells what fcntl knows of the locks of others.
OTHER = """
import fcntl, struct, sys
with open(sys.argv[1], "rb") as file:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        print("free")
    except BlockingIOError:
        print("locked")
    lock = struct.pack("hhqqi", fcntl.F_WRLCK, 0, 0, 0, 0)
    kind, _, start, size, pid = struct.unpack("hhqqi", fcntl.fcntl(file, fcntl.F_GETLK, lock))
    print({fcntl.F_UNLCK: "free", fcntl.F_RDLCK: f"read {start} {size} {pid}"}[kind])
"""


@pytest.fixture(scope="module")
def steady(shared: Bucket, module_mounter: Mounter) -> Path:
    """One mount with two large files."""
    for is_whole in (True, False):
        shared.put(f"whole {is_whole}", stamped(1, LARGE))
    return module_mounter().path


def as_another_sees(path: Path) -> list[str]:
    """What another process that opens a file gets to know of its locks: by flock, by fcntl."""
    output, complaint = python(OTHER, path).communicate()
    assert not complaint
    return output.split("\n")[:2]


@states(
    "`flock` locks hold between the programs of one machine, among handles of one version that"
    " were all opened before it was whole in the cache, or all after.",
    "`fcntl` locks hold likewise; an exclusive one needs a file that is open for writing (EBADF),"
    " as on any disk.",
)
@pytest.mark.parametrize("is_whole", [True, False], ids=["whole", "not whole"])
def test_other_processes_see_a_lock(steady: Path, *, is_whole: bool) -> None:
    path = steady / f"whole {is_whole}"
    if is_whole:
        read_all(path)
    with path.open("rb", buffering=0) as mine:
        assert as_another_sees(path) == ["free", "free"]
        fcntl.flock(mine, fcntl.LOCK_SH)
        assert as_another_sees(path) == ["locked", "free"]
        fcntl.flock(mine, fcntl.LOCK_UN)
        fcntl.lockf(mine, fcntl.LOCK_SH, 100, 4096)
        assert as_another_sees(path) == ["free", f"read 4096 100 {os.getpid()}"]
        fcntl.lockf(mine, fcntl.LOCK_UN)
        assert as_another_sees(path) == ["free", "free"]
        with pytest.raises(OSError, match="Bad file descriptor") as caught:
            fcntl.lockf(mine, fcntl.LOCK_EX)
        assert caught.value.errno == errno.EBADF


@pytest.mark.parametrize("change", ["it becomes whole", "it is replaced"])
def test_a_flock_does_not_hold_for_handles_after_a_fetch_or_of_another_version(
    passing: Mount, folder: Bucket, change: str
) -> None:
    size = SMALL if change == "it is replaced" else LARGE
    folder.put("file", stamped(1, size))
    path = passing.path / folder.prefix / "file"
    with path.open("rb", buffering=0) as mine:
        fcntl.flock(mine, fcntl.LOCK_EX)
        assert as_another_sees(path)[0] == "locked"
        if change == "it is replaced":
            folder.put("file", stamped(2, size))
        else:
            read_all(path)
        assert as_another_sees(path)[0] == "free"


SOURCE = r"""
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/time.h>
#include <unistd.h>
static void handle(int number) { (void)number; }
int main(int count, char **paths) {
    struct sigaction action = {.sa_handler = handle, .sa_flags = SA_RESTART};
    struct itimerval timer = {{0, 1000}, {0, 1000}};
    sigaction(SIGALRM, &action, 0);
    setitimer(ITIMER_REAL, &timer, 0);
    char *buffer = aligned_alloc(4096, 65536);
    for (int index = 1; index < count; index++) {
        int fd = open(paths[index], O_RDONLY | (index % 2 ? O_DIRECT : 0));
        if (fd < 0) { perror("open"); return 1; }
        ssize_t size;
        while ((size = read(fd, buffer, 65536)) > 0) {}
        if (size < 0) { perror("read"); return 1; }
        close(fd);
    }
    return 0;
}
"""


@states(
    "A signal that a program handles fails none of its calls with EINTR;"
    " a process that is being killed does not wait for the bucket."
)
def test_signals_that_a_program_handles_do_not_fail_its_calls(
    mounter: Mounter, bucket: Bucket, tmp_path: Path
) -> None:
    (tmp_path / "signals.c").write_text(SOURCE)
    program = tmp_path / "signals"
    subprocess.run(["cc", "-o", program, tmp_path / "signals.c"], check=True)
    for n in range(16):
        bucket.put(f"f{n}", content(str(n), 200_000 if n % 4 else 5 << 20))
    here = mounter("--passthrough", "off")
    result = subprocess.run(
        [program, *(here.path / f"f{n}" for n in range(16))],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (result.returncode, result.stderr) == (0, "")


def test_a_killed_reader_does_not_wait_for_a_server_that_is_silent(
    behind: Mounter, bucket: Bucket, faulty: FaultyS3
) -> None:
    data = content("slow", 3 << 20)
    bucket.put("slow", data)
    here = behind("--retry-time", "10m")
    rule = faulty.add("GET", "slow", stall=True)
    reader = subprocess.Popen(["cat", here.path / "slow"], stdout=subprocess.DEVNULL)
    until(lambda: rule.used > 0, "the request that hangs")
    reader.kill()
    assert reader.wait(timeout=30) == -signal.SIGKILL
    faulty.clear()
    assert (here.path / "slow").read_bytes() == data
