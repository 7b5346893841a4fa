"""The API server of a cluster in memory, for runs on trio's mock clock: the daemon's own client, and the fake server
over h11, on streams without a socket.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any, Final, final

import httpcore
import trio

from gpuactors.kube.client import ApiClient
from gpuactors.kube.config import FileAccess, Server
from gpuactors_simulation.kube.http import serve_stream
from gpuactors_simulation.kube.server import FakeApiServer
from gpuactors_simulation.memory.stream import Connection

_DAEMON: Final = "daemon"
_API_SERVER: Final = "kube-apiserver"


@final
class MemoryApiServer:
    """The server's side: `run` serves it, `client` reaches it."""

    def __init__(self, server: FakeApiServer) -> None:
        self.server = server
        self._numbers = itertools.count(1)
        self.dialled = 0
        """How many connections there were."""
        self._open: dict[Connection, None] = {}
        self._dialled, self._accepted = trio.open_memory_channel[trio.abc.Stream](100)

    async def run(self) -> None:
        """Serves for ever."""
        async with trio.open_nursery() as nursery:
            async for stream in self._accepted:
                nursery.start_soon(serve_stream, self.server, stream)

    def client(self, owner: str = _DAEMON) -> ApiClient:
        """The client of the process `owner`."""
        return ApiClient(FileAccess(Server("http", _API_SERVER, 80)), _MemoryNetwork(self, owner))

    @property
    def connections(self) -> int:
        """How many are open."""
        return sum(not connection.is_broken for connection in self._open)

    def kill(self, owner: str) -> None:
        """The process is killed with all connections that it has."""
        for connection in [c for c in self._open if owner in c.owners]:
            connection.cut()

    async def connect(self, owner: str) -> trio.abc.Stream:
        """A connection. Raises `OSError` while the server accepts none."""
        await trio.lowlevel.checkpoint()
        if self.server.away:
            raise ConnectionRefusedError("the API server is away")
        self._open = {c: None for c in self._open if not c.is_broken}
        connection = Connection(f"api {next(self._numbers)}", frozenset({owner, _API_SERVER}))
        self._open[connection] = None
        self.dialled += 1
        await self._dialled.send(connection.listener)
        return connection.dialler


@final
class _MemoryNetwork(httpcore.AsyncNetworkBackend):
    """Implement `httpcore.TrioBackend`."""

    def __init__(self, api: MemoryApiServer, owner: str) -> None:
        self._api = api
        self._owner = owner

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        try:
            return _MemoryNetworkStream(await self._api.connect(self._owner))
        except OSError as exc:
            raise httpcore.ConnectError(str(exc)) from exc


@final
class _MemoryNetworkStream(httpcore.AsyncNetworkStream):
    """A stream with httpcore's timeouts and errors."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self._stream = stream

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        try:
            with trio.fail_after(float("inf") if timeout is None else timeout):
                return bytes(await self._stream.receive_some(max_bytes))
        except trio.TooSlowError as exc:
            raise httpcore.ReadTimeout(str(exc)) from exc
        except (trio.BrokenResourceError, trio.ClosedResourceError) as exc:
            raise httpcore.ReadError(str(exc)) from exc

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        try:
            with trio.fail_after(float("inf") if timeout is None else timeout):
                await self._stream.send_all(buffer)
        except trio.TooSlowError as exc:
            raise httpcore.WriteTimeout(str(exc)) from exc
        except (trio.BrokenResourceError, trio.ClosedResourceError) as exc:
            raise httpcore.WriteError(str(exc)) from exc

    async def aclose(self) -> None:
        await self._stream.aclose()

    def get_extra_info(self, info: str) -> Any:
        return None
