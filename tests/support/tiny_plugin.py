"""The smallest device plugin that grpcio can make. Must not import gpuactors."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc

from tests.support.device_plugin_grpcio import add_service, message, stub
from tests.support.patience import patient

RESOURCE = "example.org/thing"
WAIT_S = patient(10.0)


class TinyPlugin:
    """One resource on one socket; `frames` takes lists of (id, health), None ends the stream."""

    def __init__(self, socket_dir: Path, name: str = "tiny.sock") -> None:
        self.frames: queue.Queue[list[tuple[str, str]] | None] = queue.Queue()
        self.on_allocate: Callable[[], None] = lambda: None
        self.name = name
        self.kubelet_socket = socket_dir / "kubelet.sock"
        self.server = grpc.server(ThreadPoolExecutor(8))
        add_service(self.server, "DevicePlugin", self)
        self.server.add_insecure_port(f"unix:{socket_dir / name}")
        self.server.start()

    def register(self, version: str = "v1beta1", resource: str = RESOURCE, timeout_s: float = WAIT_S) -> None:
        request = message("RegisterRequest")(version=version, endpoint=self.name, resource_name=resource)
        with grpc.insecure_channel(f"unix:{self.kubelet_socket}") as channel:
            stub(channel, "Registration")["Register"](request, timeout=timeout_s)

    def GetDevicePluginOptions(self, request: Any, context: grpc.ServicerContext) -> Any:
        return message("DevicePluginOptions")(get_preferred_allocation_available=True)

    def ListAndWatch(self, request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        while context.is_active():
            try:
                frame = self.frames.get(timeout=0.02)
            except queue.Empty:
                continue
            if frame is None:
                return
            nodes = message("TopologyInfo")(nodes=[message("NUMANode")(ID=1)])
            yield message("ListAndWatchResponse")(
                devices=[
                    message("Device")(ID=name, health=health, topology=nodes if name == "b" else None)
                    for name, health in frame
                ]
            )

    def GetPreferredAllocation(self, request: Any, context: grpc.ServicerContext) -> Any:
        (wanted,) = request.container_requests
        chosen = sorted(wanted.available_deviceIDs)[: wanted.allocation_size]
        container = message("ContainerPreferredAllocationResponse")(deviceIDs=chosen)
        return message("PreferredAllocationResponse")(container_responses=[container])

    def Allocate(self, request: Any, context: grpc.ServicerContext) -> Any:
        (wanted,) = request.container_requests
        self.on_allocate()
        node = message("DeviceSpec")(container_path="/dev/c", host_path="/dev/h", permissions="mrw")
        container = message("ContainerAllocateResponse")(
            envs={"IDS": ",".join(wanted.devices_ids)}, devices=[node]
        )
        return message("AllocateResponse")(container_responses=[container])

    def PreStartContainer(self, request: Any, context: grpc.ServicerContext) -> Any:
        context.abort(grpc.StatusCode.FAILED_PRECONDITION, "not yet")
