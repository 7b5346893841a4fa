"""Kubelet's side of the daemon's outside without a socket, a thread or a clock of its own, for runs on trio's mock
clock.

The same gRPC and the same fake kubelet as in the simulation over real sockets; only what carries the bytes differs,
and fails when it is told to (`faults.py`).
"""

from __future__ import annotations

import errno
import os
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from typing import Final, final

import trio

from gpuactors import limits
from gpuactors.concurrency.latest import LatestReader
from gpuactors.core.model import Frame, ResourceName
from gpuactors.grpc_trio import Server, open_channel
from gpuactors.kubelet.device_plugin import DevicePluginService
from gpuactors.kubelet.kubelet import is_others, register_over, socket_name
from gpuactors.kubelet.ledger import NOTHING_YET, YoungKubelet, checkpoint_contents, list_over, with_answers
from gpuactors.ports import Caller, KubeletError, LedgerContents, LedgerError, Sockets
from gpuactors.simulation.faults import SLOW_S, Fault, Faults
from gpuactors.simulation.kubelet.transport import (
    CHECKPOINT_FILE,
    KUBELET_SOCKET,
    POD_RESOURCES_SOCKET,
    MemoryListener,
    MemoryTransport,
    SocketsThere,
)

_DAEMON: Final = "daemon"


@final
class MemoryKubelet:
    """The way of the daemon named `owner` to a fake kubelet on a `MemoryTransport`. Implements `ports.Kubelet`.

    `evict` names the daemons whose sockets may be replaced although they live.
    """

    def __init__(
        self,
        transport: MemoryTransport,
        faults: Faults | None = None,
        owner: str = _DAEMON,
        evict: Callable[[], frozenset[str]] = frozenset,
    ) -> None:
        self._transport = transport
        self._faults = faults or Faults()
        self._owner = owner
        self._evict = evict

    @property
    def absence(self) -> str:
        """As `ports.Kubelet.absence`."""
        return f"waiting for kubelet: {KUBELET_SOCKET} does not exist"

    @asynccontextmanager
    async def sockets(self) -> AsyncIterator[AsyncIterator[Sockets]]:
        """As `ports.Kubelet.sockets`."""
        self._faults.crash(Fault.KUBELET_WATCHER_CRASHES)
        yield _Sockets(self._transport.sockets(), self._faults)

    @asynccontextmanager
    async def serve(
        self, resource: ResourceName, frames: LatestReader[Frame], caller: Caller, *, pre_start: bool
    ) -> AsyncIterator[MemoryEndpoint]:
        """As `ports.Kubelet.serve`."""
        self._faults.crash(Fault.PLUGIN_CRASHES)
        if self._faults.lasts(Fault.NO_DESCRIPTORS):
            raise KubeletError(f"cannot make the endpoint: {os.strerror(errno.EMFILE)}")
        if self._faults.strikes(Fault.BIND_FAILS):
            raise KubeletError("the endpoint was told to fail")
        name = socket_name(resource, "")
        if self._transport.listener_at(name) not in (None, self._owner, *self._evict()):
            raise KubeletError(f"another process listens on {name}")
        server = Server(
            [DevicePluginService(resource, frames, caller, pre_start=pre_start)], drain_s=limits.DRAIN_S
        )
        async with self._transport.listen_at(name, self._owner) as listener, trio.open_nursery() as nursery:
            await nursery.start(server.serve, listener)
            yield MemoryEndpoint(name, self._transport, listener, server)
            nursery.cancel_scope.cancel()

    async def register(self, resource: ResourceName, endpoint: str, *, pre_start: bool) -> None:
        """As `ports.Kubelet.register`."""
        if self._faults.strikes(Fault.REGISTER_SLOW):
            await trio.sleep(SLOW_S)
        if self._faults.lasts(Fault.NO_DESCRIPTORS):
            raise KubeletError(f"cannot reach kubelet: {os.strerror(errno.EMFILE)}")
        if self._faults.strikes(Fault.REGISTER_FAILS):
            raise KubeletError("Register was told to fail")
        try:
            with trio.fail_after(limits.REGISTER_DEADLINE_S):
                stream = await self._transport.try_dial(KUBELET_SOCKET, self._owner)
                if stream is None:
                    raise KubeletError(f"cannot reach kubelet: {self.absence}")
                async with open_channel(stream) as channel:
                    await register_over(channel, resource, endpoint, pre_start=pre_start)
        except KubeletError:
            raise
        except Exception as exc:
            raise KubeletError(f"register failed: {exc!r}") from exc


