"""Events of a card's IOMMU group: a disk of the host is in it where there is no ACS, or a platform device; firmware has
reserved memory of it one to one.

Nothing that a daemon does may change the disk's driver (`claim_check.py`), no card beside what the host uses may be
Healthy (`truth.py`, by `World.is_viable`), and no claim of one is prepared (`answer_check.py`).
"""

from __future__ import annotations

from typing import Final

from gpuactors_simulation.host.tree import PciSpec
from tests.histories.kinds import Kind, card_of, detail_of
from tests.histories.world import (
    PLATFORM_COMES,
    PLATFORM_DEVICE,
    PLATFORM_IS_BOUND,
    RESERVED,
    SECOND,
    World,
)

DISK_DRIVER: Final = "nvme"

_REGIONS: Final = (
    "0x0000000001000000 0x0000000001ffffff direct\n0x00000000fee00000 0x00000000feefffff msi\n",
    "0x00000000000e0000 0x00000000000effff direct-relaxable\n0x00000000fee00000 0x00000000feefffff msi\n",
    "0x00000000fee00000 0x00000000feefffff msi\n0x000000fd00000000 0x000000ffffffffff reserved\n",
)
"""Only the first one keeps a group from virtual machines."""

COMES: Final = "a disk of the host comes into the group"
IS_BOUND: Final = "the host takes its disk again"


def _comes(world: World, slot: int) -> None:
    spec = PciSpec(world.disk(slot), "144d", "a808", "010802", world.group(slot), driver=DISK_DRIVER)
    _disturb(world, slot)
    world.tell(world.tree.plug(spec))


def _is_bound(world: World, slot: int) -> None:
    _disturb(world, slot)
    world.tell(world.tree.bind(world.disk(slot), DISK_DRIVER))


def _disturb(world: World, slot: int) -> None:
    world.disturbed.update((world.address(slot), world.address(slot, SECOND)))


def _can_be_bound(world: World, slot: int) -> bool:
    """Not beside a virtual machine: iommu_device_use_default_domain."""
    disk = world.disk(slot)
    is_idle = disk in world.tree.functions and world.tree.driver_of(disk) is None
    return is_idle and not world.is_held(slot) and card_of(slot) not in world.changing


def _has_driver(world: World, slot: int) -> bool:
    disk = world.disk(slot)
    return disk in world.tree.functions and world.tree.driver_of(disk) is not None


def _is_idle(world: World, slot: int) -> bool:
    return world.is_plugged(slot) and not world.is_held(slot) and card_of(slot) not in world.changing


def _platform_driver(world: World, slot: int) -> tuple[bool, bool]:
    """Whether the platform device is in the group, and whether it has a driver."""
    device = world.tree.root / f"sys/kernel/iommu_groups/{world.group(slot)}/devices/{PLATFORM_DEVICE}"
    return device.is_symlink(), (device / "driver").is_symlink()


def _join(world: World, slot: int, driver: str | None) -> None:
    """By no uevent of PCI: the next inspection finds it."""
    _disturb(world, slot)
    world.missed = True
    world.tree.join_group(world.group(slot), PLATFORM_DEVICE, driver)


def _reserve(world: World, slot: int) -> None:
    """As a table of firmware has it (Intel's RMRR, AMD's IVMD): seen by the next inspection."""
    _disturb(world, slot)
    world.missed = True
    world.tree.reserve(world.group(slot), _REGIONS[detail_of(slot) % len(_REGIONS)])


GROUP_KINDS: Final = (
    Kind(
        COMES,
        lambda w, s: w.is_plugged(s) and w.disk(s) not in w.tree.functions and not w.is_held(s),
        _comes,
    ),
    Kind(IS_BOUND, _can_be_bound, _is_bound),
    Kind("the host leaves its disk", _has_driver, lambda w, s: w.tell(w.tree.unbind(w.disk(s)))),
    Kind(
        "a disk of the host is pulled",
        lambda w, s: w.disk(s) in w.tree.functions,
        lambda w, s: w.tell(w.tree.unplug(w.disk(s))),
    ),
    Kind(
        PLATFORM_COMES,
        lambda w, s: _is_idle(w, s) and not _platform_driver(w, s)[0],
        lambda w, s: _join(w, s, None),
    ),
    Kind(
        PLATFORM_IS_BOUND,
        lambda w, s: _is_idle(w, s) and _platform_driver(w, s)[0],
        lambda w, s: _join(w, s, ("intel-lpss", "pinctrl")[detail_of(s) % 2]),
    ),
    Kind(
        "the host leaves the platform device of the group",
        lambda w, s: _is_idle(w, s) and _platform_driver(w, s)[1],
        lambda w, s: _join(w, s, None),
    ),
    Kind(RESERVED, _is_idle, _reserve),
)
"""Every kind of event of what else is in a card's group."""
