"""The DevicePlugin service of one resource, for kubelet to call.

A handler turns its request into an event and waits for the core's answer. It decides nothing and keeps nothing.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

from gpuactors.concurrency.latest import Latest
from gpuactors.core.model import Frame, ResourceName
from gpuactors.kubelet import translate
from gpuactors.kubelet.grpc_trio.service import TrioService
from gpuactors.kubelet.pb.deviceplugin import v1beta1 as pb
from gpuactors.ports import Caller


class DevicePluginService(TrioService, pb.DevicePluginBase):
    """Serves one resource's frames and answers kubelet's calls about it."""

    def __init__(
        self, resource: ResourceName, frames: Latest[Frame], caller: Caller, *, pre_start: bool
    ) -> None:
        self._resource = resource
        self._frames = frames
        self._caller = caller
        self._pre_start = pre_start

    async def get_device_plugin_options(self, message: pb.Empty) -> pb.DevicePluginOptions:
        return options(pre_start=self._pre_start)

    async def list_and_watch(self, message: pb.Empty) -> AsyncIterator[pb.ListAndWatchResponse]:
        sent: tuple[object, ...] | None = None
        async with self._caller.stream(self._resource):
            async for frame in self._frames.subscribe():
                # Kubelet rewrites its ledger's file at each frame, and has no field for our reason.
                told = tuple((device.id, device.health, device.numa_node) for device in frame)
                if told != sent:
                    sent = told
                    yield translate.frame_message(frame)

    async def allocate(self, message: pb.AllocateRequest) -> pb.AllocateResponse:
        requests = translate.allocate_requests(message)
        return translate.allocate_response(await self._caller.allocate(self._resource, requests))

    async def get_preferred_allocation(
        self, message: pb.PreferredAllocationRequest
    ) -> pb.PreferredAllocationResponse:
        requests = translate.preference_requests(message)
        return translate.preferred_response(await self._caller.prefer(self._resource, requests))

    async def pre_start_container(self, message: pb.PreStartContainerRequest) -> pb.PreStartContainerResponse:
        devices = translate.pre_start_devices(message)
        return translate.pre_start_response(await self._caller.pre_start(self._resource, devices))


def options(*, pre_start: bool) -> pb.DevicePluginOptions:
    """What we want of kubelet: to be asked which devices are best, and (by default) before each container start."""
    return pb.DevicePluginOptions(pre_start_required=pre_start, get_preferred_allocation_available=True)
