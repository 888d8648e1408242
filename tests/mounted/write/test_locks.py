"""Advisory locks on files that are written: they hold between the processes of one machine."""

import errno
import fcntl
import os
import subprocess
from pathlib import Path

import pytest

from tests.support.mounting import WRITABLE, Mount, Mounter
from tests.support.semantics import states
from tests.support.servers.buckets import Bucket, stored
from tests.support.sharing import python, with_passthrough
from tests.support.survival.surviving import keeper_status, kill_serving
from tests.support.waiting import until

# Tries for both kinds of exclusive lock on a file that it opens for writing.
OTHER = """
import fcntl, sys
with open(sys.argv[1], "r+b") as file:
    for lock in (fcntl.flock, fcntl.lockf):
        try:
            lock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            print("free")
        except BlockingIOError:
            print("locked")
"""
# Takes a lock by creating a file, as often as it can within a line's time.
CREATOR = """
import os, sys
path, log = sys.argv[1:]
won = 0
while won < 5:
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        continue
    won += 1
    with open(log, "a") as file:
        file.write("in\\n")
        file.flush()
        file.write("out\\n")
    os.unlink(path)
"""


@pytest.fixture(scope="module")
def mount(shared: Bucket, module_mounter: Mounter) -> Mount:
    shared.put("object", bytes(1000))
    return module_mounter("--session", "kernel", WRITABLE)


def as_another_sees(path: Path) -> tuple[str, str]:
    """Whether another process that writes can lock a file: by flock, by fcntl."""
    output, complaint = python(OTHER, path).communicate()
    assert not complaint
    by_flock, by_fcntl = output.split()
    return by_flock, by_fcntl


@states(
    "`flock` and `fcntl` locks on files that are written hold between the processes of one machine."
)
def test_both_kinds_keep_other_processes_out_of_a_file_that_is_written(mount: Mount) -> None:
    path = mount.path / "data"
    with open(path, "wb", buffering=0) as mine:
        mine.write(b"content")
        assert as_another_sees(path) == ("free", "free")
        fcntl.flock(mine, fcntl.LOCK_EX)
        assert as_another_sees(path) == ("locked", "free")
        fcntl.lockf(mine, fcntl.LOCK_EX, 3)
        assert as_another_sees(path) == ("locked", "locked")
        fcntl.flock(mine, fcntl.LOCK_UN)
        fcntl.lockf(mine, fcntl.LOCK_UN)
        assert as_another_sees(path) == ("free", "free")


def test_a_lock_file_stays_locked_when_it_is_uploaded_and_written_again(mount: Mount) -> None:
    path = mount.path / "pid"
    with open(path, "a+b", buffering=0) as mine:
        fcntl.flock(mine, fcntl.LOCK_EX)
        for line in (b"1\n", b"2\n"):
            mine.write(line)
            os.fsync(mine.fileno())
            assert as_another_sees(path)[0] == "locked"
    assert as_another_sees(path)[0] == "free"


def test_an_empty_lock_file_is_locked_through_handles_that_read(mount: Mount) -> None:
    path = mount.path / "lock"
    path.touch()
    with open(path, "rb") as mine:
        fcntl.flock(mine, fcntl.LOCK_EX)
        with open(path, "rb") as second, pytest.raises(BlockingIOError):
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_record_locks_hold_for_their_bytes_alone(mount: Mount) -> None:
    path = mount.path / "database"
    code = OTHER.replace("fcntl.LOCK_NB)", "fcntl.LOCK_NB, *where)").replace(
        "fcntl.flock, fcntl.lockf", "fcntl.lockf,"
    )
    with open(path, "w+b", buffering=0) as mine:
        mine.write(bytes(1000))
        fcntl.lockf(mine, fcntl.LOCK_EX, 100, 200)
        output = [
            subprocess.check_output(
                ["python3", "-c", f"where = (100, {start})\n{code}", path], text=True
            ).strip()
            for start in (100, 199, 299, 300)
        ]
        assert output == ["free", "locked", "locked", "free"]


def test_a_file_that_is_created_exclusively_is_a_lock(mount: Mount) -> None:
    log = mount.path / "log"
    log.touch()
    workers = [python(CREATOR, mount.path / "exclusive", log) for _ in range(3)]
    complaints = [worker.communicate()[1] for worker in workers]
    assert complaints == ["", "", ""]
    assert log.read_text() == "in\nout\n" * 15
    assert not (mount.path / "exclusive").exists()


@states("Locks outlive the daemon.")
def test_locks_outlive_the_daemon(mount: Mount, shared: Bucket) -> None:
    path = mount.path / "held"
    with open(path, "wb", buffering=0) as mine:
        mine.write(b"one")
        fcntl.flock(mine, fcntl.LOCK_EX)
        fcntl.lockf(mine, fcntl.LOCK_EX)
        kill_serving(mount)
        assert as_another_sees(path) == ("locked", "locked")
        mine.write(b"two")
    assert as_another_sees(path) == ("free", "free")
    assert stored(shared, "held") == b"onetwo"
    until(lambda: keeper_status(mount)["pause_s"] == 0.0, "no daemon serves")


def test_a_lock_through_a_handle_that_reads_by_passthrough_holds_against_writers(
    mount: Mount,
) -> None:
    path = with_passthrough(mount).path / "object"
    path.read_bytes()
    with open(path, "rb") as mine:
        fcntl.flock(mine, fcntl.LOCK_EX)
        assert as_another_sees(path)[0] == "locked"
        with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
            fcntl.lockf(mine, fcntl.LOCK_EX)
