"""The control socket of a node in memory, over which one daemon hands over to the next: the daemon's own control on a
`MemoryTransport`, and what goes wrong on the way (`faults.py`).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import final

import trio

from gpuactors.concurrency.latest import Latest
from gpuactors.control.path import SOCKET_NAME, node_socket_path
from gpuactors.control.unix import ControlIo, UnixControl
from gpuactors.grpc_trio import BoundListener, Owner, SocketBindError
from gpuactors.kubelet.sockets import OURS
from gpuactors_simulation.kubelet.transport import MemoryTransport, owner_named
from tests.memory.faults import Fault, Faults


@dataclass
class StateDirectory:
    """The state directory of a daemon, as it finds it."""

    sockets: MemoryTransport
    is_removed: bool = False
    """The daemon still has it mounted; nothing can be made in it, and no other daemon finds what was."""

    def remove(self, owners: Collection[str]) -> None:
        """Deleted under these daemons: sockets lose their files, and what is connected stays so."""
        self.is_removed = True
        for owner in owners:
            self.sockets.unlink(SOCKET_NAME, owner)


def memory_control(
    state_dir: StateDirectory,
    hanging: Latest[frozenset[Owner]],
    owner: str,
    faults: Faults,
    kubelet: MemoryTransport | None = None,
) -> UnixControl:
    """The control of the daemon that is the process `owner`; without `kubelet` at one place only."""
    io = _MemoryControlIo(state_dir, kubelet, owner, faults)

    async def endpoints() -> list[str]:
        names = kubelet.names() if kubelet is not None else []
        return [n for n in names if n.startswith(OURS) and kubelet and kubelet.owner_of(n) is not None]

    return UnixControl(
        "",
        hanging,
        device_plugin_dir="" if kubelet is not None else None,
        endpoints=endpoints,
        io=ControlIo(
            io.dial,
            io.bind,
            io.owner_of,
            owner_named(owner).pid or 0,
            lambda _path: None,
            io.is_directory,
        ),
    )


@final
class _MemoryControlIo:
    """The sockets of a `UnixControl` in memory."""

    def __init__(
        self, state_dir: StateDirectory, kubelet: MemoryTransport | None, owner: str, faults: Faults
    ) -> None:
        self._state_dir = state_dir
        self._kubelet = kubelet
        self._owner = owner
        self._faults = faults

    def _place(self, path: str) -> MemoryTransport:
        """The directory of the node's socket, or of the daemon's own."""
        if self._kubelet is not None and path == node_socket_path(""):
            return self._kubelet
        return self._state_dir.sockets

    async def dial(self, path: str, *, deadline_s: float) -> trio.abc.Stream:
        """Implement `grpc_trio.connect_unix`."""
        return await self._place(path).connect(path, self._owner)

    def owner_of(self, path: str) -> Owner | None:
        """Implement `grpc_trio.owner_of`."""
        return self._place(path).owner_of(path)

    def is_directory(self, path: str) -> bool:
        """Implement `ControlIo.is_directory`: of kubelet's directory, or of the control socket's."""
        return path != SOCKET_NAME or not self._state_dir.is_removed

    def bind(self, path: str, *, mode: int = 0o660, evict: Collection[Owner] = ()) -> BoundListener:
        """Implement `grpc_trio.bind_unix`."""
        place = self._place(path)
        if place is self._state_dir.sockets and self._state_dir.is_removed:
            raise SocketBindError(f"cannot make the socket {path}: its directory was removed")
        return _HeldListener(place.bind(path, self._owner, evict), self._faults)


@final
class _HeldListener(BoundListener):
    """The check whether the socket is still there may crash."""

    def __init__(self, listener: BoundListener, faults: Faults) -> None:
        self._listener = listener
        self._faults = faults

    def still_there(self) -> bool:
        """Implement `BoundListener.still_there`."""
        self._faults.crash(Fault.HAND_OVER_CRASHES)
        return self._listener.still_there()

    async def accept(self) -> trio.abc.Stream:
        return await self._listener.accept()

    async def aclose(self) -> None:
        await self._listener.aclose()
