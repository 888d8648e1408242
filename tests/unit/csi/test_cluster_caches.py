"""Which volumes have a cluster cache: what the node's file says, and never what a volume says."""

import logging
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from csi import main
from csi.errors import FailedPreconditionError, InvalidArgumentError
from csi.identities.cluster_caches import CacheSecrets, read_cluster_caches
from csi.identities.credentials import CredentialFiles, Identity
from csi.volume.options import read_options
from csi.volume.stores import ConfigurationError

KEYS = "[default]\naws_access_key_id = the-access\naws_secret_access_key = the-secret\n"
KEY = "a-key-of-the-domain"


@pytest.fixture(autouse=True)
def log_levels() -> Iterator[None]:
    """The driver's command sets levels of loggers, which other tests are not to inherit."""
    loggers = [logging.getLogger(name) for name in ("csi", "fusefs")]
    before = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, before, strict=True):
        logger.setLevel(level)


@pytest.fixture
def secrets(tmp_path: Path) -> Path:
    """A directory as a Secret is mounted."""
    directory = tmp_path / "secrets"
    directory.mkdir()
    (directory / "credentials").write_text(KEYS)
    (directory / "key").write_text(KEY + "\n")
    return directory


def written(secrets: Path, domain: str = "training", **changed: str | None) -> Path:
    """The file with one domain; a setting that is None is left out."""
    table: dict[str, str | None] = {
        "url": "s3://cache/training",
        "endpoint": "http://seaweedfs:8333",
        "credentials_file": str(secrets / "credentials"),
        "key_file": str(secrets / "key"),
        **changed,
    }
    path = secrets.parent / "cluster-caches.toml"
    lines = [
        f'{name.replace("_", "-")} = "{text}"' for name, text in table.items() if text is not None
    ]
    path.write_text("\n".join([f'[cluster-caches."{domain}"]', *lines]))
    return path


def test_a_file_maps_domains_to_cluster_caches(secrets: Path) -> None:
    cache = read_cluster_caches(written(secrets)).of("training", is_inline=False)
    assert cache.settings == {
        "cluster_cache": "s3://cache/training",
        "cluster_cache_endpoint": "http://seaweedfs:8333",
    }
    assert cache.secrets() == CacheSecrets(KEYS.encode(), f"{KEY}\n".encode())
    at_aws = read_cluster_caches(written(secrets, endpoint=None)).by_domain["training"]
    assert at_aws.settings == {"cluster_cache": "s3://cache/training"}


def test_volumes_without_a_domain_have_one_if_the_administrator_says_so(secrets: Path) -> None:
    known = read_cluster_caches(written(secrets, "*"))
    assert known.of(None, is_inline=False) is known.by_domain["*"]
    assert known.of("training", is_inline=False) is None
    assert read_cluster_caches(None).of("training", is_inline=False) is None
    # Any author of a pod writes inline volumes, with whatever rights to list.
    assert known.of(None, is_inline=True) is None


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"key_file": None}, "has no key-file"),
        ({"credentials_file": None}, "has no credentials-file"),
        ({"url": None}, "has no url"),
        ({"url": "https://cache"}, r"training\.url"),
        ({"url": "s3://"}, r"training\.url"),
        ({"endpoint": "seaweedfs:8333"}, r"training\.endpoint"),
        ({"endpoint": "http://seaweedfs:8333/path"}, r"training\.endpoint"),
        ({"endpoint": "http://169.254.169.254"}, r"training\.endpoint.*link-local"),
        ({"endpoint": "http://user:word@seaweedfs"}, r"training\.endpoint"),
        ({"key_file": "/no/such/file"}, "/no/such/file"),
        ({"credentials_file": "/no/such/file"}, "/no/such/file"),
        ({"key": "x"}, "there is no such setting"),
    ],
)
def test_a_mapping_that_cannot_be_used_is_refused_in_one_line(
    secrets: Path, changed: dict[str, Any], words: str
) -> None:
    path = written(secrets, **changed)
    with pytest.raises(ConfigurationError, match=words) as caught:
        read_cluster_caches(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text", ["not toml", "[caches.a]", "cluster-caches = 1", "[cluster-caches]\na = 1"]
)
def test_a_file_of_something_else_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "cluster-caches.toml"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=str(path)):
        read_cluster_caches(path)


