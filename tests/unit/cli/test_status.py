"""`fusefs status`, `fusefs umount` and paths in mounts, without a mount."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fusefs.cli import manifest, polling, status_report, sync
from fusefs.diagnosis import findings, mount_status, mounted
from fusefs.diagnosis.subject import MountSubject
from fusefs.launch import control, registry
from fusefs.launch.control import CommandError
from fusefs.linux import mountinfo
from fusefs.settings.memory import MemoryBudget
from tests.support.commands import MOUNTINFO, run
from tests.support.commands import runtime as runtime
from tests.support.commands import sleeper as sleeper

STATUS: dict[str, Any] = {
    "mountpoint": "/mnt/data",
    "source": "s3://bucket/",
    "read_only": True,
    "session": "kernel",
    "passthrough": {"on": False, "why": "the kernel is older than 6.9"},
    "cache": {
        "directory": "/var/cache/fusefs",
        "used_bytes": 3 << 30,
        "limit_bytes": 50 << 30,
        "files": 2000,
        "hits": 75,
        "misses": 25,
        "hit_bytes": 1 << 30,
        "miss_bytes": 1 << 20,
        "evicted_files": 0,
        "warning": "the cache disk is full",
    },
    "s3": {"gets": 25, "heads": 1, "lists": 2, "bytes_fetched": 1 << 30, "errors": 1},
    "metadata": {"ttl_s": 60.0, "directories": 12, "nodes": 2001, "hidden_keys": 3},
    "requests": {"total": 4096, "waiting": 1},
    "daemon": {"pid": 4711, "rss_bytes": 90 << 20, "uptime_s": 3725, "cpu_s": 1.25},
    "version": "0.1.0",
}


@pytest.fixture
def no_mounts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mountinfo, "kernel_mounts", list)


@pytest.mark.usefixtures("runtime")
def test_what_is_no_mount_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("umount", "status"):
        assert run(command, tmp_path) == 1
        assert f"fusefs: {tmp_path} is not a mount of fusefs" in capsys.readouterr().err


@pytest.mark.usefixtures("no_mounts", "runtime")
def test_status_without_mounts_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("status") == 0
    assert capsys.readouterr().out == "no mounts\n"
    assert run("status", "--json") == 0
    assert json.loads(capsys.readouterr().out) == []


@pytest.mark.parametrize("command", [["sync", "--timeout", "0s"], ["warm"], ["unpin"]])
@pytest.mark.usefixtures("runtime")
def test_a_daemon_that_does_not_answer_is_named(
    sleeper: subprocess.Popen[bytes],
    command: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mountinfo, "kernel_mounts", lambda: mountinfo.parse(MOUNTINFO))
    monkeypatch.setattr(polling, "SILENCE_S", 0)
    registry.register(Path("/mnt/a"), "s3://bucket/", sleeper.pid)
    assert run(*command, "/mnt/a") == 1
    line = capsys.readouterr().err
    assert line.startswith("fusefs: the daemon of /mnt/a does not answer (No such file")
    assert "fusefs status" in line


@pytest.mark.usefixtures("runtime")
def test_a_mount_of_somebody_else_is_shown_as_such(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mountinfo, "kernel_mounts", lambda: mountinfo.parse(MOUNTINFO)[1:2])
    assert run("status") == 0
    assert "the mount belongs to user 4242" in capsys.readouterr().out


@pytest.mark.usefixtures("runtime")
def test_a_mount_that_is_not_on_record_is_not_shown_as_ended(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mountinfo, "kernel_mounts", lambda: mountinfo.parse(MOUNTINFO)[3:])
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert run("status") == 0
    output = capsys.readouterr().out
    assert "not registered here" in output
    assert "ended" not in output
    assert "died" not in output


@pytest.mark.usefixtures("runtime")
def test_a_mount_is_shown_once_however_often_it_is_bound_elsewhere(
    sleeper: subprocess.Popen[bytes],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mounted = mountinfo.parse(MOUNTINFO)[3]
    bound = mountinfo.parse(MOUNTINFO)[3]
    bound.path = "/mnt/bound"
    monkeypatch.setattr(mountinfo, "kernel_mounts", lambda: [mounted, bound])
    registry.register(mounted.mountpoint, mounted.source, sleeper.pid)
    assert run("status", "--json") == 1  # no daemon answers
    [found] = json.loads(capsys.readouterr().out)
    assert (found["mountpoint"], found["daemon"]["pid"]) == ("/mnt/a", sleeper.pid)
    assert run("status") == 1
    assert f"not answering, pid {sleeper.pid}" in capsys.readouterr().out


@pytest.mark.parametrize("is_buffered", [True, False])
@pytest.mark.parametrize("arguments", [["status"], ["--version"], ["status", "--help"]])
def test_a_reader_of_a_status_may_stop_reading(arguments: list[str], is_buffered: bool) -> None:
    ours, its = os.pipe()
    os.close(ours)
    done = subprocess.run(
        [sys.executable, "-m", "fusefs", *arguments],
        env={**os.environ, "PYTHONUNBUFFERED": "" if is_buffered else "1"},
        stdout=its,
        stderr=subprocess.PIPE,
        check=False,
    )
    os.close(its)
    assert done.stderr == b""
    assert done.returncode == 1 or arguments[-1] in ("--help", "--version")  # argparse prints it


@pytest.mark.parametrize(
    ("encoding", "shown"), [("utf-8", b"m\xff\xc3\xa4\n"), ("ascii", b"m\xff\\xe4\n")]
)
def test_a_name_is_shown_as_it_is_whatever_it_and_the_locale_are(
    encoding: str, shown: bytes
) -> None:
    prepare = "from fusefs.cli.main import _prepare_streams; _prepare_streams()"
    script = prepare + r"; print('m\udcff\xe4')"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONIOENCODING": f"{encoding}:strict"},
        capture_output=True,
        check=False,
    )
    assert (done.stdout, done.stderr) == (shown, b"")


@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
def test_a_status_may_have_nowhere_to_go(closed: str) -> None:
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-m", "fusefs", "status"],
        stderr=subprocess.PIPE,
        check=False,
    )
    # 1 where another mount of this machine is not well.
    assert (done.returncode in (0, 1), done.stderr) == (True, b"")


def test_a_status_is_shown_for_people() -> None:
    text = status_report.render(STATUS)
    assert text.startswith("/mnt/data\n")
    for part in (
        "kernel, read-only, passthrough off (the kernel is older than 6.9)",
        "3.0 GiB of 50.0 GiB in 2,000 files",
        "1.0 GiB of 1.0 GiB read were served locally (99.9%), 1.0 MiB were fetched for it;"
        " 75 of 100 reads",
        "25 GET, 1 HEAD, 2 LIST; 1.0 GiB fetched; 1 failed for good (errors)",
        "listings used for 1 min; 12 listings, 2,001 nodes; 3 keys hidden",
        "4,096 answered, 1 waiting",
        "pid 4711, 90.0 MiB of memory, up 1 h 2 min, 1.2 s of CPU",
        "warning     the cache disk is full",
    ):
        assert part in text


def test_the_key_of_an_object_gives_no_command_to_a_terminal() -> None:
    key = "a\x1b[2J\n/mnt/other\n  daemon\x9b5m"
    pending = {"key": key, "bytes": 1, "since_s": 1, "state": "failed", "error": f"no {key}"}
    shares = {"10": {}, "60": {}, "300": {}}
    status = {
        **STATUS,
        "mountpoint": "/mnt/a\nb",
        "writing": {"pending": [pending], "pending_files": 1, "pending_bytes": 1},
        "stalls": {"shares": shares},
    }
    text = status_report.render(status)
    assert text.replace("\n", "").isprintable()
    assert all(line.startswith("  ") for line in text.splitlines()[1:])
    assert "a\\x1b[2J\\x0a/mnt/other\\x0a  daemon\\x9b5m: failed" in text
    finding = findings.problem("uploads", f"{key} can't be uploaded", "correct that")
    assert finding.as_text().replace("\n", "", 1).isprintable()


def test_what_is_written_and_renamed_is_shown_with_its_age() -> None:
    one = {"key": "a", "bytes": 1 << 20, "since_s": 65.0, "state": "failed", "error": "no answer"}
    renaming = {
        "from": "old/",
        "to": "new/",
        "phase": "copying",
        "files": 10_000,
        "copied": 1_200,
        "deleted": 0,
        "since_s": 7.0,
        "waiting": 6,
        "waiting_keys": ["old/a", "old/b"],
    }
    writing = {
        "pending": [one],
        "pending_files": 1,
        "pending_bytes": 1 << 20,
        "renames": [renaming],
    }
    text = status_report.render({**STATUS, "writing": writing})
    assert "1 file, 1.0 MiB, not in the bucket yet" in text
    assert "pending     a: failed, 1.0 MiB, for 1 min 5 s (no answer)" in text
    assert "old/ to new/: copying, 1,200 of 10,000 copied, 0 deleted, for 7" in text
    assert "; 6 changes of this mount waiting for it: old/a, old/b, ..." in text


@pytest.mark.parametrize(
    "part", [{"cluster_cache": {"place": "s3://x"}}, {"cache": 5}, {"stalls": {"shares": []}}]
)
def test_a_status_of_another_form_concerns_its_mount_alone(part: dict[str, Any]) -> None:
    text = status_report.as_text({**STATUS, **part})
    assert text.startswith("/mnt/data\n  source      s3://bucket/\n")
    assert "its status can't be read: " in text
    subject = MountSubject(Path("/mnt/data"), {**STATUS, "cache": 5})
    assert "its status can't be read: " in [*mounted.check(subject)][-1].text


@pytest.mark.parametrize(
    ("answer", "keeper"),
    [
        ({**STATUS, "requests": None}, {"pid": 1}),
        (None, {"pid": 1, "restarts": 1, "last_death_ns": None}),
        (None, {"pid": 1, "restarts": 1, "longest_pause_s": []}),
    ],
)
def test_processes_of_another_version_keep_no_other_mount_from_the_status(
    answer: dict[str, Any] | None,
    keeper: dict[str, Any],
    runtime: Path,
    sleeper: subprocess.Popen[bytes],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def request(path: Path, _command: str, _timeout_s: float) -> dict[str, Any]:
        if path.parent != odd.directory:
            return {**STATUS, "mountpoint": "/mnt/good"}
        if answer is None:
            raise control.ControlError("no answer")
        return answer

    odd = registry.register(Path("/mnt/a"), "s3://odd/", sleeper.pid)
    registry.register(Path("/mnt/good"), "s3://good/", sleeper.pid)
    monkeypatch.setattr(mountinfo, "kernel_mounts", lambda: mountinfo.parse(MOUNTINFO))
    monkeypatch.setattr(mount_status, "FUSECTL", runtime)
    (runtime / str(mountinfo.parse(MOUNTINFO)[3].connection)).mkdir()
    (runtime / str(mountinfo.parse(MOUNTINFO)[3].connection) / "waiting").write_text("1")
    monkeypatch.setattr(control, "request", request)
    monkeypatch.setattr(mount_status, "keeper_status", lambda *_: keeper)
    run("status")
    shown = capsys.readouterr().out
    assert "s3://odd/" in shown or "/mnt/data" in shown
    assert "/mnt/good" in shown


def test_upgrades_are_no_restarts_after_a_death() -> None:
    keeper = {"pid": 1, "restarts": 0, "upgrades": 2, "last_reason": "upgrade"}
    text = status_report.render({**STATUS, "survival": {}, "keeper": keeper})
    assert "keeper pid 1, 0 restarts, 2 upgrades, the last " in text
    (finding,) = (one for one in mounted._keeper(keeper))
    assert (finding.level, finding.text) == ("ok", "the daemon has not been restarted")


def test_status_imports_next_to_nothing(runtime: Path) -> None:
    """Most of a short command's time would be imports: of S3 clients, of settings, of launching."""
    large = {"trio", "boto3", "botocore", "sqlite3", "asyncio", "ssl", "logging"}
    large |= {"dataclasses", "subprocess", "fusefs.settings.mount", "fusefs.launch.launcher"}
    script = (
        "import sys; from fusefs.cli.main import main; main(['status']);"
        f" print(*({large!r} & sys.modules.keys()), file=sys.stderr, end='')"
    )
    environment = {**os.environ, registry.RUNTIME_VARIABLE: str(runtime)}
    result = subprocess.run(
        [sys.executable, "-c", script], env=environment, check=False, capture_output=True, text=True
    )
    assert (result.returncode, result.stderr) == (0, "")


