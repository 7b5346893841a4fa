"""The vGPUs of a history's node: mediated devices and vGPUs by vendor VFIO, by a naive reading of the fake host.

One card has a driver that offers types of mediated devices, another one has virtual functions that can have a vGPU
type. The types are so small that each can always be made: its name can always be read in some list. Must not know how
the daemon decides.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Final

from gpuactors_simulation.host.mediated import MdevType
from gpuactors_simulation.host.tree import HostTree
from gpuactors_simulation.host.uevents import Uevent
from gpuactors_simulation.host.vgpu import VgpuType

PARENT_CARD: Final = 3
"""The place of the card whose driver makes mediated devices."""

VGPU_CARD: Final = 4
"""The place of the card whose virtual functions can be vGPUs."""

MDEV_TYPES: Final = (
    MdevType("nvidia-105", "GRID T4-1Q", instances=4),
    MdevType("nvidia-106", "GRID T4-2Q", instances=3),
)
VGPU_TYPES: Final = (
    VgpuType(1147, "NVIDIA L40S-1Q", instances=4),
    VgpuType(1148, "NVIDIA L40S-2Q", instances=3),
)

UUIDS: Final = tuple(f"83b8f4f2-509f-382f-3c1e-e6bfe0fa100{number}" for number in range(3))
"""Of the mediated devices that there can be at a time, as many as there is room for."""

_NAMES: Final = (*[t.name or "" for t in MDEV_TYPES], *[t.name for t in VGPU_TYPES])

RESOURCES: Final = {f"nvidia.com/{name.replace(' ', '_')}": name for name in _NAMES}
"""The name of the type of each resource: the names of kubevirt-gpu-device-plugin."""

MDEV_RESOURCES: Final = tuple(RESOURCES)[: len(MDEV_TYPES)]
VGPU_RESOURCES: Final = tuple(RESOURCES)[len(MDEV_TYPES) :]

_FIRST_GROUP: Final = 60
_DRIVER: Final = "nvidia-vgpu-vfio"
_UUID: Final = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def is_uuid(device: str) -> bool:
    """The ID is that of a mediated device."""
    return _UUID.fullmatch(device) is not None


def offer(tree: HostTree, address: str) -> Sequence[Uevent]:
    """The card's driver offers types of mediated devices, as NVIDIA's does once its daemon runs."""
    devpath = "/" + str(tree.device_dir(address).relative_to(tree.root / "sys"))
    return tree.mediated.register(devpath, MDEV_TYPES, _DRIVER, first_group=_FIRST_GROUP)


def mediated(tree: HostTree) -> Iterator[str]:
    """The mediated devices that are on their bus: one that is removed leaves it at once, whoever has it open."""
    return (device.name for device in tree.mediated.devices if device.driver is not None)


def mediated_of(tree: HostTree, address: str) -> tuple[str, ...]:
    """The mediated devices of a card, on the bus or not."""
    return tree.mediated.children(address) if tree.mediated.is_parent(address) else ()


def parent_of(tree: HostTree, uuid: str) -> str:
    """The card of a mediated device."""
    return tree.mediated.device_dir(uuid).parent.name


def group_of(tree: HostTree, key: str) -> int | None:
    """The IOMMU group of a function or mediated device; None if it is in none, or not there."""
    if key in tree.functions:
        return tree.functions[key].group
    return tree.mediated.group_of(key) if key in mediated(tree) else None


def type_of(tree: HostTree, key: str) -> str | None:
    """The name of the type of a vGPU; None of anything else."""
    if key in mediated(tree):
        wanted = tree.mediated.types[key]
        return next(t.name for t in MDEV_TYPES if t.id == wanted)
    if key not in tree.functions or not tree.has_vgpus(key, tree.driver_of(key)):
        return None
    number = tree.vgpu_type(key)
    return next((t.name for t in VGPU_TYPES if t.number == number), None)
