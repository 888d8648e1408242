"""Pods' own tokens at a real STS, SeaweedFS's, which asks a cluster's issuer for its keys."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from csi.identities.credentials import ACCOUNT
from tests.support.csi.node import Node, code_of, running_node
from tests.support.csi.node import node as node
from tests.support.csi.oidc import AUDIENCE, ROLE, Issuer, sts_gateway
from tests.support.csi.publishing import POD, tokens
from tests.support.servers.buckets import Bucket, stored
from tests.support.servers.s3_server import S3Server

Code = grpc.StatusCode

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="there is no openssl")


@pytest.fixture(scope="module")
def issuer() -> Iterator[Issuer]:
    with tempfile.TemporaryDirectory() as directory, Issuer(Path(directory)) as issuer:
        yield issuer


@pytest.fixture(scope="module")
def running(s3: S3Server, issuer: Issuer) -> Iterator[Node]:
    with (
        tempfile.TemporaryDirectory() as directory,
        sts_gateway(s3, issuer, "team:trainer", Path(directory)) as url,
        running_node(door=url, is_started=False) as node,
    ):
        node.stores.write_text(
            node.stores.read_text() + f'sts-url = "{url}"\naudience = "{AUDIENCE}"\n'
        )
        node.start()
        yield node


def publish(node: Node, bucket: Bucket, token: str, account: str = "trainer") -> Path:
    target = node.target("pod")
    node.publish(
        "role",
        target,
        secrets=tokens(token, AUDIENCE),
        store="door",
        bucket=bucket.name,
        roleArn=ROLE,
        retryTime="2s",
        **{**POD, ACCOUNT: account},
    )
    return target


def test_a_pod_reads_and_writes_with_what_its_token_is_exchanged_for(
    node: Node, shared: Bucket, issuer: Issuer
) -> None:
    shared.put("hello", b"hello")
    token = issuer.token("team:trainer")
    target = publish(node, shared, token)
    assert (target / "hello").read_bytes() == b"hello"
    (target / "written").write_bytes(b"by the role")
    assert stored(shared, "written") == b"by the role"
    assert token not in node.log.read_text()
    node.unpublish("role", target)


@pytest.mark.parametrize(
    ("account", "how", "code"),
    [
        ("trainer", {"is_forged": True}, Code.UNAUTHENTICATED),
        ("trainer", {"audience": "somebody-else"}, Code.UNAUTHENTICATED),
        ("trainer", {"lifetime_s": -60}, Code.UNAUTHENTICATED),
        ("stranger", {}, Code.PERMISSION_DENIED),
    ],
    ids=["forged", "audience", "expired", "account"],
)
def test_a_token_that_is_refused_is_reported_with_the_role(
    node: Node, shared: Bucket, issuer: Issuer, account: str, how: dict[str, Any], code: Code
) -> None:
    with pytest.raises(grpc.RpcError) as error:
        publish(node, shared, issuer.token(f"team:{account}", **how), account)
    failure: Any = error.value
    assert (code_of(error), ROLE in failure.details()) == (code, True), failure.details()