SENT = {"gets": 1, "heads": 2, "lists": 3, "puts": 4, "copies": 5, "deletes": 6}
MOVED = {"bytes_fetched": 1 << 20, "bytes_sent": 2 << 20, "errors": 0, "retries": 7, "throttled": 8}
UNSEEN = {"passthrough_opens": 7, "passthrough_bytes": 1 << 29}


@pytest.mark.parametrize(
    ("part", "shown"),
    [
        (
            {"read_only": False, "s3": {**SENT, **MOVED}},
            "1 GET, 2 HEAD, 3 LIST, 4 PUT, 5 COPY, 6 DELETE; 1.0 MiB fetched, 2.0 MiB sent;"
            " 7 retried, 8 throttled",
        ),
        (
            {"cache": {**STATUS["cache"], "limit_why": "less than --cache-size 1TiB: the disk"}},
            "50.0 GiB (less than --cache-size 1TiB: the disk)",
        ),
        (
            {"cache": {**STATUS["cache"], **UNSEEN}},
            "75 of 100 reads; 512 MiB of it for 7 passthrough opens, whose reads are not seen",
        ),
    ],
)
def test_what_a_status_has_more_is_shown_too(part: dict[str, Any], shown: str) -> None:
    assert shown in status_report.render({**STATUS, **part})


