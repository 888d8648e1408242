"""The registrar and the liveness probe, which Go's module proxy does not have.

With their flags, of which --kubelet-registration-path makes it the registrar, in an image of the
driver's own files. The registrar answers kubelet's
pluginregistration calls as node-driver-registrar does, the probe GET /healthz as livenessprobe
does: 200 if the driver's Probe succeeds.
"""

import argparse
import http.server
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc

from csi.generated import csi_pb2, csi_pb2_grpc, pluginregistration_pb2, pluginregistration_pb2_grpc

REGISTRY = Path("/registration")


class Registrar(pluginregistration_pb2_grpc.RegistrationServicer):
    """Answers kubelet for the driver `name` at the path `endpoint` of the host."""

    def __init__(self, name: str, endpoint: str) -> None:
        self._name = name
        self._endpoint = endpoint

    def GetInfo(
        self, request: pluginregistration_pb2.InfoRequest, context: grpc.ServicerContext
    ) -> pluginregistration_pb2.PluginInfo:
        return pluginregistration_pb2.PluginInfo(
            type="CSIPlugin", name=self._name, endpoint=self._endpoint, supported_versions=["1.0.0"]
        )

    def NotifyRegistrationStatus(
        self, request: pluginregistration_pb2.RegistrationStatus, context: grpc.ServicerContext
    ) -> pluginregistration_pb2.RegistrationStatusResponse:
        if not request.plugin_registered:
            print(f"kubelet refused: {request.error}", flush=True)
            threading.Timer(1, os._exit, (1,)).start()
        return pluginregistration_pb2.RegistrationStatusResponse()


def register(channel: grpc.Channel, endpoint: str) -> grpc.Server:
    """Offer the driver to kubelet, once it says its name."""
    identity = csi_pb2_grpc.IdentityStub(channel)
    while True:
        try:
            name = identity.GetPluginInfo(csi_pb2.GetPluginInfoRequest(), timeout=5).name
            break
        except grpc.RpcError:
            time.sleep(1)
    server = grpc.server(ThreadPoolExecutor(2))
    pluginregistration_pb2_grpc.add_RegistrationServicer_to_server(
        Registrar(name, endpoint), server
    )
    path = REGISTRY / f"{name}-reg.sock"
    path.unlink(missing_ok=True)
    server.add_insecure_port(f"unix://{path}")
    server.start()
    return server


def main() -> None:
    # A container's first process has to ask for its end.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    parser = argparse.ArgumentParser()
    parser.add_argument("--csi-address", required=True)
    parser.add_argument("--http-endpoint", required=True)
    parser.add_argument("--kubelet-registration-path")
    parser.add_argument("--probe-timeout", default="3s")
    options = parser.parse_args()
    channel = grpc.insecure_channel(f"unix://{options.csi_address}")
    server = None
    if options.kubelet_registration_path:
        server = register(channel, options.kubelet_registration_path)

    class Health(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            try:
                if server is None:
                    probe = csi_pb2_grpc.IdentityStub(channel).Probe
                    probe(csi_pb2.ProbeRequest(), timeout=float(options.probe_timeout[:-1]))
                self.send_response(200)
            except grpc.RpcError as error:
                print(error, flush=True)
                self.send_response(500)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Say nothing of each probe."""

    port = int(options.http_endpoint.removeprefix(":"))
    http.server.ThreadingHTTPServer(("", port), Health).serve_forever()


if __name__ == "__main__":
    main()
