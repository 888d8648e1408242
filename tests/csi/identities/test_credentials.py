"""Who reads a volume, and what its daemon learns of that: files on tmpfs, and no secret beside."""

import json
import os
import stat
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from csi.errors import (
    CsiError,
    FailedPreconditionError,
    InvalidArgumentError,
    ResourceExhaustedError,
    UnavailableError,
)
from csi.identities.cache_domains import CacheDomains
from csi.identities.credentials import ACCOUNT, NAMESPACE, TOKENS, CredentialFiles, Identity, choose
from csi.node.mount_record import MountRecord, MountRecords
from csi.volume.options import read_options
from csi.volume.stores import StoreSettings
from fusefs.settings.mount import MountSettings
from fusefs.settings.types import MountSource

ROLE = "arn:aws:iam::123456789012:role/reader"
STORE = StoreSettings("main", "http://s3:1", sts_url="http://sts:1")
KEYS = {"accessKeyId": "AKIA", "secretAccessKey": "very-secret"}
TOKEN_JSON = json.dumps({"sts.amazonaws.com": {"token": "the.jwt.token"}})
NO_OPTIONS = read_options({}, (), is_inline=False)
POD = {NAMESPACE: "team", ACCOUNT: "trainer"}


def chosen(
    secrets: dict[str, str] | None = None,
    context: dict[str, str] | None = None,
    *,
    role: str | None = None,
    store: StoreSettings = STORE,
    is_inline: bool = False,
    is_anonymous: bool = False,
) -> Identity:
    options = replace(NO_OPTIONS, role_arn=role, is_anonymous=is_anonymous)
    return choose(secrets or {}, context or {}, options, store, is_inline=is_inline)


def test_the_same_keys_are_the_same_identity_and_others_are_not() -> None:
    one = chosen(KEYS)
    assert chosen(dict(KEYS)).proof == one.proof
    assert chosen({**KEYS, "secretAccessKey": "other"}).proof != one.proof
    assert "very-secret" not in repr(one)


def test_a_fresh_token_is_the_same_identity_and_another_account_is_not() -> None:
    fresh = json.dumps({"sts.amazonaws.com": {"token": "fresh"}})
    one = chosen({TOKENS: TOKEN_JSON}, POD, role=ROLE)
    assert chosen({TOKENS: fresh}, POD, role=ROLE).proof == one.proof
    other = POD | {ACCOUNT: "other"}
    assert chosen({TOKENS: fresh}, other, role=ROLE).proof != one.proof


@pytest.mark.parametrize(
    "tokens",
    [
        "",
        "{",
        "[]",
        '{"sts.amazonaws.com": 1}',
        '{"other": {"token": "x"}}',
        '{"sts.amazonaws.com": {"token": "a\\nb"}}',
    ],
)
def test_a_missing_token_is_reported(tokens: str) -> None:
    with pytest.raises(FailedPreconditionError, match=r"tokenRequests"):
        chosen({TOKENS: tokens}, POD, role=ROLE)


def test_a_pod_identity_is_its_accounts_and_names_it() -> None:
    token = json.dumps({"pods.eks.amazonaws.com": {"token": "the.jwt.token"}})
    options = replace(NO_OPTIONS, has_pod_identity=True)
    identity = choose({TOKENS: token}, POD, options, StoreSettings("aws"), is_inline=True)
    assert identity.who == "EKS Pod Identity of team/trainer"
    assert (identity.token, identity.has_pod_identity) == ("the.jwt.token", True)
    other = choose(
        {TOKENS: token}, POD | {ACCOUNT: "other"}, options, StoreSettings("aws"), is_inline=True
    )
    assert other.proof != identity.proof


def test_one_volume_has_one_identity() -> None:
    with pytest.raises(InvalidArgumentError, match="exclude"):
        chosen(KEYS, is_anonymous=True)
    with pytest.raises(InvalidArgumentError, match="exclude"):
        chosen({**KEYS, TOKENS: TOKEN_JSON}, POD, role=ROLE)


def test_a_key_cannot_add_lines_to_the_file() -> None:
    with pytest.raises(InvalidArgumentError):
        chosen({**KEYS, "secretAccessKey": "x\n[other]\ny = z"})


def test_keys_are_in_a_file_for_the_daemons_user_alone(tmp_path: Path) -> None:
    files = CredentialFiles(tmp_path)
    files.store("mount", chosen(KEYS), 12345)
    path = Path(files.environment("mount", chosen(KEYS), STORE)["AWS_SHARED_CREDENTIALS_FILE"])
    found = path.stat()
    assert (found.st_uid, stat.S_IMODE(found.st_mode)) == (12345, 0o600)
    assert path.parent.stat().st_uid == 0
    assert "very-secret" in path.read_text()
    files.remove("mount")
    assert list(tmp_path.iterdir()) == []


