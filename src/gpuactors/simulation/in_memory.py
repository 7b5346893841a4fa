"""The daemon's outside without a socket, a thread or a clock of its own, for runs on trio's mock clock.

The same files of a fake node, the same gRPC, the same fake kubelet as in the simulation over real sockets; only what
carries the bytes differs. Faults are asked for by name and strike once.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final, final

import trio

from gpuactors import limits
from gpuactors.concurrency.latest import Latest
from gpuactors.core.model import Frame, PciAddress, PciFunction, ResourceName
from gpuactors.host.reader import InlineReader
from gpuactors.host.uevents import hint_of, parse_datagram
from gpuactors.kubelet.device_plugin import DevicePluginService
from gpuactors.kubelet.grpc_trio import Server, open_channel
from gpuactors.kubelet.kubelet import register_over, socket_name
from gpuactors.kubelet.ledger import NOTHING_YET, YoungKubelet, checkpoint_contents, list_over
from gpuactors.ports import (
    Caller,
    Hint,
    HostError,
    KubeletError,
    LedgerContents,
    UeventSource,
    UeventsOverflowError,
)
from gpuactors.simulation.kubelet_checkpoint import encode
from gpuactors.simulation.kubelet_transport import (
    CHECKPOINT_FILE,
    KUBELET_SOCKET,
    POD_RESOURCES_SOCKET,
    MemoryTransport,
)
from gpuactors.simulation.uevent_sender import Uevent

SLOW_S: Final = 0.5
"""How long a slow look takes: far longer than a healthy one, well within its deadline."""


@final
class MemoryUevents:
    """The kernel's uevent socket. Implements `ports.UeventSource`; `open` is a `ports.OpenUevents`."""

    def __init__(self) -> None:
        self._waiting: list[bytes] = []
        self._overflowed = False
        self._crash = False
        self._arrived = trio.Event()

    def send(self, uevents: Sequence[Uevent]) -> None:
        """The kernel sends."""
        self.send_raw(*(uevent.encode() for uevent in uevents))

    def send_raw(self, *datagrams: bytes) -> None:
        """Somebody sends these bytes, whatever they are."""
        self._waiting.extend(datagrams)
        self._wake()

    def overflow(self) -> None:
        """The socket's buffer overflows: what waits in it is lost, and the reader is told once."""
        self._waiting.clear()
        self._overflowed = True
        self._wake()

    def crash_reader(self) -> None:
        """The next read raises what nobody expects."""
        self._crash = True
        self._wake()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[UeventSource]:
        """What was sent while nobody listened is lost."""
        self._waiting.clear()
        yield self

    async def receive(self) -> Sequence[Hint]:
        """As `ports.UeventSource.receive`."""
        await trio.lowlevel.checkpoint()
        while not (self._waiting or self._overflowed or self._crash):
            await self._arrived.wait()
        if self._crash:
            self._crash = False
            raise RuntimeError("the uevent watcher was told to crash")
        if self._overflowed:
            self._overflowed = False
            raise UeventsOverflowError("ENOBUFS")
        datagrams, self._waiting = self._waiting, []
        parsed = (parse_datagram(datagram) for datagram in datagrams)
        return [hint for properties in parsed if properties and (hint := hint_of(properties))]

    def _wake(self) -> None:
        self._arrived.set()
        self._arrived = trio.Event()


@final
class FaultyReader:
    """A host reader that fails when told to. Implements `ports.HostReader`."""

    def __init__(self, reader: InlineReader) -> None:
        self._reader = reader
        self.scan_failures = 0
        """How many of the next scans fail."""
        self.look_failures = 0
        """How many of the next looks fail."""
        self.slow = 0
        """How many of the next looks and scans take long: they read at once and answer `SLOW_S` later."""

    async def scan(self) -> tuple[PciFunction, ...]:
        """As `ports.HostReader.scan`."""
        if self.scan_failures:
            self.scan_failures -= 1
            raise HostError("the scan was told to fail")
        return await self._take_time(await self._reader.scan())

    async def look(self, address: PciAddress) -> tuple[PciFunction, ...]:
        """As `ports.HostReader.look`."""
        if self.look_failures:
            self.look_failures -= 1
            raise HostError("the look was told to fail")
        return await self._take_time(await self._reader.look(address))

    async def _take_time(self, found: tuple[PciFunction, ...]) -> tuple[PciFunction, ...]:
        if self.slow:
            self.slow -= 1
            await trio.sleep(SLOW_S)
        return found


