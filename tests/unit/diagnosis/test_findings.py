"""What checks find where nothing is mounted and no server is needed."""

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from unittest.mock import Mock

import pytest
import trio

from fusefs.diagnosis import bucket, cache_disk, credentials, findings, machine, network
from fusefs.diagnosis.findings import Finding, Level
from fusefs.settings.mount import MountSettings, RawValue, build
from fusefs.store.errors import (
    AccessDeniedError,
    CredentialsError,
    NotFoundError,
    StoreError,
    ThrottledError,
    UnreachableError,
)
from fusefs.store.interface import ObjectInfo
from fusefs.store.s3.settings import S3Settings


def settings(cache: Path, **changes: str) -> MountSettings:
    texts = {"source": "s3://bucket", "mountpoint": "/nonexistent", "cache_dir": str(cache)}
    return build({name: RawValue(text, name) for name, text in {**texts, **changes}.items()})


def by_check(found: list[Finding]) -> dict[str, Finding]:
    return {finding.check: finding for finding in found}


@pytest.mark.parametrize(
    ("release", "level", "has_resend"),
    [
        ("6.18.2-amd64", Level.OK, True),
        ("6.12.0", Level.ADVICE, True),
        ("6.1.0-18-cloud", Level.ADVICE, False),
        ("strange", Level.ADVICE, False),
    ],
)
def test_features_follow_from_the_kernels_version(
    release: str, level: Level, has_resend: bool
) -> None:
    found = machine.kernel(release)
    assert (found.level, found.figures["resend"]) == (level, has_resend)


def test_a_cache_directory_is_checked_before_it_exists(tmp_path: Path) -> None:
    found = by_check(list(cache_disk.check(settings(tmp_path / "not" / "there"))))
    assert str(tmp_path) in found["cache disk"].text
    assert found["cache speed"].figures["write_bytes_per_second"] > 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("place", "why"), [("file/below", "is not a directory"), ("x" * 300, "File name too long")]
)
def test_a_cache_directory_that_can_be_none_is_no_broken_disk(
    tmp_path: Path, place: str, why: str
) -> None:
    (tmp_path / "file").touch()
    found = by_check(list(cache_disk.check(settings(tmp_path / place))))
    assert found["cache disk"].level is Level.PROBLEM
    assert why in found["cache disk"].text
    assert "cache room" not in found


def test_a_disk_without_room_is_a_problem(tmp_path: Path) -> None:
    found = by_check(list(cache_disk.check(settings(tmp_path, min_free="900TiB"))))
    assert found["cache room"].level is Level.PROBLEM
    assert "--min-free" in found["cache room"].advice


def test_a_disk_that_the_cache_itself_has_filled_is_no_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = 100  # of 1000 blocks of 1 KiB, and of 1000 inodes
    full = os.statvfs_result((1024, 1024, 1000, free, free, 1000, free, free, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda _path: full)
    made = settings(tmp_path, min_free="10%")
    disk = cache_disk.check(made, cached_bytes=600 << 10, cached_files=600)
    found = by_check(list(disk))
    for name in ("cache room", "cache inodes"):
        assert found[name].level is Level.ADVICE
        assert "evicts" in found[name].text
    others = by_check(list(cache_disk.check(made)))
    assert others["cache room"].level is others["cache inodes"].level is Level.PROBLEM


@pytest.mark.parametrize("host", ["nothing.invalid", "a" * 64, "\udcff", "a..b"])
def test_a_host_without_an_address_is_a_problem(host: str) -> None:
    s3 = S3Settings("bucket", endpoint_url=f"http://{host}", anonymous=True)
    found = by_check(list(network.check(s3)))
    assert found["DNS"].level is Level.PROBLEM
    assert found["connection"].level is Level.PROBLEM
    assert found["clock"].level is Level.SKIPPED


@pytest.mark.parametrize(
    ("process", "text", "remedy"),
    [
        ("", "no AWS credentials were found", "AWS_ACCESS_KEY_ID"),
        ("sh -c 'echo no ticket >&2; exit 3'", "no ticket", "correct this"),
        ("sleep 30", "the provider of the credentials does not answer", "credential_process"),
    ],
)
def test_credentials_that_are_missing_or_not_given_out_are_a_problem_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, process: str, text: str, remedy: str
) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    config = tmp_path / "config"
    config.write_text(f"[default]\ncredential_process = {process}\n" if process else "")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setattr("fusefs.store.s3.access.SOURCE_LIMIT_S", 2.0)
    found, access = credentials.check(S3Settings("bucket", endpoint_url="http://127.0.0.1:9"))
    assert access is None
    assert found.level is Level.PROBLEM
    assert text in found.text
    assert remedy in found.advice


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (AccessDeniedError("access denied"), "allow s3:ListBucket"),
        (CredentialsError("the credentials have expired"), "renew or correct the credentials"),
        (ThrottledError("S3 asks to slow down"), "the store refuses further requests"),
        (UnreachableError("S3 failed with status 500"), "check the state of the store"),
        (StoreError("the bucket is in another region: set --region"), "correct what the sentence"),
        (StoreError("there is no such bucket"), "correct what the sentence names"),
    ],
)
def test_what_to_do_follows_from_the_cause(error: StoreError, remedy: str) -> None:
    found = bucket._refused("list", error)
    assert found.advice.startswith(remedy)
    assert remedy.startswith("allow") or "s3:" not in found.advice


async def test_what_was_not_written_says_nothing_about_reading_it() -> None:
    async def missing() -> None:
        raise NotFoundError("there is no such object")

    assert (await bucket._tried("get", missing)).level is Level.SKIPPED


def test_the_validity_of_temporary_credentials_is_found() -> None:
    class Renewed:
        def refresh_needed(self, refresh_in: int) -> bool:
            return refresh_in > 1234

    assert credentials.remaining_s(Renewed()) == 1235
    assert credentials.remaining_s(object()) is None


def test_keys_of_the_environment_that_expire_are_not_said_to_be_renewed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # As `aws configure export-credentials --format env` has them.
    for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "SESSION_TOKEN"):
        monkeypatch.setenv(f"AWS_{name}", "AKIAEXAMPLE")
    end = datetime.now(UTC) + timedelta(minutes=90)
    monkeypatch.setenv("AWS_CREDENTIAL_EXPIRATION", end.isoformat())
    finding, access = credentials.check(S3Settings("bucket", endpoint_url="http://localhost:1"))
    assert access is not None
    assert finding.level is Level.ADVICE
    assert "valid for 1 h" in finding.text
    assert "not renewed" in finding.text


def test_only_a_problem_makes_the_command_fail() -> None:
    good = [
        findings.ok("a", "fine"),
        findings.advice("b", "slow", "buy"),
        findings.skipped("c", ""),
    ]
    assert not findings.has_problem(good)
    assert findings.has_problem([*good, findings.problem("d", "broken", "repair")])
    assert findings.summary(good) == "0 problems, 1 piece of advice"
    assert good[1].as_text().splitlines()[1].strip() == "-> buy"


async def test_the_throughput_takes_no_more_than_the_documents_say() -> None:
    requested = 0

    async def download(_version: object, start: int, stop: int, _sink: object) -> None:
        nonlocal requested
        requested += stop - start
        await trio.lowlevel.checkpoint()  # all readers have begun when the first has ended

    await bucket._throughput(Mock(download=download), ObjectInfo("a", 40 << 20, '"etag"', 0))
    assert requested == bucket.MOST_BYTES
