"""A claim's volume from its creation to its end, as provisioner and kubelet call for it."""

from collections.abc import Iterator

import pytest

from csi.generated import csi_pb2
from tests.support.csi.calls import Driver, mount_capability
from tests.support.csi.node import SECRETS, Node, running_node
from tests.support.csi.volumes import CLUSTER, NAME, create, delete, record_key, request
from tests.support.servers.buckets import Bucket, keys, stored
from tests.support.servers.s3_server import S3Server
from tests.support.sharing import PATIENCE_S
from tests.support.waiting import until

# What the provisioner adds to a volume's attributes, and kubelet when it publishes.
ADDED = {
    "storage.kubernetes.io/csiProvisionerIdentity": "1763700000000-8081-s3.csi.fusefs.dev",
    "csi.storage.k8s.io/pod.name": "trainer-0",
    "csi.storage.k8s.io/pod.namespace": "team",
    "csi.storage.k8s.io/pod.uid": "0b5c6a3e-0000-4b0e-9a55-9b1f1d0f4a11",
    "csi.storage.k8s.io/serviceAccount.name": "default",
    "csi.storage.k8s.io/ephemeral": "false",
}


@pytest.fixture(scope="module")
def node(s3: S3Server) -> Iterator[Node]:
    with running_node("--cluster-id", CLUSTER, serves="all", minio=s3.endpoint_url) as node:
        yield node


@pytest.fixture(scope="module")
def driver(node: Node) -> Iterator[Driver]:
    driver = Driver(node.socket)
    yield driver
    driver.close()


def test_calls_without_a_deadline_are_answered(driver: Driver, node: Node, bucket: Bucket) -> None:
    """As csi-sanity makes them: for the library their deadline is 290 years away."""
    created = driver.controller.CreateVolume(request(bucket.name, onDelete="delete"))
    volume, target = created.volume, str(node.target("pod", "no-deadline"))
    capability = mount_capability()
    driver.controller.ControllerExpandVolume(
        csi_pb2.ControllerExpandVolumeRequest(
            volume_id=volume.volume_id,
            capacity_range={"required_bytes": 2**40},
            volume_capability=capability,
            secrets=SECRETS,
        )
    )
    for _ in range(2):
        context = {**volume.volume_context, **ADDED}
        node.node.NodePublishVolume(node.request(volume.volume_id, target, **context))
    for _ in range(2):
        node.node.NodeUnpublishVolume(
            csi_pb2.NodeUnpublishVolumeRequest(volume_id=volume.volume_id, target_path=target)
        )
    for _ in range(2):
        driver.controller.DeleteVolume(
            csi_pb2.DeleteVolumeRequest(volume_id=volume.volume_id, secrets=SECRETS)
        )
    assert record_key() not in keys(bucket)


@pytest.mark.parametrize("on_delete", ["delete", "retain"])
def test_a_claim_is_provisioned_used_grown_and_given_back(
    driver: Driver, node: Node, bucket: Bucket, on_delete: str
) -> None:
    bucket.put("another", b"precious")
    volume = create(
        driver,
        bucket.name,
        prefix="fresh/${pvc.namespace}/${pv.name}",
        onDelete=on_delete,
        metadataTtl="10m",
    )
    target = node.target("pod", NAME)
    capability = mount_capability()
    node.publish(volume.volume_id, target, **{**volume.volume_context, **ADDED})
    (target / "results").mkdir()
    (target / "results" / "loss").write_bytes(b"0.1")
    key = f"fresh/team/{NAME}/results/loss"
    assert stored(bucket, key) == b"0.1"
    grown = driver.controller.ControllerExpandVolume(
        csi_pb2.ControllerExpandVolumeRequest(
            volume_id=volume.volume_id,
            capacity_range={"required_bytes": volume.capacity_bytes * 2},
            volume_capability=capability,
            secrets=SECRETS,
        ),
        timeout=PATIENCE_S,
    )
    assert grown.capacity_bytes == volume.capacity_bytes * 2
    assert record_key() in keys(bucket)
    node.unpublish(volume.volume_id, target)
    until(lambda: not node.leftovers(), "nothing is left")
    # A new claim is empty: nothing to warn of.
    lines = [line for line in node.log.read_text().splitlines() if f"{NAME}/ is empty" in line]
    assert lines
    assert not [line for line in lines if "WARNING" in line]
    delete(driver, volume.volume_id)
    kept = {key} if on_delete == "retain" else set()
    assert {one for one in keys(bucket) if not one.endswith("/")} == {"another", *kept}
