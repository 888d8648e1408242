"""`fusefs doctor` and `fusefs report` on real mounts."""

import json
import os
import signal
import stat
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fusefs.store.capabilities import PROBE_NAME
from tests.support.machine.disks import small_disk
from tests.support.mounting import Mounter, fusefs
from tests.support.servers.buckets import Bucket, keys
from tests.support.servers.faulty_s3 import FaultyS3


def examined(*arguments: object, **environment: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """The exit status, and the findings by the names of the checks."""
    result = fusefs("doctor", *arguments, "--json", environment=environment, check=False)
    assert result.stdout, result.stderr
    answer = json.loads(result.stdout)
    assert answer["is_wrong"] == bool(result.returncode)
    return result.returncode, {finding["check"]: finding for finding in answer["findings"]}


@pytest.fixture
def faults(faulty: FaultyS3) -> Iterator[FaultyS3]:
    yield faulty
    faulty.clear()


def test_a_sound_mount_has_no_problem_and_a_silent_daemon_is_one(
    bucket: Bucket, mounter: Mounter
) -> None:
    bucket.put("a", b"x" * (2 << 20))
    mount = mounter()
    status, found = examined(mount.path)
    assert status == 0, found
    assert found["latency"]["figures"]["median_seconds"] > 0
    assert found["throughput"]["figures"]["bytes"] > 2 << 20
    assert abs(found["clock"]["figures"]["skew_seconds"]) < 30
    assert found["daemon"]["level"] == "ok"
    assert found["credentials"]["figures"] == {"method": "env", "is_temporary": False}

    pid = mount.pid
    os.kill(pid, signal.SIGSTOP)
    try:
        status, found = examined(mount.path)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert status == 1
    assert found["daemon"]["level"] == "problem"
    assert found["list"]["level"] == "ok"  # by the settings that the keeper has


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", 64) as path:
        yield path


def test_a_cache_that_has_filled_its_disk_is_no_problem(
    disk: Path, bucket: Bucket, mounter: Mounter
) -> None:
    for number in range(20):
        bucket.put(f"{number:02}", b"x" * (4 << 20))
    mount = mounter(cache="disk/cache")
    for number in range(20):
        (mount.path / f"{number:02}").read_bytes()
    # As the log of any program on that disk.
    (disk / "log").write_bytes(b"x" * (4 << 20))
    _, found = examined(mount.path)
    assert found["cache room"]["level"] != "problem", found["cache room"]


def test_permissions_are_tried_on_request_and_nothing_is_left(bucket: Bucket) -> None:
    bucket.put("a", b"x")
    where = f"s3://{bucket.name}/some/prefix/", "--endpoint-url", bucket.server.endpoint_url
    examined(*where, **bucket.server.environment)
    assert keys(bucket, with_probes=True) == ["a"]
    _, found = examined(*where, "--permissions", **bucket.server.environment)
    tried = ("put", "get", "copy", "multipart", "delete")
    assert [found[f"may {name}"]["level"] for name in tried] == ["ok"] * len(tried)
    assert keys(bucket, with_probes=True) == ["a"]


def test_what_is_not_allowed_is_a_problem_that_names_the_permission(
    bucket: Bucket, faults: FaultyS3
) -> None:
    bucket.put("a", b"x")
    faults.add("PUT", f"{PROBE_NAME}*", code="AccessDenied")
    where = f"s3://{bucket.name}", "--endpoint-url", faults.endpoint_url
    status, found = examined(*where, "--permissions", **bucket.server.environment)
    assert status == 1
    assert found["may put"]["level"] == "problem"
    assert "s3:PutObject" in found["may put"]["advice"]


def test_a_delete_without_an_answer_is_not_allowed(bucket: Bucket, faults: FaultyS3) -> None:
    faults.add("DELETE", f"{PROBE_NAME}*", stall=True)
    where = f"s3://{bucket.name}", "--endpoint-url", faults.endpoint_url
    status, found = examined(*where, "--permissions", **bucket.server.environment)
    assert (status, found["may delete"]["level"]) == (1, "problem")


def test_a_server_that_is_away_is_a_problem_and_text_says_what_to_do(bucket: Bucket) -> None:
    where = f"s3://{bucket.name}", "--endpoint-url", "http://127.0.0.1:9"
    status, found = examined(*where, **bucket.server.environment)
    assert status == 1
    assert "refused" in found["connection"]["text"]
    assert found["list"]["level"] == "skipped"
    result = fusefs("doctor", *where, environment=bucket.server.environment, check=False)
    assert result.returncode == 1
    assert "-> " in result.stdout
    assert "problem" in result.stdout.splitlines()[-1]
    refused = fusefs("doctor", "/", check=False)
    assert (refused.returncode, refused.stderr) == (
        1,
        "fusefs: / is not a mount of fusefs; fusefs status lists them\n",
    )


TOKEN = "planted-session-token-0123456789"
PASSWORD = "planted-password"


def reported(path: Path, *arguments: object, **environment: str) -> dict[str, str]:
    """The texts of a report, by their names without the first directory."""
    fusefs("report", "--output", path, *arguments, environment=environment)
    with tarfile.open(path) as tar:
        return {
            member.name.partition("/")[2]: tar.extractfile(member).read().decode()  # type: ignore[union-attr]
            for member in tar
        }


def test_reports_of_one_mount_have_everything_and_no_secret(
    bucket: Bucket, mounter: Mounter, tmp_path: Path
) -> None:
    """As it is, and of a daemon that does not answer."""
    mount = mounter()
    secret = bucket.server.secret_key
    with mount.log.open("a") as log:  # what it should never say
        log.write(f"x-amz-security-token: {TOKEN}\n")
        log.write(f"proxy http://user:{PASSWORD}@proxy:3128 refused\n")
        log.write(f"a request signed with {secret}\n")
    path = tmp_path / "fusefs-report.tar.gz"
    texts = reported(path, mount.path, **bucket.server.environment)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert json.loads(texts["versions.json"])["packages"]["trio"]
    assert json.loads(texts["mount-1/status.json"])["mountpoint"] == str(mount.path)
    assert json.loads(texts["mount-1/status.json"])["keeper"]["daemon"] == mount.pid
    assert json.loads(texts["mount-1/settings.json"])["endpoint_url"]
    assert "serving s3://" in texts["mount-1/log"]
    for planted in (TOKEN, PASSWORD, secret):
        assert not [name for name, text in texts.items() if planted in text]

    pid = mount.pid
    os.kill(pid, signal.SIGSTOP)
    try:
        texts = reported(tmp_path / "silent.tar.gz", mount.path)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert json.loads(texts["mount-1/status.json"])["not_answering"]
    assert json.loads(texts["mount-1/settings.json"])["source"]


def test_an_existing_file_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "there"
    path.write_text("mine")
    result = fusefs("report", "--output", path, check=False)
    assert result.returncode == 1
    assert path.read_text() == "mine"
