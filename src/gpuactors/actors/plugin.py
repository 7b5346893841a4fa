"""The plugin of one resource: serves its endpoint and registers it, as ordered.

The core decides when to bind, when to register and what to stream (`core/deviceplugin/registration.py`); this actor
carries it out and posts the result. A failure of one plugin never affects another: each has its own task, endpoint and
connection, and retries for ever.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import final

import trio
from msgspec import Struct

from gpuactors import limits
from gpuactors.actors.registry import PluginReaders
from gpuactors.concurrency.latest import Latest, LatestReader
from gpuactors.core.deviceplugin.registration import PluginOrder
from gpuactors.core.events import Event
from gpuactors.core.events.deviceplugin import RegisterAnswered, SocketBound, SocketFailed
from gpuactors.core.values.model import ResourceName
from gpuactors.ports.errors import KubeletError
from gpuactors.ports.node import Caller, Endpoint, Kubelet


class PluginPorts(Struct, frozen=True):
    kubelet: Kubelet
    caller: Caller
    inbox: trio.MemorySendChannel[Event]
    pre_start: bool
    on_failure: Callable[[str, Exception], None]
    """Called with an unexpected exception: a bug, to be logged with its traceback."""


async def run_all(
    plugins: LatestReader[Mapping[ResourceName, PluginReaders]],
    ports: PluginPorts,
    running: Latest[frozenset[ResourceName]],
) -> None:
    """Run a plugin for every resource; end it when its resource retires, and all when the cell is closed.

    `running` names the plugins whose streams and sockets may still be there; it is set before any of them can wait.
    """
    stops: dict[ResourceName, trio.Event] = {}
    tasks = Counter[ResourceName]()
    """The tasks of each resource: two for a moment where one starts again while it still ends."""

    def count(resource: ResourceName, change: int) -> None:
        tasks[resource] += change
        running.set(frozenset(r for r, number in tasks.items() if number > 0))

    async def run(resource: ResourceName, reads: PluginReaders, stop: trio.Event) -> None:
        try:
            await Plugin(resource, reads, ports, stop).run()
        finally:
            count(resource, -1)

    async with trio.open_nursery() as nursery:
        async for wanted in plugins:
            for resource in stops.keys() - wanted.keys():
                stops.pop(resource).set()
            for resource, reads in wanted.items():
                if resource not in stops:
                    stop = stops[resource] = trio.Event()
                    count(resource, 1)
                    nursery.start_soon(run, resource, reads, stop)
        for stop in stops.values():
            stop.set()


@final
class Plugin:
    """The plugin of one resource."""

    def __init__(
        self, resource: ResourceName, reads: PluginReaders, ports: PluginPorts, stop: trio.Event
    ) -> None:
        self._resource = resource
        self._device_list = reads.device_list
        self._orders = reads.order.subscribe()
        self._ports = ports
        self._stop = stop
        self._registered = 0
        """The largest number of an order to register that was carried out."""

    async def run(self) -> None:
        """Make one endpoint after the other, whenever a bind order says so, until the plugin is stopped."""
        resource, ports = self._resource, self._ports
        order = await self._next()
        while order is not None:
            try:
                async with ports.kubelet.serve(
                    resource, self._device_list, ports.caller, pre_start=ports.pre_start
                ) as endpoint:
                    await ports.inbox.send(SocketBound(resource, order.bind))
                    order = await self._attend(endpoint, order)
                    await endpoint.drain(limits.DRAIN_S)
                    # Once kubelet has noticed, the next registration is safe.
                    with trio.move_on_after(limits.DISCONNECT_WAIT_S):
                        await endpoint.wait_disconnected()
            except KubeletError as exc:
                order = await self._failed(str(exc), order)
            except Exception as exc:
                ports.on_failure(f"plugin {resource}", exc)
                order = await self._failed(f"internal error: {exc!r}; please report it", order)

    async def _next(self) -> PluginOrder | None:
        """Return the next order; None when the plugin is to end."""
        order: PluginOrder | None = None

        async def end_wait() -> None:
            await self._stop.wait()
            nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(end_wait)
            order = await self._orders.receive()
            nursery.cancel_scope.cancel()
        return None if self._stop.is_set() else order

    async def _attend(self, endpoint: Endpoint, order: PluginOrder) -> PluginOrder | None:
        """Carry out orders as long as this endpoint can serve them; return the one that needs a new endpoint."""
        bound = order.bind
        async with trio.open_nursery() as nursery:
            current: PluginOrder | None = order
            while current is not None:
                if current.bind > bound:
                    if current.renew or not endpoint.still_there():
                        break
                    bound = current.bind
                    await self._ports.inbox.send(SocketBound(self._resource, bound))
                if current.register > self._registered:
                    self._registered = current.register
                    nursery.start_soon(self._register, endpoint, current.register)
                current = await self._next()
            nursery.cancel_scope.cancel()
        return current

    async def _register(self, endpoint: Endpoint, number: int) -> None:
        with trio.move_on_after(limits.DISCONNECT_WAIT_S):
            await endpoint.wait_disconnected()
        failure: str | None = None
        try:
            await self._ports.kubelet.register(self._resource, endpoint.name, pre_start=self._ports.pre_start)
        except KubeletError as exc:
            failure = str(exc)
        await self._ports.inbox.send(RegisterAnswered(self._resource, number, failure))

    async def _failed(self, reason: str, order: PluginOrder | None) -> PluginOrder | None:
        """Post that the endpoint could not be made or has failed, and wait for the order to try again."""
        if order is None:
            return None
        await self._ports.inbox.send(SocketFailed(self._resource, order.bind, reason))
        tried = order.bind
        while order is not None and order.bind <= tried:
            order = await self._next()
        return order
