"""A cluster cache of the node's configuration, over the driver's socket, with real mounts."""

import base64
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fusefs.launch import control, registry
from tests.support.csi.daemons import daemons_of, held
from tests.support.csi.node import SECRETS, Node, running_node
from tests.support.servers.buckets import Bucket, keys, new_bucket
from tests.support.servers.s3_server import ACCESS_KEY, SECRET_KEY, S3Server
from tests.support.sharing import PATIENCE_S, stamped
from tests.support.waiting import until

DATA = {"small": stamped(1, 5_000), "large": stamped(2, 9 << 20)}
BLOCKS = 3
KEY = "a-key-of-the-whole-domain"


@dataclass
class ClusterCacheFiles:
    """What a node has of its cluster cache, and the bucket behind it."""

    near: Bucket
    file: Path
    key: Path


@pytest.fixture
def files(s3: S3Server, tmp_path: Path) -> ClusterCacheFiles:
    near = new_bucket(s3)
    key, credentials = tmp_path / "key", tmp_path / "credentials"
    key.write_text(f"{KEY}\n")
    credentials.write_text(
        f"[default]\naws_access_key_id = {ACCESS_KEY}\naws_secret_access_key = {SECRET_KEY}\n"
    )
    for path in (key, credentials):
        path.chmod(0o400)
    file = tmp_path / "cluster-caches.toml"
    file.write_text(
        "[cluster-caches.training]\n"
        f'url = "s3://{near.name}/training"\nendpoint = "{s3.endpoint_url}"\n'
        f'credentials-file = "{credentials}"\nkey-file = "{key}"\n'
    )
    return ClusterCacheFiles(near, file, key)


def running(files: ClusterCacheFiles, s3: S3Server) -> Any:
    return running_node("--cluster-caches", str(files.file), main=s3.endpoint_url)


@pytest.fixture
def node(files: ClusterCacheFiles, s3: S3Server) -> Iterator[Node]:
    with running(files, s3) as node:
        yield node
        until(lambda: not node.leftovers(), "nothing is left")


@pytest.fixture
def volume(bucket: Bucket) -> dict[str, Any]:
    for name, data in DATA.items():
        bucket.put(name, data)
    return {"bucket": bucket.name, "readOnly": "true"}


def state_of(node: Node) -> Any:
    """What the daemon of the only mount says of its cluster cache."""
    [root] = node.roots()
    directory = node.state / "fusefs" / registry.keeper_socket(root.mountpoint).stem
    return control.request(directory / "status.sock", "status", PATIENCE_S)["cluster_cache"]


def is_in_use(node: Node) -> bool:
    return bool(state_of(node)["state"] == "closed")


def read(target: Path) -> None:
    for name, data in DATA.items():
        assert (target / name).read_bytes() == data


def test_nodes_share_blocks_and_no_secret_is_shown(
    node: Node, files: ClusterCacheFiles, s3: S3Server, volume: dict[str, Any]
) -> None:
    target = node.target("pod")
    node.publish("shared", target, cacheDomain="training", **volume)
    until(lambda: is_in_use(node), "its bucket is open")
    read(target)
    until(lambda: sum(state_of(node)["fills"].values()) == BLOCKS, "no block is left to be stored")
    assert keys(files.near)
    assert all(key.startswith("training/v1/") for key in keys(files.near))
    refuse_secrets(node)
    with running(files, s3) as other:
        there = other.target("pod")
        other.publish("shared", there, cacheDomain="training", **volume)
        until(lambda: is_in_use(other), "its bucket is open")
        read(there)
        # On a busy machine S3 may be faster for some of them.
        assert state_of(other)["lookups"]["hits"] > 0
        other.unpublish("shared", there)
    node.unpublish("shared", target)


def refuse_secrets(node: Node) -> None:
    """No process shows a secret, and of the mount's files only its user's own have one."""
    assert not [path for path in node.holders_of(SECRET_KEY.encode()) if path.name == "cmdline"]
    [record] = (json.loads(path.read_text()) for path in (node.state / "mounts").iterdir())
    assert KEY not in json.dumps(record)
    holders = node.holders_of(KEY.encode())
    assert [path.name for path in holders] == ["cluster-cache-key"]
    assert (holders[0].stat().st_uid, holders[0].stat().st_mode & 0o077) == (record["uid"], 0)


def test_a_volume_without_a_mapped_domain_has_none(node: Node, volume: dict[str, Any]) -> None:
    for domain in ({}, {"cacheDomain": "other"}):
        target = node.target("pod")
        node.publish("plain", target, **{**volume, **domain})
        assert state_of(node) is None
        node.unpublish("plain", target)


def test_what_a_customer_key_encrypts_is_stored_in_none(
    node: Node, files: ClusterCacheFiles, bucket: Bucket
) -> None:
    target = node.target("pod")
    secrets = {**SECRETS, "customer_key": base64.b64encode(bytes(32)).decode()}
    node.publish("own", target, secrets=secrets, bucket=bucket.name, cacheDomain="training")
    assert state_of(node) is None
    (target / "made").write_bytes(DATA["small"])
    node.unpublish("own", target)
    assert not keys(files.near)


def test_a_mount_keeps_the_secrets_that_it_began_with(
    node: Node, files: ClusterCacheFiles, volume: dict[str, Any]
) -> None:
    volume["cacheDomain"] = "training"
    one, two = node.target("one"), node.target("two")
    with daemons_of(node, "daemons"):
        node.publish("shared", one, **volume)
        until(lambda: is_in_use(node), "its bucket is open")
        [root] = node.roots()
        until(lambda: held(node), "it is held")
        node.kill()
        node.kill_all("keeper")
        # The domain has left the file, and so have its secrets.
        files.key.unlink()
        node.start()
        socket = node.state / "fusefs" / registry.keeper_socket(root.mountpoint).name
        until(lambda: control.peer(socket), "it has a keeper")
        assert is_in_use(node)
        read(one)
        node.publish("shared", one, **volume)  # as kubelet does each minute
        # Pods that start afterwards have a mount of their own, as the node is configured now.
        node.publish("shared", two, **volume)
        assert len(node.roots()) == 2
        for target in (one, two):
            node.unpublish("shared", target)
