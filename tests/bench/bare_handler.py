"""The least that can answer Allocate on the daemon's own gRPC server: what of a call's time is the way there and back.

`python -m tests.bench.bare_handler SOCKET`: every Allocate is answered with the same nodes.
"""

from __future__ import annotations

import sys

import trio

from gpuactors.grpc_trio import Server, TrioService, bind_unix
from gpuactors.kubelet.pb.deviceplugin import v1beta1 as pb

NODES = ("/dev/vfio/vfio", "/dev/vfio/1")


class BareHandler(TrioService, pb.DevicePluginBase):
    """Allocate only."""

    async def allocate(self, message: pb.AllocateRequest) -> pb.AllocateResponse:
        return pb.AllocateResponse(
            container_responses=[
                pb.ContainerAllocateResponse(
                    envs={"PCI_RESOURCE_NVIDIA_COM_2330": ",".join(request.devices_ids)},
                    devices=[
                        pb.DeviceSpec(container_path=node, host_path=node, permissions="mrw")
                        for node in NODES
                    ],
                )
                for request in message.container_requests
            ]
        )


if __name__ == "__main__":
    trio.run(Server([BareHandler()], drain_s=0.1).serve, bind_unix(sys.argv[1]))
