"""Events of the host: cards and their drivers, uevents, and reads of sysfs that fail."""

from __future__ import annotations

import os
from typing import Final

from gpuactors_simulation.kubelet.values import Phase
from tests.histories.kinds import (
    Act,
    Flag,
    Kind,
    always,
    card_of,
    crash,
    detail_of,
    fault,
)
from tests.histories.world import EXTERNAL_PID, SECOND, UeventMode, World
from tests.memory.faults import Fault

_ATTRIBUTES: Final = ("vendor", "device", "class", "numa_node")

NO_UTF8: Final = os.fsdecode(b"audio\xff\xe9")
"""A driver's name may be any bytes (drivers/base/bus.c checks no encoding)."""

_GARBAGE: Final = (b"", b"\xff\x00@", b"bind@/devices/x\0SUBSYSTEM=pci\0", b"\0" * 9000, b"add@\0ACTION\0=\0")


# --- cards ------------------------------------------------------------------------------------------------


def _is_empty(world: World, slot: int) -> bool:
    return world.address(slot) not in world.tree.functions and not _is_changing(world, slot)


def _is_changing(world: World, slot: int) -> bool:
    """A change is under way in this place, or waits for the card's holder."""
    addresses = [world.address(slot, function) for function in range(3)]
    waiting = any(a in world.tree.functions and world.tree.is_waiting(a) for a in addresses)
    return waiting or card_of(slot) in world.changing


def _is_unbound(world: World, slot: int) -> bool:
    return world.is_plugged(slot) and not _is_changing(world, slot) and world.driver(slot) is None


def _is_bound(world: World, slot: int) -> bool:
    return world.is_plugged(slot) and not _is_changing(world, slot) and world.driver(slot) is not None


def _is_alone(world: World, slot: int) -> bool:
    """It is there without a companion: the two are pulled one after the other."""
    return (
        world.is_plugged(slot)
        and not _is_changing(world, slot)
        and world.address(slot, 1) not in world.tree.functions
    )


def _has_companion(world: World, slot: int) -> bool:
    return world.is_plugged(slot, 1) and not _is_changing(world, slot)


def _disturb(world: World, slot: int) -> None:
    world.disturbed.add(world.address(slot, SECOND))
    world.disturb_parts(slot)


def _plug(device: str, driver: str | None) -> Act:
    return lambda w, s: w.tell(w.tree.plug(w.card(s, device, driver)))


def _plug_slowly(world: World, slot: int) -> None:
    world.change_slowly(slot, world.tree.plug_steps(world.card(slot, "2330", "vfio-pci")))


def _bind(driver: str, function: int = 0) -> Act:
    def act(world: World, slot: int) -> None:
        if function:
            _disturb(world, slot)
        world.tell(world.tree.bind(world.address(slot, function), driver))

    return act


def _unbind(function: int = 0) -> Act:
    def act(world: World, slot: int) -> None:
        _disturb(world, slot)
        world.tell(world.tree.unbind(world.address(slot, function)))

    return act


def _unplug(function: int = 0) -> Act:
    def act(world: World, slot: int) -> None:
        _disturb(world, slot)
        world.tell(world.tree.unplug(world.address(slot, function)))

    return act


def _slowly(what: str) -> Act:
    def act(world: World, slot: int) -> None:
        _disturb(world, slot)
        address = world.address(slot)
        if what == "unbind":
            world.change_slowly(slot, world.tree.unbind_steps(address))
        elif what == "bind":
            world.change_slowly(slot, world.tree.bind_steps(address, "vfio-pci"))
        else:
            world.change_slowly(slot, world.tree.unplug_steps(address))

    return act


def _half_gone(world: World, slot: int) -> None:
    """Its directory goes before the uevents are out; some attributes first."""
    _disturb(world, slot)
    address = world.address(slot)
    for name in _ATTRIBUTES[: detail_of(slot) % len(_ATTRIBUTES)]:
        world.tree.remove_attribute(address, name)
    if detail_of(slot) % 2:
        world.tree.hollow(address)
    world.change_slowly(slot, world.tree.unplug_steps(address))


def _plug_companion(world: World, slot: int) -> None:
    world.tell(world.tree.plug(world.companion(slot)))


