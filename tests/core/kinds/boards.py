"""Boards of GPUs with partitions, for tests of sets: GPU n is at bus n."""

from __future__ import annotations

from gpuactors.core.kinds.sets import DeviceSet, SetSource
from gpuactors.core.values.model import DeviceKey


def key(number: int) -> DeviceKey:
    """The key of GPU `number`."""
    return DeviceKey(f"0000:{number:02x}:00.0")


def partition(name: int, *numbers: int, active: bool = False) -> DeviceSet:
    """A partition of the fabric manager."""
    return DeviceSet(tuple(sorted(map(key, numbers))), SetSource.FABRIC_MANAGER, str(name), active)


def egm(name: str, *numbers: int, node: str = "") -> DeviceSet:
    return DeviceSet(tuple(sorted(map(key, numbers))), SetSource.EGM, name, node=node)


def switches(*numbers: int) -> DeviceSet:
    return DeviceSet(tuple(sorted(map(key, numbers))), SetSource.SWITCHES, "nvswitches")


def board(gpus: int, active: frozenset[int] = frozenset()) -> tuple[DeviceSet, ...]:
    """The partitions of an HGX board: all GPUs, then halves of these, down to each GPU; numbers from 1, as the fabric
    manager has them. `active` has the numbers of the active ones."""
    sets: list[DeviceSet] = []
    size = gpus
    while size:
        for first in range(1, gpus + 1, size):
            name = len(sets) + 1
            sets.append(partition(name, *range(first, first + size), active=name in active))
        size //= 2
    return tuple(sets)
