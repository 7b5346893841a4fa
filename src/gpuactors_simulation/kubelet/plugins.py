"""The plugin side of the fake kubelet: the Register service, one connection per plugin, its ListAndWatch stream.

Plays plugin/v1beta1/{server,client,handler}.go of kubelet 1.36 with its known faults: a Register that fails makes
kubelet forget the running client as well, and the end of a stream disconnects the plugin that has that resource's
*name* now (the re-registration race). A plugin that registers a resource of another plugin replaces it without notice
to the
other: the lists of both streams count from then on, and Allocate goes to the newer. Must not do arithmetic
(`device_manager.py`) and must not know of pods (`pods.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, final

import trio
from grpclib import GRPCError, Status

from gpuactors.grpc_trio import Channel, open_channel
from gpuactors.kubelet.pb.deviceplugin.v1beta1 import (
    AllocateRequest,
    AllocateResponse,
    ContainerAllocateRequest,
    ContainerPreferredAllocationRequest,
    Device,
    DevicePluginStub,
    Empty,
    ListAndWatchResponse,
    PreferredAllocationRequest,
    PreStartContainerRequest,
    RegisterRequest,
    RegistrationBase,
)
from gpuactors_simulation.kubelet.device_manager import (
    STOP_GRACE_S,
    DeviceManager,
    go_quoted,
    resource_name_problem,
)
from gpuactors_simulation.kubelet.transport import KubeletTransport
from gpuactors_simulation.kubelet.values import Endpoint, ListedDevice

API_VERSION: Final = "v1beta1"

DIAL_DEADLINE_S: Final = 10.0
"""How long Register waits for a listener at the endpoint (plugin/v1beta1/client.go, dial)."""

PRE_START_DEADLINE_S: Final = 30.0
"""KubeletPreStartContainerRPCTimeoutInSecs."""

LIST_AND_WATCH: Final = "/v1beta1.DevicePlugin/ListAndWatch"

CLOSING: Final = "rpc error: code = Canceled desc = grpc: the client connection is closing"


class PluginCallError(Exception):
    """A call to a plugin failed; the text is grpc-go's."""


@dataclass(eq=False, slots=True)
class _Client:
    """One connection to a plugin."""

    number: int
    resource: str
    endpoint: str
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    stub: DevicePluginStub | None = None


