"""Settings: one definition, read from flags, environment, file and JSON."""

import argparse
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusefs.cli import main
from fusefs.cli import mount as mount_command
from fusefs.cli.parser import make_parser
from fusefs.daemon import setup
from fusefs.settings import sources
from fusefs.settings.mount import SETTINGS, MountSettings, RawValue, SettingsError, build
from fusefs.settings.sources import from_config, from_environment, mistyped
from fusefs.settings.types import (
    GIB,
    MIB,
    Addressing,
    Durability,
    MinFree,
    MountSource,
    Setting,
    format_duration,
    format_size,
    parse_duration,
    parse_size,
    parse_source,
)

MOUNT = {
    "source": RawValue("s3://bucket/some/prefix", "SOURCE"),
    "mountpoint": RawValue("/mnt/data", "MOUNTPOINT"),
}


def settings_with(**texts: str) -> MountSettings:
    return build({name: RawValue(text, "--" + name) for name, text in texts.items()}, MOUNT)


def config_file(directory: Path, text: str) -> Path:
    path = directory / "fusefs.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4096", 4096),
        ("50GiB", 50 * GIB),
        ("50Gi", 50 * GIB),
        ("1.5TB", 1_500_000_000_000),
        (" 10 MiB ", 10 * MIB),
        ("0", 0),
        ("1kB", 1000),
    ],
)
def test_a_size_is_read(text: str, size: int) -> None:
    assert parse_size(text) == size


AMBIGUOUS = r"is ambiguous; write 50GiB .* or 50GB"


@pytest.mark.parametrize("text", ["", "GiB", "-1", "5XB", "1e3", "1,5TB", "ten", "50G", "50 g"])
def test_a_size_that_is_none_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match=AMBIGUOUS if "50" in text else "write it like 50GiB"):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "path", "mode"),
    [
        ("bucket", "a", "bucket"),
        ("local:runs/**", "other/a", "auto"),
        ("local:runs/**", "runs/a/b", "local"),
        ("local:runs/", "runs/a/b", "local"),
        ("local:runs", "runs2/a", "auto"),
        ("bucket, local:runs/*/log", "runs/1/log", "local"),
        ("bucket,local:runs/*/log", "runs/1/2/log", "bucket"),
        ("local:**/*.log", "a.log", "local"),
        ("local:**/*.log", "a/b/.hidden/.c.log", "local"),
        ("local:**", ".git/config", "local"),
        ("local:runs/**,bucket:runs/*/final,auto", "runs/1/final", "bucket"),
        ("bucket:runs/*/final,local:runs/**,auto", "runs/1/final", "local"),
    ],
)
def test_the_last_pattern_that_matches_decides_on_durability(
    text: str, path: str, mode: str
) -> None:
    rules = settings_with(durability=text).durability
    assert rules.of(path) == mode
    assert (Durability.LOCAL in rules.values) == ("local" in text)
    assert settings_with(durability=rules.shown()).durability == rules


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("disk", "'disk' is none of auto, bucket, local"),
        ("", "'' is none of"),
        ("runs/**:local", "'runs/\\*\\*' is none of"),
        ("bucket,local", "2 values without a pattern"),
        ("local:", "'' is not a pattern"),
        ("local:/runs/**", "'/runs/\\*\\*' is not a pattern of paths below the mount"),
        ("local:runs/../a", "is not a pattern"),
        ("local:runs**", "is not a pattern"),
        ("local:a\nb", "is not a pattern"),
    ],
)
def test_a_wrong_durability_is_one_clear_line(text: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message) as caught:
        settings_with(durability=text)
    assert str(caught.value).startswith("--durability: ")
    assert "\n" not in str(caught.value)


def test_a_metadata_ttl_is_that_of_the_path() -> None:
    ttl = settings_with(metadata_ttl="60s,indefinite:frozen/**,1h:data/**").metadata_ttl
    found = [ttl.of(path) for path in ("", "runs", "data", "data/a", "frozen/a/b")]
    assert found == [60, 60, 3600, 3600, math.inf]
    for wrong in ("soon", "1s,2s", "1s:../x", "1h:"):
        with pytest.raises(SettingsError, match=r"^--metadata.ttl: "):
            settings_with(metadata_ttl=wrong)


@given(st.integers(min_value=0, max_value=2**62))
def test_a_size_is_shown_as_text_that_reads_the_same(size: int) -> None:
    assert parse_size(format_size(size)) == size


