"""The node's kubelet over unix sockets: where its socket is, serving an endpoint for it, registering with it.

Implements `ports.node.Kubelet`. Every fault becomes a `KubeletError`: one sentence that names the path and the remedy.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Final, final

import trio
from grpclib import GRPCError
from msgspec import Struct

from gpuactors import limits
from gpuactors.concurrency.latest import LatestReader
from gpuactors.core.values.model import DeviceList, ResourceName
from gpuactors.core.values.quote import quoted
from gpuactors.core.values.text import encodable
from gpuactors.grpc_trio import (
    Bind,
    BoundListener,
    Channel,
    Dial,
    Server,
    bind_unix,
    connect_unix,
    open_unix_channel,
)
from gpuactors.kubelet.binding import Hanging, bound, short_of
from gpuactors.kubelet.device_plugin import DevicePluginService, options
from gpuactors.kubelet.dialled import unreachable
from gpuactors.kubelet.pb.deviceplugin import v1beta1 as pb
from gpuactors.kubelet.sockets import KUBELET_SOCKET, OURS, DirectoryIo, SocketsWatch, directory_of_the_node
from gpuactors.ports.errors import KubeletError
from gpuactors.ports.node import Caller, Sockets

REGISTER_DEADLINE_S: Final = 60.0
"""Deadline of Register, in seconds. Kubelet dials us inside the call (10 s) and asks for options with no deadline of
its own; a call that is cancelled early makes it drop the running client as well, so this is far longer than any kubelet
needs."""

API_VERSION: Final = "v1beta1"


class KubeletIo(Struct, frozen=True):
    """The calls that reach kubelet and its directory: the node's, or a simulation's."""

    dial: Dial
    bind: Bind
    directory: DirectoryIo


@final
class UnixKubelet:
    """Kubelet as found in its directory of device plugins."""

    def __init__(
        self,
        directory: str,
        hanging: Hanging | None = None,
        io: KubeletIo | None = None,
    ) -> None:
        self._directory = directory
        self._socket = os.path.join(self._directory, KUBELET_SOCKET)
        self._hanging = hanging
        self._io = io or KubeletIo(connect_unix, bind_unix, directory_of_the_node())
        self._serving: set[str] = set()

    @property
    def absence(self) -> str:
        return encodable(
            f"waiting for kubelet: {self._socket} does not exist; "
            "is kubelet running, and is --device-plugin-dir its directory?"
        )

    def sockets(self) -> AbstractAsyncContextManager[AsyncIterator[Sockets]]:
        return SocketsWatch(self._directory, self._io.directory).open()

    @asynccontextmanager
    async def serve(
        self,
        resource: ResourceName,
        device_lists: LatestReader[DeviceList],
        caller: Caller,
        *,
        pre_start: bool,
    ) -> AsyncIterator[UnixEndpoint]:
        """Implement `ports.node.Kubelet.serve`. The socket is directly in kubelet's directory, where operators expect
        it."""
        name = socket_name(resource, self._directory)
        path = os.path.join(self._directory, name)
        listener = bound(self._io.bind, path, self._hanging)
        server = Server(
            [DevicePluginService(resource, device_lists, caller, pre_start=pre_start)], drain_s=limits.DRAIN_S
        )
        async with trio.open_nursery() as nursery:
            await nursery.start(server.serve, listener)
            self._serving.add(path)
            try:
                yield UnixEndpoint(name, listener, server)
            finally:
                self._serving.discard(path)
            nursery.cancel_scope.cancel()

    async def unreachable(self) -> tuple[str, ...]:
        return await unreachable(self._serving, self._io.dial)

    async def register(self, resource: ResourceName, endpoint: str, *, pre_start: bool) -> None:
        """Implement `ports.node.Kubelet.register`. Kubelet dials the endpoint and asks for its options before it
        answers."""
        try:
            with trio.fail_after(REGISTER_DEADLINE_S):
                async with open_unix_channel(
                    self._socket, connect_deadline_s=limits.KUBELET_CONNECT_DEADLINE_S, dial=self._io.dial
                ) as channel:
                    await _register_over(channel, resource, endpoint, pre_start=pre_start)
        except GRPCError as exc:
            raise KubeletError(
                f"kubelet refused to register {resource}: {exc.status.name}: {quoted(exc.message or '')}"
            ) from exc
        except trio.TooSlowError as exc:
            raise KubeletError(
                f"kubelet did not answer Register on {self._socket} within {REGISTER_DEADLINE_S:.0f} s"
            ) from exc
        except Exception as exc:
            problem = f"cannot reach kubelet at {self._socket}"
            raise KubeletError(short_of(problem, exc) or f"{problem}: {_cause(exc)}") from exc


@final
class UnixEndpoint:
    """Our side of one resource's socket. Implements `ports.node.Endpoint`."""

    def __init__(self, name: str, listener: BoundListener, server: Server) -> None:
        self.name: Final = name
        self._listener = listener
        self._server = server

    def still_there(self) -> bool:
        return self._listener.still_there()

    async def wait_disconnected(self) -> None:
        await self._server.wait_disconnected()

    async def drain(self, grace_s: float) -> None:
        with trio.move_on_after(limits.LATE_CALL_S):
            await self._server.wait_idle()
        await self._server.drain(grace_s)


async def _register_over(channel: Channel, resource: ResourceName, endpoint: str, *, pre_start: bool) -> None:
    """Call Register over an open channel to kubelet. Raises `GRPCError` if kubelet refuses."""
    request = pb.RegisterRequest(
        version=API_VERSION,
        endpoint=endpoint,
        resource_name=resource,
        options=options(pre_start=pre_start),
    )
    await pb.RegistrationStub(channel).register(request)


def socket_name(resource: ResourceName, directory: str) -> str:
    """Return the socket's file name: readable, or a digest where that would be longer than the kernel allows."""
    name = f"{OURS}{resource.replace('/', '_')}.sock"
    if len(os.fsencode(os.path.join(directory, name))) <= limits.SOCKET_PATH_MAX_BYTES:
        return name
    return f"{OURS}{hashlib.sha256(resource.encode()).hexdigest()[:12]}.sock"


def _cause(exc: BaseException) -> str:
    """Return the text of the one exception inside groups of one, as nurseries raise them."""
    while isinstance(exc, BaseExceptionGroup) and len(exc.exceptions) == 1:
        exc = exc.exceptions[0]
    return quoted(str(exc)) or type(exc).__name__
