"""The node's kubelet over unix sockets: where its socket is, serving an endpoint for it, registering with it.

Implements `ports.Kubelet`. Every fault becomes a `KubeletError`: one sentence that names the path and the remedy.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import Final, final

import trio
from grpclib import GRPCError
from inotify_simple import INotify, flags

from gpuactors import limits
from gpuactors.concurrency.latest import LatestReader
from gpuactors.core.model import Frame, ResourceName
from gpuactors.core.quote import quoted
from gpuactors.core.text import encodable
from gpuactors.grpc_trio import (
    Bind,
    BoundListener,
    Channel,
    Dial,
    Owner,
    Server,
    SocketError,
    bind_unix,
    connect_unix,
    open_unix_channel,
    socket_file,
)
from gpuactors.kubelet.device_plugin import DevicePluginService, options
from gpuactors.kubelet.ledger import CHECKPOINT
from gpuactors.kubelet.pb.deviceplugin import v1beta1 as pb
from gpuactors.ports import Caller, KubeletError, Sockets
from gpuactors.shortage import shortage

API_VERSION: Final = "v1beta1"

_KUBELET: Final = "kubelet.sock"
_OURS: Final = "gpuactors-"

_CHANGES: Final = (
    flags.CREATE
    | flags.DELETE
    | flags.MOVED_TO
    | flags.MOVED_FROM
    | flags.DELETE_SELF
    | flags.MOVE_SELF
    | flags.ONLYDIR
)
_DIRECTORY_LOST: Final = flags.DELETE_SELF | flags.MOVE_SELF | flags.IGNORED | flags.UNMOUNT


@dataclass(frozen=True, slots=True)
class KubeletIo:
    """How kubelet and its directory are reached: the node's, or a simulation's."""

    dial: Dial
    bind: Bind
    sockets: Callable[[], AbstractAsyncContextManager[AsyncIterator[Sockets]]]
    """As `ports.Kubelet.sockets`."""


@final
class UnixKubelet:
    """Kubelet as found below `kubelet_dir` (normally /var/lib/kubelet).

    `hanging`: owners whose sockets may be replaced although the process lives, see `control.unix`.
    """

    def __init__(
        self,
        kubelet_dir: str,
        hanging: LatestReader[frozenset[Owner]] | None = None,
        io: KubeletIo | None = None,
    ) -> None:
        self._directory = os.path.join(kubelet_dir, "device-plugins")
        self._socket = os.path.join(self._directory, _KUBELET)
        self._hanging = hanging
        self._io = io or KubeletIo(connect_unix, bind_unix, SocketsWatch(self._directory).open)

    @property
    def absence(self) -> str:
        return encodable(
            f"waiting for kubelet: {self._socket} does not exist; "
            "is kubelet running, and is --kubelet-dir its directory?"
        )

    def sockets(self) -> AbstractAsyncContextManager[AsyncIterator[Sockets]]:
        """As `ports.Kubelet.sockets`."""
        return self._io.sockets()

    @asynccontextmanager
    async def serve(
        self, resource: ResourceName, frames: LatestReader[Frame], caller: Caller, *, pre_start: bool
    ) -> AsyncIterator[UnixEndpoint]:
        """The socket lies directly in kubelet's directory, where operators look for it."""
        name = socket_name(resource, self._directory)
        evict = self._hanging.value if self._hanging is not None else frozenset[Owner]()
        try:
            listener = self._io.bind(os.path.join(self._directory, name), evict=evict)
        except (SocketError, OSError) as exc:
            raise KubeletError(_short_of(f"the socket {name} cannot be made", exc) or str(exc)) from exc
        server = Server(
            [DevicePluginService(resource, frames, caller, pre_start=pre_start)], drain_s=limits.DRAIN_S
        )
        async with trio.open_nursery() as nursery:
            await nursery.start(server.serve, listener)
            yield UnixEndpoint(name, listener, server)
            nursery.cancel_scope.cancel()

    async def register(self, resource: ResourceName, endpoint: str, *, pre_start: bool) -> None:
        """Kubelet dials the endpoint and asks for its options before it answers."""
        try:
            with trio.fail_after(limits.REGISTER_DEADLINE_S):
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
                f"kubelet did not answer Register on {self._socket} within {limits.REGISTER_DEADLINE_S:.0f} s"
            ) from exc
        except Exception as exc:
            problem = f"cannot reach kubelet at {self._socket}"
            raise KubeletError(_short_of(problem, exc) or f"{problem}: {_cause(exc)}") from exc


