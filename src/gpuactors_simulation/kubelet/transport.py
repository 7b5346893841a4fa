"""Kubelet's directory, real or in memory: how a fake kubelet and its clients reach each other, and where its ledger's
file lies.

The fake kubelet knows only `KubeletTransport`. Must not know gRPC or kubelet's rules, but for one: at its start kubelet
removes every socket that lies directly in its device-plugins directory.
"""

from __future__ import annotations

import errno
import itertools
import os
import socket
import stat
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
    suppress,
)
from pathlib import Path
from typing import Final, Protocol, final

import trio

from gpuactors.grpc_trio import (
    BoundListener,
    ConnectError,
    Owner,
    SocketFile,
    SocketInUseError,
    socket_file,
)
from gpuactors.kubelet.sockets import Change, Changes, directory_of_the_node
from gpuactors.limits import SOCKET_PATH_MAX_BYTES
from gpuactors_simulation.kubelet.checkpoint import CorruptCheckpointError, decode, encode
from gpuactors_simulation.kubelet.values import Checkpoint
from gpuactors_simulation.memory.stream import Connection, Tap

KUBELET_SOCKET: Final = "kubelet.sock"
"""File name of the registration socket (k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1/constants.go)."""

POD_RESOURCES_SOCKET: Final = "pod-resources/kubelet.sock"
"""The PodResources socket below kubelet's directory, and its name in memory (apis/podresources/constants.go)."""

PLUGINS: Final = "plugins"
PLUGINS_REGISTRY: Final = "plugins_registry"
"""Where plugins have their sockets, and where kubelet finds them. In memory a name is the path below kubelet's
directory, and what lies directly in device-plugins has no directory at all."""

CHECKPOINT_FILE: Final = "kubelet_internal_checkpoint"
"""File name of kubelet's ledger in its device-plugins directory."""

CHECKPOINT_MODE: Final = 0o600
"""Only root reads it."""

_DIAL_RETRY_S: Final = 0.1
"""grpc-go's blocking dial tries again with a growing backoff; here that makes no difference."""

_BACKLOG: Final = 128

KUBELET: Final = "kubelet"
"""Kubelet's name among the processes of a `MemoryTransport`."""


class KubeletTransport(Protocol):
    """The node as the fake kubelet needs it."""

    def listen(self) -> AbstractAsyncContextManager[trio.abc.Listener[trio.abc.Stream]]:
        """Clears the directory as kubelet does at its start, then listens for Register calls."""
        ...

    def listen_pod_resources(self) -> AbstractAsyncContextManager[trio.abc.Listener[trio.abc.Stream]]:
        """Listens for clients of PodResources."""
        ...

    async def dial(self, endpoint: str) -> trio.abc.Stream:
        """Return a connection to a plugin's endpoint, named as Register names it. Tries for ever; the caller has a
        deadline."""
        ...

    def registry(self) -> Mapping[str, str]:
        """Return the sockets in `plugins_registry`: path → identity, another one if the socket was made anew."""
        ...

    def watch_registry(self) -> AbstractContextManager[Changes]:
        """Watch the directory for changes from now on."""
        ...

    async def dial_plugin(self, path: str) -> trio.abc.Stream:
        """Return a connection to a plugin's socket. Raises `OSError` or `SocketError` if no process listens there."""
        ...

    def read_checkpoint(self) -> Checkpoint | None:
        """Kubelet's ledger file; None if there is none. Raises `CorruptCheckpointError`."""
        ...

    def write_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Replace kubelet's ledger file, whole."""
        ...


