"""The two sockets of the DRA plugin: one that serves the API, one in `plugins_registry` by which kubelet finds it.

Implements `ports.claims.ClaimsKubelet`. The API's socket is there before the other one and goes after it, so that
kubelet never dials an endpoint that is not served. Each has a server of its own: what goes on in the API never holds up
the registration. Kubelet watches the registry and finds the socket again by itself after a restart.

Names for a rolling update: with an `instance` (the pod's UID) both names contain it, as two instances at one path are
refused; without one they are those of Kubernetes' examples.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager, contextmanager
from functools import partial
from typing import Final, final

import trio
from msgspec import Struct

from gpuactors import limits
from gpuactors.concurrency.latest import LatestReader
from gpuactors.core.values.claim import DeviceHealth
from gpuactors.core.values.text import encodable
from gpuactors.grpc_trio import Bind, BoundListener, Dial, Server, bind_unix, connect_unix
from gpuactors.kubelet.binding import Hanging, bound
from gpuactors.kubelet.dialled import unreachable
from gpuactors.kubelet.dra.dead_sockets import remove_dead
from gpuactors.kubelet.dra.health import Health
from gpuactors.kubelet.dra.registration import RegistrationService
from gpuactors.kubelet.dra.service import PACKAGES, ClaimCalls, DraPlugin, OnFailure
from gpuactors.kubelet.dra.successor import LaterSockets, UnixSuccessor, later_sockets
from gpuactors.kubelet.sockets import Changes, directory_of_the_node
from gpuactors.ports.claims import ClaimCaller, PluginStatus
from gpuactors.ports.errors import KubeletError
from gpuactors.process.logger import get_logger

PLUGIN_SOCKETS_CHECK_S: Final = 5.0
"""The interval between two checks of the DRA plugin's sockets, 5 s: inotify does not report that another directory is
mounted over theirs. Kubelet notices a gap of 30 s."""

_log: Final = get_logger(__name__)

PLUGINS: Final = "plugins"
REGISTRY: Final = "plugins_registry"
"""Kubelet's directories; in the registry it dials every socket whose name does not begin with a dot."""


class PluginIo(Struct, frozen=True):
    """How the plugin's sockets are made and watched: the node's, or a simulation's."""

    bind: Bind
    make_directory: Callable[[str], None]
    """Makes a directory with its parents, if it is missing. Raises `OSError`."""
    watch: Callable[[str], AbstractContextManager[Changes]]
    """See `DirectoryIo.watch`."""
    dial: Dial = connect_unix
    later: LaterSockets = lambda _own: ()
    """See `successor.later_sockets`; without it no successor is found."""
    now: Callable[[], float] = time.time
    """The time of day, in seconds since 1970."""
    remove_dead: Callable[[str, str, str], tuple[str, ...]] = lambda _registry, _plugin_dir, _driver: ()
    """See `dead_sockets.remove_dead`; without it nothing is removed."""


def plugin_io_of_the_node() -> PluginIo:
    """Return the node's unix sockets and inotify."""
    return PluginIo(
        bind_unix,
        partial(os.makedirs, mode=0o750, exist_ok=True),
        directory_of_the_node().watch,
        later=later_sockets,
        remove_dead=remove_dead,
    )


@final
class UnixClaims:
    """Kubelet as found below `kubelet_dir`; kubelet gets that path, so it must be the same for both.

    `instance`: the name of this instance among those of one driver, None for the only one. `on_failure` gets an
    unexpected exception: a bug, to be logged.
    """

    def __init__(
        self,
        kubelet_dir: str,
        driver: str,
        instance: str | None,
        on_failure: OnFailure,
        hanging: Hanging | None = None,
        io: PluginIo | None = None,
    ) -> None:
        self._driver = driver
        self._paths = socket_paths(kubelet_dir, driver, instance)
        self._on_failure = on_failure
        self._hanging = hanging
        self._io = io or plugin_io_of_the_node()
        self._is_serving = False
        self.successor: Final = UnixSuccessor(self._paths.api, self._io.later, self._io.dial)

    async def unreachable(self) -> tuple[str, ...]:
        paths = (self._paths.api, self._paths.registration) if self._is_serving else ()
        return await unreachable(paths, self._io.dial)

    @asynccontextmanager
    async def serve_claims(
        self,
        caller: ClaimCaller,
        health: LatestReader[tuple[DeviceHealth, ...]],
        on_status: Callable[[PluginStatus], None],
    ) -> AsyncIterator[UnixClaimsEndpoint]:
        calls = ClaimCalls(caller, self._on_failure)
        api = Server(
            [*(DraPlugin(calls, package) for package in PACKAGES), Health(health, self._io.now)],
            drain_s=limits.DRAIN_S,
        )
        registration = Server(
            [RegistrationService(self._driver, self._paths.api, on_status, self._on_failure)],
            drain_s=limits.DRAIN_S,
        )
        failed: KubeletError | None = None  # outside the nursery, which would put it into a group
        async with trio.open_nursery() as nursery:
            endpoint = UnixClaimsEndpoint(
                _Socket(self._paths.api, api, nursery, self._io, self._hanging),
                _Socket(self._paths.registration, registration, nursery, self._io, self._hanging),
                self._io,
            )
            try:
                await endpoint.mend()
                self._remove_dead()
                self._is_serving = True
                yield endpoint
            except KubeletError as exc:
                failed = exc
            finally:
                self._is_serving = False
                with trio.CancelScope(shield=True):
                    await endpoint.close()
        if failed is not None:
            raise failed

    def _remove_dead(self) -> None:
        """Remove dead sockets, once this instance has its own: kubelet can always dial one."""
        registry, own = os.path.dirname(self._paths.registration), os.path.dirname(self._paths.api)
        for path in self._io.remove_dead(registry, own, self._driver):
            _log.info("claims.dead_socket_removed", path=encodable(path), reason="no process listens on it")


