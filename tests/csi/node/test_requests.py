"""What a volume says of its requests to S3 goes with them: class, encryption, ACL and who pays."""

from collections.abc import Iterator

import grpc
import pytest

from tests.support.csi.node import Node, capability, running_node
from tests.support.csi.node import node as node
from tests.support.csi.publishing import refused
from tests.support.servers.buckets import Bucket
from tests.support.servers.faulty_s3 import FaultyS3
from tests.support.servers.forward_proxy import ForwardProxy, forward_proxy
from tests.support.servers.s3_server import S3Server

ARN = "arn:aws:s3:us-west-2:123456789012:accesspoint/data"
KMS = "arn:aws:kms:us-east-1:123456789012:key/0b5c6a3e-7a3c-4b0e-9a55-9b1f1d0f4a11"
SENT = {
    "storage-class": "STANDARD_IA",
    "acl": "bucket-owner-full-control",
    "encryption": "aws:kms:dsse",
    "kms-key": KMS,
    "requester-pays": "true",
}
HEADERS = {
    "x-amz-storage-class": "STANDARD_IA",
    "x-amz-acl": "bucket-owner-full-control",
    "x-amz-server-side-encryption": "aws:kms:dsse",
    "x-amz-server-side-encryption-aws-kms-key-id": KMS,
    "x-amz-request-payer": "requester",
}

NO_NAME = "no name of a bucket"


@pytest.fixture(scope="module")
def proxy() -> Iterator[ForwardProxy]:
    with forward_proxy(refusal=403) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def running(s3: S3Server, faulty: FaultyS3, proxy: ForwardProxy) -> Iterator[Node]:
    stores = {"main": s3.endpoint_url, "faulty": faulty.endpoint_url}
    with running_node(is_started=False, **stores) as node:
        node.environment["HTTPS_PROXY"] = proxy.url
        node.start()
        yield node


@pytest.mark.parametrize("place", ["attributes", "mount options"])
def test_what_a_volume_makes_is_sent_as_it_says(
    node: Node, bucket: Bucket, faulty: FaultyS3, place: str
) -> None:
    # The real server encrypts nothing without a KMS, and would refuse.
    faulty.add(ignored_header="x-amz-server-side-encryption")
    target = node.target("pod")
    in_options = place == "mount options"
    flags = tuple(f"{name}={value}" for name, value in SENT.items()) if in_options else ()
    attributes = {} if in_options else SENT
    node.publish(
        "sent", target, cap=capability(flags=flags), store="faulty", bucket=bucket.name,
        **attributes,
    )  # fmt: skip
    before = len(faulty.requests())
    (target / "made").write_bytes(b"made")
    requests = faulty.requests()[before:]
    [put] = [request for request in requests if request.operation == "PUT"]
    assert {name: put.headers.get(name) for name in HEADERS} == HEADERS
    assert put.headers.get("x-amz-checksum-crc32")
    payers = {request.headers.get("x-amz-request-payer") for request in requests}
    assert payers == {"requester"}
    (target / "made").unlink()
    node.unpublish("sent", target)
    faulty.clear()


@pytest.mark.parametrize(
    ("bucket", "store", "why"),
    [
        ("data--usw2-az1--x-s3", "aws", "directory buckets"),
        (ARN, "aws", "no name of a bucket; an access point has its alias"),
        ("arn:" + "x" * 100_000, "aws", NO_NAME),
    ],
)
def test_what_is_no_name_of_a_bucket_is_refused(
    node: Node, proxy: ForwardProxy, bucket: str, store: str, why: str
) -> None:
    before = len(proxy.wanted)
    with refused(grpc.StatusCode.INVALID_ARGUMENT, "bucket: ", why) as error:
        node.publish("point", node.target("pod"), store=store, bucket=bucket)
    assert "\n" not in error.value.details()
    assert len(error.value.details().encode()) <= 1024
    assert len(proxy.wanted) == before
