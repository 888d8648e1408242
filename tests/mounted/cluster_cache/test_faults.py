"""The cluster cache on a real cluster: what it saves, and that none of its faults is seen."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cluster_nodes import FAULTS, Nodes, fetched, kill_the_filer, section, troubles
from tests.support.servers.buckets import Bucket
from tests.support.servers.faulty_s3 import FaultyS3
from tests.support.servers.seaweed_cluster import SeaweedCluster
from tests.support.sharing import content
from tests.support.waiting import until

OBJECTS = {f"small/{number}": content(f"small {number}", 30_000 + number) for number in range(12)}
OBJECTS["large"] = content("large", (20 << 20) + 7)
# The others take longer, and are tried by `make test-cluster-cache`.
SHORT = (
    "a volume server is killed",
    "a volume server is stopped",
    "blocks are written with other bytes",
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedCluster]:
    with SeaweedCluster(tmp_path_factory.mktemp("cluster")) as running:
        yield running


@pytest.fixture(scope="module")
def tree(shared: Bucket) -> Bucket:
    for key, data in OBJECTS.items():
        shared.put(key, data)
    return shared


@pytest.fixture(scope="module")
def nodes(
    tree: Bucket,
    faulty: FaultyS3,
    cluster: SeaweedCluster,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Nodes]:
    """Nodes with a cluster cache that the first of them has filled."""
    directory = tmp_path_factory.mktemp("nodes")
    with Nodes(directory, tree, OBJECTS, cluster, faulty.endpoint_url) as made:
        made.fill(made.join())
        yield made


@pytest.fixture
def healed(nodes: Nodes) -> Iterator[Nodes]:
    """The same, whose cluster runs again afterwards, with all blocks as they were."""
    yield nodes
    nodes.heal()


def test_what_one_node_has_read_another_one_reads_without_s3(
    nodes: Nodes, faulty: FaultyS3
) -> None:
    """S3 is far away: of a busy machine's answers some may be late even so, most are not."""
    second = nodes.join()
    far = faulty.add("GET", delay_s=5.0)
    nodes.read(second)
    faulty.remove(far)
    found = section(second)
    assert found["lookups"]["misses"] == 0
    assert found["read_bytes"] >= nodes.size // 2, found


@pytest.mark.parametrize("fault", SHORT)
def test_a_fault_costs_no_program_anything(healed: Nodes, fault: str) -> None:
    mount = healed.join()
    FAULTS[fault](healed)
    healed.read(mount)
    assert mount.status()["s3"]["errors"] == 0
    assert troubles(mount) > 0


def test_a_node_starts_and_reads_while_the_cluster_is_gone(healed: Nodes) -> None:
    kill_the_filer(healed)
    mount = healed.join(is_up=False)
    healed.read(mount)
    assert section(mount)["state"] == "opening"
    assert fetched(mount) == healed.size


def test_who_has_another_key_shares_nothing_and_harms_no_other(
    tree: Bucket, cluster: SeaweedCluster, faulty: FaultyS3, tmp_path: Path
) -> None:
    with Nodes(tmp_path, tree, OBJECTS, cluster, faulty.endpoint_url) as domain:
        domain.fill(domain.join())
        ours = domain.stored()
        stranger = domain.join(key="the key of somebody else")
        domain.read(stranger)
        assert fetched(stranger) == domain.size
        until(lambda: len(domain.stored()) == 2 * domain.blocks)
        replace(domain, ours, by=sorted({*domain.stored()} - {*ours}))
        mount = domain.join()
        domain.read(mount)
        assert section(mount)["lookups"]["bad"] > 0


def replace(domain: Nodes, ours: list[str], by: list[str]) -> None:
    """Put blocks that were stored with another key in the place of ours; sizes tell which."""
    client, bucket = domain.cluster.client(), domain.bucket
    theirs = {client.head_object(Bucket=bucket, Key=key)["ContentLength"]: key for key in by}
    for key in ours:
        size = client.head_object(Bucket=bucket, Key=key)["ContentLength"]
        source = {"Bucket": bucket, "Key": theirs[size]}
        client.copy_object(Bucket=bucket, Key=key, CopySource=source)
