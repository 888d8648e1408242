"""Who may read what on a node: tokens and their exchange, rotated keys, and two identities."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from csi.credentials import ACCOUNT, NAMESPACE, TOKENS
from fusefs.store.s3 import RECONNECT_EVERY_S
from tests.conftest import Bucket, new_bucket
from tests.support.csi_node import Node, code_of, running_node
from tests.support.csi_rights import allow, retire
from tests.support.fake_sts import AUDIENCE, FakeSts, token_for
from tests.support.s3_server import S3Server
from tests.support.sharing import skip_without_fuse, until

ROLE = "arn:aws:iam::123456789012:role/reader"
POD = {NAMESPACE: "team", ACCOUNT: "trainer"}


@pytest.fixture(scope="module")
def sts(s3: S3Server) -> Iterator[FakeSts]:
    with FakeSts(s3.endpoint_url) as sts:
        yield sts


@pytest.fixture(scope="module")
def running(s3: S3Server, sts: FakeSts) -> Iterator[Node]:
    skip_without_fuse()
    if os.geteuid() != 0:
        pytest.skip("the node service is root's")
    with running_node(main=s3.endpoint_url, door=sts.url) as node:
        node.stores.write_text(node.stores.read_text() + f'sts-url = "{sts.url}"\n')
        node.kill()
        node.start()
        yield node


@pytest.fixture
def node(running: Node) -> Iterator[Node]:
    yield running
    assert running.leftovers() == []


@pytest.fixture(scope="module")
def data(s3: S3Server) -> Bucket:
    bucket = new_bucket(s3)
    bucket.put("a/hello", b"hello")
    bucket.put("b/hello", b"secret of b")
    return bucket


def tokens(token: str) -> dict[str, str]:
    return {TOKENS: json.dumps({AUDIENCE: {"token": token, "expirationTimestamp": "later"}})}


def with_role(data: Bucket) -> dict[str, str]:
    return {"store": "door", "bucket": data.name, "prefix": "a", "roleArn": ROLE, **POD}


# --- the pod's own token ------------------------------------------------------------


@pytest.mark.parametrize("place", ["secrets", "context"])
def test_a_pods_token_is_exchanged_and_never_shown(
    node: Node, data: Bucket, sts: FakeSts, place: str
) -> None:
    target = node.target("pod")
    token = token_for("team:trainer")
    in_secrets = place == "secrets"
    node.publish("role", target, secrets=tokens(token) if in_secrets else {},
                 **with_role(data), **({} if in_secrets else tokens(token)))  # fmt: skip
    assert (target / "hello").read_bytes() == b"hello"
    assert sts.exchanged[-1] == (ROLE, "team-trainer", token)
    assert token not in node.log.read_text()
    assert not any(token in seen for seen in sts.seen_by_s3)
    node.unpublish("role", target)


@pytest.mark.parametrize(
    "token",
    [
        token_for("team:trainer", audience="somebody-else"),
        token_for("team:trainer", lifetime_s=-60),
        token_for("team:trainer", key=b"forged"),
    ],
    ids=["audience", "expired", "forged"],
)
def test_a_token_that_sts_refuses_is_said_with_the_role(
    node: Node, data: Bucket, token: str
) -> None:
    with pytest.raises(grpc.RpcError) as error:
        node.publish("role", node.target("pod"), secrets=tokens(token), retryTime="1s",
                     **with_role(data))  # fmt: skip
    assert code_of(error) == grpc.StatusCode.UNAUTHENTICATED
    assert ROLE in error.value.details()


def test_reads_wait_while_keys_are_renewed_with_the_latest_token(
    node: Node, data: Bucket, sts: FakeSts
) -> None:
    target = node.target("pod")
    node.publish("role", target, secrets=tokens(token_for("team:trainer")), **with_role(data))
    latest = token_for("team:trainer")
    node.publish("role", target, secrets=tokens(latest), **with_role(data))
    time.sleep(RECONNECT_EVERY_S)  # nobody's keys expire as soon as they were made
    sts.expire_all()
    assert (target / "hello").read_bytes() == b"hello"
    assert sts.exchanged[-1][2] == latest
    node.unpublish("role", target)


# --- two identities -----------------------------------------------------------------


def is_refused(node: Node, uid: int, code: str, *arguments: object) -> bool:
    """Whether Python code fails for want of a right when it runs as a user of the node."""
    done = subprocess.run(
        ["setpriv", "--reuid", str(uid), "--regid", str(uid), "--clear-groups",
         node.command[0], "-c", code, *map(str, arguments)],
        env={**os.environ, **node.environment}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return "Permission denied" in done.stderr


READ = "import sys; print(len(open(sys.argv[1], 'rb').read()))"
CONNECT = "import socket, sys; socket.socket(socket.AF_UNIX).connect(sys.argv[1])"


def test_one_identity_gets_at_nothing_of_another(node: Node, data: Bucket, s3: S3Server) -> None:
    mine = allow(s3, "A", data.name, "a/")
    others = allow(s3, "B", data.name, "b/")
    one, other = node.target("pod-a"), node.target("pod-b")
    node.publish("of-b", other, secrets=others, bucket=data.name, prefix="b")
    assert (other / "hello").read_bytes() == b"secret of b"  # it is cached now
    with pytest.raises(grpc.RpcError) as error:
        node.publish("of-b", one, secrets=mine, bucket=data.name, prefix="b")
    assert code_of(error) == grpc.StatusCode.PERMISSION_DENIED
    node.publish("of-a", one, secrets=mine, bucket=data.name, prefix="a")

    users = {Path(f"/proc/{pid}").stat().st_uid: pid for pid in node.daemons()}
    assert len(users) == 2
    for uid in users:
        for theirs, pid in users.items():
            if theirs == uid:
                continue
            for name in ("environ", "mem", "maps"):
                assert is_refused(node, uid, READ, f"/proc/{pid}/{name}"), name
            for path in things_of(node, theirs):
                code = CONNECT if stat.S_ISSOCK(path.lstat().st_mode) else READ
                assert is_refused(node, uid, code, path), path
    node.unpublish("of-a", one)
    node.unpublish("of-b", other)


def things_of(node: Node, uid: int) -> list[Path]:
    """Files and sockets that belong to a user of the node."""
    return [
        path
        for place in (node.cache, node.state)
        for directory, _, names in os.walk(place)
        for path in (Path(directory, name) for name in names)
        if path.lstat().st_uid == uid
    ]


def test_rotated_keys_are_used_when_the_old_ones_are_no_more(
    node: Node, data: Bucket, s3: S3Server
) -> None:
    target = node.target("pod")
    old = allow(s3, "C", data.name, "a/")
    node.publish("rotated", target, secrets=old, bucket=data.name, prefix="a", metadataTtl="0s")
    new = allow(s3, "D", data.name, "a/")
    node.publish("rotated", target, secrets=new, bucket=data.name, prefix="a", metadataTtl="0s")
    assert len(node.mounted()) == 2
    retire(s3, "C")
    data.put("a/later", b"later")
    until(lambda: reads(target / "later") == b"later", "the new keys are used")
    node.unpublish("rotated", target)
    data.delete("a/later")


def reads(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
