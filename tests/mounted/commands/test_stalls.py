"""What programs on a mount wait for is named by its cause, in metrics and in status."""

import os
from collections.abc import Iterator

import pytest

from fusefs.telemetry.stalls import WaitCause
from tests.support.mounting import Mount, Mounter, fusefs, mostly, waits
from tests.support.semantics import states
from tests.support.servers.buckets import Bucket
from tests.support.servers.faulty_s3 import FaultyS3

MIB = 1 << 20


@pytest.fixture
def slow(faulty: FaultyS3) -> Iterator[FaultyS3]:
    """A server before the real one; its rules end with the test."""
    yield faulty
    faulty.clear()


@pytest.fixture
def far(bucket: Bucket, slow: FaultyS3, mounter: Mounter) -> Mount:
    """A mount whose server is made slow, with files of two sizes."""
    bucket.put("data/small", os.urandom(MIB // 8))
    bucket.put("data/large", os.urandom(6 * MIB))
    bucket.put("data/ahead", os.urandom(MIB // 8))
    bucket.put("other/a", b"x")
    one = mounter(endpoint_url=slow.endpoint_url)
    os.listdir(one.path / "data")
    return one


@states(
    "`fusefs status` shows how much of the last 10 seconds, minute and 5 minutes programs waited,"
    " and for what; what is fetched ahead and not waited for does not count."
)
def test_a_late_answer_a_slow_one_and_a_listing(far: Mount, slow: FaultyS3) -> None:
    late = slow.add("GET", delay_s=1.0)
    with mostly(WaitCause.S3_FIRST_BYTE, far):
        (far.path / "data" / "small").read_bytes()
    slow.remove(late)
    slow.add("GET", "data/ahead", delay_s=1.0)
    before = waits(far)
    fusefs("warm", "--wait", far.path / "data" / "ahead")
    assert waits(far) == before
    narrow = slow.add("GET", bytes_per_s=2 * MIB)
    with mostly(WaitCause.S3_TRANSFER, far):
        (far.path / "data" / "large").read_bytes()
    slow.remove(narrow)
    slow.add("LIST", delay_s=1.0)
    with mostly(WaitCause.METADATA, far):
        os.listdir(far.path / "other")
    text = fusefs("status", far.path).stdout
    for part in ("programs waited", "S3's first byte", "hint  ", "slowest  ", "of data/"):
        assert part in text
