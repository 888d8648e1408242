"""Encryption with a customer's key (SSE-C): from a Secret alone, with whatever needs it, and shown
nowhere."""

import base64
import os
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from tests.support.csi.node import SECRETS, Node, running_node
from tests.support.csi.node import node as node
from tests.support.csi.publishing import refused
from tests.support.servers.buckets import Bucket
from tests.support.servers.faulty_s3 import FaultyS3
from tests.support.servers.s3_server import S3Server
from tests.support.waiting import until

RAW, OTHER = bytes(range(32)), bytes(range(1, 33))
TEXT, OTHER_TEXT = (base64.b64encode(raw).decode() for raw in (RAW, OTHER))
WITH_KEY = {**SECRETS, "customer_key": TEXT}
ENCRYPTED = {"SSECustomerAlgorithm": "AES256", "SSECustomerKey": RAW}
HEADER = "x-amz-server-side-encryption-customer-key"


@pytest.fixture(scope="module")
def running(s3: S3Server, faulty: FaultyS3) -> Iterator[Node]:
    stores = {"main": s3.endpoint_url, "faulty": faulty.endpoint_url}
    with running_node(**stores, far="http://192.0.2.1:9000") as node:
        yield node


@pytest.fixture(scope="module")
def data(shared: Bucket) -> Bucket:
    for name in ("first", "second"):
        shared.put(name, name.encode() * 1000, **ENCRYPTED)
    return shared


def key_file(node: Node) -> Path:
    [record] = node.records()
    return Path(record["settings"]["customer_key"])


def test_the_key_of_a_secret_encrypts_and_reads(node: Node, data: Bucket, faulty: FaultyS3) -> None:
    target = node.target("pod")
    node.publish("sse", target, secrets=WITH_KEY, store="faulty", bucket=data.name)
    before = len(faulty.requests())
    assert (target / "first").read_bytes() == b"first" * 1000
    (target / "made").write_bytes(b"made")
    answer = data.client.get_object(Bucket=data.name, Key="made", **ENCRYPTED)
    assert answer["Body"].read() == b"made"
    requests = faulty.requests()[before:]
    assert {request.headers.get(HEADER) for request in requests if request.key} == {TEXT}
    # The next daemon has it as well.
    node.kill_all("fusefs.daemon")
    until(lambda: (target / "second").read_bytes() == b"second" * 1000, "the next daemon")
    (target / "made").unlink()
    node.unpublish("sse", target)


def test_the_key_is_in_one_file_for_its_daemon_alone_and_stays_while_it_runs(
    node: Node, data: Bucket
) -> None:
    target = node.target("pod")
    node.publish("sse", target, secrets=WITH_KEY, bucket=data.name)
    assert (target / "first").read_bytes()
    path = key_file(node)
    [daemon] = node.daemons()
    found = path.stat()
    assert (found.st_uid, found.st_mode & 0o777) == (os.stat(f"/proc/{daemon}").st_uid, 0o600)
    assert path.read_text() == TEXT
    # The log is at the level debug, with all requests.
    assert node.holders_of(TEXT.encode()) == [path]
    assert node.holders_of(RAW) == []
    for secrets in ({**SECRETS, "customer_key": OTHER_TEXT}, SECRETS):
        node.publish("sse", target, secrets=secrets, bucket=data.name)
        assert key_file(node).read_text() == TEXT
    assert (target / "second").read_bytes() == b"second" * 1000
    node.unpublish("sse", target)
    assert not path.exists()


@pytest.mark.parametrize("domain", [{}, {"cacheDomain": "all"}], ids=["own", "shared"])
def test_those_without_the_key_have_another_mount_and_cache(
    node: Node, data: Bucket, domain: dict[str, str]
) -> None:
    targets = []
    for number, secrets in enumerate([WITH_KEY, {**SECRETS, "customerKey": OTHER_TEXT}, SECRETS]):
        target = node.target(f"pod-{number}")
        node.publish("sse", target, secrets=secrets, bucket=data.name, **domain)
        targets.append(target)
    assert (targets[0] / "first").read_bytes() == b"first" * 1000  # it is cached now
    for other in targets[1:]:
        with pytest.raises(OSError, match=r"Permission denied|Input/output"):
            (other / "first").read_bytes()
    assert len({one["settings"]["cache_dir"] for one in node.records()}) == 3
    for target in targets:
        node.unpublish("sse", target)


@pytest.mark.parametrize(
    "text", ["", "short", TEXT[:-4], TEXT + "AAAA", "é" * 32, "x" * 100_000, f"{TEXT}\nx", "=" * 44]
)
def test_what_is_no_key_is_refused_without_being_shown(node: Node, data: Bucket, text: str) -> None:
    with refused(grpc.StatusCode.INVALID_ARGUMENT, "the Secret's customer_key is no key") as error:
        node.publish(
            "sse", node.target("pod"), secrets={**SECRETS, "customer_key": text}, bucket=data.name
        )
    if text:
        assert text not in error.value.details()


def test_a_secret_has_a_key_once(node: Node, data: Bucket) -> None:
    twice = {**WITH_KEY, "CUSTOMER_KEY": OTHER_TEXT}
    with refused(grpc.StatusCode.INVALID_ARGUMENT, "customer_key under two names"):
        node.publish("sse", node.target("pod"), secrets=twice, bucket=data.name)


@pytest.mark.parametrize("name", ["customerKey", "customer-key"])
def test_an_attribute_is_no_place_for_it(node: Node, data: Bucket, name: str) -> None:
    with refused(grpc.StatusCode.INVALID_ARGUMENT, name, "Secret") as error:
        node.publish("sse", node.target("pod"), bucket=data.name, **{name: OTHER_TEXT})
    assert OTHER_TEXT not in error.value.details()
    assert OTHER_TEXT not in node.log.read_text()


def test_it_is_not_sent_in_the_clear_over_a_network(node: Node, data: Bucket) -> None:
    with refused(grpc.StatusCode.INVALID_ARGUMENT, "over TLS alone"):
        node.publish("sse", node.target("pod"), secrets=WITH_KEY, store="far", bucket=data.name)


@pytest.mark.parametrize("other", [{"encryption": "AES256"}, {"kmsKey": "alias/data"}])
def test_one_encryption_is_enough(node: Node, data: Bucket, other: dict[str, str]) -> None:
    with refused(grpc.StatusCode.INVALID_ARGUMENT, next(iter(other)), "customer key already"):
        node.publish("sse", node.target("pod"), secrets=WITH_KEY, bucket=data.name, **other)
