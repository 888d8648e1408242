"""The secrets of a cluster cache: read from files by who mounts, handed over in memory."""

from pathlib import Path

import pytest

from fusefs.cluster_cache import access
from fusefs.cluster_cache.cluster_cache import ClearJob
from fusefs.settings.mount import MountSettings, RawValue, build

CREDENTIALS = """
[default]
aws_access_key_id = AKIA1
aws_secret_access_key = secret
[other]
aws_access_key_id = AKIA2
"""


def settings_with(**texts: object) -> MountSettings:
    given = {"source": "s3://bucket", "mountpoint": "/mnt", "cluster_cache": "s3://near/blocks"}
    given |= {name: str(text) for name, text in texts.items()}
    return build({name: RawValue(text, f"--{name}") for name, text in given.items()})


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_the_secrets_are_what_the_files_have(tmp_path: Path) -> None:
    key = write(tmp_path / "key", b"\x00sixteen bytes, and more\n")
    keys = write(tmp_path / "keys", CREDENTIALS)
    settings = settings_with(cluster_cache_key=key, cluster_cache_credentials=keys)
    assert access.key(settings) == b"\x00sixteen bytes, and more"
    assert access.credentials(settings) == {
        "AWS_ACCESS_KEY_ID": "AKIA1",
        "AWS_SECRET_ACCESS_KEY": "secret",
    }


def test_what_is_handed_over_is_used_where_the_files_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = write(tmp_path / "key", b"\xff" * 32)
    keys = write(tmp_path / "keys", CREDENTIALS)
    settings = settings_with(cluster_cache_key=key, cluster_cache_credentials=keys)
    handed = access.read(settings)
    for variable, text in handed.items():
        monkeypatch.setenv(variable, str(write(tmp_path / variable, text)))
    key.unlink()
    keys.unlink()
    assert access.key(settings) == b"\xff" * 32
    found = access.credentials(settings)
    assert found is not None
    assert found["AWS_SECRET_ACCESS_KEY"] == "secret"
    # A daemon hands it on to the keeper that it starts.
    assert access.read(settings) == handed


def test_a_mount_without_files_has_no_key_and_its_own_credentials() -> None:
    settings = settings_with()
    assert access.read(settings) == {}
    assert access.key(settings) == b""
    assert access.credentials(settings) is None


@pytest.mark.parametrize("content", ["", "fifteen bytes..", "\n" * 40, "x" * 5000])
def test_a_key_that_is_too_short_or_too_long_is_refused_without_being_shown(
    tmp_path: Path, content: str
) -> None:
    settings = settings_with(cluster_cache_key=write(tmp_path / "key", content))
    with pytest.raises(access.AccessError, match=r"key: a key has 16 to 4096 bytes$"):
        access.read(settings)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("", "has no profile"),
        ("[other]\naws_access_key_id = a\n", "has no profile"),
        ("[default]\naws_access_key_id = a\n", "aws_secret_access_key"),
        ("aws_access_key_id = a\n", "has no profile"),
        (b"\xff\xfe", "has no profile"),
    ],
)
def test_credentials_that_are_none_are_refused(
    tmp_path: Path, content: str | bytes, why: str
) -> None:
    settings = settings_with(cluster_cache_credentials=write(tmp_path / "keys", content))
    with pytest.raises(access.AccessError, match=why):
        access.read(settings)


def test_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    settings = settings_with(cluster_cache_key=tmp_path / "none")
    with pytest.raises(access.AccessError, match=r"/none cannot be read: No such file"):
        access.read(settings)


def test_what_could_not_be_removed_is_not_counted_as_removed() -> None:
    clearing = ClearJob()
    clearing.note([("a", 3), ("b", 5)], {"b"})
    clearing.note([("c", 7)], set())
    assert (clearing.blocks, clearing.bytes, clearing.failed) == (2, 10, 1)
