"""What was saved is saved: uploads that fail, are interrupted, wait, or outlive their mount."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fusefs.cli import sync
from fusefs.launch import control, registry
from fusefs.linux.libc import KEEP_SIZE, allocate
from tests.support.machine.disks import small_disk
from tests.support.mounting import WRITABLE, Mount, Mounter, fusefs, pending, status
from tests.support.semantics import states
from tests.support.servers.buckets import Bucket, keys, stored
from tests.support.servers.faulty_s3 import FaultyS3
from tests.support.survival.surviving import keeper_status, kill_serving
from tests.support.waiting import until

LIMIT_S = 60.0

pytestmark = pytest.mark.root


@pytest.fixture(scope="module")
def local(module_mounter: Mounter) -> Mount:
    return module_mounter(WRITABLE, "--durability", "local")


@states(
    "With `--durability local`, `close` and `fsync` return when the file and the record "
    "of its upload are safe on the local disk; it is uploaded a moment later, once, under "
    "the name that it has then."
)
def test_a_temporary_file_that_is_renamed_is_uploaded_once(local: Mount, shared: Bucket) -> None:
    before = status(local)["s3"]
    with open(local.path / "tmp", "wb") as file:
        file.write(b"weights" * 1000)
        file.flush()
        os.fsync(file.fileno())
    os.rename(local.path / "tmp", local.path / "model")
    os.chmod(local.path / "model", 0o600)
    fusefs("sync", local.path)
    after = status(local)["s3"]
    assert pending(local) == []
    assert stored(shared, "model") == (local.path / "model").read_bytes() == b"weights" * 1000
    assert "tmp" not in keys(shared)
    assert after["puts"] - before["puts"] == 1
    assert after["copies"] == before["copies"]


@states(
    "`fusefs sync` waits until the bucket has everything at or below a path, also what is open."
)
def test_sync_uploads_what_is_open(local: Mount, shared: Bucket) -> None:
    with open(local.path / "log", "wb", buffering=0) as file:
        file.write(b"line\n")
        fusefs("sync", local.path)
        assert stored(shared, "log") == b"line\n"


def test_sync_knows_a_mount_behind_a_link(local: Mount, shared: Bucket, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(local.path.parent)
    (local.path / "a").write_bytes(b"content")
    fusefs("sync", tmp_path / "link" / local.path.name / "a")
    assert stored(shared, "a") == b"content"


def test_sync_waits_for_what_was_just_written_however_late_answers_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = time.monotonic()
    to_come = [1, 1, 0]

    def exchange(*_: object) -> dict[str, Any]:
        left = to_come.pop(0)
        since_s = time.monotonic() - written
        time.sleep(0.1)
        one = {"key": "a", "since_s": since_s}
        return {
            "pending": [one] * left,
            "pending_files": left,
            "pending_bytes": left,
            "under_way": left,
        }

    monkeypatch.setattr(control, "exchange", exchange)
    monkeypatch.setattr(registry, "registration_of", lambda path: SimpleNamespace(socket=path))
    assert sync.wait(tmp_path, "", LIMIT_S) == []
    assert to_come == []


@pytest.mark.parametrize("command", ["sync", "umount"])
def test_sync_and_umount_wait_for_the_next_daemon_where_the_last_one_dies(
    behind: Mounter, bucket: Bucket, faulty: FaultyS3, command: str
) -> None:
    mount = behind("--session", "kernel", "--no-read-only", "--durability", "local")
    stalled = faulty.add("PUT", "a", stall=True, times=1)
    (mount.path / "a").write_bytes(b"content")
    until(lambda: stalled.used, "the daemon sends it")  # else the next daemon's would stall
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(fusefs, command, mount.path)
        kill_serving(mount)
        ended.result()
    assert stored(bucket, "a") == b"content"


@pytest.fixture
def broken(behind: Mounter) -> Mount:
    """A mount whose requests fail when a test says so, after a short while."""
    return behind("--no-read-only", "--retry-time", "1s", "--hang-timeout", "3s")


def fail_to_write(broken: Mount, faulty: FaultyS3, content: bytes) -> None:
    """Write the file "a", which the bucket does not take until faults are cleared."""
    faulty.add("PUT", code="InternalError")
    fd = os.open(broken.path / "a", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.write(fd, content)
    with pytest.raises(OSError, match="Input/output error"):
        os.close(fd)


@contextlib.contextmanager
def waiting_writer(broken: Mount, faulty: FaultyS3) -> Iterator[subprocess.Popen[bytes]]:
    """A program in its close of the file "a", for which no credentials are accepted."""
    faulty.add("PUT", code="ExpiredToken")
    script = "import sys; open(sys.argv[1], 'wb').write(b'content')"
    with subprocess.Popen([sys.executable, "-c", script, str(broken.path / "a")]) as writer:
        try:
            until(lambda: [one["state"] for one in pending(broken)] == ["waiting for credentials"])
            assert writer.poll() is None
            yield writer
        finally:
            writer.kill()


@states(
    "A failed upload is EIO for whoever closes; the content stays, is what readers see, "
    "and is tried again until the bucket has it."
)
def test_a_close_tells_of_a_failed_upload_and_the_content_is_kept(
    broken: Mount, bucket: Bucket, faulty: FaultyS3
) -> None:
    fail_to_write(broken, faulty, b"content")
    assert [one["key"] for one in pending(broken)] == ["a"]
    assert (broken.path / "a").read_bytes() == b"content"
    faulty.clear()
    until(lambda: keys(bucket) == ["a"] and stored(bucket, "a") == b"content")


@states(
    "`fusefs umount` waits for uploads and names those that fail; they are kept, and made "
    "when the bucket is mounted there again."
)
def test_umount_says_what_could_not_be_uploaded_and_the_next_mount_uploads_it(
    broken: Mount, bucket: Bucket, faulty: FaultyS3
) -> None:
    fail_to_write(broken, faulty, b"content")
    result = fusefs("umount", broken.path, check=False)
    assert result.returncode == 1
    assert "a (" in result.stderr
    assert "stay on the local disk" in result.stderr
    faulty.clear()
    broken.start()
    assert (broken.path / "a").read_bytes() == b"content"
    fusefs("sync", broken.path)
    assert stored(bucket, "a") == b"content"


@states(
    "The exit status of `fusefs umount` is 0 only if the bucket has everything, also where the"
    " daemon was stopped or killed; else it names the files, and the directory that has them."
)
@pytest.mark.parametrize("fate", ["stopped", "without a keeper", "forced"])
def test_umount_fails_where_a_daemon_that_did_not_end_by_itself_left_files(
    broken: Mount, faulty: FaultyS3, fate: str
) -> None:
    fail_to_write(broken, faulty, b"content")
    pid = broken.pid
    if fate == "without a keeper":
        os.kill(keeper_status(broken)["pid"], signal.SIGKILL)
    if fate != "forced":
        os.kill(pid, signal.SIGSTOP)
    result = fusefs("umount", *["--force"] * (fate == "forced"), broken.path, check=False)
    assert result.returncode == 1
    assert "not in the bucket yet: a (" in result.stderr
    (left,) = (broken.cache / "mounts").glob("*/staging/*/[0-9]*")
    assert left.read_bytes() == b"content"
    assert str(left.parent) in result.stderr


def test_what_was_left_is_uploaded_beside_what_somebody_else_has_written(
    broken: Mount, bucket: Bucket, faulty: FaultyS3
) -> None:
    fail_to_write(broken, faulty, b"ours")
    fusefs("umount", broken.path, check=False)
    faulty.clear()
    bucket.put("a", b"theirs")
    broken.start()
    until(lambda: len(keys(bucket)) == 2)
    conflict = next(key for key in keys(bucket) if key != "a")
    assert conflict.startswith("a.conflict-")
    assert stored(bucket, "a") == b"theirs"
    assert stored(bucket, conflict) == b"ours"


@states("While credentials are refused uploads wait and do not fail, and `fusefs status` says so.")
def test_credentials_that_are_refused_make_a_close_wait(
    broken: Mount, bucket: Bucket, faulty: FaultyS3
) -> None:
    with waiting_writer(broken, faulty) as writer:
        faulty.clear()
        assert writer.wait(60) == 0
    assert stored(bucket, "a") == b"content"


@states(
    "A program that is killed in its `close` does not wait for the bucket, and its file "
    "is uploaded all the same."
)
def test_a_program_that_is_killed_in_its_close_does_not_wait_and_its_file_is_uploaded(
    broken: Mount, bucket: Bucket, faulty: FaultyS3
) -> None:
    with waiting_writer(broken, faulty) as writer:
        writer.send_signal(signal.SIGKILL)
        assert writer.wait(30) == -signal.SIGKILL
    faulty.clear()
    until(lambda: keys(bucket) == ["a"] and stored(bucket, "a") == b"content")


@states(
    "With `--conflict fail` the second of two mounts that write one file gets ESTALE however it"
    " wrote, and its content is kept as NAME.conflict-HOST-TIME."
)
def test_a_conflict_fails_the_second_close_and_keeps_its_content_beside(
    mounter: Mounter, bucket: Bucket
) -> None:
    ways = {"rw": os.O_RDWR, "anew": os.O_WRONLY | os.O_TRUNC, "log": os.O_WRONLY | os.O_APPEND}
    for name in ways:
        bucket.put(f"{name}/a", b"" if name == "log" else b"first")
    mount = mounter(WRITABLE, "--conflict", "fail")
    for name, flags in ways.items():
        folder = mount.path / name
        fd = os.open(folder / "a", flags)
        os.write(fd, b"OURS!")
        bucket.put(f"{name}/a", b"theirs")
        with pytest.raises(OSError, match="Stale"):
            os.close(fd)
        assert (folder / "a").read_bytes() == b"theirs"
        [conflict] = {*os.listdir(folder)} - {"a"}
        assert (folder / conflict).read_bytes() == stored(bucket, f"{name}/{conflict}") == b"OURS!"
        (folder / "a").write_bytes(b"again")
        assert stored(bucket, f"{name}/a") == b"again"


@states("Beyond `--staging-size` writing is ENOSPC.")
def test_more_than_the_staging_size_is_enospc(mounter: Mounter, bucket: Bucket) -> None:
    mount = mounter("--no-read-only", "--staging-size", "1MiB")
    (mount.path / "fits").write_bytes(bytes(1 << 20))
    with open(mount.path / "large", "wb", buffering=0) as file:
        file.write(bytes(1 << 20))
        with pytest.raises(OSError, match="No space left"):
            file.write(b"one more")
        with pytest.raises(OSError, match="No space left"):
            allocate(file.fileno(), KEEP_SIZE, 1 << 20, 1 << 20)  # as rsync --preallocate
    (mount.path / "fits again").write_bytes(bytes(1 << 20))
    assert stored(bucket, "fits again") == bytes(1 << 20)


@states(
    "A full cache disk is ENOSPC for what is written, and for nothing else: reads, renames and"
    " directories go on, and once there is room, writes too."
)
def test_a_full_disk_is_enospc_for_the_writer_alone(
    mounter: Mounter, bucket: Bucket, tmp_path: Path
) -> None:
    bucket.put("there", b"there")
    with small_disk(tmp_path / "disk", 32):
        mount = mounter("--no-read-only", cache="disk/cache")
        with open(mount.path / "large", "wb", buffering=0) as file:
            with pytest.raises(OSError, match="No space left"):
                all(iter(lambda: file.write(bytes(1 << 20)), None))
            assert (mount.path / "there").read_bytes() == b"there"
            (mount.path / "directory").mkdir()
            os.rename(mount.path / "there", mount.path / "directory" / "there")
            file.truncate(1 << 20)
        assert stored(bucket, "large") == bytes(1 << 20)
        (mount.path / "fits again").write_bytes(b"content")
        assert stored(bucket, "fits again") == b"content"
        mount.end()


@states("With `--no-delete` removing and overwriting are EPERM.")
def test_without_deleting_nothing_is_overwritten(mounter: Mounter, bucket: Bucket) -> None:
    bucket.put("a", b"old")
    mount = mounter("--no-read-only", "--no-delete")
    for flags in (os.O_WRONLY, os.O_RDWR, os.O_WRONLY | os.O_TRUNC):
        with pytest.raises(PermissionError):
            os.open(mount.path / "a", flags)
    (mount.path / "directory").mkdir()
    (mount.path / "tmp").write_bytes(b"final")
    (mount.path / "tmp").rename(mount.path / "final")
    for call in (
        lambda: os.truncate(mount.path / "a", 1),
        (mount.path / "directory").rmdir,
        (mount.path / "a").unlink,
        lambda: (mount.path / "final").rename(mount.path / "a"),
    ):
        with pytest.raises(PermissionError):
            call()
    with open(mount.path / "b", "xb", buffering=0) as file:
        file.write(b"newer")
        file.truncate(3)
    assert [stored(bucket, name) for name in ("a", "b", "final")] == [b"old", b"new", b"final"]


@states(
    "`fusefs drop --unsent` gives up what could not be uploaded: files are as the bucket has them,"
    " and what was written stays in the cache directory as edited-N, where no mount takes it up."
)
def test_keys_that_only_read_are_named_at_the_mount_and_their_files_can_be_given_up(
    behind: Mounter, bucket: Bucket, faulty: FaultyS3, capfd: pytest.CaptureFixture[str]
) -> None:
    bucket.put("there", b"before")
    for operation, key in (("PUT", ".fusefs-probe/object"), ("PUT", "*"), ("COPY", "*")):
        faulty.add(operation, key, code="AccessDenied")
    mount = behind("--no-read-only")
    fusefs("umount", mount.path)
    mount.start()
    assert mount.said.count("\n") == 1
    assert "these credentials may not write" in mount.said
    for name in ("there", "new", "removed"):
        with pytest.raises(PermissionError):
            (mount.path / name).write_bytes(b"content")
    os.chmod(mount.path / "there", 0o600)
    (mount.path / "removed").unlink()  # never was in the bucket: no DELETE
    assert {one["key"] for one in pending(mount)} == {"there", "new"}
    assert fusefs("umount", mount.path, check=False).returncode == 1
    mount.start("--no-read-only")
    given_up = fusefs("drop", "--unsent", mount.path).stdout
    assert "2 files given up" in given_up
    assert os.listdir(mount.path) == ["there"]
    assert (mount.path / "there").read_bytes() == b"before"
    fusefs("umount", mount.path)
    kept = {path.read_bytes() for path in mount.cache.glob("mounts/*/staging/*/edited-*")}
    assert kept == {b"content"}
