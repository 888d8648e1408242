"""`fusefs mount`, `mount.fusefs` and `fusefs warm` before a daemon runs."""

import fcntl
import io
import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fusefs
from csi.main import make_parser
from fusefs import mount_helper
from fusefs.cli import mount as mount_command
from fusefs.cli import parser, polling
from fusefs.cli.warm import shard
from fusefs.launch import log_location, preflight
from fusefs.mount_helper import OptionError, read_options
from fusefs.settings.mount import RawValue, build
from tests.support.commands import run
from tests.support.commands import runtime as runtime
from tests.support.semantics import states


@pytest.fixture
def mountpoint(tmp_path: Path) -> Path:
    directory = tmp_path / "mnt"
    directory.mkdir()
    return directory


def refusal(capsys: pytest.CaptureFixture[str], *arguments: object, status: int = 1) -> str:
    """The one line with which `fusefs mount` refuses."""
    assert run("mount", *arguments) == status
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("fusefs: ")
    return lines[0]


def test_a_mountpoint_that_another_command_is_mounting_is_refused(
    mountpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = os.open(mountpoint, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    assert "by another command" in refusal(capsys, "s3://bucket", mountpoint)
    os.close(other)


def test_what_pyfuse3_cannot_do_is_refused(
    mountpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "check_device", lambda: None)
    monkeypatch.setattr(preflight, "may_mount", lambda: True)
    line = refusal(capsys, "s3://bucket", mountpoint, "--session", "pyfuse3", "--user", "nobody")
    assert line.startswith("fusefs: --user needs the kernel session")


@pytest.mark.parametrize(("seconds", "is_warned"), [("0", False), ("30", True), ("3600", False)])
def test_a_kernel_that_soon_ends_silent_mounts_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: str, is_warned: bool
) -> None:
    (tmp_path / "max_request_timeout").write_text(seconds + "\n")
    monkeypatch.setattr(preflight, "FUSE_SETTINGS", tmp_path)
    assert ["max_request_timeout" in one for one in preflight.warnings()] == [True] * is_warned


@pytest.mark.parametrize(
    "command",
    [
        *(["mount", "s3://bucket"], ["umount"], ["status"], ["upgrade"], ["doctor"], ["report"]),
        *(["sync"], ["warm"], ["pin"], ["unpin"], ["drop"]),
        ["warm", "--manifest", "list"],
    ],
    ids=" ".join,
)
def test_an_empty_path_is_not_the_working_directory(
    capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run(*command, "")
    assert ended.value.code == 2
    assert "the path is empty; see fusefs" in capsys.readouterr().err


@pytest.mark.parametrize("option", [["--manifest", "list"], ["--shard", "0/2"]], ids=" ".join)
def test_what_is_cancelled_is_named_by_paths_alone(
    option: list[str], runtime: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("warm", "--cancel", *option, "/data") == 2
    assert capsys.readouterr().err.startswith("fusefs: --cancel: ")


def test_in_a_directory_that_is_gone_absolute_paths_can_be_named(
    tmp_path: Path,
    runtime: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    for command in ("umount", "status", "sync"):
        assert run(command, "/") == 1
        assert "fusefs: / is not " in capsys.readouterr().err
        assert run(command, "here") == 1
        why = "the working directory is not there any more; change to another"
        assert capsys.readouterr().err == f"fusefs: here: {why}\n"
    assert refusal(capsys, "s3://bucket", "/proc").startswith("fusefs: /proc is already a mount")
    assert "the working" in refusal(capsys, "s3://bucket", "/", "--cache-dir", "here", status=2)


@pytest.fixture
def start_with(
    mountpoint: Path, tmp_path: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], int]:
    """Run `fusefs mount` with the given script in the daemon's place."""

    def start(script: str) -> int:
        package = tmp_path / "modules" / "fusefs"
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
        (package / "daemon.py").write_text(script)
        monkeypatch.setenv("PYTHONPATH", str(package.parent))
        # Under this session the daemon is started directly.
        options = ("--log-file", tmp_path / "log", "--session", "pyfuse3")
        return run("mount", "s3://bucket", mountpoint, *options)

    return start


def test_mount_shows_the_daemon_s_error(
    start_with: Callable[[str], int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert start_with('print(\'{"error": "there is no bucket of that name"}\')') == 1
    assert capsys.readouterr().err == "fusefs: there is no bucket of that name\n"


@pytest.mark.parametrize(
    "script",
    ["raise RuntimeError('so it goes')", "raise ExceptionGroup('', [RuntimeError('so it goes')])"],
)
def test_mount_shows_the_last_line_of_a_daemon_that_dies(
    start_with: Callable[[str], int], capsys: pytest.CaptureFixture[str], script: str
) -> None:
    assert start_with(script) == 1
    assert capsys.readouterr().err == (
        "fusefs: the daemon ended while starting: RuntimeError: so it goes\n"
    )


def test_a_mountpoint_with_a_long_name_has_a_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / ("\u30c7" * 80) / ("\u30fc" * 80)  # three bytes each
    directory.mkdir(parents=True)
    texts = {"source": "s3://bucket", "mountpoint": str(directory)}
    settings = build({name: RawValue(text, name) for name, text in texts.items()})
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with log_location.opened(log_location.path_of(settings)) as log:
        assert log.write(b"a line\n")


def test_a_log_that_is_a_device_stays_everybody_s(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("making a device needs root")
    device = tmp_path / "null"
    os.mknod(device, stat.S_IFCHR | 0o666, os.makedev(1, 3))
    device.chmod(0o666)
    with log_location.opened(device) as log:
        log.write(b"nothing")
    assert device.stat().st_mode & 0o777 == 0o666


def test_the_log_belongs_to_its_user_alone(
    start_with: Callable[[str], int], tmp_path: Path
) -> None:
    start_with("raise SystemExit(3)")
    assert (tmp_path / "log").stat().st_mode & 0o777 == 0o600


def test_an_interrupt_before_a_command_has_begun_is_no_traceback() -> None:
    script = (
        "import sys; from fusefs import __main__ as program;"
        "sys.argv = ['fusefs', 'status'];"
        "sys.meta_path.insert(0, type('Slow', (), {'find_spec': lambda *_: signal()}));"
        "signal = lambda: (_ for _ in ()).throw(KeyboardInterrupt);"
        "program.run()"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


@pytest.mark.parametrize(
    ("arguments", "first"), [((), "usage: fusefs [-h]"), (("-V",), f"fusefs {fusefs.__version__}")]
)
def test_help_and_the_version_are_found_however_they_are_called(
    arguments: tuple[str, ...], first: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run(*arguments)
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(first)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("mount", "s3://b", "/mnt", "--cache-s", "1GiB"), "--cache-s; did you mean --cache-size?"),
        (("mount", "s3://b", "/mnt", "--endpoint=x"), "--endpoint; did you mean --endpoint-url?"),
        (("mount", "s3://b", "/mnt", "--read-onyl"), "--read-onyl; did you mean --read-only?"),
        (("mount", "s3://b", "/mnt", "--qqq"), "there is no option --qqq; see fusefs mount --help"),
        (("umount", "--forse", "/mnt"), "--forse; did you mean --force?"),
        (("mout", "s3://b", "/mnt"), "'mout' is not known; did you mean mount?"),
    ],
)
def test_an_option_or_a_command_is_written_out_and_a_near_one_is_named(
    arguments: tuple[str, ...], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run(*arguments)
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("fusefs: ")
    assert part in line


def test_a_mount_on_demand_that_would_wait_for_itself_is_refused(
    mountpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(preflight, "check_device", lambda: None)
    monkeypatch.setattr(preflight, "check_privileges", lambda *_, **__: None)
    monkeypatch.setattr(preflight.mountinfo, "has_automount", lambda path: path == mountpoint)
    line = refusal(capsys, "s3://bucket", mountpoint, "--session", "pyfuse3")
    assert "is mounted on demand (autofs)" in line
    monkeypatch.setattr(preflight, "may_mount", lambda: False)
    assert "is mounted on demand (autofs)" in refusal(capsys, "s3://bucket", mountpoint)


def test_an_upgrade_names_a_setting_that_it_cannot_change(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for option in ("--read-only", "--no-allow-other", "--cache-dir=/nvme"):
        assert run("upgrade", "/mnt", option) == 2
        name = option.partition("=")[0].replace("--no-", "--")
        assert f"fusefs: {name}: cannot be changed while mounted" in capsys.readouterr().err


def test_an_upgrade_changes_what_it_is_given_alone() -> None:
    arguments = ["upgrade", "/mnt", "--metadata-ttl", "5s"]
    given = mount_command.flags(parser.make_parser(arguments).parse_args(arguments))
    assert {name: value.text for name, value in given.items()} == {"metadata_ttl": "5s"}


def test_an_older_version_takes_over_a_mount_with_settings_that_it_does_not_know(
    monkeypatch: pytest.MonkeyPatch, runtime: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = {"source": "s3://bucket/", "mountpoint": "/mnt", "metadata_ttl": "5s", "newer": "on"}
    sent: list[dict[str, Any]] = []

    def keeper_request(_place: Path, message: dict[str, Any], _timeout_s: float) -> dict[str, Any]:
        sent.append(message)
        if message["do"] == "settings":
            return {"settings": json.dumps({"settings": texts, "files": {}})}
        return {"pid": 4104, "pause_s": 0.1}

    monkeypatch.setattr(mount_command, "keeper_request", keeper_request)
    assert run("upgrade", "/mnt", "--retry-time", "9s") == 0
    assert "daemon 4104 took over" in capsys.readouterr().out
    given = json.loads(sent[-1]["settings"])["settings"]
    assert (given["metadata_ttl"], given["retry_time"], "newer" in given) == ("5s", "9s", False)


def test_the_help_of_an_upgrade_names_no_default_that_would_be_taken(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        run("upgrade", "--help")
    text = capsys.readouterr().out
    assert "--metadata-ttl" in text
    assert "(default" not in text


def test_the_driver_knows_no_abbreviations_either(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        make_parser().parse_args(["daemons", "--state", "/run/x"])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("fusefs-csi: there is no option --state; did you mean --state-dir?")


def flags(text: str, *, is_sloppy: bool = False) -> list[str]:
    return read_options(text.split(","), is_sloppy=is_sloppy)[0]


GIVEN = "--allow-other --cache-size=1GiB --metadata-ttl=5m"


@pytest.mark.parametrize(
    ("text", "given"),
    [
        ("allow_other,cache_size=1GiB,metadata-ttl=5m", GIVEN),
        ("ro,config=/etc/data.toml", "--read-only --config /etc/data.toml"),
        ("allow_other=false,no_delete", "--no-allow-other --no-delete"),
        ("user=svc,ro", "--user=svc --read-only"),
        ("users,user,noexec,nosuid,nodev", "--noexec"),
        # What mount and systemd handle is left to them.
        ("defaults,_netdev,nofail,rw,noatime,x-systemd.automount,X-mount.mkdir", ""),
    ],
)
def test_options_are_settings_by_their_names(text: str, given: str) -> None:
    assert flags(text) == given.split()


def test_files_of_credentials_are_named_and_never_keys() -> None:
    made, variables = read_options(["credentials=/etc/fusefs/keys", "home=/root"])
    assert (made, variables) == (
        [],
        {"AWS_SHARED_CREDENTIALS_FILE": "/etc/fusefs/keys", "HOME": "/root"},
    )


@pytest.mark.parametrize(
    "option",
    [
        "suid",
        "dev",
        "cache-siz=1",
        "cache_size",
        "allow_other=perhaps",
        "sync",
        "foreground",
        "foreground=true",
        "no_delete=false",
    ],
)
def test_what_cannot_be_had_is_refused(option: str) -> None:
    with pytest.raises(OptionError):
        flags(option)


def test_a_sloppy_mount_leaves_out_what_is_unknown() -> None:
    assert flags("suid,ro", is_sloppy=True) == ["--read-only"]


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["s3://bucket"],
        ["s3://b", "/data", "-o"],
        ["a", "b", "c"],
        ["s3://b", "/data", "-ofile_mode=0644,bogus"],
        ["s3://bucket", "/data", "-ocache_size=big"],
    ],
)
def test_a_wrong_command_line_has_mounts_status_for_it(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["mount.fusefs", *arguments])
    assert mount_helper.mount() == mount_helper.USAGE
    assert capsys.readouterr().err.startswith(("mount.fusefs: ", "fusefs: --cache-size: "))


def test_a_list_keeps_its_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "bucket,local:runs/**,auto:a/*"
    commands: list[list[str]] = []
    monkeypatch.setattr(mount_helper.program, "main", lambda line: commands.append(line) or 0)
    options = f"allow_other,durability={text},auto,ro"
    monkeypatch.setattr("sys.argv", ["mount.fusefs", "s3://b", "/data", "-o", options])
    assert mount_helper.mount() == mount_helper.SUCCESS
    flags = ["--allow-other", f"--durability={text}", "--read-only"]
    assert commands == [["mount", "s3://b", "/data", *flags]]


@states(
    "`fusefs warm --shard N` takes the number of its part from `$JOB_COMPLETION_INDEX`, which an "
    "Indexed Job of Kubernetes sets."
)
def test_a_pod_of_an_indexed_job_knows_its_number() -> None:
    assert shard("8", {"JOB_COMPLETION_INDEX": "3"}) == (3, 8)
    assert shard("0/8", {"JOB_COMPLETION_INDEX": "3"}) == (0, 8)


@pytest.mark.parametrize(
    ("text", "index", "why"),
    [
        ("8", None, r"there is no \$JOB_COMPLETION_INDEX; write I/N"),
        ("3", "3", "'3/3' are numbered from 0 to N-1"),
        ("8", "two", "'two/8' is not of the form I/N"),
        ("", "1", "is not of the form I/N"),
        ("1/2/3", None, "is not of the form I/N"),
        ("-1/2", None, "is not of the form I/N"),
        ("2/2", None, "are numbered from 0 to N-1"),
    ],
)
def test_what_is_no_shard_is_refused(text: str, index: str | None, why: str) -> None:
    environment = {} if index is None else {"JOB_COMPLETION_INDEX": index}
    with pytest.raises(ValueError, match=why):
        shard(text, environment)


class Terminal(io.StringIO):
    """Standard error as a terminal."""

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return 2


@pytest.mark.parametrize("columns", [20, 200, 0])
def test_progress_stays_on_one_line_of_the_terminal(
    columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(os, "get_terminal_size", lambda _fd: os.terminal_size((columns, 24)))
    polling.show_line("41%, 3.1 of 7.5 GiB, 1,234 of 5,678 files")
    polling.show_line("")
    shown, cleared = terminal.getvalue().strip("\r").split("\r\r")
    assert len(shown) == len(cleared) == (columns or 80) - 1
    assert shown.startswith("41%, 3.1 of 7.5")
    assert not cleared.strip()