def _companion_is_unbound(world: World, slot: int) -> bool:
    """A host driver may not take a member of a group that is open (iommu_device_use_default_domain)."""
    return _has_companion(world, slot) and world.driver(slot, 1) is None and not world.is_held(slot)


def _has_room_beside(world: World, slot: int) -> bool:
    """There is a card, and none beside it in its group."""
    return (
        world.is_plugged(slot)
        and not _is_changing(world, slot)
        and world.address(slot, SECOND) not in world.tree.functions
    )


def _can_switch(world: World, slot: int) -> bool:
    """Not before every daemon has seen the unbind, and that no process has the card open: until then a card that is
    switched on cannot be told from one that is open."""
    if not _is_unbound(world, slot) or world.is_leaving(slot):
        return False
    return world.tree.enabled(world.address(slot)) > 0 or not world.is_thought_bound(slot)


def _bind_to_host_driver(name: str, function: int = 0) -> Act:
    """Every other time its name is no UTF-8."""
    return lambda w, s: _bind(NO_UTF8 if detail_of(s) % 2 else name, function)(w, s)


# --- attributes -------------------------------------------------------------------------------------------


def _attribute(slot: int) -> str:
    return _ATTRIBUTES[detail_of(slot) % len(_ATTRIBUTES)]


def _can_break(world: World, slot: int) -> bool:
    return (
        world.is_plugged(slot)
        and not _is_changing(world, slot)
        and (world.address(slot), _attribute(slot)) not in world.broken
    )


def _break(world: World, slot: int) -> None:
    """No uevent announces it: the next inspection finds it."""
    _disturb(world, slot)
    world.break_attribute(world.address(slot), _attribute(slot))


# --- uevents ----------------------------------------------------------------------------------------------


def _next_uevents(mode: UeventMode) -> Act:
    return lambda w, _s: setattr(w, "uevent_mode", mode)


def _no_mode(world: World, _slot: int) -> bool:
    return world.uevent_mode is None


def _garbage(world: World, slot: int) -> None:
    world.send_raw(_GARBAGE[detail_of(slot) % len(_GARBAGE)], *_GARBAGE[:3])


# --- external processes -----------------------------------------------------------------------------------


def _is_free_for_external(world: World, slot: int) -> bool:
    """Kubelet has allocated it to no pod, no claim has it, and no pod is between kubelet's choice and its own open: the
    daemon cannot tell an external process from a pod that has not opened yet."""
    return (
        _is_bound(world, slot)
        and world.driver(slot) == "vfio-pci"
        and not world.is_held(slot)
        and world.is_viable(world.group(slot))
        and world.given().keys().isdisjoint(world.tree.group_members(world.group(slot)))
        and world.claimed().isdisjoint(world.tree.group_members(world.group(slot)))
        and not any(pod.phase is Phase.ADMITTING for pod in world.kubelet.view.pods.values())
    )


def _external_opens(*, device: bool) -> Act:
    def act(world: World, slot: int) -> None:
        card = card_of(slot)
        world.tree.open_group(world.group(slot), EXTERNAL_PID + card, "python3", device=device)
        world.external[card] = device

    return act


def _is_held_externally(world: World, slot: int) -> bool:
    return card_of(slot) in world.external


def _external_is_killed(world: World, slot: int) -> None:
    world.end_external(card_of(slot))


def _external_closes(world: World, slot: int) -> None:
    """It closes the group, and has nothing open any more."""
    card = card_of(slot)
    del world.external[card]
    if world.tree.holder_of(world.group(slot)) == EXTERNAL_PID + card:  # its node may be gone
        world.tell(world.tree.close_group(world.group(slot), EXTERNAL_PID + card))
    world.tell(world.tree.kill(EXTERNAL_PID + card))