STALLS: dict[str, Any] = {
    "shares": {
        "10": {"any": 0.0},
        "60": {"any": 0.38, "s3_first_byte": 0.31, "connection": 0.07, "cache_disk": 0.001},
        "300": {"any": 0.02, "s3_first_byte": 0.02},
    }
}


def test_what_programs_waited_for_is_a_sentence_with_a_hint() -> None:
    text = status_report.render({**STATUS, "stalls": STALLS})
    assert (
        "programs waited 38% of the last minute: 31% for S3's first byte,"
        " 7% for a free connection\n" in text
    )
    assert "programs waited 2% of the last 5 minutes: 2% for S3's first byte\n" in text
    assert "of the last 10 s" not in text
    assert "hint        fetch the data before it is needed (fusefs warm)" in text
    full = STATUS["cache"] | {"used_bytes": 50 << 30}
    text = status_report.render({**STATUS, "cache": full, "stalls": STALLS})
    assert "hint        the cache is full: a larger --cache-size" in text


@pytest.mark.parametrize(
    ("change", "shown", "is_healthy"),
    [
        ({}, "1 failed for good (errors)", True),
        (
            {"s3": {"last_error": {"what": "no answer", "ago_s": 20.0, "since_s": 40.0}}},
            "; failing for 40 s: no answer",
            False,
        ),
        (
            {"s3": {"last_error": {"what": "no answer", "ago_s": 90.0, "since_s": None}}},
            "; the last error 1 min 30 s ago: no answer",
            True,
        ),
        ({"access": {"is_shut": True, "refused_s": 9.0}}, "not served any more", False),
        (
            {
                "writing": {
                    "pending": [
                        {"key": "a", "bytes": 1, "since_s": 9, "state": "failed", "error": "no"}
                    ]
                }
            },
            "a: failed, 1 B, for 9 s (no)",
            False,
        ),
    ],
)
def test_status_says_what_fails_since_when_and_whether_a_mount_is_healthy(
    change: dict[str, Any], shown: str, is_healthy: bool
) -> None:
    status = {**STATUS, **change}
    assert shown in status_report.render(status)
    assert status_report.is_healthy(status) is is_healthy


