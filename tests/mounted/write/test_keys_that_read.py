"""A writable mount with credentials that may only read: said at once, and not for ever."""

from __future__ import annotations

import os

import pytest

from tests.support.mounting import Mounter, fusefs, pending
from tests.support.semantics import states
from tests.support.servers.buckets import Bucket
from tests.support.servers.faulty_s3 import FaultyS3

pytestmark = pytest.mark.root


@states(
    "`fusefs drop --unsent` gives up what could not be uploaded: files are as the bucket has them,"
    " and what was written stays in the cache directory as edited-N, where no mount takes it up."
)
def test_keys_that_only_read_are_named_at_the_mount_and_their_files_can_be_given_up(
    mounter: Mounter, bucket: Bucket, faulty: FaultyS3, capfd: pytest.CaptureFixture[str]
) -> None:
    bucket.put("there", b"before")
    for operation, key in (("PUT", ".fusefs-probe/object"), ("PUT", "*"), ("COPY", "*")):
        faulty.add(operation, key, code="AccessDenied")
    mount = mounter("--no-read-only", endpoint_url=faulty.endpoint_url)
    fusefs("umount", mount.path)
    said = fusefs(
        "mount",
        mount.source,
        mount.path,
        "--endpoint-url",
        mount.endpoint_url,
        "--cache-dir",
        mount.cache,
        environment=mount.environment,
    ).stderr
    assert said.count("\n") == 1
    assert "these credentials may not write" in said
    for name in ("there", "new", "removed"):
        with pytest.raises(PermissionError):
            (mount.path / name).write_bytes(b"content")
    os.chmod(mount.path / "there", 0o600)
    (mount.path / "removed").unlink()  # never was in the bucket: no DELETE
    assert {one["key"] for one in pending(mount)} == {"there", "new"}
    assert fusefs("umount", mount.path, check=False).returncode == 1
    mount.start("--no-read-only")
    given_up = fusefs("drop", "--unsent", mount.path).stdout
    assert "2 files given up" in given_up
    assert os.listdir(mount.path) == ["there"]
    assert (mount.path / "there").read_bytes() == b"before"
    fusefs("umount", mount.path)
    kept = {path.read_bytes() for path in mount.cache.glob("mounts/*/staging/*/edited-*")}
    assert kept == {b"content"}
    faulty.clear()
