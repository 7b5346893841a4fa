"""The script's own device plugin: it answers as a step says, and records each call with its deadline."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc

from tests.support.device_plugin_grpcio import add_service, message, stub
from tests.support.patience import patient

WAIT_S: Final = patient(40.0)
"""Bound of a wait for a call."""

REGISTER_S: Final = 25.0
"""Deadline of a Register, which may dial for 10 s."""

DEADLINES_S: Final = (1.0, 5.0, 10.0, REGISTER_S, 30.0, 45.0)
"""The deadlines that a call to a plugin may have: kubelet's own, and that of the Register which it belongs to."""

NO_DEADLINE_S: Final = 86400.0
"""More is left of a call without a deadline."""

IN_FLIGHT_S: Final = 0.5
"""A deadline is rounded up on its way."""

HOST_NODE: Final = "/dev/null"
"""The node of the host that each container gets: one that every machine has."""

THREADS: Final = 16


@dataclass(frozen=True, slots=True)
class Device:
    """A device of a list."""

    id: str
    health: str = "Healthy"
    nodes: tuple[int, ...] | None = None
    """NUMA nodes; None: without topology."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """The error that a call is answered."""

    code: grpc.StatusCode
    text: str


@dataclass(frozen=True, slots=True)
class Call:
    """One call to the plugin."""

    method: str
    fields: tuple[tuple[str, Any], ...] = ()
    deadline_s: float | None = None
    """Kubelet's deadline, or None."""


def deadline_of(context: grpc.ServicerContext) -> float | None:
    """The deadline that the caller set, of those that there are; None if it set none."""
    left = context.time_remaining()
    if left > NO_DEADLINE_S:
        return None
    return next((deadline for deadline in DEADLINES_S if left <= deadline + IN_FLIGHT_S), left)


@dataclass(slots=True, eq=False)
class _Stream:
    """One open ListAndWatch."""

    lists: queue.SimpleQueue[Sequence[Device] | Refusal | None]
    ended: threading.Event
    """Kubelet's side ended it."""


class Plugin:
    """A device plugin at one endpoint. Each list goes to the newest stream only."""

    def __init__(self, socket_dir: Path, name: str, resource: str) -> None:
        self.name = name
        self.resource = resource
        self.calls: list[Call] = []
        self.refusals: dict[str, list[Refusal]] = {}
        """By method: the errors of its next calls."""
        self.pre_start_required = False
        self.prefers = False
        self.prefer: Callable[[Sequence[str], int], Collection[str]] = lambda ids, size: sorted(ids)[:size]
        self.on_call: dict[str, Callable[[], object]] = {}
        """By method: what runs before its answer."""
        self.containers_answered = 1
        self.over: list[str] = []
        """The methods of the calls that are over, answered or given up by kubelet."""
        self._streams: list[_Stream] = []
        self._kubelet = socket_dir / "kubelet.sock"
        self._path = socket_dir / name
        self._server = self._serve()

    def _serve(self) -> grpc.Server:
        server = grpc.server(ThreadPoolExecutor(THREADS))
        add_service(server, "DevicePlugin", self)
        server.add_insecure_port(f"unix:{self._path}")
        server.start()
        return server

    def stop(self) -> None:
        """Ends the process's part: streams, connections, socket."""
        self._server.stop(grace=None).wait()

    def register(self, **change: Any) -> str:
        """Calls Register; returns the code and text of its error, or nothing."""
        timeout_s = change.pop("timeout_s", REGISTER_S)
        fields = {"version": "v1beta1", "endpoint": self.name, "resource_name": self.resource, **change}
        with grpc.insecure_channel(f"unix:{self._kubelet}") as channel:
            try:
                stub(channel, "Registration")["Register"](
                    message("RegisterRequest")(**fields), timeout=timeout_s
                )
            except grpc.RpcError as error:
                status: Any = error
                return f"{status.code().name}: {status.details()}"
        return ""

    def send(self, *devices: Device) -> None:
        """Sends a list on the newest stream."""
        self._streams[-1].lists.put(devices)

    def end(self, refusal: Refusal | None = None) -> None:
        """Ends the newest stream, with an error if one is given."""
        self._streams[-1].lists.put(refusal)

    @property
    def streams(self) -> int:
        """How many streams kubelet has opened."""
        return len(self._streams)

    @property
    def cut_off(self) -> bool:
        """Kubelet ended the newest stream."""
        return self._streams[-1].ended.is_set()

    def asked(self, *methods: str) -> list[Call]:
        """The calls of these methods, in order."""
        return [call for call in tuple(self.calls) if call.method in methods]

    # --- the service ------------------------------------------------------------------------------------------

    def _answer(self, context: grpc.ServicerContext, method: str, **fields: Any) -> None:
        self.calls.append(Call(method, tuple(fields.items()), deadline_of(context)))
        context.add_callback(lambda: self.over.append(method))
        self.on_call.get(method, lambda: None)()
        if self.refusals.get(method):
            refusal = self.refusals[method].pop(0)
            context.abort(refusal.code, refusal.text)

    def GetDevicePluginOptions(self, request: Any, context: grpc.ServicerContext) -> Any:
        self._answer(context, "GetDevicePluginOptions")
        return message("DevicePluginOptions")(
            pre_start_required=self.pre_start_required, get_preferred_allocation_available=self.prefers
        )

    def ListAndWatch(self, request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        stream = _Stream(queue.SimpleQueue(), threading.Event())
        finished = threading.Event()

        def closed() -> None:
            if not finished.is_set():
                stream.ended.set()
                stream.lists.put(None)

        context.add_callback(closed)
        self._streams.append(stream)
        self._answer(context, "ListAndWatch")
        while (found := stream.lists.get()) is not None:
            if isinstance(found, Refusal):
                finished.set()
                context.abort(found.code, found.text)
            yield message("ListAndWatchResponse")(devices=[_message(device) for device in found])
        finished.set()

    def GetPreferredAllocation(self, request: Any, context: grpc.ServicerContext) -> Any:
        (wanted,) = request.container_requests
        self._answer(
            context,
            "GetPreferredAllocation",
            available=sorted(wanted.available_deviceIDs),
            must_include=sorted(wanted.must_include_deviceIDs),
            size=wanted.allocation_size,
        )
        chosen = self.prefer(wanted.available_deviceIDs, wanted.allocation_size)
        container = message("ContainerPreferredAllocationResponse")(deviceIDs=chosen)
        return message("PreferredAllocationResponse")(container_responses=[container])

    def Allocate(self, request: Any, context: grpc.ServicerContext) -> Any:
        (wanted,) = request.container_requests
        self._answer(context, "Allocate", ids=sorted(wanted.devices_ids))
        node = message("DeviceSpec")(container_path="/dev/given", host_path=HOST_NODE, permissions="mrw")
        container = message("ContainerAllocateResponse")(
            envs={"IDS": ",".join(sorted(wanted.devices_ids))}, devices=[node]
        )
        return message("AllocateResponse")(container_responses=[container] * self.containers_answered)

    def PreStartContainer(self, request: Any, context: grpc.ServicerContext) -> Any:
        self._answer(context, "PreStartContainer", ids=sorted(request.devices_ids))
        return message("PreStartContainerResponse")()


def _message(device: Device) -> Any:
    topology = None
    if device.nodes is not None:
        topology = message("TopologyInfo")(nodes=[message("NUMANode")(ID=node) for node in device.nodes])
    return message("Device")(ID=device.id, health=device.health, topology=topology)
