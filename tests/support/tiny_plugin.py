"""The smallest device plugin that grpcio can make. Must not import gpuactors."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc

from tests.support.device_plugin_grpcio import add_service, message, stub
from tests.support.patience import patient

RESOURCE = "example.org/thing"
WAIT_S = patient(10.0)

Refusal = tuple[grpc.StatusCode, str]


class TinyPlugin:
    """One resource on one socket; `lists` takes lists of (id, health), None ends the stream, a refusal ends it with an
    error. The device `b` is on NUMA node 1, the others on none."""

    def __init__(self, socket_dir: Path, name: str = "tiny.sock") -> None:
        self.lists: queue.Queue[list[tuple[str, str]] | Refusal | None] = queue.Queue()
        self.asked: list[tuple[str, tuple[str, ...]]] = []
        """Each call of a method, with the devices that it names, sorted."""
        self.refusals: dict[str, list[Refusal]] = {}
        """By method: what its next calls are answered."""
        self.pre_start_required = False
        self.prefers = True
        self.prefer: Callable[[Sequence[str], int], Collection[str]] = lambda ids, size: sorted(ids)[:size]
        self.on_options: Callable[[], None] = lambda: None
        self.on_allocate: Callable[[], None] = lambda: None
        self.containers_answered = 1
        self.cut_off = threading.Event()
        """Its stream ended from the other side."""
        self.name = name
        self.kubelet_socket = socket_dir / "kubelet.sock"
        self.server = grpc.server(ThreadPoolExecutor(8))
        add_service(self.server, "DevicePlugin", self)
        self.server.add_insecure_port(f"unix:{socket_dir / name}")
        self.server.start()

    def register(
        self,
        version: str = "v1beta1",
        resource: str = RESOURCE,
        timeout_s: float = WAIT_S,
        endpoint: str = "",
    ) -> None:
        """Raises grpc.RpcError. `endpoint` is its own where none is given."""
        request = message("RegisterRequest")(
            version=version, endpoint=endpoint or self.name, resource_name=resource
        )
        with grpc.insecure_channel(f"unix:{self.kubelet_socket}") as channel:
            stub(channel, "Registration")["Register"](request, timeout=timeout_s)

    def stop(self) -> None:
        """It ends; its socket's file goes."""
        self.server.stop(grace=None).wait()

    def calls(self, method: str) -> list[tuple[str, ...]]:
        """The devices of each call of one method so far, sorted."""
        return [ids for asked, ids in self.asked if asked == method]

    def _note(self, context: grpc.ServicerContext, method: str, ids: Collection[str] = ()) -> None:
        self.asked.append((method, tuple(sorted(ids))))
        if self.refusals.get(method):
            context.abort(*self.refusals[method].pop(0))

    def GetDevicePluginOptions(self, request: Any, context: grpc.ServicerContext) -> Any:
        self._note(context, "GetDevicePluginOptions")
        self.on_options()
        return message("DevicePluginOptions")(
            pre_start_required=self.pre_start_required, get_preferred_allocation_available=self.prefers
        )

    def ListAndWatch(self, request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        self._note(context, "ListAndWatch")
        ours = threading.Event()
        # Not after the loop: a stream that is cancelled while an answer is on its way is asked for no further one.
        context.add_callback(lambda: None if ours.is_set() else self.cut_off.set())
        while context.is_active():
            try:
                devices = self.lists.get(timeout=0.02)
            except queue.Empty:
                continue
            if devices is None:
                ours.set()
                return
            if isinstance(devices, tuple):
                ours.set()
                context.abort(*devices)
            nodes = message("TopologyInfo")(nodes=[message("NUMANode")(ID=1)])
            yield message("ListAndWatchResponse")(
                devices=[
                    message("Device")(ID=name, health=health, topology=nodes if name == "b" else None)
                    for name, health in devices
                ]
            )

    def GetPreferredAllocation(self, request: Any, context: grpc.ServicerContext) -> Any:
        (wanted,) = request.container_requests
        self._note(context, "GetPreferredAllocation", wanted.available_deviceIDs)
        chosen = self.prefer(wanted.available_deviceIDs, wanted.allocation_size)
        container = message("ContainerPreferredAllocationResponse")(deviceIDs=chosen)
        return message("PreferredAllocationResponse")(container_responses=[container])

    def Allocate(self, request: Any, context: grpc.ServicerContext) -> Any:
        (wanted,) = request.container_requests
        self._note(context, "Allocate", wanted.devices_ids)
        self.on_allocate()
        node = message("DeviceSpec")(container_path="/dev/c", host_path="/dev/h", permissions="mrw")
        container = message("ContainerAllocateResponse")(
            envs={"IDS": ",".join(sorted(wanted.devices_ids))}, devices=[node]
        )
        return message("AllocateResponse")(container_responses=[container] * self.containers_answered)

    def PreStartContainer(self, request: Any, context: grpc.ServicerContext) -> Any:
        self._note(context, "PreStartContainer", request.devices_ids)
        return message("PreStartContainerResponse")()
