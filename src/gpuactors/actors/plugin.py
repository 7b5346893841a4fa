"""The plugin of one resource: serves its endpoint and registers it, as ordered.

The core decides when to bind, when to register and what to stream (`core/deviceplugin/registration.py`); this actor
carries it out and posts the result. A failure of one plugin never affects another: each has its own task, endpoint and
connection, and retries for ever.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

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

OnFailure = Callable[[str, Exception], None]


class PluginPorts(Struct, frozen=True):
    """The ports of every plugin."""

    kubelet: Kubelet
    caller: Caller
    inbox: trio.MemorySendChannel[Event]
    pre_start: bool
    on_failure: OnFailure
    """Called with an unexpected exception: a bug, to be logged with its traceback."""


async def run_all(
    plugins: LatestReader[Mapping[ResourceName, PluginReaders]],
    ports: PluginPorts,
    running: Latest[frozenset[ResourceName]] | None = None,
) -> None:
    """Run a plugin for every resource; end it when its resource retires, and all when the cell is closed.

    `running` names the plugins whose streams and sockets may still be there; it is set before any of them can wait.
    """
    stops: dict[ResourceName, trio.Event] = {}
    count = _Running(running)

    async def run_counted(resource: ResourceName, reads: PluginReaders, stop: trio.Event) -> None:
        try:
            await run(resource, reads, ports, stop)
        finally:
            count.ended(resource)

    async with trio.open_nursery() as nursery:
        async for wanted in plugins:
            for resource in stops.keys() - wanted.keys():
                stops.pop(resource).set()
            for resource, reads in wanted.items():
                if resource not in stops:
                    stop = stops[resource] = trio.Event()
                    count.began(resource)
                    nursery.start_soon(run_counted, resource, reads, stop)
        for stop in stops.values():
            stop.set()


class _Running:
    """The plugins that run. One that starts again while it still ends runs twice for a moment."""

    def __init__(self, names: Latest[frozenset[ResourceName]] | None) -> None:
        self._names = names
        self._tasks: Counter[ResourceName] = Counter()

    def began(self, resource: ResourceName) -> None:
        self._tasks[resource] += 1
        self._show()

    def ended(self, resource: ResourceName) -> None:
        self._tasks[resource] -= 1
        self._show()

    def _show(self) -> None:
        if self._names is not None:
            self._names.set(frozenset(r for r, tasks in self._tasks.items() if tasks > 0))


async def run(resource: ResourceName, reads: PluginReaders, ports: PluginPorts, stop: trio.Event) -> None:
    """Make one endpoint after the other, whenever a bind order says so, until `stop` is set."""
    orders = _Orders(reads.order.subscribe(), stop)
    registered = _Counter()
    order = await orders.next()
    while order is not None:
        try:
            async with ports.kubelet.serve(
                resource, reads.device_list, ports.caller, pre_start=ports.pre_start
            ) as endpoint:
                bind = order.bind
                await ports.inbox.send(SocketBound(resource, bind))
                order = await _attend(resource, endpoint, order, orders, registered, ports)
                await endpoint.drain(limits.DRAIN_S)
                with trio.move_on_after(
                    limits.DISCONNECT_WAIT_S
                ):  # kubelet has noticed: the next registration is safe
                    await endpoint.wait_disconnected()
        except KubeletError as exc:
            order = await _failed(resource, str(exc), order, orders, ports)
        except Exception as exc:
            ports.on_failure(f"plugin {resource}", exc)
            order = await _failed(
                resource, f"internal error: {exc!r}; please report it", order, orders, ports
            )


class _Counter:
    """The largest number of an order that was carried out."""

    def __init__(self) -> None:
        self.value = 0


class _Orders:
    """The orders, until the plugin is stopped."""

    def __init__(self, orders: LatestReader[PluginOrder], stop: trio.Event) -> None:
        self._orders = orders
        self._stop = stop

    async def next(self) -> PluginOrder | None:
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


async def _attend(
    resource: ResourceName,
    endpoint: Endpoint,
    order: PluginOrder,
    orders: _Orders,
    registered: _Counter,
    ports: PluginPorts,
) -> PluginOrder | None:
    """Carry out orders as long as this endpoint can serve them; return the one that needs a new endpoint."""
    bound = order.bind
    async with trio.open_nursery() as nursery:
        current: PluginOrder | None = order
        while current is not None:
            if current.bind > bound:
                if current.renew or not endpoint.still_there():
                    break
                bound = current.bind
                await ports.inbox.send(SocketBound(resource, bound))
            if current.register > registered.value:
                registered.value = current.register
                nursery.start_soon(_register, resource, endpoint, current.register, ports)
            current = await orders.next()
        nursery.cancel_scope.cancel()
    return current


async def _register(resource: ResourceName, endpoint: Endpoint, number: int, ports: PluginPorts) -> None:
    with trio.move_on_after(limits.DISCONNECT_WAIT_S):
        await endpoint.wait_disconnected()
    try:
        await ports.kubelet.register(resource, endpoint.name, pre_start=ports.pre_start)
    except KubeletError as exc:
        await ports.inbox.send(RegisterAnswered(resource, number, str(exc)))
    else:
        await ports.inbox.send(RegisterAnswered(resource, number))


async def _failed(
    resource: ResourceName,
    reason: str,
    order: PluginOrder | None,
    orders: _Orders,
    ports: PluginPorts,
) -> PluginOrder | None:
    """Post that the endpoint could not be made or has failed, and wait for the order to try again."""
    if order is None:
        return None
    await ports.inbox.send(SocketFailed(resource, order.bind, reason))
    tried = order.bind
    while order is not None and order.bind <= tried:
        order = await orders.next()
    return order
