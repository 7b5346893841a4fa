"""The resources that this node's daemons have served, the names of vGPU types that they have read, and the signs of
dead functions that they have seen, kept in memory as a state directory keeps them.

They outlive a daemon; the resources outlive a reboot as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

import trio

from gpuactors.core.values.dead_signs import DeadSigns
from gpuactors.core.values.model import PciAddress, ResourceName
from gpuactors.core.values.vgpu import CardTypes
from gpuactors.ports.errors import StateFileError
from tests.memory.faults import Fault, Faults


@final
class MemoryServed:
    """Implements `ports.node.ServedResources`."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults
        self._served: Mapping[ResourceName, frozenset[str]] = {}

    async def read(self) -> Mapping[ResourceName, frozenset[str]]:
        """Implement `ports.node.ServedResources.read`."""
        await trio.lowlevel.checkpoint()
        return self._served

    async def write(self, served: Mapping[ResourceName, frozenset[str]]) -> None:
        """Implement `ports.node.ServedResources.write`."""
        await trio.lowlevel.checkpoint()
        if self._faults.lasts(Fault.NO_DESCRIPTORS):
            raise StateFileError("the resources that were served cannot be kept: no descriptor is left")
        self._served = dict(served)


@final
class MemoryVgpuTypes:
    """Implements `ports.node.VgpuTypesFile`."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults
        self._cards: Mapping[PciAddress, CardTypes] = {}

    def reboot(self) -> None:
        """The file is of another boot now."""
        self._cards = {}

    async def read(self) -> Mapping[PciAddress, CardTypes]:
        """Implement `ports.node.VgpuTypesFile.read`."""
        await trio.lowlevel.checkpoint()
        return self._cards

    async def write(self, cards: Mapping[PciAddress, CardTypes]) -> None:
        """Implement `ports.node.VgpuTypesFile.write`."""
        await trio.lowlevel.checkpoint()
        if self._faults.lasts(Fault.NO_DESCRIPTORS):
            raise StateFileError("the names of vGPU types cannot be kept: no descriptor is left")
        self._cards = dict(cards)


@final
class MemoryDeadSigns:
    """Implements `ports.node.DeadSignsFile`. A reboot gives every function another presence."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults
        self._signs: DeadSigns = {}

    async def read(self) -> DeadSigns:
        """Implement `ports.node.DeadSignsFile.read`."""
        await trio.lowlevel.checkpoint()
        return self._signs

    async def write(self, signs: DeadSigns) -> None:
        """Implement `ports.node.DeadSignsFile.write`."""
        await trio.lowlevel.checkpoint()
        if self._faults.lasts(Fault.NO_DESCRIPTORS):
            raise StateFileError("the signs of dead functions cannot be kept: no descriptor is left")
        self._signs = dict(signs)
