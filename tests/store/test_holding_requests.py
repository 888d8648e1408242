"""The server that fails on demand holds requests back, and executes them late."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from botocore.exceptions import ConnectionClosedError, ReadTimeoutError

from tests.support.servers.buckets import Bucket, keys, stored
from tests.support.servers.faulty_s3 import FaultyS3
from tests.support.servers.s3_server import S3Server
from tests.support.waiting import until

LIMIT_S = 60


@pytest.fixture
def through(s3: S3Server, faulty: FaultyS3, bucket: Bucket) -> Iterator[Bucket]:
    """The bucket through the proxy, for a client that is impatient and tries once."""
    import boto3
    from botocore.config import Config

    client = boto3.client(
        "s3",
        endpoint_url=faulty.endpoint_url,
        region_name="us-east-1",
        aws_access_key_id=s3.environment["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=s3.environment["AWS_SECRET_ACCESS_KEY"],
        config=Config(read_timeout=1, retries={"total_max_attempts": 1}),
    )
    yield Bucket(s3, bucket.name, client)
    faulty.clear()


def test_a_held_request_is_executed_when_the_test_says_so(
    faulty: FaultyS3, bucket: Bucket, through: Bucket
) -> None:
    hold = faulty.hold("PUT", "a")
    with pytest.raises(ReadTimeoutError):
        through.put("a", b"late")
    through.put("a", b"on time")
    assert stored(bucket, "a") == b"on time"
    until(lambda: hold.held[0].is_client_gone, "the client has not gone")
    (held,) = hold.release()
    assert (held.operation, held.key, held.status) == ("PUT", "a", 200)
    assert stored(bucket, "a") == b"late"


def test_a_held_request_is_executed_a_while_after_its_connection_was_cut(
    faulty: FaultyS3, bucket: Bucket, through: Bucket
) -> None:
    bucket.put("a", b"a")
    hold = faulty.hold("DELETE", "a", 0.3, hangs_up=True)
    with pytest.raises(ConnectionClosedError):
        through.delete("a")
    assert hold.held[0].done.wait(LIMIT_S)
    assert hold.held[0].status == 204
    assert keys(bucket) == []


def test_what_is_held_is_dropped_at_the_end(
    faulty: FaultyS3, bucket: Bucket, through: Bucket
) -> None:
    hold = faulty.hold("PUT", "a", hangs_up=True)
    with pytest.raises(ConnectionClosedError):
        through.put("a", b"late")
    faulty.clear()
    assert hold.held[0].done.wait(LIMIT_S)
    assert hold.held[0].status is None
    assert keys(bucket) == []
