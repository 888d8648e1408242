"""What all mounts of a node may have together: the share of one, times the most that may be."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from csi.errors import ResourceExhaustedError
from csi.generated import csi_pb2
from csi.node.mount_record import MountRecord, MountRecords
from fusefs.settings.mount import MountSettings
from fusefs.settings.types import MIB
from tests.support.csi.node import Node, code_of
from tests.support.servers.buckets import Bucket
from tests.support.sharing import PATIENCE_S

MOST = 2
MEMORY = 128 * MIB
CONNECTIONS = 8
FLAGS = (f"--max-volumes={MOST}", f"--memory-limit={MEMORY}", f"--max-connections={CONNECTIONS}")


def settings_of(node: Node) -> list[MountSettings]:
    return [MountSettings.from_texts(record["settings"]) for record in node.records()]


def test_mounts_together_never_have_more_than_the_nodes_budget(node: Node, data: Bucket) -> None:
    targets = {name: node.target(name) for name in ("one", "two", "three", "again")}

    def publish(volume: str, pod: str = "", **attributes: str) -> None:
        node.publish(volume, targets[pod or volume], bucket=data.name, **attributes)

    answer = node.node.NodeGetInfo(csi_pb2.NodeGetInfoRequest(), timeout=PATIENCE_S)
    assert answer.max_volumes_per_node == MOST
    publish("one", maxConnections="100", memoryLimit="1GiB")
    publish("two")
    with pytest.raises(grpc.RpcError, match="--max-volumes") as refused:
        publish("three")
    assert code_of(refused) is grpc.StatusCode.RESOURCE_EXHAUSTED
    publish("one", "again", maxConnections="100", memoryLimit="1GiB")  # shares the mount
    publish("two")  # is there already
    assert sum(one.memory_limit for one in settings_of(node)) == MOST * MEMORY
    assert sum(one.max_connections for one in settings_of(node)) == MOST * CONNECTIONS
    node.unpublish("two", targets["two"])
    publish("three")
    for volume, pod in (("one", "one"), ("one", "again"), ("three", "three")):
        node.unpublish(volume, targets[pod])


def test_of_many_that_come_at_once_no_more_get_in_than_there_is_room_for(tmp_path: Path) -> None:
    records = MountRecords(tmp_path)

    def come(number: int) -> bool:
        try:
            with records.one_more(8):
                key = str(number)
                records.write(key, MountRecord(key, "v", "/m", "s3://b", "me", 1, "", "", 0.0))
        except ResourceExhaustedError:
            return False
        return True

    with ThreadPoolExecutor(20) as threads:
        assert sum(threads.map(come, range(20))) == 8
    assert len(records.all()) == 8
