"""The DRA plugins of a fake kubelet: found in `plugins_registry`, asked, connected, called, and waited for when gone.

Plays pluginmanager, and cm/dra/plugin of kubelet 1.36. Of several instances of one driver the last registered that is
connected is used. A driver without a connection for WIPE_AFTER_S loses this node's slices. Must not know claims
(`manager.py`) or pods.

Times are those that were seen on a kubelet 1.35.3.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final, final

import trio
from grpclib import GRPCError, Status

from gpuactors.grpc_trio import Channel, SocketError, open_channel
from gpuactors.kubelet.dra.service import in_package
from gpuactors.kubelet.pb.dra_health_v1 import v1 as health
from gpuactors.kubelet.pb.dra_v1.k8s.io.kubelet.pkg.apis.dra import v1
from gpuactors.kubelet.pb.pluginregistration import pluginregistration as registration
from gpuactors_simulation.kubelet.device_manager import go_quoted
from gpuactors_simulation.kubelet.dra.values import (
    Answer,
    ApiAwayError,
    ClaimDevice,
    ClaimError,
    ClaimInfo,
    DraCall,
    HealthRow,
    Instance,
    Surroundings,
)
from gpuactors_simulation.kubelet.plugins import CLOSING, go_text
from gpuactors_simulation.kubelet.transport import KubeletTransport

REGISTER_AFTER_S: Final = (0.15, 0.8)
"""From a change in `plugins_registry` to GetInfo: seen between these bounds; the reconciler runs each second."""

START_AFTER_S: Final = (0.5, 2.0)
"""The same from kubelet's start: seen up to 2 s."""

GET_INFO_DEADLINE_S: Final = 1.0
NOTIFY_DEADLINE_S: Final = 5.0
"""Kubelet's bounds (pluginmanager/operationexecutor)."""

REGISTER_AGAIN_S: Final = (17.6, 33.2, 66.4, 122.0)
"""Waits after registrations that failed: the first two were seen, with a GetInfo that took 1.5 s. The last repeats."""

CALL_DEADLINE_S: Final = 45.0
"""One call, for all claims of one pod."""

RECONNECT_S: Final = (1.0, 1.6, 2.6, 4.1, 6.6, 10.5, 16.8, 26.8, 43.0, 68.7, 120.0)
"""grpc-go's backoff between attempts to connect, without its jitter. The last repeats."""

WIPE_AFTER_S: Final = 30.0
"""Without any connection to a driver for so long, its slices are deleted."""

WIPE_AGAIN_S: Final = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 300.0)
"""Waits while the API server is away. The last repeats."""

HEALTH_AGAIN_S: Final = 5.0
"""After the end of a health stream it is opened again."""

PLUGIN_TYPE: Final = "DRAPlugin"


class _PluginStub(v1.DraPluginStub):
    """Calls a version of the service, such as `v1beta1.DRAPlugin`: the messages of each are those of v1."""

    def __init__(self, channel: Any, version: str) -> None:
        super().__init__(channel)
        self._package = f"k8s.io.kubelet.pkg.apis.dra.{version.partition('.')[0]}"

    async def _unary_unary(self, route: str, *args: Any, **kwargs: Any) -> Any:
        return await super()._unary_unary(in_package(self._package, route), *args, **kwargs)


class _RegistrationError(Exception):
    """It failed; kubelet tries again later."""


@dataclass(eq=False, slots=True)
class _Instance:
    """One registered plugin."""

    driver: str
    endpoint: str
    version: str
    listed: tuple[str, ...]
    """Its supported versions."""
    channel: Channel | None = None


@dataclass(eq=False, slots=True)
class _Socket:
    """One socket in the registry."""

    identity: str
    instance: _Instance | None = None
    """The plugin that was registered by it."""
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)


