"""Other processes in kubelet's directory: another device plugin on the same resource, and a monitor that reads our
list.

Both speak the real protocol over the transport of the fake kubelet. Neither reads kubelet's own list, as no plugin in
the field does. Must not know the daemon.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import AbstractAsyncContextManager
from typing import Final, Protocol, final

import trio

from gpuactors.concurrency.latest import Latest
from gpuactors.grpc_trio import Server, TrioService, open_channel
from gpuactors.kubelet.pb.deviceplugin import v1beta1 as pb
from gpuactors_simulation.kubelet.plugins import API_VERSION, LIST_AND_WATCH
from gpuactors_simulation.kubelet.transport import KUBELET_SOCKET

OTHER_ENDPOINT: Final = "kubevirt-gpu.sock"
"""NVIDIA's sandbox plugin names its sockets so: `kubevirt-<model>.sock`."""

_DRAIN_S: Final = 0.1

_RESTART_S: Final = 0.5
"""From the end of a stubborn plugin's stream until its next process registers."""

_AGAIN_S: Final = 0.01
"""A monitor that dials again so soon is connected before kubelet, when kubelet is slow in Register."""


class Directory(Protocol):
    """Kubelet's directory, as its neighbours see it."""

    def listen_at(
        self, name: str, owner: str = "plugin"
    ) -> AbstractAsyncContextManager[trio.abc.Listener[trio.abc.Stream]]:
        """Return a plugin's endpoint."""
        ...

    async def dial(self, endpoint: str) -> trio.abc.Stream:
        """Return a connection to an endpoint. Tries for ever."""
        ...


@final
class OtherPlugin(TrioService, pb.DevicePluginBase):
    """Another vendor's plugin, which serves `resource` as well: it registers, streams what `list` sets, and grants
    every Allocate.

    A `stubborn` one ends when its stream does, is started again as by a DaemonSet, and registers; for ever. Another one
    goes on serving and waits in vain, as most do.
    """

    def __init__(
        self,
        directory: Directory,
        resource: str,
        devices: Iterable[str],
        *,
        endpoint: str = OTHER_ENDPOINT,
        stubborn: bool = False,
    ) -> None:
        self._directory = directory
        self._resource = resource
        self._endpoint = endpoint
        self.is_stubborn = stubborn
        self._devices = Latest(tuple(devices))
        self._stream_ended = trio.Event()
        self._scope = trio.CancelScope()
        self.registrations: list[float] = []
        """When kubelet accepted it, on trio's clock."""
        self.allocated: list[tuple[str, ...]] = []
        """The devices asked for by each Allocate that reached it."""

    def list(self, devices: Iterable[str]) -> None:
        """Send another list of healthy devices."""
        self._devices.set(tuple(devices))

    def leave(self) -> None:
        """Its process ends."""
        self._scope.cancel()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Its process, until `leave`; started when it is registered for the first time."""
        with self._scope:
            while True:
                self._stream_ended = trio.Event()
                async with (
                    self._directory.listen_at(self._endpoint, "other") as listener,
                    trio.open_nursery() as nursery,
                ):
                    await nursery.start(Server([self], drain_s=_DRAIN_S).serve, listener)
                    await self._register()
                    if len(self.registrations) == 1:
                        task_status.started()
                    await self._stream_ended.wait()
                    if not self.is_stubborn:
                        await trio.sleep_forever()
                    nursery.cancel_scope.cancel()
                await trio.sleep(_RESTART_S)

    async def _register(self) -> None:
        request = pb.RegisterRequest(
            version=API_VERSION, endpoint=self._endpoint, resource_name=self._resource
        )
        async with open_channel(await self._directory.dial(KUBELET_SOCKET)) as channel:
            await pb.RegistrationStub(channel).register(request)
        self.registrations.append(trio.current_time())

    async def get_device_plugin_options(self, message: pb.Empty) -> pb.DevicePluginOptions:
        """No extras."""
        return pb.DevicePluginOptions()

    async def list_and_watch(self, message: pb.Empty) -> AsyncIterator[pb.ListAndWatchResponse]:
        """One message per list."""
        ended = self._stream_ended
        try:
            async for devices in self._devices.subscribe():
                yield pb.ListAndWatchResponse(devices=[pb.Device(id=d, health="Healthy") for d in devices])
        finally:
            ended.set()

    async def allocate(self, message: pb.AllocateRequest) -> pb.AllocateResponse:
        """Grants every request."""
        self.allocated.extend(tuple(request.devices_ids) for request in message.container_requests)
        return pb.AllocateResponse(
            container_responses=[pb.ContainerAllocateResponse() for _ in message.container_requests]
        )


@final
class Bystander:
    """A monitor: keeps a ListAndWatch stream of its own open at an endpoint, and dials again as soon as it ends."""

    def __init__(self, directory: Directory, endpoint: str) -> None:
        self._directory = directory
        self._endpoint = endpoint
        self.streams = 0
        """How many have sent it a list."""

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Never returns; started when it has its first list."""
        while True:
            try:
                async with (
                    open_channel(await self._directory.dial(self._endpoint)) as channel,
                    channel.server_stream(LIST_AND_WATCH, pb.Empty(), pb.ListAndWatchResponse) as lists,
                ):
                    first = True
                    async for _ in lists:
                        self.streams += first
                        if first and self.streams == 1:
                            task_status.started()
                        first = False
            except Exception:  # a monitor dials again whatever the error
                pass
            await trio.sleep(_AGAIN_S)