@pytest.mark.parametrize(
    ("text", "seconds"), [("60s", 60), ("500ms", 0.5), ("5m", 300), ("2h", 7200), ("7", 7)]
)
def test_a_duration_is_read(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@given(st.floats(min_value=0, max_value=1e9))
def test_a_duration_is_shown_as_text_that_reads_the_same(seconds: float) -> None:
    assert parse_duration(format_duration(seconds)) == seconds


@pytest.mark.parametrize(
    ("url", "prefix"),
    [
        ("s3://bucket", ""),
        ("s3://bucket/", ""),
        ("s3://bucket/a", "a/"),
        ("s3://bucket/a/b/", "a/b/"),
        ("S3://bucket/a b", "a b/"),
    ],
)
def test_a_prefix_is_empty_or_ends_with_a_slash(url: str, prefix: str) -> None:
    assert parse_source(url) == MountSource("bucket", prefix)


@pytest.mark.parametrize(
    ("message", "urls"),
    [
        (
            "write it like s3://bucket",
            ["bucket", "http://b/a", "s3://", "s3:///a", "s3:/b", ""],
        ),
        (
            "is not an S3 key",
            [f"s3://bucket/{prefix}" for prefix in ("a\0b", "\udcff", "x" * 1024)],
        ),
    ],
)
def test_a_source_that_is_none_is_refused(message: str, urls: list[str]) -> None:
    for url in urls:
        with pytest.raises(ValueError, match=message):
            parse_source(url)


def test_the_floor_is_a_share_of_the_disk_or_a_size() -> None:
    assert settings_with(min_free="10%").min_free.bytes_of(500) == 50
    assert settings_with(min_free="50GiB").min_free.bytes_of(100 * GIB) == 50 * GIB
    assert MinFree(size=50 * GIB).bytes_of(GIB) == GIB


def test_a_wait_has_an_end_that_can_be_waited_for() -> None:
    assert settings_with(retry_time="10d", max_pause="10d").max_pause == 864_000
    for name in ("retry_time", "max_pause", "hang_timeout"):
        with pytest.raises(SettingsError, match="is too long; the most is 10d"):
            settings_with(**{name: "11d"})


NOT_A_FLOOR = "write it like 10% or 50GiB"
NOT_AN_ENDPOINT = "is not an endpoint"
# What is said of wrong texts of a setting.
REFUSED = {
    ("cache_size", "the most is 8191PiB"): ["9" * 5000, f"{'9' * 5000}.5kB", "8192PiB", f"{2**63}"],
    ("min_free", NOT_A_FLOOR): ["100%", "-1%", "x%", "10%%", "10%5"],
    ("hang_timeout", "'0s' is too small; the least is 2s"): ["0s"],
    ("retry_time", "is not a duration"): ["indefinite"],
    ("file_mode", "three octal digits"): ["0888"],
    ("session", "none of auto, kernel, pyfuse3"): ["fast"],
    ("max_connections", "whole number from 1 to 1024"): ["0", "2000", "many", "-1", "1.5"],
    ("memory_limit", "the least is 112MiB"): ["1MiB"],
    ("kms_key", "is not a KMS key"): ["", "ключ", "a b", "a\nb", "a\x7fb"],
    ("endpoint_url", "no user or password"): ["http://key:secret@localhost:9000"],
    ("endpoint_url", NOT_AN_ENDPOINT): ["localhost:9000", "ftp://host", "http://", "s3.example"],
    ("endpoint_url", "not an endpoint"): ["http://host:99999", "http://host:0", "http://h:port"],
    ("endpoint_url", "write it like https"): ["http://[::1", "http://h/?x=1", "http://h/#x"],
    ("cache_dir", "no name has a NUL"): ["/a\0b"],
    ("log_file", "there is no such user"): ["~no-such-user/log"],
    ("user", "characters that no name has"): ["a\0b"],
    ("region", "characters that no name has"): ["a\nb"],
}


@pytest.mark.parametrize(
    ("name", "message", "text"), [(*key, text) for key, texts in REFUSED.items() for text in texts]
)
def test_a_wrong_text_is_refused_with_what_is_wrong(name: str, message: str, text: str) -> None:
    with pytest.raises(SettingsError, match=rf"^--{name}: .*{message}"):
        settings_with(**{name: text})


@pytest.mark.parametrize(
    ("limit", "most", "streams"),
    [("256MiB", "32", 32), ("160MiB", "32", 16), ("160MiB", "8", 8), ("112MiB", "32", 4)],
)
def test_as_much_is_downloaded_at_a_time_as_the_memory_allows(
    limit: str, most: str, streams: int
) -> None:
    settings = settings_with(memory_limit=limit, max_connections=most)
    assert setup.s3_settings(settings).max_streams == streams


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ({"anonymous": "true", "profile": "work"}, r"^--profile: an anonymous mount"),
        ({"cache_dir": "/mnt/data"}, "below the mountpoint"),
        ({"cache_dir": "/mnt/data/cache"}, "below the mountpoint"),
        ({"cluster_cache": "s3://near", "customer_key": "/key"}, "stored nowhere else"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    texts: dict[str, str], message: str
) -> None:
    with pytest.raises(SettingsError, match=message):
        settings_with(**texts)


def test_a_flag_wins_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    config = config_file(
        tmp_path, 'cache-size = "1GiB"\nmetadata-ttl = "1s"\nregion = "from-file"\n'
    )
    environment = from_environment(
        {"FUSEFS_CACHE_SIZE": "2GiB", "FUSEFS_METADATA_TTL": "2s", "HOME": "/root"}
    )
    flags = {**MOUNT, "cache_size": RawValue("3GiB", "--cache-size")}

    settings = build(flags, environment, from_config(config))

    assert settings.cache_size == 3 * GIB
    assert settings.metadata_ttl.otherwise == 2
    assert settings.region == "from-file"
    assert settings.addressing is Addressing.AUTO


SAMPLES = {
    "SIZE": "640MiB",
    "SIZE|N%": "7GiB",
    "TIME": "7s",
    "N": "5",
    "PATH": "/some/where",
    "URL": "http://host:9000",
    "s3://BUCKET[/PREFIX]": "s3://near/blocks",
    "NAME": "word",
    "KEY": "alias/word",
    "MODE": "0640",
    "MODE[:PATTERN],…": "bucket,local:runs/**",
    "TIME[:PATTERN],…": "7s,indefinite:data/**",
    "": "true",
}


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    return make_parser()


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_every_setting_is_a_flag_a_variable_and_a_key_of_the_file(
    setting: Setting, tmp_path: Path, parser: argparse.ArgumentParser
) -> None:
    text = SAMPLES.get(setting.type.metavar) or setting.type.metavar.split("|")[-1]
    config = str(config_file(tmp_path, f'{setting.key} = "{text}"'))
    flag = [setting.flag] if setting.is_switch else [setting.flag, text]
    ways: list[tuple[list[str], dict[str, str]]] = [
        (flag, {}),
        ([], {setting.variable: text}),
        (["--config", config], {}),
        ([], {"FUSEFS_CONFIG": config}),
    ]
    without, wanted = build(MOUNT), settings_with(**{setting.name: text})
    assert getattr(wanted, setting.name) != getattr(without, setting.name)
    for arguments, environment in ways:
        command = ["mount", "s3://bucket/some/prefix", "/mnt/data", *arguments]
        assert mount_command.settings(parser.parse_args(command), environment) == wanted


def test_help_shows_every_option_in_its_group(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main.main(["mount", "--help"])
    assert ended.value.code == 0
    _, *sections = re.split(r"^(\S.*):$", capsys.readouterr().out, flags=re.MULTILINE)
    shown = dict(zip(sections[::2], sections[1::2], strict=True))
    for setting in SETTINGS:
        assert re.search(rf"^  {setting.flag}\b", shown[setting.group], re.MULTILINE), setting.name
        assert setting.help, setting.name
        assert setting.default not in ("", "None"), setting.name


def test_a_mistyped_variable_is_named_with_a_guess() -> None:
    environment = {
        "FUSEFS_CACHE_SIZ": "1GiB",
        "FUSEFS_READONLY": "true",
        "FUSEFS_CACHE_DIR": "/x",
        "FUSEFS_CONFIG": "/y",
        "FUSEFS_SOMETHING_ELSE": "1",
        "CACHE_SIZ": "1",
    }
    assert list(mistyped(environment)) == [
        "FUSEFS_CACHE_SIZ is no setting, and ignored; did you mean FUSEFS_CACHE_SIZE?",
        "FUSEFS_READONLY is no setting, and ignored; did you mean FUSEFS_READ_ONLY?",
    ]


def test_an_empty_variable_is_unset() -> None:
    assert from_environment({"FUSEFS_CACHE_SIZE": ""}) == {}


def test_a_table_is_for_the_mount_of_its_name_and_the_machines_file_is_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_file(
        tmp_path,
        'cache-size = "1GiB"\nregion = "eu-1"\n["/data"]\nsource = "s3://b"\n'
        'cache-size = "2GiB"\n["/other"]\nread-only = true\n',
    )
    monkeypatch.setattr(sources, "DEFAULT_CONFIG", config)
    found = sources.config_of(None, {}, "/data")
    assert {name: value.text for name, value in found.items()} == {
        "cache_size": "2GiB",
        "region": "eu-1",
    }
    assert "read_only" in sources.config_of(None, {}, "/other")
    assert sources.config_of(None, {}, "/third")["cache_size"].text == "1GiB"
    other = config_file(tmp_path, 'region = "us-2"')
    assert sources.config_of(None, {"FUSEFS_CONFIG": str(other)})["region"].text == "us-2"
    monkeypatch.setattr(sources, "DEFAULT_CONFIG", tmp_path / "none")
    assert sources.config_of(None, {}) == {}


def test_a_file_may_give_numbers_and_truth_values(tmp_path: Path) -> None:
    config = config_file(
        tmp_path, "cache-size = 4096\nmetadata-ttl = 0.5\nmax-connections = 8\nanonymous = true\n"
    )
    settings = build(MOUNT, from_config(config))
    assert settings.cache_size == 4096
    assert settings.metadata_ttl.otherwise == 0.5
    assert settings.max_connections == 8
    assert settings.anonymous


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('cache-size = "big"', r"fusefs\.toml: cache-size: 'big' is not a size"),
        ('cache_sise = "1GiB"', "did you mean cache-size"),
        ("file-mode = 420", "has the wrong type"),
        ("region = 1", "has the wrong type"),
        ("anonymous = 1", "has the wrong type"),
        ("uid = [1]", "has the wrong type"),
        (f"cache-size = 0x{'f' * 6000}", "cache-size: Exceeds the limit"),
        (f"cache-size = {'9' * 5000}", "is not TOML: Exceeds the limit"),
        ("cache-size", "is not TOML"),
    ],
    ids=range(9),
)
def test_a_wrong_file_is_an_error_that_says_what_is_wrong(
    tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(SettingsError, match=message):
        build(MOUNT, from_config(config_file(tmp_path, text)))


def test_a_file_is_utf_8_whatever_the_locale_is(tmp_path: Path) -> None:
    path = tmp_path / "fusefs.toml"
    path.write_text('profile = "josé"\n', encoding="utf-8")
    code = (
        "import pathlib, sys; from fusefs.settings.sources import from_config;"
        "print(ascii(from_config(pathlib.Path(sys.argv[1]))['profile'].text))"
    )
    shown = subprocess.run(
        [sys.executable, "-X", "utf8=0", "-c", code, path],
        env={**os.environ, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"},
        check=True,
        capture_output=True,
        text=True,
    )
    assert shown.stdout == "'jos\\xe9'\n"


def test_a_file_that_is_missing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="cannot be read: No such file"):
        from_config(tmp_path / "none.toml")


def test_settings_survive_json() -> None:
    settings = settings_with(
        cache_size="50GiB",
        min_free="7.5%",
        metadata_ttl="60s,indefinite:frozen/**",
        durability="bucket,local:runs/**",
        retry_time="100ms",
        file_mode="0600",
        uid="1000",
        log_file="/var/log/x.log",
        session="pyfuse3",
    )
    assert MountSettings.from_texts(settings.as_texts()) == settings


def test_settings_of_another_version_are_left_out_where_they_are_unknown() -> None:
    other = settings_with().as_texts() | {"colour": "red"}
    assert MountSettings.from_texts(other) == settings_with()
    with pytest.raises(SettingsError, match="not texts by their names"):
        MountSettings.from_texts(cast("dict[str, str]", "nonsense"))


@pytest.mark.parametrize("place", ["s3://bucket", "s3://bucket/some", "s3://bucket/some/prefix/x"])
def test_a_cluster_cache_is_no_part_of_what_is_mounted(place: str) -> None:
    with pytest.raises(SettingsError, match="is part of what is mounted"):
        settings_with(cluster_cache=place)
    elsewhere = settings_with(cluster_cache=place, cluster_cache_endpoint="http://near:8333")
    assert elsewhere.cluster_cache is not None
    assert settings_with(cluster_cache="s3://bucket/other").cluster_cache is not None
