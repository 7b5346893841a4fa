"""Kubelet's side of the daemon's outside without a socket, a thread or a clock of its own, for runs on trio's mock
clock.

The same gRPC and the same fake kubelet as in the simulation over real sockets; only what carries the bytes differs,
and fails when it is told to (`faults.py`).
"""

from __future__ import annotations

import errno
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final, final

import trio

from gpuactors import limits
from gpuactors.concurrency.latest import LatestReader
from gpuactors.core.model import Frame, ResourceName
from gpuactors.grpc_trio import ConnectError, Server, SocketFile, open_channel
from gpuactors.kubelet.device_plugin import DevicePluginService
from gpuactors.kubelet.kubelet import is_others, register_over, socket_name
from gpuactors.kubelet.ledger import KubeletLedger, LedgerIo
from gpuactors.ports import Caller, KubeletError, LedgerContents, Sockets
from gpuactors.simulation.faults import SLOW_S, Fault, Faults
from gpuactors.simulation.kubelet.transport import (
    CHECKPOINT_FILE,
    KUBELET_SOCKET,
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


def memory_ledger(
    transport: MemoryTransport, faults: Faults | None = None, owner: str = _DAEMON
) -> KubeletLedger:
    """The daemon's own reader of the ledger, of a fake kubelet on a `MemoryTransport`."""
    way = _WayToLedger(transport, faults or Faults(), owner)
    return KubeletLedger("", LedgerIo(way.dial, way.socket_file, way.read_file, way.apart))


@final
class _WayToLedger:
    """What a `KubeletLedger` reaches in memory, and what goes wrong on the way."""

    def __init__(self, transport: MemoryTransport, faults: Faults, owner: str) -> None:
        self._transport = transport
        self._faults = faults
        self._owner = owner

    def socket_file(self, path: str) -> SocketFile | None:
        """The first thing in a read."""
        self._faults.crash(Fault.LEDGER_CRASHES)
        return self._transport.socket_file(path)

    async def dial(self, path: str, *, deadline_s: float) -> trio.abc.Stream:
        """As `connect_unix`."""
        self._need_descriptor()
        if self._faults.strikes(Fault.READ_FAILS):
            raise ConnectError(f"dialling {path} was told to fail")
        stream = await self._transport.connect(path, self._owner)
        if self._faults.strikes(Fault.READ_MALFORMED):
            await stream.aclose()
            return _Nonsense()
        return stream

    def read_file(self, path: str, max_bytes: int) -> bytes | None:
        """As `LedgerIo.read_file`; there is no other file."""
        assert path == f"device-plugins/{CHECKPOINT_FILE}", path
        self._need_descriptor()
        content = self._transport.checkpoint_file()
        return None if content is None else content[:max_bytes]

    async def apart(self, function: Callable[[], LedgerContents]) -> LedgerContents:
        """The last thing in a read: a slow one has read at once and answers later, out of date."""
        await trio.lowlevel.checkpoint()
        contents = function()
        if self._faults.strikes(Fault.READ_SLOW):
            await trio.sleep(SLOW_S)
        return contents

    def _need_descriptor(self) -> None:
        if self._faults.lasts(Fault.NO_DESCRIPTORS):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


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