def test_a_mount_that_does_not_answer_fails_the_command_unless_it_is_somebody_elses() -> None:
    silent = {"mountpoint": "/a", "source": "s3://b/", "not_answering": "timed out"}
    assert not status_report.is_healthy(silent)
    assert status_report.is_healthy({**silent, "is_foreign": True})


@pytest.mark.parametrize(
    ("shares", "shown"),
    [
        ({"10": {"any": 0.0}}, "programs waited for nothing in the last 5 minutes"),
        # Of many small causes none is named.
        (
            {"300": {"any": 0.006, "s3_first_byte": 0.004, "metadata": 0.004}},
            "programs waited 1% of the last 5 minutes",
        ),
        ({"10": {"any": 0.5, "connection": 0.5}}, "--memory-limit (4 MiB each)"),
    ],
)
def test_what_programs_waited_for_is_named_where_it_matters(
    shares: dict[str, dict[str, float]], shown: str
) -> None:
    assert MemoryBudget.of(256 << 20).streams == 40  # of 128 connections
    text = status_report.render({**STATUS, "stalls": {"shares": shares}})
    assert f"{shown}\n" in f"{text}\n"


NESTED = """
25 1 254:0 / / rw - ext4 /dev/vda rw
36 25 0:30 / /mnt/a rw - fuse.fusefs s3://outer/ rw,user_id=0
37 36 0:31 / /mnt/a/b/c rw - fuse.fusefs s3://inner/ rw,user_id=0
38 36 0:32 / /mnt/a/scratch rw - tmpfs tmpfs rw
39 36 0:33 / /mnt/a/hidden/x rw - fuse.fusefs s3://hidden/ rw,user_id=0
40 36 0:34 / /mnt/a/hidden rw - fuse.fusefs s3://above/ rw,user_id=0
"""


