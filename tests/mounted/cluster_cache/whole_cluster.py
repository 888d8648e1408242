"""`make test-cluster-cache`: every fault of a cluster with each replication, and what it saves.

Several nodes read one data set, each with an empty disk at first; they count what comes from the
source, which is 30 ms away. A read from a cluster cache that is broken waits for no more than the
longest deadline of a first byte, 99 times of 100.
"""

import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fusefs.cluster_cache.policy import MOST_S
from tests.support.cluster_nodes import FAULTS, HARMLESS, Nodes, fetched, section, troubles
from tests.support.mounting import Mount, fusefs
from tests.support.servers.buckets import Bucket
from tests.support.servers.faulty_s3 import FaultyS3
from tests.support.servers.seaweed_cluster import REPLICATIONS, SeaweedCluster, can_have_small_disks
from tests.support.sharing import content
from tests.support.waiting import until

NODES = 4
OBJECTS = {f"small/{number}": content(f"small {number}", 50_000 + number) for number in range(200)}
OBJECTS |= {f"large/{number}": content(f"large {number}", (20 << 20) + 7) for number in range(3)}
# Of what the source sends while four nodes warm a data set together: parts that two of them read.
SHARDED_SHARE = 1.1
# How far away the source is, in seconds to each first byte.
DISTANCE_S = 0.03
# What all these processes on one machine may add to a read, in seconds.
BUSY_S = 0.1


@pytest.fixture(scope="module")
def tree(shared: Bucket) -> Bucket:
    for key, data in OBJECTS.items():
        shared.put(key, data)
    return shared


@pytest.fixture(scope="module", params=REPLICATIONS)
def cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SeaweedCluster]:
    directory = tmp_path_factory.mktemp("cluster")
    with SeaweedCluster(directory, replication=request.param) as running:
        yield running


@pytest.fixture
def nodes(
    tree: Bucket, cluster: SeaweedCluster, faulty: FaultyS3, tmp_path: Path
) -> Iterator[Nodes]:
    """Nodes whose cluster cache has nothing yet."""
    faulty.clear()
    faulty.add("GET", delay_s=DISTANCE_S)
    with Nodes(tmp_path, tree, OBJECTS, cluster, faulty.endpoint_url) as made:
        yield made
        made.leave()
        cluster.heal()
        faulty.clear()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_costs_a_read_its_deadline_and_heals(nodes: Nodes, fault: str) -> None:
    nodes.fill(nodes.join())
    alone, first, second = nodes.join_without(), nodes.join(), nodes.join()
    usual = p99(nodes, alone)
    FAULTS[fault](nodes)
    slow = p99(nodes, first)
    print(f"p99 of small files: {usual * 1000:.0f} ms, {slow * 1000:.0f} ms after: {fault}")
    assert slow <= usual + MOST_S + BUSY_S
    third = nodes.join(is_up=False)
    read_together(nodes, [first, second, third], fault)
    for mount in (first, second, third):
        assert mount.status()["s3"]["errors"] == 0
    if fault not in HARMLESS and nodes.cluster.replication == "000":
        assert troubles(first) + troubles(second) > 0
    nodes.heal()
    until(lambda: reads_without_s3(nodes), "a later node finds all blocks again")


@pytest.mark.parametrize("replication", REPLICATIONS)
def test_a_full_disk_costs_no_program_anything_and_heals(
    tree: Bucket, faulty: FaultyS3, replication: str, tmp_path: Path
) -> None:
    if not can_have_small_disks():
        pytest.skip("a file system of its own needs root and unshare")
    room = 2 * sum(map(len, OBJECTS.values()))
    faulty.clear()
    with (
        SeaweedCluster(
            tmp_path / "cluster", replication=replication, small_disk_bytes=room
        ) as cluster,
        Nodes(tmp_path, tree, OBJECTS, cluster, faulty.endpoint_url) as nodes,
    ):
        mounts = [nodes.join() for _ in range(2)]
        nodes.read(mounts[0], list(OBJECTS)[:20])
        cluster.fill_disk()
        read_together(nodes, mounts, "full")
        for mount in mounts:
            assert mount.status()["s3"]["errors"] == 0
        cluster.free_disk()
        nodes.heal()
        until(lambda: reads_without_s3(nodes), "a later node finds all blocks")


def reads_without_s3(nodes: Nodes) -> bool:
    """True if one more node finds everything; what it does not find it stores."""
    mount = nodes.join()
    nodes.read(mount)
    until(lambda: section(mount)["queued_fills"] == 0)
    return fetched(mount) == 0


def test_four_nodes_read_one_data_set_in_four_orders(nodes: Nodes) -> None:
    mounts = [nodes.join() for _ in range(NODES)]
    read_together(nodes, mounts, "four orders")
    share = sum(map(fetched, mounts)) / nodes.size
    print(f"from the source: {share:.2f} times the data set")
    until(lambda: sum(section(mount)["queued_fills"] for mount in mounts) == 0)
    until(lambda: reads_without_s3(nodes), "a later node finds all blocks")


def test_a_job_on_four_nodes_fetches_the_data_set_once(nodes: Nodes) -> None:
    mounts = [nodes.join() for _ in range(NODES)]

    def warm(number: int) -> None:
        shard = f"{number}/{NODES}"
        fusefs("warm", "--wait", "--shard", shard, mounts[number].path)

    with ThreadPoolExecutor(NODES) as threads:
        list(threads.map(warm, range(NODES)))
    assert len(nodes.stored()) == nodes.blocks
    read_together(nodes, mounts, "after a job")
    share = sum(map(fetched, mounts)) / nodes.size
    print(f"from the source: {share:.3f} times the data set")
    assert share <= SHARDED_SHARE


def read_together(nodes: Nodes, mounts: list[Mount], seed: str) -> None:
    """Read everything through all mounts at once, in an order of its own each."""

    def read(mount: Mount) -> None:
        names = list(nodes.objects)
        random.Random(f"{seed} {mount.path.name}").shuffle(names)
        nodes.read(mount, names)

    with ThreadPoolExecutor(len(mounts)) as threads:
        list(threads.map(read, mounts))


def p99(nodes: Nodes, mount: Mount) -> float:
    """The time in which 99 of 100 small files have been read for the first time, in seconds."""

    def read(name: str) -> float:
        begun = time.monotonic()
        assert (mount.path / name).read_bytes() == nodes.objects[name]
        return time.monotonic() - begun

    names = [name for name in nodes.objects if name.startswith("small/")]
    with ThreadPoolExecutor(4) as threads:
        took = sorted(threads.map(read, names))
    return took[len(took) * 99 // 100]