@final
class UnixTransport:
    """A kubelet's directory with real sockets; missing directories are made."""

    def __init__(self, kubelet_dir: Path) -> None:
        self.device_plugins = kubelet_dir / "device-plugins"
        self.pod_resources = kubelet_dir / "pod-resources"
        self.plugins_registry = kubelet_dir / PLUGINS_REGISTRY
        for directory in (self.device_plugins, self.pod_resources, self.plugins_registry):
            directory.mkdir(parents=True, exist_ok=True)

    @asynccontextmanager
    async def listen(self) -> AsyncIterator[trio.abc.Listener[trio.abc.Stream]]:
        """Raises `OSError` if the socket cannot be made, for instance because its path is over the kernel's limit."""
        self._remove_sockets()
        async with _listen_at(self.device_plugins / KUBELET_SOCKET) as listener:
            yield listener

    @asynccontextmanager
    async def listen_pod_resources(self) -> AsyncIterator[trio.abc.Listener[trio.abc.Stream]]:
        """Raises as `listen`. A dead kubelet's socket is replaced."""
        path = self.pod_resources / KUBELET_SOCKET
        path.unlink(missing_ok=True)
        async with _listen_at(path) as listener:
            yield listener

    @asynccontextmanager
    async def listen_at(
        self, name: str, owner: str = "plugin"
    ) -> AsyncIterator[trio.abc.Listener[trio.abc.Stream]]:
        """A plugin's endpoint, as of a plugin that removes its socket: the file goes with the listener. Raises as
        `listen`."""
        path = self.device_plugins / name
        path.unlink(missing_ok=True)
        async with _listen_at(path) as listener:
            made = path.stat().st_ino
            try:
                yield listener
            finally:
                with suppress(FileNotFoundError):
                    if path.stat().st_ino == made:  # kubelet may have removed it, and another may be there
                        path.unlink()

    async def dial(self, endpoint: str) -> trio.abc.Stream:
        """Tries again until a process listens at the endpoint."""
        path = self.device_plugins / endpoint.lstrip("/")  # filepath.Join: an absolute one is below as well
        while True:
            try:
                return await trio.open_unix_socket(str(path))
            except OSError:
                await trio.sleep(_DIAL_RETRY_S)

    def registry(self) -> Mapping[str, str]:
        """Implement `KubeletTransport.registry`. Names that begin with a dot are ignored."""
        files = {str(p): socket_file(str(p)) for p in self.plugins_registry.iterdir() if p.name[0] != "."}
        return {path: file.identity for path, file in files.items() if file is not None}

    def watch_registry(self) -> AbstractContextManager[Changes]:
        """Implement `KubeletTransport.watch_registry`."""
        return directory_of_the_node().watch(str(self.plugins_registry))

    async def dial_plugin(self, path: str) -> trio.abc.Stream:
        """Implement `KubeletTransport.dial_plugin`."""
        return await trio.open_unix_socket(path)

    def read_checkpoint(self) -> Checkpoint | None:
        """Implement `KubeletTransport.read_checkpoint`."""
        try:
            return decode((self.device_plugins / CHECKPOINT_FILE).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None

    def write_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Implement `KubeletTransport.write_checkpoint`: rename a new file over the old one."""
        draft = self.device_plugins / f".{CHECKPOINT_FILE}"
        draft.write_text(encode(checkpoint), encoding="utf-8")
        draft.chmod(CHECKPOINT_MODE)
        draft.replace(self.device_plugins / CHECKPOINT_FILE)

    def _remove_sockets(self) -> None:
        """Sockets only, and only those directly in the directory (server.go, removeContents)."""
        for entry in os.scandir(self.device_plugins):
            if stat.S_ISSOCK(entry.stat(follow_symlinks=False).st_mode):
                os.unlink(entry.path)


@asynccontextmanager
async def _listen_at(path: Path) -> AsyncIterator[trio.abc.Listener[trio.abc.Stream]]:
    """The file stays when the listener has gone, as after a crash."""
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


def owner_named(process: str) -> Owner:
    """Return the owner that a process of a `MemoryTransport` is: `daemon 3` has the PID 3."""
    number = process.rpartition(" ")[2]
    return Owner(int(number) if number.isdecimal() else None)


def plugin_name(path: str) -> str:
    """Return the name in a `MemoryTransport` of a path below kubelet's directory, which is `/` there."""
    return path.removeprefix("/")


def _is_plugins(name: str) -> bool:
    return name.startswith((f"{PLUGINS}/", f"{PLUGINS_REGISTRY}/"))


@final
class MemoryTransport:
    """A kubelet's directory in memory, for runs on trio's mock clock.

    A plugin listens with `listen_at(name)`, calls kubelet over `dial(KUBELET_SOCKET)`, and finds its endpoint's name
    gone after kubelet's start as it would find its socket's file gone. A process is known by the name that it passes as
    `owner`, so that it can be killed.
    """

    def __init__(self, tap: Tap | None = None) -> None:
        self._tap = tap
        self._listening: dict[str, MemoryListener] = {}
        self._lives = itertools.count(1)
        self._numbers = itertools.count(1)
        self._pod_resources: tuple[str, float] | None = None
        self._watches: list[tuple[str, MemoryChanges]] = []
        """With the directory that is watched; the empty one is device-plugins."""
        self._connections: list[Connection] = []
        self._doomed: dict[str, int] = {}
        self.checkpoint: Checkpoint | None = None
        """Kubelet's ledger file."""
        self.checkpoint_damaged = False
        """The file is there and cannot be read, until kubelet writes it anew."""

    @asynccontextmanager
    async def listen(self) -> AsyncIterator[trio.abc.Listener[trio.abc.Stream]]:
        """Only the names are removed: open connections stay. Names in a sub-directory stay."""
        for name in [name for name in self._listening if "/" not in name]:
            del self._listening[name]
            self._changed(name)
        async with self.listen_at(KUBELET_SOCKET, KUBELET) as listener:
            yield listener

    @asynccontextmanager
    async def listen_pod_resources(self) -> AsyncIterator[trio.abc.Listener[trio.abc.Stream]]:
        """Implement `KubeletTransport.listen_pod_resources`."""
        async with self.listen_at(POD_RESOURCES_SOCKET, KUBELET) as listener:
            self._pod_resources = f"PodResources {next(self._lives)}", trio.current_time()
            yield listener

    @contextmanager
    def watch(self, directory: str = "") -> Iterator[MemoryChanges]:
        """Watch a directory, kubelet's own or one below it, from now on, as inotify reports it."""
        watch = directory, MemoryChanges()
        self._watches.append(watch)
        try:
            yield watch[1]
        finally:
            self._watches.remove(watch)

    def watch_registry(self) -> AbstractContextManager[Changes]:
        """Implement `KubeletTransport.watch_registry`."""
        return self.watch(PLUGINS_REGISTRY)

    def registry(self) -> Mapping[str, str]:
        """Implement `KubeletTransport.registry`; paths as in `plugin_name`."""
        names = [
            name for name in self._listening if name.startswith(f"{PLUGINS_REGISTRY}/") and "/." not in name
        ]
        return {f"/{name}": f"socket {self._listening[name].number}" for name in names}

    async def dial_plugin(self, path: str) -> trio.abc.Stream:
        """Implement `KubeletTransport.dial_plugin`."""
        return await self.connect(plugin_name(path), KUBELET)

    def names(self) -> list[str]:
        """Return the names in kubelet's directory."""
        names = {
            name.partition("/")[0]
            for name in self._listening
            if name != POD_RESOURCES_SOCKET and not _is_plugins(name)
        }
        return sorted(names | ({CHECKPOINT_FILE} if self.checkpoint is not None else set()))

    def _changed(self, name: str) -> None:
        directory, _, base = name.rpartition("/")
        for watched, changes in list(self._watches):
            if watched == directory:
                changes.add(base)

    def socket_file(self, name: str) -> SocketFile | None:
        """A dead kubelet leaves its PodResources socket behind."""
        if name == POD_RESOURCES_SOCKET:
            if self._pod_resources is None:
                return None
            identity, made_at = self._pod_resources
        else:
            listener = self._listening.get(name)
            if listener is None:
                return None
            identity, made_at = f"socket {listener.number}", listener.made_at
        return SocketFile(identity, trio.current_time() - made_at)

    def later(self, name: str) -> list[str]:
        """Return the sockets in the directory of the one at `name` that were made after it, the newest first."""
        directory, own = name.rpartition("/")[0], self._listening.get(name)
        made = {n: at.number for n, at in self._listening.items() if n.rpartition("/")[0] == directory}
        if own is None:
            return []
        return sorted((n for n in made if made[n] > own.number), key=lambda n: made[n], reverse=True)

    def listens(self, name: str, listener: trio.abc.Listener[trio.abc.Stream]) -> bool:
        """Return whether `listener` is the one that a peer would reach at `name`."""
        return self._listening.get(name) is listener

    def listener_at(self, name: str) -> str | None:
        """Return the process that listens at `name`; None if none does."""
        listener = self._listening.get(name)
        return None if listener is None else listener.owner

    # --- what can go wrong ----------------------------------------------------------------------------------

    def cut(self, endpoint: str, after_bytes: int = 0) -> int:
        """Break every open connection to an endpoint, as a dying peer would, when so many more bytes have passed;
        returns how many there were."""
        open_now = [c for c in self._open() if c.name == endpoint]
        for connection in open_now:
            connection.cut(after_bytes)
        return len(open_now)

    def cut_next(self, endpoint: str, after_bytes: int) -> None:
        """The next connection to an endpoint breaks when so many bytes have passed."""
        self._doomed[endpoint] = after_bytes

    def kill(self, owner: str) -> None:
        """A process ends as by SIGKILL: its connections break, its sockets have no listener any more."""
        for connection in self._open():
            if owner in connection.owners:
                connection.cut()
        for name, listener in [(name, at) for name, at in self._listening.items() if at.owner == owner]:
            if _is_plugins(name):
                listener.is_closed = True  # its file stays
                continue
            del self._listening[name]
            self._changed(name)

    def _open(self) -> list[Connection]:
        self._connections = [c for c in self._connections if not c.is_broken]
        return self._connections

    # --- what a peer does -----------------------------------------------------------------------------------

    @asynccontextmanager
    async def listen_at(self, name: str, owner: str = "plugin") -> AsyncIterator[MemoryListener]:
        """A plugin's endpoint."""
        listener = self._listen(name, owner)
        try:
            yield listener
        finally:
            await listener.aclose()

    def bind(self, name: str, owner: str, evict: Collection[Owner] = ()) -> MemoryListener:
        """Implement `grpc_trio.bind_unix` for a process that is known by its name; `Owner.pid` is the number in it."""
        holder = self.owner_of(name)
        if holder is not None and holder not in evict:
            raise SocketInUseError(f"{self.listener_at(name)} listens on {name}", pid=holder.pid)
        return self._listen(name, owner)

    def owner_of(self, path: str) -> Owner | None:
        """Implement `grpc_trio.owner_of`."""
        listener = self._listening.get(path)
        return None if listener is None or listener.is_closed else owner_named(listener.owner)

    def _listen(self, name: str, owner: str) -> MemoryListener:
        listener = self._listening[name] = MemoryListener(self, name, owner, next(self._numbers))
        self._changed(name)
        return listener

    def unlink(self, name: str, owner: str) -> None:
        """The file of this process's socket is removed by somebody else. Who has dialled it stays connected."""
        if self.listener_at(name) == owner:
            del self._listening[name]
            self._changed(name)

    def remove(self, listener: MemoryListener) -> None:
        """The socket's file, if it is still this listener's."""
        if self.listens(listener.name, listener):
            del self._listening[listener.name]
            self._changed(listener.name)

    async def dial(self, endpoint: str, owner: str = KUBELET) -> trio.abc.Stream:
        """Tries again until a process listens at the endpoint."""
        while True:
            stream = await self.try_dial(endpoint, owner)
            if stream is not None:
                return stream
            await trio.sleep(_DIAL_RETRY_S)

    async def try_dial(self, endpoint: str, owner: str) -> trio.abc.Stream | None:
        """Return a connection to an endpoint; None if no process listens there."""
        await trio.lowlevel.checkpoint()
        listener = self._listening.get(endpoint)
        if listener is None or listener.is_closed:  # no such file; or one without a listener any more
            return None
        connection = Connection(endpoint, frozenset({owner, listener.owner}), self._tap)
        if (after_bytes := self._doomed.pop(endpoint, None)) is not None:
            connection.cut(after_bytes)
        listener.connect(connection)
        self._open().append(connection)
        return connection.dialler

    async def connect(self, name: str, owner: str) -> trio.abc.Stream:
        """Implement `grpc_trio.connect_unix`; raises `ConnectError` for the same reasons."""
        stream = await self.try_dial(name, owner)
        if stream is None:
            left_behind = self.socket_file(name) is not None
            number = errno.ECONNREFUSED if left_behind else errno.ENOENT
            raise ConnectError(f"cannot connect to {name}") from OSError(number, os.strerror(number))
        return stream

    def read_checkpoint(self) -> Checkpoint | None:
        """Implement `KubeletTransport.read_checkpoint`."""
        if self.checkpoint_damaged:
            raise CorruptCheckpointError("checkpoint is corrupted")
        return self.checkpoint

    def write_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Implement `KubeletTransport.write_checkpoint`."""
        self.checkpoint = checkpoint
        self.checkpoint_damaged = False
        self._changed(CHECKPOINT_FILE)

    def checkpoint_file(self) -> bytes | None:
        """Return the ledger file's content, as a process other than kubelet reads it; None if there is none."""
        if self.checkpoint is None:
            return None
        content = encode(self.checkpoint).encode()
        return content[: len(content) // 2] if self.checkpoint_damaged else content


@final
class MemoryChanges:
    """Made by `MemoryTransport.watch`."""

    def __init__(self) -> None:
        self._waiting: list[Change] = []
        self._came = trio.Event()

    def add(self, name: str) -> None:
        """Something of that name came or went."""
        self._waiting.append(Change(name))
        self._came.set()

    async def wait(self) -> None:
        """Implement `Changes.wait`."""
        await self._came.wait()

    def read(self) -> Sequence[Change]:
        """Implement `Changes.read`."""
        waiting, self._waiting, self._came = self._waiting, [], trio.Event()
        return waiting


@final
class MemoryListener(BoundListener):
    """Made by a `MemoryTransport`."""

    def __init__(self, directory: MemoryTransport, name: str, owner: str, number: int) -> None:
        self._directory = directory
        self.name: Final = name
        self.owner: Final = owner
        self.number: Final = number
        self.made_at: Final = trio.current_time()
        # As a listening socket's backlog: a peer that dials does not wait to be accepted.
        self._send, self._receive = trio.open_memory_channel[Connection](_BACKLOG)
        self.is_closed = False

    def still_there(self) -> bool:
        """Implement `BoundListener.still_there`."""
        return self._directory.listens(self.name, self)

    def connect(self, connection: Connection) -> None:
        """A peer has dialled. Raises `trio.WouldBlock` if too many wait to be accepted."""
        self._send.send_nowait(connection)

    async def accept(self) -> trio.abc.Stream:
        try:
            return (await self._receive.receive()).listener
        except trio.ClosedResourceError:
            raise
        except trio.EndOfChannel:
            raise trio.ClosedResourceError from None

    async def aclose(self) -> None:
        """A peer that was never accepted sees its connection end, as with a socket. What a killed process has left
        stays."""
        if not self.is_closed:
            self._directory.remove(self)
        self.is_closed = True
        self._send.close()
        try:
            while True:
                self._receive.receive_nowait().listener.close()
        except (trio.EndOfChannel, trio.ClosedResourceError):
            pass
        self._receive.close()
        await trio.lowlevel.checkpoint()