@pytest.fixture
def nested(
    runtime: Path, sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    table = mountinfo.parse(NESTED)
    monkeypatch.setattr(mountinfo, "kernel_mounts", lambda: table)
    for mount in table:
        if mount.is_fusefs:
            registry.register(mount.mountpoint, mount.source, sleeper.pid)


@pytest.mark.parametrize(
    ("path", "mountpoint", "below"),
    [
        ("/mnt/a", "/mnt/a", ""),
        ("/mnt/a/b", "/mnt/a", "b"),
        ("/mnt/a/b/cc", "/mnt/a", "b/cc"),
        ("/mnt/a/b/c", "/mnt/a/b/c", ""),
        ("/mnt/a/b/c/d/e", "/mnt/a/b/c", "d/e"),
        ("/mnt/a/hidden/x/y", "/mnt/a/hidden", "x/y"),
    ],
)
@pytest.mark.usefixtures("nested")
def test_of_mounts_in_each_other_the_innermost_has_a_path(
    path: str, mountpoint: str, below: str
) -> None:
    assert sync.find(Path(path)) == (Path(mountpoint), below)


@pytest.mark.usefixtures("nested")
def test_what_something_else_in_a_mount_has_is_not_in_the_mount() -> None:
    with pytest.raises(CommandError, match="is not in a mount of fusefs"):
        sync.find(Path("/mnt/a/scratch/file"))


@pytest.mark.parametrize("base", ["two\nlines", "no text \udcff"])
@pytest.mark.usefixtures("nested")
def test_a_line_below_a_directory_that_no_line_can_name_is_refused(base: str) -> None:
    refused = []
    reader = manifest.Manifest(Path("/mnt/a"), base)
    lines = [b"file", b"../file", b"s3://outer/file"]
    found = list(reader.paths(lines, lambda number, why: refused.append((number, why))))
    assert found == ["", "file", "file"]
    ((number, why),) = refused
    assert number == 1
    assert why == f"file is in {base!r}, which a line of a list cannot name"


@pytest.mark.usefixtures("nested")
def test_lines_of_a_mount_in_the_mount_are_refused() -> None:
    refused = []
    reader = manifest.Manifest(Path("/mnt/a"), "b")
    lines = [b"c/x", b"/mnt/a/b/c", b"/mnt/a/scratch/x", b"cc/x", b"/mnt/a/d", b"s3://outer/b/c/x"]
    found = list(reader.paths(lines, lambda number, why: refused.append((number, why))))
    assert found == ["", "", "", "b/cc/x", "d", "b/c/x"]
    assert refused[0] == (1, "c/x is in the mount /mnt/a/b/c, not in /mnt/a")
    assert [number for number, _ in refused] == [1, 2, 3]
    inner = manifest.Manifest(Path("/mnt/a/b/c"), "")
    assert list(inner.paths([b"x", b"/mnt/a/b/c/y"], pytest.fail)) == ["x", "y"]
