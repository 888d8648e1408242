"""A mount over TLS: what is refused when it is made, and what works for all its reads."""

import os
from pathlib import Path

import pytest

from tests.support.machine import surroundings
from tests.support.mounting import Mounter, fusefs
from tests.support.servers.buckets import Bucket
from tests.support.servers.tls import tls_door


@pytest.fixture(autouse=True)
def of_no_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    surroundings.clear(monkeypatch)


def test_a_certificate_that_is_its_own_authority_serves_files_of_all_sizes(
    bucket: Bucket, mounter: Mounter, tmp_path: Path
) -> None:
    content = os.urandom(2 << 20)
    bucket.put("large", content)
    bucket.put("small", content[:1000])
    with tls_door(bucket.server.endpoint_url, tmp_path, is_own_authority=True) as door:
        options = ("--ca-bundle", str(door.authority))
        mount = mounter(*options, endpoint_url=door.url)
        assert (mount.path / "small").read_bytes() == content[:1000]
        assert (mount.path / "large").read_bytes() == content
        mount.end()


def test_a_certificate_that_is_not_trusted_is_the_reason_that_is_given(
    bucket: Bucket, tmp_path: Path
) -> None:
    (tmp_path / "mnt").mkdir()
    with tls_door(bucket.server.endpoint_url, tmp_path) as door:
        result = fusefs(
            "mount",
            f"s3://{bucket.name}",
            tmp_path / "mnt",
            "--endpoint-url",
            door.url,
            "--cache-dir",
            tmp_path / "cache",
            "--log-file",
            tmp_path / "log",
            environment=bucket.server.environment,
            check=False,
        )
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert "its certificate is of an authority that is not trusted" in line
