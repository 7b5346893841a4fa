"""Kubelet's side of the daemon without a socket, a thread or a clock of its own, for runs on trio's mock clock.

The same gRPC and the same fake kubelet as in the simulation over real sockets; only what carries the bytes differs,
and fails when a fault is ordered (`faults.py`).
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Final, final

import trio

from gpuactors.concurrency.latest import LatestReader
from gpuactors.grpc_trio import BoundListener, ConnectError, Owner, SocketBindError, SocketFile
from gpuactors.kubelet.dra.plugin import PluginIo, UnixClaims
from gpuactors.kubelet.kubelet import KubeletIo, UnixKubelet
from gpuactors.kubelet.ledger import FileAndPods, KubeletLedger, LedgerIo
from gpuactors.kubelet.sockets import Change, Changes, Directory, DirectoryIo
from gpuactors.ports.node import PodsSeen
from gpuactors_simulation.kubelet.transport import (
    CHECKPOINT_FILE,
    MemoryTransport,
    plugin_name,
)
from tests.memory.faults import SLOW_S, Fault, Faults

_DAEMON: Final = "daemon"


def memory_kubelet(
    transport: MemoryTransport,
    faults: Faults | None = None,
    owner: str = _DAEMON,
    hanging: LatestReader[frozenset[Owner]] | None = None,
) -> UnixKubelet:
    """The daemon's own way to kubelet, to a fake one on a `MemoryTransport`."""
    io = _MemoryKubeletIo(transport, faults or Faults(), owner)
    directory = DirectoryIo(io.watch, io.directory, io.names, io.socket_file)
    return UnixKubelet("device-plugins", hanging, KubeletIo(io.dial, io.bind, directory))


def memory_claims(
    transport: MemoryTransport,
    driver: str,
    on_failure: Callable[[str, Exception], None],
    *,
    instance: str | None = None,
    faults: Faults | None = None,
    owner: str = _DAEMON,
    hanging: LatestReader[frozenset[Owner]] | None = None,
) -> UnixClaims:
    """The daemon's own DRA plugin, to a fake kubelet on a `MemoryTransport`, whose directory is `/`."""
    io = _MemoryKubeletIo(transport, faults or Faults(), owner)
    plugin_io = PluginIo(
        io.bind_plugin,
        lambda _path: None,
        io.watch_plugins,
        dial=io.dial_plugin,
        later=lambda own: [f"/{name}" for name in transport.later(plugin_name(own))],
        now=trio.current_time,
    )
    return UnixClaims("/", driver, instance, on_failure, hanging, plugin_io)


@final
class _MemoryKubeletIo:
    """The sockets and directories of a `UnixKubelet` in memory, and their faults."""

    def __init__(self, transport: MemoryTransport, faults: Faults, owner: str) -> None:
        self._transport = transport
        self._faults = faults
        self._owner = owner

    @contextmanager
    def watch(self, path: str) -> Iterator[Changes]:
        """Implement `DirectoryIo.watch`."""
        self._faults.crash(Fault.KUBELET_WATCHER_CRASHES)
        need_descriptor(self._faults)
        with self._transport.watch() as changes:
            yield _Changes(changes, self._faults)

    @contextmanager
    def names(self, path: str) -> Iterator[Sequence[str]]:
        """Implement `DirectoryIo.names`."""
        need_descriptor(self._faults)
        yield self._transport.names()

    def directory(self, path: str) -> Directory:
        """Implement `DirectoryIo.directory`: it is always there."""
        return Directory((0, 0), links=2)

    def socket_file(self, path: str) -> SocketFile | None:
        """Implement `DirectoryIo.socket_file`."""
        return self._transport.socket_file(_name(path))

    def bind(self, path: str, *, mode: int = 0o660, evict: Collection[Owner] = ()) -> BoundListener:
        """Implement `grpc_trio.bind_unix`."""
        self._faults.crash(Fault.PLUGIN_CRASHES)
        need_descriptor(self._faults)
        if self._faults.strikes(Fault.BIND_FAILS):
            raise SocketBindError(f"making {path} fails as planned")
        return self._transport.bind(_name(path), self._owner, evict)

    def bind_plugin(self, path: str, *, mode: int = 0o660, evict: Collection[Owner] = ()) -> BoundListener:
        """`bind` for a socket of the DRA plugin."""
        need_descriptor(self._faults)
        return self._transport.bind(plugin_name(path), self._owner, evict)

    def watch_plugins(self, path: str) -> AbstractContextManager[Changes]:
        """Implement `DirectoryIo.watch` for a directory of the DRA plugin."""
        need_descriptor(self._faults)
        return self._transport.watch(plugin_name(path))

    async def dial_plugin(self, path: str, *, deadline_s: float) -> trio.abc.Stream:
        """Implement `grpc_trio.connect_unix` to another instance of the DRA plugin."""
        need_descriptor(self._faults)
        return await self._transport.connect(plugin_name(path), self._owner)

    async def dial(self, path: str, *, deadline_s: float) -> trio.abc.Stream:
        """Implement `grpc_trio.connect_unix`."""
        if self._faults.strikes(Fault.REGISTER_SLOW):
            await trio.sleep(SLOW_S)
        need_descriptor(self._faults)
        if self._faults.strikes(Fault.REGISTER_FAILS):
            raise ConnectError(f"dialling {path} fails as planned")
        return await self._transport.connect(_name(path), self._owner)