class _Sockets:
    """The sockets in kubelet's directory, as a daemon sees them."""

    def __init__(self, sockets: LatestReader[SocketsThere], faults: Faults) -> None:
        self._sockets = sockets
        self._faults = faults
        self._last: tuple[str | None, tuple[tuple[str, int], ...]] | None = None

    def __aiter__(self) -> _Sockets:
        return self

    async def __anext__(self) -> Sockets:
        while True:
            found = await self._sockets.receive()
            others = tuple((name, number) for name, number in found.plugins if is_others(name))
            if (found.kubelet, others) != self._last:
                break
        self._last = found.kubelet, others
        self._faults.crash(Fault.KUBELET_WATCHER_CRASHES)
        return Sockets(found.kubelet, tuple(name for name, _ in others[: limits.NEIGHBOURS_MAX]))


@final
class MemoryEndpoint:
    """Implements `ports.Endpoint`."""

    def __init__(
        self, name: str, transport: MemoryTransport, listener: MemoryListener, server: Server
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

    def __init__(
        self, transport: MemoryTransport, faults: Faults | None = None, owner: str = _DAEMON
    ) -> None:
        self._transport = transport
        self._faults = faults or Faults()
        self._owner = owner
        self._young = YoungKubelet()

    async def read(self, resources: Collection[ResourceName] = ()) -> LedgerContents:
        """As `ports.LedgerReader.read`."""
        self._faults.crash(Fault.LEDGER_CRASHES)
        if self._faults.lasts(Fault.NO_DESCRIPTORS):
            raise LedgerError(f"cannot ask kubelet for its ledger: {os.strerror(errno.EMFILE)}")
        if self._faults.strikes(Fault.READ_FAILS):
            raise with_answers(LedgerError("the read of kubelet's ledger was told to fail"), self._beside())
        contents = await self._read(resources)
        if self._faults.strikes(Fault.READ_SLOW):  # it was read at once, and is told later
            await trio.sleep(SLOW_S)
        return contents

    async def _read(self, resources: Collection[ResourceName]) -> LedgerContents:
        found = self._transport.pod_resources()
        if found is None:
            await trio.lowlevel.checkpoint()
            return self._checkpoint()
        kubelet, since = found
        try:
            listed = await self._list(resources)
        except LedgerError as exc:
            raise with_answers(exc, self._beside()) from exc
        return self._young.complete(kubelet, trio.current_time() - since, listed, self._beside())

    async def _list(self, resources: Collection[ResourceName]) -> LedgerContents:
        try:
            with trio.fail_after(limits.LEDGER_LIST_DEADLINE_S):
                async with open_channel(await self._dial()) as channel:
                    return await list_over(channel, resources)
        except LedgerError:
            raise
        except Exception as exc:  # kubelet stops just now
            raise LedgerError(f"kubelet did not answer PodResources List: {exc!r}") from exc

    async def _dial(self) -> trio.abc.Stream:
        if self._faults.strikes(Fault.READ_MALFORMED):
            return _Nonsense()
        return await self._transport.dial(POD_RESOURCES_SOCKET, self._owner)

    def _beside(self) -> LedgerContents | None:
        """The file beside List. One that cannot be read says nothing then."""
        try:
            return self._checkpoint()
        except LedgerError:
            return None

    def _checkpoint(self) -> LedgerContents:
        content = self._transport.checkpoint_file()
        if content is None:
            return LedgerContents(NOTHING_YET, (), (), cached=())
        return checkpoint_contents(content, CHECKPOINT_FILE)


class _Nonsense(trio.abc.Stream):
    """A peer that takes everything and answers with what is not HTTP/2."""

    def __init__(self) -> None:
        self._said = False

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await trio.lowlevel.checkpoint()

    async def wait_send_all_might_not_block(self) -> None:
        await trio.lowlevel.checkpoint()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        await trio.lowlevel.checkpoint()
        said, self._said = self._said, True
        return b"" if said else b"HTTP/1.1 400 Bad Request\r\n\r\n"

    async def aclose(self) -> None:
        await trio.lowlevel.checkpoint()
