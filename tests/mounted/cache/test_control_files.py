"""The control files in a mount: plans, warming and the status without a command or a socket."""

import errno
import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

import fusefs as fusefs_module
from fusefs.launch.control import CommandError
from tests.support.machine.ordinary_user import NOBODY
from tests.support.mounting import WRITABLE, Mount, Mounter, fusefs
from tests.support.semantics import states
from tests.support.servers.buckets import Bucket, keys
from tests.support.sharing import read_all, stamped
from tests.support.survival.surviving import serving_pid
from tests.support.waiting import until

SIZE = 100_000
FILES = {f"train/f{number}": stamped(number, SIZE) for number in range(40)}
LINES = "".join(f"{key}\n" for key in FILES)
# As a mount with control files is made.
OPTIONS = (WRITABLE, "--session", "kernel")


@pytest.fixture
def tmp_path(public_path: Path) -> Path:
    """Where the mounts are: other users may pass."""
    return public_path


@pytest.fixture(scope="module")
def tree(shared: Bucket) -> Bucket:
    for key, content in FILES.items():
        shared.put(key, content)
    return shared


def control(mount: Mount) -> Path:
    return mount.path / ".fusefs"


def told(mount: Mount) -> dict[str, Any]:
    """The status as a program in the mount reads it."""
    return dict(json.loads((control(mount) / "status").read_text()))


def write(path: Path, text: bytes) -> str:
    """Write as the shell does; the error's name, "" if there is none."""
    try:
        with path.open("wb", buffering=0) as file:
            for at in range(0, len(text), 100_000):
                file.write(text[at : at + 100_000])
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    return ""


@states(
    "`.fusefs` in a mount's root is in no listing and no key of the bucket: what is written to"
    " its `plan` is a plan, what is written to its `warm` is warmed, and its `status` has both."
)
def test_a_program_gives_a_plan_by_a_file_and_has_paths_warmed(
    mounter: Mounter, tree: Bucket, tmp_path: Path
) -> None:
    here = mounter(*OPTIONS, bucket=tree)
    assert sorted(os.listdir(here.path)) == ["train"]
    assert sorted(os.listdir(control(here))) == ["plan", "status", "warm"]
    (tmp_path / "order").write_text(LINES)
    for command in (["cp", tmp_path / "order"], ["dd", "bs=777", f"if={tmp_path}/order"]):
        target = control(here) / "plan"
        subprocess.run([*command, target if command[0] == "cp" else f"of={target}"], check=True)
        until(lambda: told(here)["plans"][0]["has_all"], "the plan is complete")
        assert told(here)["plans"][0]["entries"] == len(FILES)
    until(lambda: told(here)["plans"][0]["ahead_files"] == len(FILES), "all of it is there")
    for key, content in FILES.items():
        assert read_all(here.path / key) == content
    assert told(here)["plans"][0]["in_time"] == len(FILES)
    fusefs("drop", here.path)
    assert write(control(here) / "warm", b"train\nno/such\n") == ""
    until(lambda: [job["state"] for job in told(here)["warming"]] == ["ended"], "it is warmed")
    [job] = told(here)["warming"]
    assert (job["done_files"], job["failed_files"]) == (len(FILES), 1)
    assert told(here)["refused"] is None
    assert not [key for key in keys(tree) if ".fusefs" in key]


def test_readers_are_told_apart_and_paths_may_have_tabs(here: Mount) -> None:
    with (control(here) / "plan").open("wb", 0) as one, (control(here) / "plan").open("wb", 0) as b:
        for key in FILES:  # at the same time
            one.write(f"{key}\trank 0\n".encode())
            b.write(f"{key}\trank 1\n".encode())
    assert write(control(here) / "plan", b"train/f0\0a\tb\0# c\0") == ""
    entries = {plan["reader"]: plan["entries"] for plan in told(here)["plans"]}
    assert entries == {"rank 0": len(FILES), "rank 1": len(FILES), "": 3}