@final
class DriverManager:
    """Lives as long as kubelet's process: `nursery` is the process, `publish` is called after each change. `there`
    says whether the API server can be reached."""

    def __init__(
        self,
        transport: KubeletTransport,
        nursery: trio.Nursery,
        publish: Callable[[], None],
        rng: random.Random,
        surroundings: Surroundings,
        is_reachable: Callable[[], bool],
        calls: list[DraCall],
    ) -> None:
        self._transport = transport
        self._nursery = nursery
        self._publish = publish
        self._rng = rng
        self._surroundings = surroundings
        self._release = surroundings.release
        self._is_reachable = is_reachable
        self._calls = calls
        self._sockets: dict[str, _Socket] = {}
        self._instances: list[_Instance] = []
        self._wipes: dict[str, trio.CancelScope] = {}
        self._health: dict[tuple[str, str, str], HealthRow] = {}
        self.errors: list[str] = []
        """Lines of kubelet's log: registrations and health streams that failed."""

    @property
    def instances(self) -> tuple[Instance, ...]:
        """Implement `DraView.instances`."""
        return tuple(
            Instance(i.driver, i.endpoint, i.version, i.channel is not None) for i in self._instances
        )

    @property
    def health(self) -> Mapping[tuple[str, str, str], HealthRow]:
        """Implement `DraView.health`."""
        return dict(self._health)

    # --- the registry -----------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Register what is in `plugins_registry`, for ever."""
        self._nursery.start_soon(self._wipe, None)
        bounds = START_AFTER_S
        with self._transport.watch_registry() as changes:
            while True:
                await trio.sleep(self._rng.uniform(*bounds))
                changes.read()
                self._reconcile()
                bounds = REGISTER_AFTER_S
                await changes.wait()

    def _reconcile(self) -> None:
        identities = self._transport.registry()
        for path, socket in list(self._sockets.items()):
            if identities.get(path) != socket.identity:
                del self._sockets[path]
                self._leave(socket)
                socket.scope.cancel()
        added = sorted(identities.keys() - self._sockets.keys())
        self._rng.shuffle(added)  # after a start the order is that of a map
        for path in added:
            socket = self._sockets[path] = _Socket(identities[path])
            self._nursery.start_soon(self._attend, path, socket)

    async def _attend(self, path: str, socket: _Socket) -> None:
        """Until the socket is gone."""
        waits = _repeating(REGISTER_AGAIN_S)
        with socket.scope:
            while True:
                try:
                    await self._register(path, socket)
                except (_RegistrationError, GRPCError, OSError, SocketError) as error:
                    text = go_text(error) if isinstance(error, GRPCError) else str(error)
                    self.errors.append(f"RegisterPlugin error -- {text}")
                await trio.sleep(next(waits))

    async def _register(self, path: str, socket: _Socket) -> None:
        """Register the plugin and stay with it. Raises if that fails."""
        failure: Exception | None = None
        try:
            async with trio.open_nursery() as nursery:
                try:
                    await self._introduce(path, socket, nursery)
                except (_RegistrationError, GRPCError, OSError, SocketError) as error:
                    failure = error
                    nursery.cancel_scope.cancel()
        finally:
            self._leave(socket)
        if failure is not None:
            raise failure

    async def _introduce(self, path: str, socket: _Socket, nursery: trio.Nursery) -> None:
        """Ask the plugin, connect to it, and tell it that it is registered, or why not. Raises as `_register`."""
        async with self._dialled(path) as channel:
            stub = registration.RegistrationStub(channel)
            info = await stub.get_info(registration.InfoRequest(), timeout=GET_INFO_DEADLINE_S)
            endpoint = info.endpoint or path  # without one the registration's own socket counts
            problem = self._problem(info, path, endpoint)
            if problem is None:
                version = next(v for v in info.supported_versions if v in self._release.versions)
                instance = _Instance(info.name, endpoint, version, tuple(info.supported_versions))
                socket.instance = instance
                self._instances.append(instance)
                self._sync(info.name)
                nursery.start_soon(self._stay_connected, instance)
            await stub.notify_registration_status(
                registration.RegistrationStatus(
                    plugin_registered=problem is None,
                    error="" if problem is None else f"RegisterPlugin error -- {problem}",
                ),
                timeout=NOTIFY_DEADLINE_S,
            )
            if problem is not None:
                raise _RegistrationError(problem)

    def _leave(self, socket: _Socket) -> None:
        """Deregisters its plugin; the connection is closed next, under the calls that are in flight."""
        if socket.instance in self._instances:
            self._instances.remove(socket.instance)
            self._sync(socket.instance.driver)

    def _problem(self, info: registration.PluginInfo, path: str, endpoint: str) -> str | None:
        """Return why kubelet does not take the plugin."""
        if info.type != PLUGIN_TYPE:
            return f"no handler registered for plugin type: {info.type} at socket {path}"
        if not set(self._release.versions).intersection(info.supported_versions):
            why = (
                f"none of services supported by the plugin ({_go_list(info.supported_versions)}) are supported by "
                f"the kubelet ({_go_list(self._release.versions)})"
                if info.supported_versions
                else "empty list of supported gRPC services (aka supported versions)"
            )
            return (
                "plugin validation failed with err: invalid supported gRPC versions of DRA driver plugin "
                f"{info.name} at endpoint {endpoint}: {why}"
            )
        if any(i.driver == info.name and i.endpoint == endpoint for i in self._instances):
            return (
                f"plugin registration failed with err: endpoint {endpoint} already registered for DRA driver "
                f"plugin {info.name}"
            )
        return None

    # --- connections ------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _dialled(self, path: str) -> AsyncIterator[Channel]:
        """Raises `OSError` or `SocketError` where nobody listens."""
        stream = await self._transport.dial_plugin(path)
        async with open_channel(stream) as channel:
            yield channel

    async def _stay_connected(self, instance: _Instance) -> None:
        waits = _repeating(RECONNECT_S)
        while True:
            try:
                async with self._dialled(instance.endpoint) as channel, trio.open_nursery() as nursery:
                    instance.channel = channel
                    waits = _repeating(RECONNECT_S)
                    self._sync(instance.driver)
                    nursery.start_soon(self._watch_health, instance, channel)
                    await channel.lost.wait()
                    nursery.cancel_scope.cancel()
            except (OSError, SocketError):
                pass
            finally:
                instance.channel = None
                self._forget_health(instance.driver)
                self._sync(instance.driver)
            await trio.sleep(next(waits))

    def _sync(self, driver: str) -> None:
        """Begin or end the time to the deletion of a driver's slices."""
        connected = any(i.driver == driver and i.channel is not None for i in self._instances)
        if connected:
            if (scope := self._wipes.pop(driver, None)) is not None:
                scope.cancel()
        elif driver not in self._wipes:
            self._wipes[driver] = trio.CancelScope()
            self._nursery.start_soon(self._wipe_later, driver, self._wipes[driver])
        self._publish()

    async def _wipe_later(self, driver: str, scope: trio.CancelScope) -> None:
        with scope:
            await trio.sleep(WIPE_AFTER_S)
            await self._wipe(driver)
            await trio.sleep_forever()  # once, until it is connected again

    async def _wipe(self, driver: str | None) -> None:
        for wait_s in _repeating(WIPE_AGAIN_S):
            if self._is_reachable():
                try:
                    self._surroundings.wipe(driver)
                    return
                except ApiAwayError:
                    pass
            await trio.sleep(wait_s)

    # --- health -----------------------------------------------------------------------------------------------

    async def _watch_health(self, instance: _Instance, channel: Channel) -> None:
        service = next((s for s in instance.listed if s in self._release.health), None)
        if service is None and self._release.health_unlisted:
            service = self._release.health[0]
        if service is None:
            return
        while True:
            try:
                async with channel.server_stream(
                    f"/{service}/NodeWatchResources",
                    health.NodeWatchResourcesRequest(),
                    health.NodeWatchResourcesResponse,
                ) as lists:
                    async for message in lists:
                        self._take_health(instance.driver, message.devices)
            except GRPCError as error:
                self.errors.append(f"WatchResources of {instance.driver} failed: {go_text(error)}")
            self._forget_health(instance.driver)
            await trio.sleep(HEALTH_AGAIN_S)

    def _take_health(self, driver: str, devices: Sequence[Any]) -> None:
        self._forget_health(driver)
        for device in devices:
            self._health[driver, device.device.pool_name, device.device.device_name] = HealthRow(
                int(device.health),
                device.message,
                float(device.health_check_timeout_seconds),
                trio.current_time(),
            )
        self._publish()

    def _forget_health(self, driver: str) -> None:
        self._health = {key: row for key, row in self._health.items() if key[0] != driver}

    # --- calls ------------------------------------------------------------------------------------------------

    def check(self, driver: str) -> None:
        """Raise `ClaimError` where no plugin of that driver is registered."""
        self._of(driver)

    def _of(self, driver: str) -> _Instance:
        """Return the last registered one that is connected, else the last registered one."""
        instances = [instance for instance in self._instances if instance.driver == driver]
        if not instances:
            raise ClaimError(f"DRA driver {driver} is not registered")
        return next((i for i in reversed(instances) if i.channel is not None), instances[-1])

    async def prepare(self, driver: str, claims: Sequence[ClaimInfo]) -> Mapping[str, Answer]:
        """The answers by UID, in no order. Raises `ClaimError`."""
        instance = self._of(driver)
        request = v1.NodePrepareResourcesRequest(claims=_messages(claims))
        response = await self._call("prepare", "NodePrepareResources", instance, request, claims)
        return self._shuffled(
            {
                uid: Answer(tuple(_device(driver, d) for d in answer.devices), answer.error)
                for uid, answer in response.claims.items()
            }
        )

    async def unprepare(self, driver: str, claims: Sequence[ClaimInfo]) -> Mapping[str, Answer]:
        """Unprepare the claims; see `prepare`."""
        instance = self._of(driver)
        request = v1.NodeUnprepareResourcesRequest(claims=_messages(claims))
        response = await self._call("unprepare", "NodeUnprepareResources", instance, request, claims)
        return self._shuffled({uid: Answer((), answer.error) for uid, answer in response.claims.items()})

    async def _call(
        self, call: str, method: str, instance: _Instance, request: Any, claims: Sequence[ClaimInfo]
    ) -> Any:
        began_at, text = trio.current_time(), "the call was cancelled"
        try:
            if instance.channel is None:
                text = f"rpc error: code = Unavailable desc = connection error: dial unix {instance.endpoint}"
                raise ClaimError(f"{method}: {text}")
            stub = _PluginStub(instance.channel, instance.version)
            unary: Any = stub.node_prepare_resources if call == "prepare" else stub.node_unprepare_resources
            try:
                response = await unary(request, timeout=CALL_DEADLINE_S)
            except GRPCError as error:
                late = error.status is Status.DEADLINE_EXCEEDED
                text = "rpc error: code = DeadlineExceeded desc = context deadline exceeded"
                text = text if late else self._text(instance, error)
                raise ClaimError(f"{method}: {text}") from None
            text = next((answer.error for answer in response.claims.values() if answer.error), "")
            return response
        finally:
            self._calls.append(
                DraCall(
                    call,
                    instance.driver,
                    instance.endpoint,
                    tuple(claim.uid for claim in claims),
                    began_at,
                    trio.current_time(),
                    text,
                )
            )
            self._publish()

    def _text(self, instance: _Instance, error: GRPCError) -> str:
        """Why a call failed; grpc-go has a text of its own where kubelet has closed the connection, as it does when it
        deregisters a plugin."""
        return go_text(error) if instance in self._instances else CLOSING

    def _shuffled(self, answers: dict[str, Answer]) -> Mapping[str, Answer]:
        """Go's maps have no order."""
        uids = sorted(answers)
        self._rng.shuffle(uids)
        return {uid: answers[uid] for uid in uids}


def _go_list(words: Sequence[str]) -> str:
    """As Go's `%q` of a list."""
    return f"[{' '.join(map(go_quoted, words))}]"


def _repeating(waits: Sequence[float]) -> Iterator[float]:
    return itertools.chain(waits, itertools.repeat(waits[-1]))


def _messages(claims: Sequence[ClaimInfo]) -> list[v1.Claim]:
    return [v1.Claim(namespace=c.namespace, name=c.name, uid=c.uid) for c in claims]


def _device(driver: str, device: v1.Device) -> ClaimDevice:
    return ClaimDevice(
        driver,
        device.pool_name,
        device.device_name,
        tuple(device.request_names),
        tuple(device.cdi_device_ids),
        device.share_id,
    )