def _name(path: str) -> str:
    """The name in a `MemoryTransport` of a file in kubelet's directory."""
    return path.removeprefix("device-plugins/")


def need_descriptor(faults: Faults) -> None:
    """Raises `OSError` while there is none."""
    if faults.lasts(Fault.NO_DESCRIPTORS):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


@final
class _Changes:
    """Changes of kubelet's directory, and the faults of their reader."""

    def __init__(self, changes: Changes, faults: Faults) -> None:
        self._changes = changes
        self._faults = faults
        self.wait = changes.wait

    def read(self) -> Sequence[Change]:
        """Implement `Changes.read`."""
        self._faults.crash(Fault.KUBELET_WATCHER_CRASHES)
        return self._changes.read()


def memory_ledger(
    transport: MemoryTransport,
    faults: Faults | None = None,
    owner: str = _DAEMON,
    pods: PodsSeen | None = None,
) -> KubeletLedger:
    """The daemon's own reader of the ledger, of a fake kubelet on a `MemoryTransport`."""
    io = _MemoryLedgerIo(transport, faults or Faults(), owner)
    return KubeletLedger(
        "", "device-plugins", LedgerIo(io.dial, io.socket_file, io.read_file, io.apart, pods)
    )


@final
class _MemoryLedgerIo:
    """The sockets and files of a `KubeletLedger` in memory, and their faults."""

    def __init__(self, transport: MemoryTransport, faults: Faults, owner: str) -> None:
        self._transport = transport
        self._faults = faults
        self._owner = owner

    def socket_file(self, path: str) -> SocketFile | None:
        """Implement `grpc_trio.socket_file`; with it a read begins."""
        self._faults.crash(Fault.LEDGER_CRASHES)
        return self._transport.socket_file(path)

    async def dial(self, path: str, *, deadline_s: float) -> trio.abc.Stream:
        """Implement `connect_unix`."""
        need_descriptor(self._faults)
        if self._faults.strikes(Fault.READ_FAILS):
            raise ConnectError(f"dialling {path} fails as planned")
        stream = await self._transport.connect(path, self._owner)
        if self._faults.strikes(Fault.READ_MALFORMED):
            await stream.aclose()
            return _Nonsense()
        return stream

    def read_file(self, path: str, max_bytes: int) -> bytes | None:
        """Implement `LedgerIo.read_file`; there is no other file."""
        assert path == f"device-plugins/{CHECKPOINT_FILE}", path
        need_descriptor(self._faults)
        content = self._transport.checkpoint_file()
        return None if content is None else content[:max_bytes]

    async def apart(self, function: Callable[[], FileAndPods]) -> FileAndPods:
        """The first part of a read: a slow one has read at once and returns later, outdated."""
        await trio.lowlevel.checkpoint()
        contents = function()
        if self._faults.strikes(Fault.READ_SLOW):
            await trio.sleep(SLOW_S)
        return contents


class _Nonsense(trio.abc.Stream):
    """A peer that takes everything and answers with what is not HTTP/2."""

    def __init__(self) -> None:
        self._sent = False

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await trio.lowlevel.checkpoint()

    async def wait_send_all_might_not_block(self) -> None:
        await trio.lowlevel.checkpoint()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        await trio.lowlevel.checkpoint()
        sent, self._sent = self._sent, True
        return b"" if sent else b"HTTP/1.1 400 Bad Request\r\n\r\n"

    async def aclose(self) -> None:
        await trio.lowlevel.checkpoint()
