"""The control socket of a node in memory, over which one daemon hands over to the next.

Plays `control.unix` without a socket: who has the place serves, a successor asks, whoever does not answer in time is
taken over anyway.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import final

import trio

from gpuactors import limits
from gpuactors.concurrency.latest import Latest, LatestReader
from gpuactors.core.state import NodeState
from gpuactors.grpc_trio import Owner
from gpuactors.ports import ControlTakenError
from gpuactors.simulation.faults import Fault, Faults
from gpuactors.simulation.kubelet.transport import owner_named


@final
class ControlPlace:
    """The socket's path in the state directory: one daemon has it, or none."""

    def __init__(self) -> None:
        self.held: MemoryHeldControl | None = None

    def kill(self, owner: str) -> None:
        """A process ends as by SIGKILL."""
        if self.held is not None and self.held.owner == owner:
            held, self.held = self.held, None
            held.over.set()


@final
class MemoryHeldControl:
    """Implements `ports.HeldControl`."""

    def __init__(self, place: ControlPlace, owner: str, faults: Faults) -> None:
        self._place = place
        self._faults = faults
        self.owner = owner
        self.request = trio.Event()
        """A successor has asked."""
        self.given_up = False
        self.over = trio.Event()
        """It was given up, or its daemon has ended."""

    def still_ours(self) -> bool:
        """As `ports.HeldControl.still_ours`."""
        self._faults.crash(Fault.HAND_OVER_CRASHES)
        return self._place.held is self

    async def asked(self) -> None:
        """As `ports.HeldControl.asked`."""
        await self.request.wait()

    async def give_up(self) -> None:
        """As `ports.HeldControl.give_up`."""
        await trio.lowlevel.checkpoint()
        self.let_go()
        self.given_up = True
        self.over.set()

    def let_go(self) -> None:
        """The socket is closed."""
        if self._place.held is self:
            self._place.held = None


@final
class MemoryControl:
    """One daemon's view of the place. Implements `ports.Control`."""

    def __init__(self, place: ControlPlace, owner: str, faults: Faults) -> None:
        self._place = place
        self._owner = owner
        self._faults = faults
        self._hanging: MemoryHeldControl | None = None
        self.hanging = Latest(frozenset[Owner]())
        """Who was asked to hand over and did not."""

    async def ask(self) -> str:
        """As `ports.Control.ask`."""
        await trio.lowlevel.checkpoint()
        self._hanging = None
        self.hanging.set(frozenset())
        with trio.move_on_after(limits.HAND_OVER_DEADLINE_S):
            # Another successor was quicker; as in production, it is asked again and again.
            while (held := self._place.held) is not None and held.request.is_set():  # noqa: ASYNC110
                await trio.sleep(limits.HAND_OVER_RETRY_S)
            if held is None:
                return "none"
            held.request.set()
            await held.over.wait()
            return f"{held.owner} has handed over" if held.given_up else f"{held.owner} has ended"
        self._hanging = self._place.held
        if self._hanging is not None:
            self.hanging.set(frozenset({owner_named(self._hanging.owner)}))
        return "did not hand over, taken over anyway"

    @asynccontextmanager
    async def hold(self, state: LatestReader[NodeState]) -> AsyncIterator[MemoryHeldControl]:
        """As `ports.Control.hold`."""
        await trio.lowlevel.checkpoint()
        if self._place.held is not None and self._place.held is not self._hanging:
            raise ControlTakenError(f"{self._place.held.owner} listens on it")
        held = self._place.held = MemoryHeldControl(self._place, self._owner, self._faults)
        try:
            yield held
        finally:
            held.let_go()
            held.over.set()

    async def is_held(self) -> bool:
        """As `ports.Control.is_held`."""
        await trio.lowlevel.checkpoint()
        return self._place.held is not None
