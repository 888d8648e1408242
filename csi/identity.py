"""The CSI Identity service: the driver's name, version and capabilities, and Probe.

Every instance of a version gives the same answers, whichever other services it has. Probe sends no
request to S3: kubelet ends a container whose probe fails, and one store that is down is no reason
to end the mounts of another store.
"""

from __future__ import annotations

import grpc

from csi.generated import csi_pb2, csi_pb2_grpc
from csi.server import DRIVER_NAME
from fusefs import __version__

_SERVICE = csi_pb2.PluginCapability.Service
_EXPANSION = csi_pb2.PluginCapability.VolumeExpansion


class IdentityService(csi_pb2_grpc.IdentityServicer):
    """The Identity service. It has no state and answers at once."""

    register = staticmethod(csi_pb2_grpc.add_IdentityServicer_to_server)

    def GetPluginInfo(
        self, request: csi_pb2.GetPluginInfoRequest, context: grpc.ServicerContext
    ) -> csi_pb2.GetPluginInfoResponse:
        return csi_pb2.GetPluginInfoResponse(name=DRIVER_NAME, vendor_version=__version__)

    def GetPluginCapabilities(
        self, request: csi_pb2.GetPluginCapabilitiesRequest, context: grpc.ServicerContext
    ) -> csi_pb2.GetPluginCapabilitiesResponse:
        controller = _SERVICE(type=_SERVICE.CONTROLLER_SERVICE)
        return csi_pb2.GetPluginCapabilitiesResponse(
            capabilities=[
                csi_pb2.PluginCapability(service=controller),
                csi_pb2.PluginCapability(volume_expansion=_EXPANSION(type=_EXPANSION.ONLINE)),
            ]
        )

    def Probe(
        self, request: csi_pb2.ProbeRequest, context: grpc.ServicerContext
    ) -> csi_pb2.ProbeResponse:
        return csi_pb2.ProbeResponse()