@final
class UnixClaimsEndpoint:
    """Implements `ports.claims.ClaimsEndpoint`."""

    def __init__(self, api: _Socket, registration: _Socket, io: PluginIo) -> None:
        self.names: Final = (api.path, registration.path)
        self._api = api
        self._registration = registration
        self._io = io

    async def lost(self) -> None:
        with self._watch() as watches:
            while self._api.still_there() and self._registration.still_there():
                with trio.move_on_after(PLUGIN_SOCKETS_CHECK_S):
                    await _any(watches)

    async def mend(self) -> None:
        for socket in (self._api, self._registration):
            if not socket.still_there():
                await socket.open()

    async def withdraw(self, grace_s: float) -> None:
        with trio.move_on_after(grace_s):
            await self._api.server.wait_idle()
        await self._registration.close()
        with trio.move_on_after(limits.DEREGISTERED_S):
            await self._api.server.wait_disconnected()

    async def drain(self, grace_s: float) -> None:
        await self._api.server.drain(grace_s)

    async def close(self) -> None:
        """Remove both sockets, the registration's first, and end all calls."""
        await self._registration.close()
        await self._api.close()

    @contextmanager
    def _watch(self) -> Iterator[list[_Watch]]:
        """Watch both directories; where inotify is unavailable, the sockets are checked periodically."""
        with ExitStack() as stack:
            watches = []
            for socket in (self._api, self._registration):
                directory, name = os.path.split(socket.path)
                try:
                    watches.append(_Watch(stack.enter_context(self._io.watch(directory)), name))
                except OSError:
                    continue
            yield watches


@final
class _Socket:
    """One of the sockets. Its server outlives the file: who is connected stays so when the file is made again."""

    def __init__(
        self, path: str, server: Server, nursery: trio.Nursery, io: PluginIo, hanging: Hanging | None
    ) -> None:
        self.path: Final = path
        self.server: Final = server
        self._nursery = nursery
        self._io = io
        self._hanging = hanging
        self._listener: BoundListener | None = None
        self._scopes: list[trio.CancelScope] = []

    def still_there(self) -> bool:
        return self._listener is not None and self._listener.still_there()

    async def open(self) -> None:
        """Make the socket, and its directory. Raises `KubeletError`."""
        directory = os.path.dirname(self.path)
        try:
            self._io.make_directory(directory)
        except OSError as exc:
            raise KubeletError(
                f"cannot make the directory {encodable(directory)} for the sockets of the DRA plugin: {exc.strerror}; "
                "is --kubelet-dir kubelet's directory, and may this process write there?"
            ) from exc
        listener = bound(self._io.bind, self.path, self._hanging)
        before, self._listener = self._listener, listener
        if before is not None:
            await before.aclose()
        # Not by `start`: where this is being cancelled, it would wait for ever for a shielded task.
        self._nursery.start_soon(self._serve, listener)

    async def close(self) -> None:
        """Remove the socket's file, then end its calls."""
        if self._listener is not None:
            await self._listener.aclose()
        for scope in list(self._scopes):
            scope.cancel()

    async def _serve(self, listener: BoundListener) -> None:
        """Serve until `close`, or until the file was made again and all clients of this one have gone. Shielded: the
        sockets are closed in their order, also when everything is cancelled at once."""
        with trio.CancelScope(shield=True) as scope:
            self._scopes.append(scope)
            try:
                await self.server.serve(listener)
            finally:
                self._scopes.remove(scope)


class _Watch(Struct, frozen=True):
    """The directory of a socket, and the socket's name in it."""

    changes: Changes
    name: str

    async def changed(self) -> None:
        """Wait until something has happened to the socket, or to its directory. The checkpoint is in one directory with
        a socket, and is written several times for each claim."""
        while True:
            await self.changes.wait()
            if any(change.lost or change.name in ("", self.name) for change in self.changes.read()):
                return


async def _any(watches: list[_Watch]) -> None:
    """Wait until one of the sockets may be gone; for ever where nothing is watched."""
    async with trio.open_nursery() as nursery:

        async def wait(watch: _Watch) -> None:
            await watch.changed()
            nursery.cancel_scope.cancel()

        for watch in watches:
            nursery.start_soon(wait, watch)
        if not watches:
            await trio.sleep_forever()


# --- names ------------------------------------------------------------------------------------------------------


class SocketPaths(Struct, frozen=True):
    """The absolute paths of the two sockets."""

    api: str
    registration: str


def socket_paths(kubelet_dir: str, driver: str, instance: str | None) -> SocketPaths:
    """Return the sockets' paths: readable, or with a digest where a readable one is too long for the kernel. Kubelet
    takes any name."""
    root = os.path.abspath(kubelet_dir)
    suffix = "" if instance is None else f"-{instance}"
    digest = hashlib.sha256(f"{driver}{suffix}".encode()).hexdigest()[:12]
    return SocketPaths(
        api=_fitting(os.path.join(root, PLUGINS, driver), f"dra{suffix}.sock", f"dra-{digest}.sock"),
        registration=_fitting(
            os.path.join(root, REGISTRY), f"{driver}{suffix}-reg.sock", f"{digest}-reg.sock"
        ),
    )


def _fitting(directory: str, name: str, short: str) -> str:
    path = os.path.join(directory, name)
    fits = len(os.fsencode(path)) <= limits.SOCKET_PATH_MAX_BYTES
    return path if fits else os.path.join(directory, short)
