"""Events of a card's IOMMU group, where there is no ACS: a disk of the host is in it, and comes and goes.

Nothing that a daemon does may change the disk's driver (`claim_check.py`), and no card beside it may be Healthy while
the host uses it (`truth.py`, by `World.is_viable`).
"""

from __future__ import annotations

from typing import Final

from gpuactors.simulation.host.tree import PciSpec
from tests.histories.kinds import Kind, card_of
from tests.histories.world import SECOND, World

DISK_DRIVER: Final = "nvme"

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
)
"""Every kind of event of a group with a disk of the host."""