HOST_KINDS: Final = (
    Kind("plug a card without driver", _is_empty, _plug("2330", None)),
    Kind("plug a card that vfio-pci knows", _is_empty, _plug("2330", "vfio-pci")),
    Kind("plug another model", _is_empty, _plug("20b0", "vfio-pci")),
    Kind("plug a never-seen model", _is_empty, _plug("29ff", "vfio-pci")),
    Kind("plug slowly", _is_empty, _plug_slowly),
    Kind("bind to vfio-pci", _is_unbound, _bind("vfio-pci")),
    Kind("bind slowly", _is_unbound, _slowly("bind")),
    Kind("bind to nvidia", _is_unbound, _bind_to_host_driver("nvidia")),
    Kind("enable is switched by hand", _can_switch, lambda w, s: w.switch(s)),
    Kind("unbind", _is_bound, _unbind()),
    Kind("unbind slowly", _is_bound, _slowly("unbind")),
    Kind("unplug", _is_alone, _unplug()),
    Kind("unplug slowly", _is_alone, _slowly("unplug")),
    Kind("half gone", lambda w, s: _is_alone(w, s) and not w.is_held(s), _half_gone),
    Kind(
        "plug a companion",
        _is_alone,
        _plug_companion,
    ),
    Kind("plug a second card into the group", _has_room_beside, lambda w, s: w.plug_beside(s)),
    Kind(
        "unplug the second card",
        lambda w, s: w.is_plugged(s, SECOND) and not _is_changing(w, s),
        _unplug(SECOND),
    ),
    Kind("bind the companion to vfio-pci", _companion_is_unbound, _bind("vfio-pci", 1)),
    Kind(
        "bind the companion to a host driver", _companion_is_unbound, _bind_to_host_driver("snd_hda_intel", 1)
    ),
    Kind(
        "unbind the companion",
        lambda w, s: _has_companion(w, s) and w.driver(s, 1) is not None,
        _unbind(1),
    ),
    Kind("unplug the companion", _has_companion, _unplug(1)),
    Kind("an attribute turns unreadable", _can_break, _break, leaves={Flag.ATTRIBUTES_ARE_BROKEN: True}),
    Kind(
        "attributes can be read again",
        lambda w, _s: bool(w.broken),
        lambda w, _s: w.restore_attributes(),
        needs={Flag.ATTRIBUTES_ARE_BROKEN: True},
        leaves={Flag.ATTRIBUTES_ARE_BROKEN: False},
    ),
    *(
        Kind(
            f"the next uevents are {mode}",
            _no_mode,
            _next_uevents(mode),
            needs={Flag.MODE_IS_SET: False},
            leaves={Flag.MODE_IS_SET: True},
            may_bring={Flag.UEVENTS_ARE_LATE: True} if mode == "late" else {},
        )
        for mode in ("lost", "doubled", "late", "reversed")
    ),
    Kind(
        "late uevents come",
        lambda w, _s: bool(w.late),
        lambda w, _s: w.deliver_late(),
        needs={Flag.UEVENTS_ARE_LATE: True},
        leaves={Flag.UEVENTS_ARE_LATE: False},
    ),
    Kind("the uevent socket overflows", always, lambda w, _s: w.overflow()),
    Kind("garbage on the uevent socket", always, _garbage),
    Kind("inspections and scans take long", always, fault(Fault.INSPECTION_SLOW, 4)),
    Kind("inspections fail", always, fault(Fault.INSPECTION_FAILS, 2)),
    Kind("an inspection hangs", always, fault(Fault.INSPECTION_HANGS, 1)),
    Kind("scans fail", always, fault(Fault.SCAN_FAILS, 2)),
    Kind("polls take long", always, fault(Fault.POLL_SLOW, 3)),
    Kind("polls can read nothing", always, fault(Fault.POLL_BLIND, 2)),
    crash("the uevent watcher crashes", Fault.WATCHER_CRASHES),
    crash("the inspector crashes", Fault.INSPECTOR_CRASHES),
    crash("the poller crashes", Fault.POLLER_CRASHES),
    Kind("an external process opens a card", _is_free_for_external, _external_opens(device=True)),
    Kind(
        "an external process opens only a group",
        lambda w, s: w.holders == "proc" and _is_free_for_external(w, s),
        _external_opens(device=False),
    ),
    Kind("an external process closes a card", _is_held_externally, _external_closes),
    Kind("an external process is killed", _is_held_externally, _external_is_killed),
)
"""Every kind of event on the host."""