def test_the_environment_names_files_and_no_secret(tmp_path: Path) -> None:
    files = CredentialFiles(tmp_path)
    role = chosen({TOKENS: TOKEN_JSON}, POD, role=ROLE)
    files.store("role", role, 12345)
    variables = files.environment("role", role, STORE)
    assert variables["AWS_ENDPOINT_URL_STS"] == "http://sts:1"
    at_aws = files.environment("role", role, StoreSettings("aws"), is_fips=True)
    assert at_aws["AWS_USE_FIPS_ENDPOINT"] == "true"
    assert "AWS_USE_FIPS_ENDPOINT" not in files.environment("role", role, STORE, is_fips=True)
    assert Path(variables["AWS_WEB_IDENTITY_TOKEN_FILE"]).read_text() == "the.jwt.token"
    for identity in (role, chosen(KEYS)):
        environment = str(files.environment("mount", identity, STORE))
        assert "the.jwt.token" not in environment
        assert "very-secret" not in environment


def test_files_of_a_newer_driver_go_with_their_mount(tmp_path: Path) -> None:
    files = CredentialFiles(tmp_path / "files")
    files.store("mount", chosen(KEYS), 12345)
    (tmp_path / "files/mount/unknown").write_text("later")
    for _ in range(2):
        files.remove("mount")
    assert list((tmp_path / "files").iterdir()) == []


def test_domains_have_uids_of_their_own_and_keep_them(tmp_path: Path) -> None:
    domains = CacheDomains(tmp_path / "cache", 2000, 2001)
    one, other = (domains.claim(domains.name_of("domain", part)) for part in "ab")
    assert {one.uid, other.uid} == {2000, 2001}
    again = CacheDomains(tmp_path / "cache", 2000, 2001)
    assert again.claim(again.name_of("domain", "b")) == other
    found = other.directory.stat()
    assert (found.st_uid, stat.S_IMODE(found.st_mode)) == (other.uid, 0o700)
    with pytest.raises(ResourceExhaustedError) as error:
        again.claim(again.name_of("domain", "c"))
    assert isinstance(error.value, CsiError)
    assert os.stat(tmp_path / "cache" / "identity.key").st_mode & 0o077 == 0


def test_no_daemons_user_can_keep_others_from_their_domains(public_path: Path) -> None:
    cache = public_path / "cache"
    CacheDomains(cache, 2000, 2001)
    (cache / "lock").chmod(0o644)  # as earlier drivers left it
    domains = CacheDomains(cache, 2000, 2001)
    domains.claim(domains.name_of("domain", "a"))
    # Any user who can open a file can lock it, for reading alone as well.
    command = ["flock", "--nonblock", os.fspath(cache / "lock"), "true"]
    done = subprocess.run(command, user=2000, group=2000, check=False, capture_output=True)
    assert b"Permission denied" in done.stderr


def test_a_domain_that_was_half_made_is_finished(tmp_path: Path) -> None:
    domains = CacheDomains(tmp_path, 2000, 2001)
    name = domains.name_of("domain", "a")
    (tmp_path / name).mkdir(mode=0o700)
    assert domains.claim(name).uid == 2000


def test_no_domain_gets_the_user_of_another_ones_mounts(tmp_path: Path) -> None:
    mounts: dict[str, int] = {}
    old, new = (
        CacheDomains(tmp_path / disk, 2000, 2002, lambda: mounts) for disk in ("old", "new")
    )
    first, later = (disk.name_of("domain") for disk in (old, new))
    mounts[first] = old.claim(first).uid
    # The disk of the caches is another one now, and the pods go on.
    assert new.claim(later).uid not in mounts.values()
    # A resumed mount has its user again, and so has the domain where its cache was removed.
    assert new.claim(first).uid == mounts[first]
    # And back again.
    mounts[later] = mounts.pop(first)
    with pytest.raises(UnavailableError, match="have to end first"):
        old.claim(first)
    mounts.clear()
    assert old.claim(first).uid == 2000


def test_the_user_of_a_mount_whose_settings_cannot_be_read_is_taken_as_well(tmp_path: Path) -> None:
    readable = MountSettings(
        source=MountSource("bucket"), mountpoint=Path("/mnt"), cache_dir=Path("/cache/domain")
    ).as_texts()
    records = MountRecords(tmp_path)
    found: list[Any] = [None, {}, 7, {"cache_dir": 7}, readable]
    for uid, settings in enumerate(found):
        key = f"key-{uid}"
        record = MountRecord(key, "volume", "/root", "s3://b", "me", uid, "", settings, 0.0)
        records.write(key, record)
    users = {"?key-0": 0, "?key-1": 1, "?key-2": 2, "?key-3": 3, "domain": 4}
    assert records.uids_of_domains() == users


def test_names_depend_on_every_part_and_its_bounds(tmp_path: Path) -> None:
    domains = CacheDomains(tmp_path, 2000, 2001)
    assert domains.name_of("ab", "c") != domains.name_of("a", "bc")
    assert domains.name_of("a", "b") == domains.name_of("a", "b")