@final
class PluginManager(RegistrationBase):
    """Lives as long as kubelet's process: `nursery` is the process, `publish` is called after each change."""

    def __init__(
        self,
        manager: DeviceManager,
        transport: KubeletTransport,
        nursery: trio.Nursery,
        publish: Callable[[], None],
        dial_deadline_s: float = DIAL_DEADLINE_S,
    ) -> None:
        self._manager = manager
        self._transport = transport
        self._nursery = nursery
        self._publish = publish
        self._dial_deadline_s = dial_deadline_s
        self._numbers = itertools.count(1)
        self._clients: dict[str, _Client] = {}
        """By resource name, as in kubelet: the one that registered last."""
        self._connections: dict[int, _Client] = {}
        self.slow_s = 0.0
        """How much longer Register takes before kubelet dials: 12 s were seen to be accepted."""
        self.streams_ended = 0
        """Also those whose end kubelet does not notice: it has forgotten their plugin."""
        self.late_s: Callable[[], float] = lambda: 0.0
        """How long after its arrival a list is handled: the goroutine for it may be later than the others."""

    # --- Register ---------------------------------------------------------------------------------------------

    async def register(self, message: RegisterRequest) -> Empty:
        """Dial the endpoint and ask for its options before it answers."""
        if message.version != API_VERSION:
            raise GRPCError(
                Status.UNKNOWN,
                f"requested API version {go_quoted(message.version)} is not supported by kubelet. "
                f"Supported version is [{go_quoted(API_VERSION)}]",
            )
        if (problem := resource_name_problem(message.resource_name)) is not None:
            raise GRPCError(Status.UNKNOWN, problem)
        if self.slow_s:
            await trio.sleep(self.slow_s)
        client = _Client(next(self._numbers), message.resource_name, message.endpoint)
        self._clients[client.resource] = client
        registered = False
        try:
            failure: str | None = await self._nursery.start(self._run, client)
            registered = failure is None
        finally:
            if not registered:
                # By name: this forgets the plugin whose stream is open as well, and its end will not be noticed.
                self._clients.pop(client.resource, None)
        if failure is not None:
            raise GRPCError(Status.UNKNOWN, failure)
        return Empty()

    # --- one connection ---------------------------------------------------------------------------------------

    async def _run(self, client: _Client, *, task_status: trio.TaskStatus[str | None]) -> None:
        """The connection's life. Started with None when the plugin is connected, or with the reason why it is not."""
        answered = False

        def answer(failure: str | None) -> None:
            nonlocal answered
            if not answered:
                task_status.started(failure)
            answered = True

        try:
            with client.scope:
                await self._connect_and_listen(client, answer)
        finally:
            self._connections.pop(client.number, None)
        if client.scope.cancelled_caught:
            answer(f"failed to get device plugin options: {CLOSING}")

    async def _connect_and_listen(self, client: _Client, answer: Callable[[str | None], None]) -> None:
        try:
            with trio.fail_after(self._dial_deadline_s):
                stream = await self._transport.dial(client.endpoint)
        except trio.TooSlowError:
            answer("failed to dial device plugin: context deadline exceeded")
            return
        async with open_channel(stream) as channel:
            client.stub = DevicePluginStub(channel)
            self._connections[client.number] = client
            try:
                options = await client.stub.get_device_plugin_options(Empty())
            except GRPCError as error:
                answer(f"failed to get device plugin options: {go_text(error)}")
                # Kubelet has forgotten this connection and never closes it.
                await trio.sleep_forever()
            self._manager.connected(
                client.resource,
                client.number,
                pre_start=options.pre_start_required,
                preferred=options.get_preferred_allocation_available,
            )
            self._publish()
            answer(None)
            await self._list_and_watch(client, channel)
            self._stream_ended(client.resource)
            # If another plugin was disconnected in its place, this connection is never closed.
            await trio.sleep_forever()

    async def _list_and_watch(self, client: _Client, channel: Channel) -> None:
        try:
            async with channel.server_stream(LIST_AND_WATCH, Empty(), ListAndWatchResponse) as lists:
                async for response in lists:
                    if late_s := self.late_s():
                        await trio.sleep(late_s)
                    self._manager.list_received(client.resource, _listed(response))
                    self._publish()
        except GRPCError:
            pass  # an error and a clean end are the same to kubelet

    def _stream_ended(self, resource: str) -> None:
        """Kubelet finds the client by name and disconnects that one (server.go, runClient)."""
        self.streams_ended += 1
        client = self._clients.pop(resource, None)
        if client is None:
            return
        if client.stub is not None:
            client.scope.cancel()
        self._manager.disconnected(resource, trio.current_time())
        self._publish()
        self._nursery.start_soon(self.expire_later)

    def lose_stream(self, resource: str) -> None:
        """The connection to a plugin breaks; kubelet takes it for the end of the stream, and never dials again.

        Raises `KeyError` if no plugin of that resource is connected.
        """
        client = self._clients[resource]
        self._stream_ended(resource)
        client.scope.cancel()

    async def expire_later(self) -> None:
        """Expires when the time of grace of the plugins that are gone now is over."""
        await trio.sleep(STOP_GRACE_S)
        self.expire()

    def expire(self) -> None:
        """Do what kubelet does whenever it posts the node's status."""
        self._manager.expire(trio.current_time())
        self._publish()

    # --- calls for pods ---------------------------------------------------------------------------------------

    async def preferred(
        self, endpoint: Endpoint, resource: str, available: tuple[str, ...], size: int
    ) -> tuple[str, ...]:
        """GetPreferredAllocation. Raises `PluginCallError`."""
        if not endpoint.preferred_allocation:
            return ()
        request = ContainerPreferredAllocationRequest(
            available_deviceIDs=list(available), must_include_deviceIDs=[], allocation_size=size
        )
        client, stub = self._dialled(endpoint, resource)
        try:
            response = await stub.get_preferred_allocation(
                PreferredAllocationRequest(container_requests=[request])
            )
        except GRPCError as error:
            text = _text(client, error)
            raise PluginCallError(
                f"device plugin GetPreferredAllocation rpc failed with err: {text}"
            ) from None
        return tuple(device for container in response.container_responses for device in container.device_i_ds)

    async def allocate(self, endpoint: Endpoint, resource: str, devices: tuple[str, ...]) -> AllocateResponse:
        """Allocate for one container; no deadline, no second try. Raises `PluginCallError`."""
        request = AllocateRequest(container_requests=[ContainerAllocateRequest(devices_ids=list(devices))])
        client, stub = self._dialled(endpoint, resource)
        try:
            response = await stub.allocate(request)
        except GRPCError as error:
            raise PluginCallError(_text(client, error)) from None
        if client.scope.cancel_called:  # the answer came while the connection was being closed
            raise PluginCallError(CLOSING)
        return response

    async def pre_start(self, resource: str, devices: tuple[str, ...]) -> None:
        """PreStartContainer, if the plugin asked for it. Raises `PluginCallError`."""
        endpoint = self._manager.endpoint(resource)
        if endpoint is None:
            raise PluginCallError(f"endpoint not found in cache for a registered resource: {resource}")
        if not endpoint.pre_start_required:
            return
        client, stub = self._dialled(endpoint, resource)
        request = PreStartContainerRequest(devices_ids=list(devices))
        try:
            await stub.pre_start_container(request, timeout=PRE_START_DEADLINE_S)
        except GRPCError as error:
            text = _text(client, error)
            raise PluginCallError(f"device plugin PreStartContainer rpc failed with err: {text}") from None

    def _dialled(self, endpoint: Endpoint, resource: str) -> tuple[_Client, DevicePluginStub]:
        if endpoint.stopped_at is not None or endpoint.client is None:
            raise PluginCallError(f"endpoint {resource} has been stopped")
        client = self._connections.get(endpoint.client)
        if client is None or client.stub is None:
            raise PluginCallError(CLOSING)
        return client, client.stub


def _text(client: _Client, error: GRPCError) -> str:
    """Return why a call failed; grpc-go has a text of its own where kubelet itself has closed the connection."""
    return CLOSING if client.scope.cancel_called and error.status is Status.UNAVAILABLE else go_text(error)


def go_text(error: GRPCError) -> str:
    """Return a failed call in grpc-go's words: `rpc error: code = NotFound desc = …`."""
    code = "".join(part.capitalize() for part in error.status.name.split("_"))
    return f"rpc error: code = {code} desc = {error.message or ''}"


def _listed(response: ListAndWatchResponse) -> list[ListedDevice]:
    return [
        ListedDevice(
            d.id,
            d.health == "Healthy",
            _numa_nodes(d),
            empty_topology=d.topology is not None and not d.topology.nodes,
        )
        for d in response.devices
    ]


def _numa_nodes(device: Device) -> tuple[int, ...]:
    return () if device.topology is None else tuple(node.id for node in device.topology.nodes)