@final
class MemoryKubelet:
    """The daemon's way to a fake kubelet on a `MemoryTransport`. Implements `ports.Kubelet`."""

    def __init__(self, transport: MemoryTransport) -> None:
        self._transport = transport
        self.bind_failures = 0
        """How many of the next endpoints cannot be made."""

    @property
    def absence(self) -> str:
        """As `ports.Kubelet.absence`."""
        return f"waiting for kubelet: {KUBELET_SOCKET} does not exist"

    @asynccontextmanager
    async def sockets(self) -> AsyncIterator[AsyncIterator[str | None]]:
        """As `ports.Kubelet.sockets`."""
        yield self._transport.kubelet()

    @asynccontextmanager
    async def serve(
        self, resource: ResourceName, frames: Latest[Frame], caller: Caller, *, pre_start: bool
    ) -> AsyncIterator[MemoryEndpoint]:
        """As `ports.Kubelet.serve`."""
        if self.bind_failures:
            self.bind_failures -= 1
            raise KubeletError("the endpoint was told to fail")
        name = socket_name(resource, "")
        server = Server(
            [DevicePluginService(resource, frames, caller, pre_start=pre_start)], drain_s=limits.DRAIN_S
        )
        async with self._transport.listen_at(name) as listener, trio.open_nursery() as nursery:
            await nursery.start(server.serve, listener)
            yield MemoryEndpoint(name, self._transport, listener, server)
            nursery.cancel_scope.cancel()

    async def register(self, resource: ResourceName, endpoint: str, *, pre_start: bool) -> None:
        """As `ports.Kubelet.register`."""
        if self._transport.kubelet().value is None:
            raise KubeletError(f"cannot reach kubelet: {self.absence}")
        try:
            async with open_channel(await self._transport.dial(KUBELET_SOCKET)) as channel:
                await register_over(channel, resource, endpoint, pre_start=pre_start)
        except Exception as exc:
            raise KubeletError(f"register failed: {exc!r}") from exc


@final
class MemoryEndpoint:
    """Implements `ports.Endpoint`."""

    def __init__(
        self,
        name: str,
        transport: MemoryTransport,
        listener: trio.abc.Listener[trio.abc.Stream],
        server: Server,
    ) -> None:
        self._name = name
        self._transport = transport
        self._listener = listener
        self._server = server

    @property
    def name(self) -> str:
        """As `ports.Endpoint.name`."""
        return self._name

    def still_there(self) -> bool:
        """As `ports.Endpoint.still_there`."""
        return self._transport.listens(self._name, self._listener)

    async def wait_disconnected(self) -> None:
        """As `ports.Endpoint.wait_disconnected`."""
        await self._server.wait_disconnected()

    async def drain(self, grace_s: float) -> None:
        """As `ports.Endpoint.drain`."""
        await self._server.drain(grace_s)


@final
class MemoryLedger:
    """The ledger of a fake kubelet on a `MemoryTransport`, read as `KubeletLedger` reads a real one. Implements
    `ports.LedgerReader`."""

    def __init__(self, transport: MemoryTransport) -> None:
        self._transport = transport
        self._young = YoungKubelet()
        self.read_failures = 0
        """How many of the next reads fail."""
        self.slow = 0
        """How many of the next reads take long: they read at once and answer `SLOW_S` later."""

    async def read(self) -> LedgerContents:
        """As `ports.LedgerReader.read`."""
        if self.read_failures:
            self.read_failures -= 1
            raise KubeletError("the read of kubelet's ledger was told to fail")
        contents = await self._read()
        if self.slow:
            self.slow -= 1
            await trio.sleep(SLOW_S)
        return contents

    async def _read(self) -> LedgerContents:
        found = self._transport.pod_resources()
        if found is None:
            await trio.lowlevel.checkpoint()
            return self._checkpoint()
        kubelet, since = found
        young = trio.current_time() - since < limits.LEDGER_SETTLE_S
        try:
            with trio.fail_after(limits.LEDGER_DEADLINE_S):
                async with open_channel(await self._transport.dial(POD_RESOURCES_SOCKET)) as channel:
                    listed = await list_over(channel)
        except KubeletError:
            raise
        except Exception as exc:  # kubelet stops just now
            raise KubeletError(f"kubelet did not answer PodResources List: {exc!r}") from exc
        return self._young.complete(kubelet, listed, self._checkpoint() if young else None)

    def _checkpoint(self) -> LedgerContents:
        if self._transport.checkpoint is None:
            return LedgerContents(NOTHING_YET, (), ())
        return checkpoint_contents(encode(self._transport.checkpoint).encode(), CHECKPOINT_FILE)
