"""Mounts whose journal is damaged end and say why; one whose disk is full goes on."""

import contextlib
import json
import os
import random
import signal
from pathlib import Path

import pytest

from fusefs.launch import control, registry
from fusefs.launch.registry import RUNTIME_VARIABLE
from fusefs.posix.journal import records
from tests.support.machine.disks import fill, small_disk
from tests.support.mounting import WRITABLE, Mount, Mounter, fusefs
from tests.support.semantics import states
from tests.support.servers.buckets import Bucket, stored
from tests.support.survival.surviving import expect_not_connected, serving_pid
from tests.support.waiting import until

NAMES = [f"d/f{number:02}" for number in range(40)]


def content(name: str) -> bytes:
    return random.Random(name).randbytes(5000)


@pytest.fixture
def mount(bucket: Bucket, mounter: Mounter) -> Mount:
    """Its journal tells of forty files, of which some have been renamed and removed."""
    for name in NAMES[:30]:
        bucket.put(name, content(name))
    made = mounter("--session", "kernel", WRITABLE)
    for name in NAMES[30:]:
        (made.path / name).write_bytes(content(name))
    (made.path / NAMES[3]).rename(made.path / "other")
    (made.path / NAMES[4]).unlink()
    (made.path / NAMES[5]).rename(made.path / NAMES[3])
    read(made)
    return made


def read(mount: Mount) -> None:
    for name in os.listdir(mount.path / "d"):
        was = NAMES[5] if name == Path(NAMES[3]).name else f"d/{name}"
        assert (mount.path / "d" / name).read_bytes() == content(was)


def journal(mount: Mount) -> Path:
    (path,) = mount.cache.glob("mounts/*/journal.[0-9]*")
    return path


def end_of(path: Path) -> int:
    """Where the last record of a log ends."""
    *_, last = records.parse(path.read_bytes())
    return last.stop


def expect_damage(mount: Mount, path: Path) -> None:
    """The mount ends, its log says why, and the next one has everything."""
    expect_not_connected(mount)
    line = f"{path} is damaged"
    until(lambda: line in mount.log.read_text(), "the reason in the log")
    assert "up to byte" in mount.log.read_text()
    mount.force()
    mount.start()
    read(mount)
    assert (mount.path / "other").read_bytes() == content(NAMES[3])
    assert sorted(os.listdir(mount.path / "d")) == sorted(
        Path(name).name for name in NAMES if name not in (NAMES[4], NAMES[5])
    )


@states(
    "A mount whose journal is damaged ends with ENOTCONN when its daemon dies, and the log says"
    " which byte of which file is wrong; it never shows one file's content for another's."
)
@pytest.mark.parametrize("place", ["any", "last"])
def test_a_changed_byte_in_the_journal_ends_the_mount(
    mount: Mount, bucket: Bucket, place: str, dice: random.Random
) -> None:
    path = journal(mount)
    pid = serving_pid(mount)
    os.kill(pid, signal.SIGSTOP)  # so that no record comes behind the last one
    end = end_of(path)
    at = end - 1 if place == "last" else dice.randrange(records.HEADER_SIZE, end)
    with path.open("r+b") as file:
        file.seek(at)
        [byte] = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ dice.randrange(1, 256)]))
    os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(OSError):  # while it ends; what is read is right
        read(mount)
    expect_damage(mount, path)
    assert stored(bucket, NAMES[35]) == content(NAMES[35])


@pytest.mark.parametrize("is_at_first_record", [False, True])
def test_a_journal_that_is_cut_ends_the_mount(
    mount: Mount, is_at_first_record: bool, dice: random.Random
) -> None:
    """The daemon itself dies of it: the file is mapped, and no longer there."""
    path = journal(mount)
    pid = serving_pid(mount)
    os.kill(pid, signal.SIGSTOP)
    first, end = records.HEADER_SIZE, end_of(path)
    os.truncate(path, first if is_at_first_record else dice.randrange(first, end))
    os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(OSError):
        read(mount)
    expect_damage(mount, path)


def test_a_whole_journal_goes_on_after_any_kill(mount: Mount) -> None:
    """Killed while it writes records; each daemon reads what the last one wrote."""
    for _ in range(3):
        pid = serving_pid(mount)
        for name in NAMES[10:15]:
            (mount.path / name).stat()
        (mount.path / "new").write_bytes(b"new")
        os.kill(pid, signal.SIGKILL)
        (mount.path / "new").unlink()
        until(lambda pid=pid: serving_pid(mount) != pid, "another daemon")
        read(mount)
    assert "is damaged" not in mount.log.read_text()


TEXT = "commands do not find this mount for now"


@pytest.mark.root
def test_a_mount_goes_on_where_the_next_daemon_can_not_register(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.put("a", b"content")
    (tmp_path / "mnt").mkdir()
    with small_disk(tmp_path / "run", 1) as run:
        run.chmod(0o755)
        monkeypatch.setenv(RUNTIME_VARIABLE, str(run / "fusefs"))
        environment = bucket.server.environment | {RUNTIME_VARIABLE: str(run / "fusefs")}
        path, log = tmp_path / "mnt", tmp_path / "log"
        options = ["--endpoint-url", bucket.server.endpoint_url, "--cache-dir", tmp_path / "cache"]
        try:
            source = f"s3://{bucket.name}/"
            options += ["--session", "kernel", "--log-file", log]
            fusefs("mount", source, path, *options, environment=environment)
            filler = fill(run)
            keeper = registry.keeper_socket(path)
            os.kill(control.exchange(keeper, {"do": "status"}, 10)["daemon"], signal.SIGKILL)
            assert (path / "a").read_bytes() == b"content"
            assert TEXT in log.read_text()
            filler.unlink()
            until(lambda: "commands find this mount again" in log.read_text())
            status = fusefs("status", path, "--json", environment=environment).stdout
            assert json.loads(status)["mountpoint"] == str(path)
        finally:
            fusefs("umount", "--force", path, environment=environment, check=False)
