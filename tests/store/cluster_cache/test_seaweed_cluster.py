"""The cluster that tests of the cluster cache break: its parts fail as they are meant to."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from botocore.exceptions import BotoCoreError, ClientError

from tests.support.servers.seaweed_cluster import SeaweedCluster, can_have_small_disks
from tests.support.sharing import content
from tests.support.waiting import until

SIZE = 256 << 10
OBJECTS = {f"object{number}": content(f"object{number}", SIZE) for number in range(8)}


def test_without_copies_a_fault_costs_its_own_objects_alone(tmp_path: Path) -> None:
    with SeaweedCluster(tmp_path) as cluster:
        bucket = filled(cluster)
        holders = {key: cluster.holders(bucket, key) for key in OBJECTS}
        assert all(len(servers) == 1 for servers in holders.values())
        [lost] = holders["object0"]
        of_lost = {key for key, servers in holders.items() if servers == [lost]}
        lost.kill()
        until(lambda: unreadable(cluster, bucket) == of_lost)
        cluster.heal()
        until(lambda: unreadable(cluster, bucket) == set())
        lost.freeze()
        until(lambda: unreadable(cluster, bucket) == of_lost)
        cluster.heal()
        cluster.flip_by_writing(bucket, "object1", 1000)
        cluster.flip_at_rest(bucket, "object2", 1000)
        until(lambda: unreadable(cluster, bucket) == {"object1", "object2"})
        cluster.filer.kill()
        assert unreadable(cluster, bucket) == set(OBJECTS)


def test_with_copies_a_server_may_go_and_a_disk_can_be_full(tmp_path: Path) -> None:
    if not can_have_small_disks():
        pytest.skip("a file system of its own needs root and unshare")
    with SeaweedCluster(tmp_path, replication="001", small_disk_bytes=32 << 20) as cluster:
        bucket = filled(cluster)
        assert all(len(cluster.holders(bucket, key)) == 2 for key in OBJECTS)
        cluster.fill_disk()
        assert shutil.disk_usage(cluster.disk(0)).free == 0
        cluster.free_disk()
        assert shutil.disk_usage(cluster.disk(0)).free > 0
        cluster.fullest(bucket).kill()
        until(lambda: unreadable(cluster, bucket) == set())


def filled(cluster: SeaweedCluster) -> str:
    bucket = cluster.new_bucket()
    for key, body in OBJECTS.items():
        cluster.client().put_object(Bucket=bucket, Key=key, Body=body)
    return bucket


def unreadable(cluster: SeaweedCluster, bucket: str) -> set[str]:
    """The objects that are not there, or not with the bytes that were written."""
    # A server that does not answer is waited for in vain, as one that is gone.
    client = cluster.client(retries={"total_max_attempts": 1}, read_timeout=2)

    def is_unreadable(key: str) -> bool:
        try:
            stored: bytes = client.get_object(Bucket=bucket, Key=key)["Body"].read()
        except (BotoCoreError, ClientError):
            return True
        return stored != OBJECTS[key]

    with ThreadPoolExecutor(len(OBJECTS)) as threads:
        bad = threads.map(is_unreadable, OBJECTS)
        return {key for key, is_bad in zip(OBJECTS, bad, strict=True) if is_bad}
