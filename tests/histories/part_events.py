"""Events of virtual functions: SR-IOV is switched on and off, they are bound, unbound and removed, and pods get them.

What happens to the physical function alone (it is bound, unbound, unplugged) is in `host_events.py`: its virtual ones
go with its driver. Beside these and `BESIDE` nothing is drawn on a node with parts of cards. No card beside its virtual
functions may be Healthy, nor one of these whose physical function is on vfio-pci or on no driver (`truth.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from gpuactors_simulation.host.kernel import NVIDIA
from gpuactors_simulation.kubelet.values import Phase
from tests.histories.kinds import Kind, card_of, detail_of
from tests.histories.kubelet_events import PODS_MAX
from tests.histories.world import PART_PID, PART_RESOURCES, PARTS_OF_CARD, VFIO, World

BESIDE: Final = (
    "bind to vfio-pci",
    "bind slowly",
    "bind to nvidia",
    "unbind",
    "unbind slowly",
    "unplug",
    "plug a card without driver",
    "the next uevents are lost",
    "the next uevents are doubled",
    "the next uevents are late",
    "the next uevents are reversed",
    "late uevents come",
    "the uevent socket overflows",
    "inspections and scans take long",
    "inspections fail",
    "an inspection hangs",
    "scans fail",
    "polls take long",
    "polls can read nothing",
    "the inspector crashes",
    "an external process opens a card",
    "an external process is killed",
    "a pod comes",
    "a pod ends",
    "a pod ends slowly",
    "a pod is force-deleted",
    "a pod is force-deleted and dies late",
    "a virtual machine ends by itself",
    "kubelet stops",
    "kubelet starts",
    "the daemon is told to stop",
    "a daemon starts",
    "a successor starts",
    "the predecessor is told to stop",
    "a daemon crashes",
    "reads of the ledger take long",
    "a stream is lost",
    "the node reboots",
)
"""The kinds that are drawn beside those of parts of cards."""

ON_BY_VFIO: Final = "SR-IOV is switched on by vfio-pci"
OFF: Final = "SR-IOV is switched off"
OFF_SLOWLY: Final = "SR-IOV is switched off slowly"
UNBOUND: Final = "a virtual function is unbound"
REMOVED: Final = "half the virtual functions are removed by hand"
OPENED: Final = "an external process opens a virtual function"

CHANGED_BY: Final = (ON_BY_VFIO, OFF, OFF_SLOWLY, UNBOUND, REMOVED)
"""After these a virtual function, or its card, is not what it was."""

CLAIMED: Final = (
    "SR-IOV is switched on",
    OFF,
    "a virtual function is bound to vfio-pci",
    UNBOUND,
)
"""The kinds of these that are drawn where claims are served."""

_DRIVERS: Final = (VFIO, VFIO, None, NVIDIA)


def _kind(name: str, act: Callable[[World, int], None], enabled: Callable[[World, int], bool]) -> Kind:
    return Kind(name, lambda w, s: w.has_parts and enabled(w, s), act)


# --- SR-IOV -----------------------------------------------------------------------------------------------


def _can_switch_on(driver: str) -> Callable[[World, int], bool]:
    def can(world: World, slot: int) -> bool:
        address = world.address(slot)
        return (
            world.is_plugged(slot)
            and world.driver(slot) == driver
            and world.tree.functions[address].total_vfs > 0
            and not world.tree.virtual_functions(address)
            and not world.tree.has_stale_links(address)
        )

    return can


def _has_parts(world: World, slot: int) -> bool:
    return world.is_plugged(slot) and bool(world.parts_of(slot))


def _switch_on(world: World, slot: int) -> None:
    driver = _DRIVERS[detail_of(slot) % len(_DRIVERS)]
    world.tell(world.tree.virtualize(world.address(slot), PARTS_OF_CARD, driver))


def _switch_on_slowly(world: World, slot: int) -> None:
    driver = _DRIVERS[detail_of(slot) % len(_DRIVERS)]
    world.change_slowly(slot, world.tree.virtualize_steps(world.address(slot), PARTS_OF_CARD, driver))


def _switch_on_by_vfio(world: World, slot: int) -> None:
    """With its parameter `enable_sriov`, which has it take them as well."""
    world.disturb_parts(slot)
    world.tell(world.tree.virtualize(world.address(slot), PARTS_OF_CARD, VFIO))


def _can_switch_off(world: World, slot: int) -> bool:
    """The writer would sleep on the lock of one whose unbind waits for its holder, or on the card's."""
    return _has_parts(world, slot) and not any(map(world.tree.is_waiting, world.parts_of(slot)))


