"""How a fake kubelet and device plugins reach each other: over unix sockets in a directory, or in memory.

The fake kubelet knows only `KubeletTransport`. Must not know gRPC or kubelet's rules, but for one: at its start kubelet
removes every socket that lies directly in its directory.
"""

from __future__ import annotations

import itertools
import os
import socket
import stat
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Final, Protocol, TypeAlias, final

import trio
from trio.testing import MemoryReceiveStream, MemorySendStream, memory_stream_pair

from gpuactors.concurrency.latest import Latest, LatestReader
from gpuactors.limits import SOCKET_PATH_MAX_BYTES

KUBELET_SOCKET: Final = "kubelet.sock"
"""File name of the registration socket (k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1/constants.go)."""

_DIAL_RETRY_S: Final = 0.1
"""grpc-go's blocking dial tries again with a growing backoff; nobody here can tell the difference."""

_BACKLOG: Final = 128

_MemoryStream: TypeAlias = "trio.StapledStream[MemorySendStream, MemoryReceiveStream]"


class KubeletTransport(Protocol):
    """What the fake kubelet needs of the world."""

    def listen(self) -> AbstractAsyncContextManager[trio.abc.Listener[trio.abc.Stream]]:
        """Clears the directory as kubelet does at its start, then listens for Register calls."""
        ...

    async def dial(self, endpoint: str) -> trio.abc.Stream:
        """A connection to a plugin's endpoint, named as Register names it. Tries for ever; the caller has a
        deadline."""
        ...


@final
class UnixTransport:
    """The device-plugins directory of a kubelet, with real sockets. `directory` is made if it is not there."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)

    @asynccontextmanager
    async def listen(self) -> AsyncIterator[trio.abc.Listener[trio.abc.Stream]]:
        """Raises `OSError` if the socket cannot be made, for instance because its path is over the kernel's limit."""
        self._remove_sockets()
        path = self._directory / KUBELET_SOCKET
        if len(os.fsencode(path)) > SOCKET_PATH_MAX_BYTES:
            raise OSError(f"{path} is longer than the {SOCKET_PATH_MAX_BYTES} bytes of a unix socket's path")
        # The standard library binds: trio has no way to bind a unix socket that is not asynchronous.
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listening.bind(str(path))
            listening.listen(_BACKLOG)
            listening.setblocking(False)
            async with trio.SocketListener(trio.socket.from_stdlib_socket(listening)) as listener:
                yield listener
        finally:
            listening.close()

    async def dial(self, endpoint: str) -> trio.abc.Stream:
        """Tries again while nobody listens at the endpoint."""
        while True:
            try:
                return await trio.open_unix_socket(str(self._directory / endpoint))
            except OSError:
                await trio.sleep(_DIAL_RETRY_S)

    def _remove_sockets(self) -> None:
        """Sockets only, and only those directly in the directory (server.go, removeContents)."""
        for entry in os.scandir(self._directory):
            if stat.S_ISSOCK(entry.stat(follow_symlinks=False).st_mode):
                os.unlink(entry.path)


@final
class MemoryTransport:
    """A directory of endpoints in memory, for tests on trio's mock clock.

    A plugin listens with `listen_at(name)`, calls kubelet over `dial(KUBELET_SOCKET)`, and finds its endpoint's name
    gone after kubelet's start as it would find its socket's file gone.
    """

    def __init__(self) -> None:
        self._listening: dict[str, _MemoryListener] = {}
        self._lives = itertools.count(1)
        self._kubelet: Latest[str | None] = Latest(None)
        self._dialled: list[tuple[str, _MemoryStream]] = []

    @asynccontextmanager
    async def listen(self) -> AsyncIterator[trio.abc.Listener[trio.abc.Stream]]:
        """A removed name is only that: who holds an open connection keeps it."""
        self._listening.clear()
        async with self.listen_at(KUBELET_SOCKET) as listener:
            self._kubelet.set(f"kubelet {next(self._lives)}")
            try:
                yield listener
            finally:
                self._kubelet.set(None)

    def kubelet(self) -> LatestReader[str | None]:
        """Which kubelet listens now, and after every change; None while there is none."""
        return self._kubelet.subscribe()

    def listens(self, name: str, listener: trio.abc.Listener[trio.abc.Stream]) -> bool:
        """Whether `listener` is the one that a peer would reach at `name`."""
        return self._listening.get(name) is listener

    def cut(self, endpoint: str) -> int:
        """Breaks every open connection to an endpoint, as a dying peer would; returns how many there were."""
        streams = [stream for name, stream in self._dialled if name == endpoint]
        self._dialled = [(name, stream) for name, stream in self._dialled if name != endpoint]
        for stream in streams:
            stream.send_stream.close()
            stream.receive_stream.close()
        return len(streams)

    @asynccontextmanager
    async def listen_at(self, name: str) -> AsyncIterator[trio.abc.Listener[trio.abc.Stream]]:
        """A plugin's endpoint."""
        listener = _MemoryListener()
        self._listening[name] = listener
        try:
            yield listener
        finally:
            if self._listening.get(name) is listener:
                del self._listening[name]
            await listener.aclose()

    async def dial(self, endpoint: str) -> trio.abc.Stream:
        """Tries again while nobody listens at the endpoint."""
        while True:
            listener = self._listening.get(endpoint)
            if listener is not None:
                stream = await listener.connect()
                self._dialled.append((endpoint, stream))
                return stream
            await trio.sleep(_DIAL_RETRY_S)


class _MemoryListener(trio.abc.Listener[trio.abc.Stream]):
    def __init__(self) -> None:
        # As a listening socket's backlog: a peer that dials does not wait to be accepted.
        self._send, self._receive = trio.open_memory_channel[trio.abc.Stream](_BACKLOG)

    async def connect(self) -> _MemoryStream:
        ours, theirs = memory_stream_pair()
        await self._send.send(theirs)
        return ours

    async def accept(self) -> trio.abc.Stream:
        try:
            return await self._receive.receive()
        except trio.ClosedResourceError:
            raise
        except trio.EndOfChannel:
            raise trio.ClosedResourceError from None

    async def aclose(self) -> None:
        self._send.close()
        self._receive.close()
        await trio.lowlevel.checkpoint()
