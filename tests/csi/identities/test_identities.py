"""Who may read what on a node: tokens and their exchange, rotated keys, and two identities."""

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from fusefs.store.s3.access import RECONNECT_EVERY_S
from tests.support.csi.node import Node, code_of, running_node
from tests.support.csi.node import node as node
from tests.support.csi.publishing import POD, tokens
from tests.support.csi.rights import allow, retire
from tests.support.servers.buckets import Bucket
from tests.support.servers.fake_sts import AUDIENCE, FakeSts, token_for
from tests.support.servers.faulty_s3 import FaultyS3
from tests.support.servers.s3_server import SECRET_KEY, S3Server
from tests.support.waiting import until

ROLE = "arn:aws:iam::123456789012:role/reader"


@pytest.fixture(scope="module")
def sts(s3: S3Server) -> Iterator[FakeSts]:
    with FakeSts(s3.endpoint_url) as sts:
        yield sts


@pytest.fixture(scope="module")
def running(s3: S3Server, sts: FakeSts, faulty: FaultyS3) -> Iterator[Node]:
    with running_node(main=s3.endpoint_url, door=sts.endpoint_url, is_started=False) as node:
        node.stores.write_text(
            f'{node.stores.read_text()}sts-url = "{sts.endpoint_url}"\naudience = "{AUDIENCE}"\n'
            f'[stores.away]\nendpoint-url = "{s3.endpoint_url}"\n'
            f'sts-url = "{faulty.endpoint_url}"\naudience = "{AUDIENCE}"\n'
        )
        node.start()
        yield node


@pytest.fixture(scope="module")
def data(shared: Bucket) -> Bucket:
    shared.put("a/hello", b"hello")
    shared.put("b/hello", b"secret of b")
    return shared


def with_role(data: Bucket) -> dict[str, str]:
    return {"store": "door", "bucket": data.name, "prefix": "a", "roleArn": ROLE, **POD}


@pytest.mark.parametrize("place", ["secrets", "context"])
def test_a_pods_token_is_exchanged_and_never_shown(
    node: Node, data: Bucket, sts: FakeSts, place: str
) -> None:
    target = node.target("pod")
    token = token_for("team:trainer")
    in_secrets = place == "secrets"
    node.publish(
        "role",
        target,
        secrets=tokens(token, AUDIENCE) if in_secrets else {},
        **with_role(data),
        **({} if in_secrets else tokens(token, AUDIENCE)),
    )
    assert (target / "hello").read_bytes() == b"hello"
    assert sts.exchanged[-1] == (ROLE, "team-trainer", token)
    assert token not in node.log.read_text()
    assert not any(token in seen for seen in sts.seen_by_s3)
    node.unpublish("role", target)


@pytest.mark.parametrize("status", [301, 307])
def test_a_token_is_sent_to_the_configured_sts_alone(
    node: Node, data: Bucket, s3: S3Server, faulty: FaultyS3, status: int
) -> None:
    with FaultyS3(s3.endpoint_url) as elsewhere:
        faulty.add(status=status, headers={"Location": elsewhere.endpoint_url})
        with pytest.raises(grpc.RpcError) as error:
            node.publish(
                "role",
                node.target("pod"),
                secrets=tokens(token_for("team:trainer"), AUDIENCE),
                retryTime="1s",
                **{**with_role(data), "store": "away"},
            )
        assert ROLE in error.value.details()
        assert faulty.requests()
        assert elsewhere.requests() == []
    faulty.clear()


def test_reads_wait_while_keys_are_renewed_with_the_latest_token(
    node: Node, data: Bucket, sts: FakeSts
) -> None:
    target = node.target("pod")
    node.publish(
        "role", target, secrets=tokens(token_for("team:trainer"), AUDIENCE), **with_role(data)
    )
    latest = token_for("team:trainer")
    node.publish("role", target, secrets=tokens(latest, AUDIENCE), **with_role(data))
    time.sleep(RECONNECT_EVERY_S)  # no keys expire as soon as they were made
    sts.expire_all()
    assert (target / "hello").read_bytes() == b"hello"
    assert sts.exchanged[-1][2] == latest
    node.unpublish("role", target)