@pytest.mark.parametrize("domain", ["a/b", "", ".hidden", "**", "x" * 64])
def test_only_what_a_volume_can_name_is_a_domain(secrets: Path, domain: str) -> None:
    with pytest.raises(ConfigurationError, match="no cacheDomain"):
        read_cluster_caches(written(secrets, domain))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("key", "fifteen-bytes--\n"),
        ("key", ""),
        ("credentials", "[other]\naws_access_key_id = very-private\n"),
        ("credentials", "[default]\naws_access_key_id = very-private\n"),
        ("credentials", "very-private"),
    ],
)
def test_the_driver_does_not_start_without_a_usable_secret_and_shows_none(
    secrets: Path, capsys: pytest.CaptureFixture[str], name: str, content: str
) -> None:
    (secrets / name).write_text(content)
    path = written(secrets)
    arguments = ["node", f"--endpoint=unix://{secrets}/csi.sock", "--node-id=n"]
    assert main.main([*arguments, f"--cluster-caches={path}"]) == 2
    errors = capsys.readouterr().err
    assert errors.startswith(f"fusefs-csi: {path}: ")
    assert str(secrets / name) in errors
    assert errors.count("\n") == 1
    assert "very-private" not in errors
    assert not (secrets / "csi.sock").exists()


def test_other_secrets_make_another_mount_and_unusable_ones_none(secrets: Path) -> None:
    cache = read_cluster_caches(written(secrets)).by_domain["training"]
    proofs = [cache.secrets().proof]
    (secrets / "key").write_text("another-key-of-the-domain")
    proofs.append(cache.secrets().proof)
    (secrets / "credentials").write_text(KEYS.replace("the-secret", "another"))
    proofs.append(cache.secrets().proof)
    assert len(set(proofs)) == 3
    assert cache.secrets().proof == proofs[-1]
    assert KEY not in repr(cache.secrets())
    assert "another" not in repr(cache.secrets())
    (secrets / "key").write_text("short")
    with pytest.raises(FailedPreconditionError, match=r"the cluster cache of training: .*key"):
        cache.secrets()


@pytest.mark.root
def test_a_mounts_copies_are_its_users_alone_and_go_with_it(tmp_path: Path) -> None:
    files = CredentialFiles(tmp_path)
    secrets, identity = CacheSecrets(KEYS.encode(), KEY.encode()), Identity("me", ())
    files.store_kept("mount", identity, secrets, 12345)
    settings = files.settings_of("mount", identity, has_cluster_cache=True)
    paths = [Path(text) for text in settings.values()]
    assert [path.read_text() for path in paths] == [KEYS, KEY]
    for path in paths:
        found = path.stat()
        assert (found.st_uid, stat.S_IMODE(found.st_mode)) == (12345, 0o600)
    assert stat.S_IMODE(paths[0].parent.stat().st_mode) == 0o710
    files.remove("mount")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("option", ["", "-endpoint", "-credentials", "-key", "-of-the-future"])
@pytest.mark.parametrize("is_inline", [False, True])
def test_no_volume_chooses_its_cluster_cache(option: str, is_inline: bool) -> None:
    name = f"cluster-cache{option}"
    camel = "".join(part.capitalize() for part in name.split("-"))
    for spelling in (name, camel[0].lower() + camel[1:], name.replace("-", "_")):
        with pytest.raises(InvalidArgumentError, match=f"^{spelling}: .*cacheDomain"):
            read_options({spelling: "s3://mine"}, [], is_inline=is_inline)
        with pytest.raises(InvalidArgumentError, match=f"^mountOptions: {spelling}: .*cacheDomain"):
            read_options({}, [f"ro,{spelling}=s3://mine"], is_inline=is_inline)