def test_python_gives_a_plan_by_the_file_where_no_mount_is_registered(
    here: Mount, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = Mock(side_effect=CommandError("the path is not in a mount of fusefs"))
    monkeypatch.setattr("fusefs.cli.sync.find", find)
    paths = [here.path / key for key in FILES]
    fusefs_module.plan([*paths, *((paths[0], start, 9) for start in (0, 5))], reader="rank 1")
    until(lambda: told(here)["plans"][0]["has_all"], "the plan is complete")
    plan = told(here)["plans"][0]
    assert (plan["reader"], plan["entries"]) == ("rank 1", len(FILES) + 1)
    with pytest.raises(OSError, match="Invalid argument"):
        fusefs_module.plan([(paths[0], 9, 3)])
    assert told(here)["refused"]["why"] == "line 1: '9-3' is no range of bytes, START-STOP"
    with pytest.raises(CommandError, match="is not in a mount"):
        fusefs_module.plan(["/etc/passwd"])


@states(
    "What can't be taken by a control file fails the `write` with EINVAL, `status` has the"
    " reason, and nothing else is disturbed."
)
def test_bad_texts_are_refused(here: Mount) -> None:
    assert write(control(here) / "plan", LINES.encode()) == ""
    bad = {
        "line 1: it is too long": b"a" * (3 << 20),
        "line 1: its path is not relative": b"/etc/passwd\n",
        "line 2: its path is not relative": b"# so\n../../etc/passwd\n",
        "line 1: 'utf-8' codec can't decode": b"\xff\n" * (1 << 20),
    }
    for why, text in bad.items():
        for name in ("plan", "warm"):
            assert write(control(here) / name, text) == "EINVAL"
            refused = told(here)["refused"]
            assert (refused["file"], refused["why"][: len(why)]) == (name, why)
            assert refused["why"] in here.log.read_text()
    assert write(control(here) / "warm", b"a\n" * 500 + b"/\n") == "EINVAL"
    [lists] = here.cache.rglob("warming")
    assert not any(lists.iterdir())
    with (lists / "other").open("wb") as other:
        other.truncate(2 << 30)
    assert write(control(here) / "warm", b"train\n") == "EINVAL"
    assert told(here)["refused"]["why"] == "the lists of a mount have 2 GiB together at most"
    (lists / "other").unlink()
    assert told(here)["plans"][0]["entries"] == len(FILES)
    assert write(control(here) / "plan", b"no/such\n") == ""
    until(lambda: told(here)["plans"][0]["missing"] == 1, "it is looked up")
    for change in (
        lambda: (control(here) / "new").write_bytes(b""),
        lambda: (control(here) / "plan").unlink(),
        lambda: (control(here) / "plan").rename(here.path / "plan"),
    ):
        with pytest.raises(PermissionError):
            change()
    with pytest.raises(OSError, match="Invalid argument"):
        (here.path / "train").rename(control(here))
    assert read_all(here.path / "train/f1") == FILES["train/f1"]


@states(
    "Who may write in the mount's root may write to control files, and who may read there may"
    " read the status."
)
def test_a_user_who_may_only_read_gives_no_plan(mounter: Mounter, tree: Bucket) -> None:
    here = mounter(*OPTIONS, "--allow-other", bucket=tree)

    def as_nobody(command: str) -> subprocess.CompletedProcess[str]:
        user = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "sh", "-c"]
        return subprocess.run(
            [*user, command], cwd=control(here), check=False, capture_output=True, text=True
        )

    assert "Permission denied" in as_nobody("echo train/f1 > plan").stderr
    assert "Permission denied" in as_nobody("echo train/f1 > warm").stderr
    assert json.loads(as_nobody("cat status").stdout)["plans"] == []


@states(
    "With `--read-only` the kernel refuses writes to control files (EROFS), and with"
    " `--no-control-files` there are none."
)
def test_mounts_without_writable_control_files(mounter: Mounter, tree: Bucket) -> None:
    here = mounter("--session", "kernel", bucket=tree)
    assert write(control(here) / "plan", b"train/f1\n") == "EROFS"
    assert told(here)["read_only"]
    without = mounter(*OPTIONS, "--no-control-files", bucket=tree)
    assert not control(without).exists()


@states("Control files are there after the daemon's death as well; a half-written text is EIO.")
def test_the_next_daemon_has_control_files(mounter: Mounter, tree: Bucket) -> None:
    here = mounter(*OPTIONS, bucket=tree)
    with (
        (control(here) / "status").open("rb", 0) as status,
        (control(here) / "plan").open("wb", 0) as plan,
    ):
        plan.write(b"train/f1\ntrain/f2\n")
        os.kill(before := here.pid, signal.SIGKILL)
        until(lambda: serving_pid(here) not in (None, before), "another daemon serves")
        assert json.loads(status.read(1 << 20))["version"]
        with pytest.raises(OSError, match="Input/output error"):
            plan.write(b"train/f3\n")
    until(lambda: told(here)["plans"], "it goes on with the plan")
    assert write(control(here) / "plan", LINES.encode()) == ""
    assert told(here)["plans"][0]["entries"] == len(FILES)
