"""The control socket of a node in memory, over which one daemon hands over to the next: the daemon's own control on a
`MemoryTransport`, and what goes wrong on the way (`faults.py`).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import final

import trio

from gpuactors.concurrency.latest import Latest
from gpuactors.control.unix import ControlIo, UnixControl
from gpuactors.grpc_trio import BoundListener, Owner
from gpuactors.simulation.kubelet.transport import MemoryTransport, owner_named
from tests.memory.faults import Fault, Faults


def memory_control(
    state_dir: MemoryTransport, hanging: Latest[frozenset[Owner]], owner: str, faults: Faults
) -> UnixControl:
    """The control of the daemon that is the process `owner`."""
    io = _MemoryControlIo(state_dir, owner, faults)
    return UnixControl(
        "", hanging, io=ControlIo(io.dial, io.bind, state_dir.owner_of, owner_named(owner).pid or 0)
    )


@final
class _MemoryControlIo:
    """The sockets of a `UnixControl` in memory."""

    def __init__(self, state_dir: MemoryTransport, owner: str, faults: Faults) -> None:
        self._state_dir = state_dir
        self._owner = owner
        self._faults = faults

    async def dial(self, path: str, *, deadline_s: float) -> trio.abc.Stream:
        """Implement `grpc_trio.connect_unix`."""
        return await self._state_dir.connect(path, self._owner)

    def bind(self, path: str, *, mode: int = 0o660, evict: Collection[Owner] = ()) -> BoundListener:
        """Implement `grpc_trio.bind_unix`."""
        return _HeldListener(self._state_dir.bind(path, self._owner, evict), self._faults)


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
