"""The options of /etc/fstab, as mount.fusefs takes them."""

from __future__ import annotations

import pytest

from fusefs import mount_helper
from fusefs.mount_helper import OptionError, read_options


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
        "noexec",
        "suid",
        "dev",
        "cache-siz=1",
        "cache_size",
        "allow_other=perhaps",
        "sync",
        "user",
        "users",
        "foreground",
        "foreground=true",
        "no_delete=false",
    ],
)
def test_what_cannot_be_had_is_refused(option: str) -> None:
    with pytest.raises(OptionError):
        flags(option)


def test_a_sloppy_mount_leaves_out_what_is_unknown() -> None:
    assert flags("noexec,ro", is_sloppy=True) == ["--read-only"]


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
