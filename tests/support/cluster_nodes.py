"""Mounts of one bucket as on the nodes of a cluster, with a cluster cache between them and S3."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError

from tests.support.mounting import Mount
from tests.support.servers.buckets import Bucket, keys
from tests.support.servers.seaweed_cluster import SeaweedCluster
from tests.support.sharing import skip_without_fuse
from tests.support.waiting import until

BLOCK = 8 << 20
# The lookups that were of no use, as `status` names them.
TROUBLE = ("late", "refused", "bad", "failed")
# One block of so many gets other bytes.
FLIPPED = 3


@dataclass
class Nodes:
    """Mounts below `directory` that share blocks in a bucket of `cluster`; a context manager.

    `endpoint_url` is that of the source, whose `objects` are what each of them shows.
    """

    directory: Path
    source: Bucket
    objects: Mapping[str, bytes]
    cluster: SeaweedCluster
    endpoint_url: str
    bucket: str = ""
    _mounts: list[Mount] = field(default_factory=list)
    _numbers: Any = field(default_factory=lambda: itertools.count(1))

    def __enter__(self) -> Nodes:
        skip_without_fuse()
        self.bucket = self.cluster.new_bucket()
        (self.directory / "key").write_text("the key of the domain\n")
        self.cluster.write_credentials(self.directory / "credentials")
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()

    @property
    def blocks(self) -> int:
        """How many blocks the objects have together."""
        return sum(-(-len(content) // BLOCK) for content in self.objects.values())

    @property
    def size(self) -> int:
        """The bytes of all objects."""
        return sum(map(len, self.objects.values()))

    def stored(self) -> list[str]:
        """The keys of all blocks that the cluster has."""
        return keys(Bucket(self.cluster, self.bucket, self.cluster.client()))

    def join(self, *, is_up: bool = True) -> Mount:
        """One more node, with nothing on its disk; returns when it uses the cluster cache.

        With `is_up` false it only is mounted.
        """
        mount = self._mount(
            *("--cluster-cache", f"s3://{self.bucket}"),
            *("--cluster-cache-endpoint", self.cluster.endpoint_url),
            *("--cluster-cache-credentials", str(self.directory / "credentials")),
            *("--cluster-cache-key", str(self.directory / "key")),
        )
        if is_up:
            until(lambda: section(mount)["state"] == "closed", "the cluster cache is in use")
        return mount

    def join_without(self) -> Mount:
        """One more node, which has no cluster cache."""
        return self._mount()

    def _mount(self, *options: str) -> Mount:
        number = next(self._numbers)
        path = self.directory / f"node{number}"
        path.mkdir()
        mount = Mount(
            f"s3://{self.source.name}",
            path,
            self.directory / f"disk{number}",
            self.endpoint_url,
            self.source.server.environment,
            self.directory / f"node{number}.log",
            options,
        )
        self._mounts.append(mount)
        mount.start()
        return mount

    def leave(self) -> None:
        """Have no node any more, whatever it is about to store."""
        for mount in self._mounts:
            mount.clean_up()
        self._mounts.clear()

    def read(self, mount: Mount, names: list[str] | None = None) -> None:
        """Read objects, all if no names are given, and compare them with what S3 has."""
        for name in names or self.objects:
            assert (mount.path / name).read_bytes() == self.objects[name], name

    def fill(self, mount: Mount) -> None:
        """Read everything, until all that came from S3 is stored."""
        self.read(mount)
        until(lambda: len(self.stored()) == self.blocks, "all blocks are stored")

    def heal(self) -> None:
        """Have all processes run, and each block right again by what a later node reads."""
        self.leave()
        self.cluster.heal()
        until(self._are_repaired, "all blocks can be read")

    def _are_repaired(self) -> bool:
        """True if the cluster answers for each block once one more node has read everything.

        What is damaged at rest is answered with an error until a node has stored it again, and
        those before may have left too early for that.
        """
        later = self.join()
        self.read(later)
        until(lambda: section(later)["queued_fills"] == 0, "what was lost is stored again")
        return self._are_readable()

    def _are_readable(self) -> bool:
        """True if the cluster answers for each block."""
        client = self.cluster.client(retries={"total_max_attempts": 1}, read_timeout=2)

        def is_readable(key: str) -> bool:
            try:
                client.get_object(Bucket=self.bucket, Key=key)["Body"].read()
            except (BotoCoreError, ClientError):
                return False
            return True

        with ThreadPoolExecutor(16) as threads:
            return all(threads.map(is_readable, self.stored()))


def section(mount: Mount) -> dict[str, Any]:
    """What a mount's status tells of its cluster cache."""
    return dict(mount.status()["cluster_cache"])


def troubles(mount: Mount) -> int:
    """How many lookups were of no use, for another reason than that there is no such block."""
    lookups = section(mount)["lookups"]
    return sum(lookups[name] for name in TROUBLE)


def fetched(mount: Mount) -> int:
    """The bytes that a mount has got from S3."""
    count: int = mount.status()["s3"]["bytes_fetched"]
    return count


def _flip(nodes: Nodes, flip: Callable[[str, str, int], None]) -> None:
    """Change a byte of some blocks."""
    for key in nodes.stored()[::FLIPPED]:
        flip(nodes.bucket, key, 100)


def _kill_all_servers(nodes: Nodes) -> None:
    for server in nodes.cluster.volume_servers:
        server.kill()


FAULTS: dict[str, Callable[[Nodes], None]] = {
    "a volume server is killed": lambda one: one.cluster.fullest(one.bucket).kill(),
    "a volume server is stopped": lambda one: one.cluster.fullest(one.bucket).freeze(),
    "all volume servers are killed": _kill_all_servers,
    "the filer is killed": lambda one: one.cluster.filer.kill(),
    "the filer is stopped": lambda one: one.cluster.filer.freeze(),
    "the master is killed": lambda one: one.cluster.master.kill(),
    # As somebody may who may write to the cluster cache, or in the files of the volume servers.
    "blocks are written with other bytes": lambda nodes: _flip(
        nodes, nodes.cluster.flip_by_writing
    ),
    "blocks have other bytes at rest": lambda nodes: _flip(nodes, nodes.cluster.flip_at_rest),
}
# After which nothing is lost, and no answer is late or wrong: the cluster cache is as before.
HARMLESS = {"the master is killed"}
