"""A small device plugin and a started fake kubelet for it, over unix sockets or in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import trio
from grpclib import GRPCError

from gpuactors.grpc_trio import Server, TrioService, bind_unix, open_channel, open_unix_channel
from gpuactors.kubelet.pb.deviceplugin import v1beta1 as pb
from gpuactors.kubelet.pb.podresources.v1 import ListPodResourcesRequest, PodResourcesListerStub
from gpuactors.replay.counts import Counts
from gpuactors_simulation.kubelet.containers import Tenancy
from gpuactors_simulation.kubelet.fake import FakeKubelet, open_fake_kubelet
from gpuactors_simulation.kubelet.pods import CdiNodes
from gpuactors_simulation.kubelet.transport import (
    KUBELET_SOCKET,
    POD_RESOURCES_SOCKET,
    MemoryTransport,
    UnixTransport,
)
from tests.support.patience import patient

GPU = "nvidia.com/GH100_H100_SXM5_80GB"
WITHIN_S = patient(20.0)


@dataclass
class Plugin(TrioService, pb.DevicePluginBase):
    """A device plugin whose lists a test sends by hand."""

    pre_start_required: bool = False
    options_error: GRPCError | None = None
    allocate_error: GRPCError | None = None
    pre_start_errors: list[GRPCError] = field(default_factory=list)
    empty_answers: int = 0
    """How many of its next answers to Allocate have no container."""
    hold_allocate: trio.Event | None = None
    allocating: trio.Event = field(default_factory=trio.Event)
    asked: list[tuple[str, Any]] = field(default_factory=list)
    nodes: dict[str, str] = field(default_factory=dict)
    """The group node of each device."""
    cdi_ids: tuple[str, ...] = ()
    """The CDI names of each of its answers."""
    streams: list[trio.MemorySendChannel[list[tuple[str, str]]]] = field(default_factory=list)
    first: list[tuple[str, str]] = field(default_factory=list)

    async def get_device_plugin_options(self, message: pb.Empty) -> pb.DevicePluginOptions:
        if self.options_error:
            raise self.options_error
        return pb.DevicePluginOptions(
            pre_start_required=self.pre_start_required, get_preferred_allocation_available=True
        )

    async def list_and_watch(self, message: pb.Empty) -> AsyncIterator[pb.ListAndWatchResponse]:
        send, receive = trio.open_memory_channel[list[tuple[str, str]]](10)
        self.streams.append(send)
        yield list_message(self.first)
        async with receive:
            async for devices in receive:
                yield list_message(devices)

    async def get_preferred_allocation(
        self, message: pb.PreferredAllocationRequest
    ) -> pb.PreferredAllocationResponse:
        (request,) = message.container_requests
        self.asked.append(("prefer", list(request.available_deviceIDs)))
        chosen = sorted(request.available_deviceIDs)[: request.allocation_size]
        return pb.PreferredAllocationResponse(
            container_responses=[pb.ContainerPreferredAllocationResponse(device_i_ds=chosen)]
        )

    async def allocate(self, message: pb.AllocateRequest) -> pb.AllocateResponse:
        (request,) = message.container_requests
        self.asked.append(("allocate", list(request.devices_ids)))
        self.allocating.set()
        if self.hold_allocate is not None:
            await self.hold_allocate.wait()
        if self.allocate_error:
            raise self.allocate_error
        if self.empty_answers:
            self.empty_answers -= 1
            return pb.AllocateResponse()
        nodes = [self.nodes[device] for device in request.devices_ids if device in self.nodes]
        container = pb.ContainerAllocateResponse(
            envs={"GPUS": ",".join(sorted(request.devices_ids))},
            devices=[pb.DeviceSpec(container_path=n, host_path=n, permissions="mrw") for n in nodes],
            cdi_devices=[pb.CdiDevice(name=name) for name in self.cdi_ids],
        )
        return pb.AllocateResponse(container_responses=[container])

    async def pre_start_container(self, message: pb.PreStartContainerRequest) -> pb.PreStartContainerResponse:
        self.asked.append(("pre_start", list(message.devices_ids)))
        if self.pre_start_errors:
            raise self.pre_start_errors.pop(0)
        return pb.PreStartContainerResponse()


def list_message(devices: list[tuple[str, str]]) -> pb.ListAndWatchResponse:
    return pb.ListAndWatchResponse(devices=[pb.Device(id=i, health=h) for i, h in devices])


def all_healthy(count: int) -> list[tuple[str, str]]:
    return [(f"gpu{n}", "Healthy") for n in range(count)]


class Rig:
    """A started fake kubelet and what is needed to be its plugin, over one of the two transports."""

    def __init__(self, kubelet: FakeKubelet, transport: UnixTransport | MemoryTransport, where: Path) -> None:
        self.kubelet = kubelet
        self.transport = transport
        self.directory = where

    @asynccontextmanager
    async def serving(self, plugin: Plugin, name: str = "p.sock") -> AsyncIterator[Server]:
        server = Server([plugin], drain_s=0.1)
        async with trio.open_nursery() as nursery:
            if isinstance(self.transport, MemoryTransport):
                async with self.transport.listen_at(name) as listener:
                    await nursery.start(server.serve, listener)
                    yield server
                    nursery.cancel_scope.cancel()
            else:
                await nursery.start(server.serve, bind_unix(str(self.directory / name)))
                yield server
                nursery.cancel_scope.cancel()

    async def register(self, name: str = "p.sock", resource: str = GPU, version: str = "v1beta1") -> None:
        request = pb.RegisterRequest(version=version, endpoint=name, resource_name=resource)
        if isinstance(self.transport, MemoryTransport):
            async with open_channel(await self.transport.dial(KUBELET_SOCKET)) as channel:
                await pb.RegistrationStub(channel).register(request)
        else:
            path = str(self.directory / KUBELET_SOCKET)
            async with open_unix_channel(path, connect_deadline_s=WITHIN_S) as channel:
                await pb.RegistrationStub(channel).register(request)

    @asynccontextmanager
    async def pod_resources(self) -> AsyncIterator[PodResourcesListerStub]:
        assert isinstance(self.transport, MemoryTransport)
        async with open_channel(await self.transport.dial(POD_RESOURCES_SOCKET)) as channel:
            yield PodResourcesListerStub(channel)

    async def listed(self) -> dict[str, list[str]]:
        """What PodResources lists: devices by pod, without the node's own pods."""
        async with self.pod_resources() as stub:
            response = await stub.list(ListPodResourcesRequest())
        return {
            pod.name: [d for c in pod.containers for devices in c.devices for d in devices.device_ids]
            for pod in response.pod_resources
            if pod.namespace != "kube-system"
        }

    async def figures(self, capacity: int, allocatable: int, allocated: int = 0, resource: str = GPU) -> None:
        expected = Counts(capacity, allocatable, allocated)
        with trio.fail_after(WITHIN_S):
            await self.kubelet.until(lambda view: view.resources.get(resource) == expected)


@asynccontextmanager
async def rig(
    directory: Path | None = None, tenancy: Tenancy | None = None, cdi: CdiNodes | None = None
) -> AsyncIterator[Rig]:
    """Over unix sockets in `directory`, or in memory."""
    transport = UnixTransport(directory) if directory else MemoryTransport()
    where = transport.device_plugins if isinstance(transport, UnixTransport) else Path()
    async with open_fake_kubelet(transport, seed=1, tenancy=tenancy, cdi=cdi) as kubelet:
        await kubelet.start()
        yield Rig(kubelet, transport, where)


@asynccontextmanager
async def registered(
    plugin: Plugin,
    name: str = "p.sock",
    *,
    directory: Path | None = None,
    tenancy: Tenancy | None = None,
    cdi: CdiNodes | None = None,
) -> AsyncIterator[Rig]:
    """A rig with a plugin that is registered and whose first list has come."""
    async with rig(directory, tenancy, cdi) as r, r.serving(plugin, name):
        await r.register(name)
        await r.figures(len(plugin.first), sum(health == "Healthy" for _, health in plugin.first))
        yield r
