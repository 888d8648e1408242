"""What tests of writable mounts share: what the bucket has, and what a call costs there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fusefs.launch import control, registry
from tests.support.mounting import Mount
from tests.support.servers.buckets import Bucket
from tests.support.waiting import until

WRITABLE = "--no-read-only"


def uploads(bucket: Bucket) -> list[str]:
    """The keys of multipart uploads that are neither complete nor aborted."""
    page = bucket.client.list_multipart_uploads(Bucket=bucket.name)
    return [one["Key"] for one in page.get("Uploads", [])]


def pending(mount: Mount) -> list[dict[str, Any]]:
    """What the mount says is not in the bucket yet."""
    found: list[dict[str, Any]] = status(mount)["writing"]["pending"]
    return found


def metadata(bucket: Bucket, key: str) -> dict[str, str]:
    metadata: dict[str, str] = bucket.client.head_object(Bucket=bucket.name, Key=key)["Metadata"]
    return metadata


def status(mount: Mount) -> dict[str, Any]:
    """As `mount.status`, without a process; one would close copies of open files."""
    return control.request(registry.mount_directory(mount.path) / "status.sock", "status", 30)


def all_sent(mount: Mount) -> None:
    """Wait until the bucket has everything, attributes as well."""
    until(lambda: not pending(mount), "the bucket has everything")


def cost(mount: Mount, call: Callable[[], object]) -> dict[str, int]:
    """Which requests to the bucket a call takes, by their kind."""
    kinds = ("gets", "heads", "lists", "puts", "copies", "deletes")
    before = status(mount)["s3"]
    call()
    after = status(mount)["s3"]
    return {kind: after[kind] - before[kind] for kind in kinds if after[kind] != before[kind]}
