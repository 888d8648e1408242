"""A bucket of the tests' server, as a test uses it."""

from dataclasses import dataclass
from typing import Any

from fusefs.store.capabilities import PROBE_NAME
from tests.support.servers.s3_server import S3Server


@dataclass
class Bucket:
    """An empty one at first, or what one has below a prefix."""

    server: S3Server
    name: str
    client: Any
    prefix: str = ""

    def put(self, key: str, data: bytes, **options: Any) -> str:
        """Put an object and return its ETag."""
        key = self.prefix + key
        answer = self.client.put_object(Bucket=self.name, Key=key, Body=data, **options)
        etag: str = answer["ETag"]
        return etag

    def delete(self, key: str) -> None:
        self.client.delete_object(Bucket=self.name, Key=self.prefix + key)


def new_bucket(s3: S3Server) -> Bucket:
    return Bucket(s3, s3.new_bucket(), s3.client())


def keys(bucket: Bucket, *, with_probes: bool = False) -> list[str]:
    """The keys of at most a thousand objects, without those that a mount tries things with.

    Nor is the prefix itself among them.
    """
    answer = bucket.client.list_objects_v2(Bucket=bucket.name, Prefix=bucket.prefix)
    found = [one["Key"].removeprefix(bucket.prefix) for one in answer.get("Contents", [])]
    return [key for key in found if key and (with_probes or f"{PROBE_NAME}/" not in key)]


def stored(bucket: Bucket, key: str) -> bytes:
    answer = bucket.client.get_object(Bucket=bucket.name, Key=bucket.prefix + key)
    content: bytes = answer["Body"].read()
    return content
