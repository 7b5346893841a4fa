"""The names that this node's daemons have served, kept in memory as a state directory keeps them.

They outlive a daemon, and a reboot.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import final

import trio

from gpuactors.core.model import ResourceName
from gpuactors.ports import StateFileError
from gpuactors.simulation.faults import Fault, Faults


@final
class MemoryServed:
    """Implements `ports.ServedResources`."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults
        self._names: frozenset[ResourceName] = frozenset()

    def read(self) -> frozenset[ResourceName]:
        """As `ports.ServedResources.read`."""
        return self._names

    async def write(self, names: Iterable[ResourceName]) -> None:
        """As `ports.ServedResources.write`."""
        await trio.lowlevel.checkpoint()
        if self._faults.lasts(Fault.NO_DESCRIPTORS):
            raise StateFileError("the names that were served cannot be kept: no descriptor is left")
        self._names = frozenset(names)