def _switch_off(world: World, slot: int) -> None:
    """One that is open keeps it, and those after it, until its holder is gone."""
    world.disturb_parts(slot)
    world.tell(world.tree.virtualize(world.address(slot), 0))


def _switch_off_slowly(world: World, slot: int) -> None:
    world.disturb_parts(slot)
    world.change_slowly(slot, world.tree.virtualize_steps(world.address(slot), 0))


# --- one virtual function -----------------------------------------------------------------------------------


def _part(world: World, slot: int) -> str:
    """The virtual function that a step is about."""
    parts = world.parts_of(slot)
    return parts[detail_of(slot) % len(parts)]


def _part_is(*drivers: str | None) -> Callable[[World, int], bool]:
    def can(world: World, slot: int) -> bool:
        if not _has_parts(world, slot):
            return False
        part = _part(world, slot)
        return not world.tree.is_waiting(part) and world.tree.driver_of(part) in drivers

    return can


def _bind(driver: str) -> Callable[[World, int], None]:
    return lambda w, s: w.tell(w.tree.bind(_part(w, s), driver))


def _unbind(world: World, slot: int) -> None:
    world.disturb_parts(slot)
    world.tell(world.tree.unbind(_part(world, slot)))


def _can_be_removed(world: World, slot: int) -> bool:
    """The last one, so that the link of the first one goes with it (drivers/pci/iov.c, pci_iov_remove_virtfn)."""
    parts = world.parts_of(slot)
    return _has_parts(world, slot) and len(parts) == PARTS_OF_CARD and not world.tree.is_waiting(parts[-1])


def _remove(world: World, slot: int) -> None:
    """1 is written to `remove` of the last one."""
    world.disturb_parts(slot)
    world.tell(world.tree.unplug(world.parts_of(slot)[-1]))


# --- who has it -------------------------------------------------------------------------------------------


def _has_room(world: World, _slot: int) -> bool:
    return world.pods < PODS_MAX


def _submit(world: World, slot: int) -> None:
    world.pods += 1
    resource = PART_RESOURCES[detail_of(slot) % len(PART_RESOURCES)]
    world.kubelet.submit(f"vm-{world.pods}", {resource: 1})


def _can_be_opened(world: World, slot: int) -> bool:
    """As `host_events.py` has it of a card: no pod has it, or may be about to."""
    if not _part_is(VFIO)(world, slot):
        return False
    part = _part(world, slot)
    group = world.tree.functions[part].group
    assert group is not None
    return (
        world.tree.driver_of(world.address(slot)) != VFIO
        and card_of(slot) not in world.part_holders
        and world.tree.holder_of(group) is None
        and world.is_viable(group)
        and world.given().keys().isdisjoint(world.tree.group_members(group))
        and not any(pod.phase is Phase.ADMITTING for pod in world.kubelet.view.pods.values())
    )


def _open(world: World, slot: int) -> None:
    group = world.tree.functions[_part(world, slot)].group
    assert group is not None
    world.part_holders.add(card_of(slot))
    world.tree.open_group(group, PART_PID + card_of(slot), "python3")


def _end_holder(world: World, slot: int) -> None:
    world.part_holders.discard(card_of(slot))
    world.tell(world.tree.kill(PART_PID + card_of(slot)))


PART_KINDS: Final = (
    _kind("SR-IOV is switched on", _switch_on, _can_switch_on(NVIDIA)),
    _kind("SR-IOV is switched on slowly", _switch_on_slowly, _can_switch_on(NVIDIA)),
    _kind(ON_BY_VFIO, _switch_on_by_vfio, _can_switch_on(VFIO)),
    _kind(OFF, _switch_off, _can_switch_off),
    _kind(OFF_SLOWLY, _switch_off_slowly, _can_switch_off),
    _kind("a virtual function is bound to vfio-pci", _bind(VFIO), _part_is(None)),
    _kind("a virtual function is bound to a host driver", _bind("igbvf"), _part_is(None)),
    _kind(UNBOUND, _unbind, _part_is(VFIO, NVIDIA, "igbvf")),
    _kind(REMOVED, _remove, _can_be_removed),
    _kind("a pod for a virtual function comes", _submit, _has_room),
    _kind(OPENED, _open, _can_be_opened),
    _kind("the holder of a virtual function ends", _end_holder, lambda w, s: card_of(s) in w.part_holders),
)
"""Every kind of event of parts of cards."""
