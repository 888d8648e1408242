"""Pods whose identity is shut out: what is cached is theirs no more, until they get valid keys."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.csi.node import START, Node, running_node
from tests.support.csi.node import node as node
from tests.support.csi.rights import allow, retire
from tests.support.servers.buckets import Bucket
from tests.support.servers.s3_server import S3Server
from tests.support.waiting import until

# The driver gives its mounts two minutes, which no volume may change.
SHORTENED = f"from csi.volume import options; options.REVOKE_AFTER = '2s'; {START}"
DATA = os.urandom(1 << 20)


@pytest.fixture(scope="module")
def running(s3: S3Server) -> Iterator[Node]:
    with running_node(main=s3.endpoint_url, is_started=False) as node:
        node.command = [*node.command[:-1], SHORTENED]
        node.start()
        yield node


@pytest.fixture(scope="module")
def data(shared: Bucket) -> Bucket:
    shared.put("a/hello", DATA)
    shared.put("elsewhere/hello", b"")
    return shared


class Team:
    """A pod with a volume of its own, read with keys of its own."""

    def __init__(self, node: Node, data: Bucket, name: str) -> None:
        self._node = node
        self._data = data
        self.name = name
        self.target = node.target(f"pod-{name}")
        self.give_keys(f"{name}1")

    def give_keys(self, name: str) -> None:
        """As kubelet, when there are others in the volume's Secret."""
        keys = allow(self._data.server, name, self._data.name, "a/")
        self._node.publish(self.name, self.target, secrets=keys, bucket=self._data.name, prefix="a")

    def error(self) -> int | None:
        """What a read of what is cached fails with."""
        try:
            assert (self.target / "hello").read_bytes() == DATA
        except OSError as error:
            return error.errno
        return None

    def leave(self) -> None:
        self._node.unpublish(self.name, self.target)


def mounted(node: Node) -> list[tuple[Path, str]]:
    return [(one.mountpoint, one.device) for one in node.mounted()]


def test_who_is_shut_out_reads_nothing_cached_until_there_are_other_keys(
    node: Node, data: Bucket, s3: S3Server
) -> None:
    gone, denied, other = (Team(node, data, name) for name in ("gone", "denied", "other"))
    for team in (gone, denied, other):
        assert team.error() is None
    mounts_before, daemons_before = mounted(node), sorted(node.daemons())
    retire(s3, "gone1")  # whose keys S3 knows no more
    allow(s3, "denied1", data.name, "elsewhere/")  # whose keys may do something else
    for team in (gone, denied):
        until(lambda team=team: team.error() == errno.EACCES, f"{team.name} is shut out")
    assert other.error() is None
    for team in (gone, denied):
        team.give_keys(f"{team.name}2")
    for team in (gone, denied):
        until(lambda team=team: team.error() is None, f"{team.name} is let in")
    assert (mounted(node), sorted(node.daemons())) == (mounts_before, daemons_before)
    for team in (gone, denied, other):
        team.leave()