@final
class SocketsWatch:
    """The sockets in kubelet's directory on the node, by inotify."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._socket = os.path.join(directory, _KUBELET)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[AsyncIterator[Sockets]]:
        """The directory is an ordinary one, made by a program and not by the kernel, so inotify does see it. Where
        inotify is unavailable (fs.inotify.max_user_instances is used up), the directory is read periodically."""
        watched = self._directory_id()
        self._check_not_removed()
        with self._watch() as inotify:
            yield self._identities(inotify, watched)

    @contextmanager
    def _watch(self) -> Iterator[INotify | None]:
        try:
            inotify = INotify(nonblocking=True)
        except OSError:
            yield None
            return
        with inotify:
            try:
                inotify.add_watch(self._directory, _CHANGES)
            except (FileNotFoundError, NotADirectoryError) as exc:
                raise KubeletError(
                    f"waiting for kubelet: the directory {self._directory} does not exist; "
                    "is kubelet installed, and is --kubelet-dir its directory?"
                ) from exc
            except PermissionError as exc:
                raise KubeletError(f"may not watch {self._directory}: {exc.strerror}; run as root") from exc
            except OSError:  # fs.inotify.max_user_watches is used up
                yield None
                return
            yield inotify

    async def _identities(
        self, inotify: INotify | None, watched: tuple[int, int] | None
    ) -> AsyncIterator[Sockets]:
        """Kubelet's own socket is reported at once, the others together and at most once in ODD_SIGHT_S."""
        kubelet: str | None = ""
        others: dict[str, str] = {}
        others_at = -math.inf
        odd = False  # another process's socket may have come and gone since they were read
        while True:
            now, changed = self._identity(), False
            if (wait_s := others_at + limits.ODD_SIGHT_S - trio.current_time()) <= 0:
                found, others_at, wait_s = self._others(others), trio.current_time(), math.inf
                changed, others, odd = found != others or odd, found, False
            if now != kubelet or changed:
                kubelet = now
                yield Sockets(now, tuple(sorted(others)))
            # inotify reports the directory's removal only when no process has it open, and our own sockets keep it
            # open. It cannot be removed while kubelet.sock is in it, whose removal is reported at once.
            unsure = now is None or inotify is None
            with trio.move_on_after(min(wait_s, limits.KUBELET_DIR_RETRY_S if unsure else math.inf)):
                if inotify is None:
                    await trio.sleep_forever()
                else:
                    await trio.lowlevel.wait_readable(inotify.fileno())
            changes = [] if inotify is None else inotify.read(timeout=0)
            odd = odd or any(change.name and is_others(change.name) for change in changes)
            self._check_not_removed()
            if any(c.mask & _DIRECTORY_LOST for c in changes) or self._directory_id() != watched:
                raise self._directory_lost()

    def _others(self, before: dict[str, str]) -> dict[str, str]:
        """The sockets that are neither kubelet's nor ours, and which each one is. As `before` for want of descriptors:
        that is no evidence about any socket."""
        found: dict[str, str] = {}
        try:
            with os.scandir(self._directory) as entries:
                for entry in entries:
                    if is_others(entry.name) and (identity := _socket_identity(entry.path)) is not None:
                        found[encodable(entry.name)] = identity
                        if len(found) == limits.NEIGHBOURS_MAX:
                            break
        except OSError as exc:
            return before if shortage(exc) is not None else found
        return found

    def _check_not_removed(self) -> None:
        """Raises `KubeletError` if it was: a mount outlives that, and never shows another directory of that name."""
        with suppress(OSError):
            if os.stat(self._directory).st_nlink == 0:
                raise KubeletError(
                    f"waiting for kubelet: the directory {self._directory} has been removed from the node, and this "
                    "container still has the removed one: delete this pod, its successor gets the one that is there now"
                )

    def _directory_id(self) -> tuple[int, int] | None:
        try:
            found = os.stat(self._directory)
        except OSError:
            return None
        return found.st_dev, found.st_ino

    def _directory_lost(self) -> KubeletError:
        return KubeletError(f"waiting for kubelet: the directory {self._directory} has disappeared")

    def _identity(self) -> str | None:
        """Which socket kubelet.sock is now: a restarted kubelet makes a new one, perhaps with the same inode."""
        return _socket_identity(self._socket)


@final
class UnixEndpoint:
    """Our side of one resource's socket. Implements `ports.Endpoint`."""

    def __init__(self, name: str, listener: BoundListener, server: Server) -> None:
        self._name = name
        self._listener = listener
        self._server = server

    @property
    def name(self) -> str:
        return self._name

    def still_there(self) -> bool:
        return self._listener.still_there()

    async def wait_disconnected(self) -> None:
        await self._server.wait_disconnected()

    async def drain(self, grace_s: float) -> None:
        await self._server.drain(grace_s)


async def _register_over(channel: Channel, resource: ResourceName, endpoint: str, *, pre_start: bool) -> None:
    """Calls Register over an open channel to kubelet. Raises `GRPCError` if kubelet refuses."""
    request = pb.RegisterRequest(
        version=API_VERSION,
        endpoint=endpoint,
        resource_name=resource,
        options=options(pre_start=pre_start),
    )
    await pb.RegistrationStub(channel).register(request)


def is_others(name: str) -> bool:
    """Whether a socket of that name in the directory is neither kubelet's nor ours, nor one that is being made."""
    return not name.startswith((".", _OURS)) and name not in (_KUBELET, CHECKPOINT) and "/" not in name


def _socket_identity(path: str) -> str | None:
    found = socket_file(path)
    return None if found is None else found.identity


def socket_name(resource: ResourceName, directory: str) -> str:
    """The socket's file name: readable, or a digest where that would be longer than the kernel allows."""
    name = f"{_OURS}{resource.replace('/', '_')}.sock"
    if len(os.fsencode(os.path.join(directory, name))) <= limits.SOCKET_PATH_MAX_BYTES:
        return name
    return f"{_OURS}{hashlib.sha256(resource.encode()).hexdigest()[:12]}.sock"


def _short_of(problem: str, exc: BaseException) -> str | None:
    """`problem` with what there is too little of; None if that is not why."""
    short = shortage(exc)
    return f"{problem}: {short}" if short is not None else None


def _cause(exc: BaseException) -> str:
    """The text of the one exception inside groups of one, as nurseries raise them."""
    while isinstance(exc, BaseExceptionGroup) and len(exc.exceptions) == 1:
        exc = exc.exceptions[0]
    return quoted(str(exc)) or type(exc).__name__
