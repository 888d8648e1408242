"""Volumes as the provisioner asks the controller for them."""

import threading
from collections.abc import Callable
from typing import Any

import grpc

from csi.generated import csi_pb2
from tests.support.csi.calls import GIB, Driver, mount_capability
from tests.support.servers.faulty_s3 import FaultyS3
from tests.support.servers.s3_server import ACCESS_KEY, SECRET_KEY
from tests.support.sharing import PATIENCE_S

Code = grpc.StatusCode
KEYS = {"accessKeyId": ACCESS_KEY, "secretAccessKey": SECRET_KEY}
CLUSTER = "this-cluster"
NAME = "pvc-0b5c6a3e-7a3c-4b0e-9a55-9b1f1d0f4a11"


def request(bucket: str, name: str = NAME, **parameters: str) -> csi_pb2.CreateVolumeRequest:
    """What the provisioner asks for a claim `data` in the namespace `team`."""
    return csi_pb2.CreateVolumeRequest(
        name=name,
        capacity_range=csi_pb2.CapacityRange(required_bytes=5 * GIB),
        volume_capabilities=[mount_capability()],
        parameters={
            "store": "minio",
            "bucket": bucket,
            "csi.storage.k8s.io/pvc/namespace": "team",
            "csi.storage.k8s.io/pvc/name": "data",
            "csi.storage.k8s.io/pv/name": name,
            **parameters,
        },
        secrets=KEYS,
    )


def create(driver: Driver, bucket: str, name: str = NAME, **parameters: str) -> csi_pb2.Volume:
    message = request(bucket, name, **parameters)
    return driver.controller.CreateVolume(message, timeout=PATIENCE_S).volume


def delete(driver: Driver, volume_id: str, timeout: float = PATIENCE_S) -> None:
    message = csi_pb2.DeleteVolumeRequest(volume_id=volume_id, secrets=KEYS)
    driver.controller.DeleteVolume(message, timeout=timeout)


def record_key(name: str = NAME) -> str:
    return f".fusefs/volumes/{name}.json"


def changed(**fields: Any) -> Callable[[csi_pb2.CreateVolumeRequest], None]:
    """What merges these fields into a request."""

    def change(message: csi_pb2.CreateVolumeRequest) -> None:
        message.MergeFrom(csi_pb2.CreateVolumeRequest(**fields))

    return change


class Held:
    """A request of one kind that waits until the test lets it go on."""

    def __init__(self, faulty: FaultyS3, operation: str, key: str = "*") -> None:
        self.begun = threading.Event()
        self._going_on = threading.Event()
        faulty.add(operation, key, times=1, before=self._hold)

    def _hold(self) -> None:
        self.begun.set()
        self._going_on.wait(PATIENCE_S)

    def let_go(self) -> None:
        self._going_on.set()
