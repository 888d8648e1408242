"""The CSI driver as kubelet and the sidecars see it: gRPC over a Unix socket.

A short path, for a socket's is 107 bytes at most.
"""

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest

from csi.generated import csi_pb2, csi_pb2_grpc
from csi.server import Server, Service

Mode = csi_pb2.VolumeCapability.AccessMode
GIB = 1 << 30
DEADLINE_S = 30


class Driver:
    """The stubs for a socket."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.channel = grpc.insecure_channel(f"unix:{path}")
        self.identity = csi_pb2_grpc.IdentityStub(self.channel)
        self.controller = csi_pb2_grpc.ControllerStub(self.channel)
        self.node = csi_pb2_grpc.NodeStub(self.channel)

    def close(self) -> None:
        self.channel.close()


@contextlib.contextmanager
def serving(services: Sequence[Service]) -> Iterator[Driver]:
    """A server in this process with these services."""
    with tempfile.TemporaryDirectory(prefix="csi-") as directory:
        server = Server(f"unix://{directory}/csi.sock", services)
        server.start()
        driver = Driver(server.path)
        try:
            yield driver
        finally:
            driver.close()
            server.stop(0)


def mount_capability(
    mode: int = Mode.MULTI_NODE_MULTI_WRITER, *flags: str, fs_type: str = ""
) -> csi_pb2.VolumeCapability:
    return csi_pb2.VolumeCapability(
        mount=csi_pb2.VolumeCapability.MountVolume(fs_type=fs_type, mount_flags=flags),
        access_mode=Mode(mode=mode),
    )


def block_capability() -> csi_pb2.VolumeCapability:
    return csi_pb2.VolumeCapability(
        block=csi_pb2.VolumeCapability.BlockVolume(), access_mode=Mode(mode=Mode.SINGLE_NODE_WRITER)
    )


def refusal(call: Callable[..., Any], request: Any) -> tuple[grpc.StatusCode, str]:
    """The code and the sentence of a call that has to fail."""
    with pytest.raises(grpc.RpcError) as caught:
        call(request, timeout=DEADLINE_S)
    error: Any = caught.value
    return error.code(), error.details()
