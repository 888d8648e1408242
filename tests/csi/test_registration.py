"""Kubelet registers the driver: this test speaks in kubelet's place, and in the registrar's."""

import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from csi.generated import csi_pb2, pluginregistration_pb2, pluginregistration_pb2_grpc
from tests.support.csi.calls import DEADLINE_S, Driver

# What Kubernetes takes for the name of a driver.
NAME = re.compile(r"[a-zA-Z0-9]([-a-zA-Z0-9.]{0,61}[a-zA-Z0-9])?")


class Registrar(pluginregistration_pb2_grpc.RegistrationServicer):
    """The sidecar: it passes on to kubelet what the driver answers."""

    def __init__(self, driver: Driver) -> None:
        answer = driver.identity.GetPluginInfo(csi_pb2.GetPluginInfoRequest(), timeout=1)
        self._info = pluginregistration_pb2.PluginInfo(
            type="CSIPlugin",
            name=answer.name,
            endpoint=str(driver.path),
            supported_versions=["1.0.0"],
        )
        self.status: pluginregistration_pb2.RegistrationStatus | None = None

    def GetInfo(
        self, request: pluginregistration_pb2.InfoRequest, context: grpc.ServicerContext
    ) -> pluginregistration_pb2.PluginInfo:
        return self._info

    def NotifyRegistrationStatus(
        self, request: pluginregistration_pb2.RegistrationStatus, context: grpc.ServicerContext
    ) -> pluginregistration_pb2.RegistrationStatusResponse:
        self.status = request
        return pluginregistration_pb2.RegistrationStatusResponse()


@pytest.fixture(scope="module")
def driver() -> Iterator[Driver]:
    """`fusefs-csi all` as a process; its state is on a tmpfs."""
    directory = Path(tempfile.mkdtemp(prefix="csi-", dir="/dev/shm"))
    path = directory / "csi.sock"
    process = subprocess.Popen(
        [
            Path(sys.prefix) / "bin" / "fusefs-csi",
            "all",
            "--endpoint",
            f"unix://{path}",
            "--node-id",
            "node-1",
            "--state-dir",
            directory / "state",
            "--kubelet-dir",
            directory / "kubelet",
            "--mounts-dir",
            directory / "mounts",
            "--cache-dir",
            directory / "cache",
        ]
    )
    try:
        deadline = time.monotonic() + DEADLINE_S
        while not path.exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        made = Driver(path)
        yield made
        made.close()
        process.send_signal(signal.SIGTERM)
        process.wait(DEADLINE_S)
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(directory)


def test_kubelet_registers_the_driver(driver: Driver) -> None:
    registrar = Registrar(driver)
    server = grpc.server(ThreadPoolExecutor(2))
    pluginregistration_pb2_grpc.add_RegistrationServicer_to_server(registrar, server)
    socket = driver.path.with_name("driver-reg.sock")
    server.add_insecure_port(f"unix:{socket}")
    server.start()
    kubelet = grpc.insecure_channel(f"unix:{socket}")
    try:
        stub = pluginregistration_pb2_grpc.RegistrationStub(kubelet)
        info = stub.GetInfo(pluginregistration_pb2.InfoRequest(), timeout=DEADLINE_S)
        assert (info.type, list(info.supported_versions)) == ("CSIPlugin", ["1.0.0"])
        assert NAME.fullmatch(info.name)
        # Kubelet then asks the driver itself, and refuses it if that fails.
        node = Driver(Path(info.endpoint))
        answer = node.node.NodeGetInfo(csi_pb2.NodeGetInfoRequest(), timeout=DEADLINE_S)
        node.close()
        assert answer.node_id == "node-1"
        assert answer.max_volumes_per_node >= 0
        assert not answer.HasField("accessible_topology")
        status = pluginregistration_pb2.RegistrationStatus(plugin_registered=True)
        stub.NotifyRegistrationStatus(status, timeout=DEADLINE_S)
        assert registrar.status == status
    finally:
        kubelet.close()
        server.stop(None).wait()


def test_one_socket_has_all_services(driver: Driver) -> None:
    """As the sidecars ask when they start."""
    driver.identity.Probe(csi_pb2.ProbeRequest(), timeout=DEADLINE_S)
    controller = csi_pb2.ControllerGetCapabilitiesRequest()
    assert driver.controller.ControllerGetCapabilities(controller, timeout=DEADLINE_S).capabilities
    node = csi_pb2.NodeGetCapabilitiesRequest()
    assert driver.node.NodeGetCapabilities(node, timeout=DEADLINE_S).capabilities