# Tells what of its arguments it could read or connect to.
TRY = """
import ctypes, os, socket, sys
libc = ctypes.CDLL(None, use_errno=True)
for path in sys.argv[1:]:
    try:
        if path.endswith(".sock"):
            socket.socket(socket.AF_UNIX).connect(path)
        elif path.isdecimal():  # a process: PTRACE_SEIZE, which stops no process
            if libc.ptrace(0x4206, int(path), 0, 0):
                raise PermissionError
        elif path.startswith("/proc/") and "/fd/" in path:
            os.readlink(path)
        else:
            open(path, "rb").read()
    except PermissionError:
        continue
    print(path)
"""


def within_reach(node: Node, uid: int, paths: list[str]) -> str:
    """Which of some files and sockets a user of the node gets at."""
    ids = [f"--reuid={uid}", f"--regid={uid}", "--clear-groups"]
    done = subprocess.run(
        ["setpriv", *ids, node.command[0], "-c", TRY, *paths],
        env={**os.environ, **node.environment},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return done.stdout


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

    users = {uid_of(pid): pid for pid in node.daemons()}
    assert len(users) == 2
    for uid, pid in users.items():
        [stranger] = users.keys() - {uid}
        process = [*(f"/proc/{pid}/{name}" for name in INSIDE), str(pid)]
        things = things_of(node, uid)
        assert any(path.endswith("keys") for path in things)
        assert any(path.endswith(".sock") for path in things)
        assert within_reach(node, stranger, [*process, *things]) == ""
        # Not even one that has come to run as the daemon's own user gets into the process.
        assert within_reach(node, uid, process) == ""
        assert within_reach(node, uid, things).splitlines() == things
    node.unpublish("of-a", one)
    node.unpublish("of-b", other)


def test_identities_share_a_cache_where_an_administrator_says_so_and_nowhere_else(
    node: Node, data: Bucket, s3: S3Server
) -> None:
    """Each volume is read by A and by B; `caches` are what their mounts have."""
    whose = [allow(s3, name, data.name, "a/") for name in ("A", "B")]
    published = []
    caches: dict[str, list[str]] = {}
    for volume, domain in {"plain": {}, "shared": {"cacheDomain": "all"}}.items():
        for number, secrets in enumerate(whose):
            target = node.target(f"{volume}-{number}")
            node.publish(volume, target, secrets=secrets, bucket=data.name, prefix="a", **domain)
            assert (target / "hello").read_bytes() == b"hello"
            published.append((volume, target))
        mounts = (one for one in node.records() if one["volume_id"] == volume)
        caches[volume] = sorted(one["settings"]["cache_dir"] for one in mounts)
    assert len(set(caches["plain"])) == 2
    assert len(caches["shared"]) == 2
    assert len(set(caches["shared"])) == 1
    assert not set(caches["plain"]) & set(caches["shared"])
    for volume, target in published:
        node.unpublish(volume, target)


INSIDE = ("environ", "mem", "maps", "fd/0", "root/etc/passwd", "cwd/etc/passwd", "exe")


def uid_of(pid: int) -> int:
    """Whom a process runs as."""
    return Path(f"/proc/{pid}").stat().st_uid


def things_of(node: Node, uid: int) -> list[str]:
    """Files and sockets that belong to a user of the node."""
    return [
        path
        for place in (node.cache, node.state)
        for directory, _, names in os.walk(place)
        for path in (os.path.join(directory, name) for name in names)
        if os.lstat(path).st_uid == uid
    ]


def test_a_daemon_is_a_user_of_its_identitys_own_and_no_other_file_has_its_keys(
    node: Node, data: Bucket
) -> None:
    first, second = node.target("pod-1"), node.target("pod-2")
    node.publish("keys", first, bucket=data.name)
    [file] = node.holders_of(SECRET_KEY.encode())
    assert file.is_relative_to(node.state / "credentials")
    node.publish("driver", second, secrets={}, bucket=data.name)
    uids = {uid_of(pid) for pid in node.daemons()}
    assert len(uids) == 2
    assert min(uids) >= 1_900_000_000
    for pid in node.daemons():
        assert "NoNewPrivs:\t1" in Path(f"/proc/{pid}/status").read_text()
        assert Path(f"/proc/{pid}/environ").stat().st_uid == 0  # not the daemon's own user's
    node.unpublish("keys", first)
    node.unpublish("driver", second)


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
