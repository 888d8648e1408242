"""A bucket of the tests' server, as a test uses it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.support.s3_server import S3Server


@dataclass
class Bucket:
    """An empty one at first."""

    server: S3Server
    name: str
    client: Any

    def put(self, key: str, data: bytes, **options: Any) -> str:
        """Put an object and return its ETag."""
        answer = self.client.put_object(Bucket=self.name, Key=key, Body=data, **options)
        etag: str = answer["ETag"]
        return etag

    def delete(self, key: str) -> None:
        self.client.delete_object(Bucket=self.name, Key=key)


def new_bucket(s3: S3Server) -> Bucket:
    return Bucket(s3, s3.new_bucket(), s3.client())


def keys(bucket: Bucket) -> list[str]:
    answer = bucket.client.list_objects_v2(Bucket=bucket.name)
    return [one["Key"] for one in answer.get("Contents", [])]


def stored(bucket: Bucket, key: str) -> bytes:
    content: bytes = bucket.client.get_object(Bucket=bucket.name, Key=key)["Body"].read()
    return content
