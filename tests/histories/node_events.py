"""Events of the node as a whole: a reboot, and a daemon with other options at its next start."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from msgspec.structs import replace

from gpuactors.core.values.selector import parse_selector
from gpuactors_simulation.kubelet.values import Phase
from tests.histories.kinds import Flag, Kind, always, card_of, detail_of
from tests.histories.truth import given_by_us
from tests.histories.world import CARDS, MODEL, OLDER_POD, SECOND, SELECTORS, World

NARROWED: Final = tuple(
    parse_selector(f"vendor=10de,class=03,address=0000:{slot + 1:02x}:00.0") for slot in range(0, CARDS, 2)
)
"""Every other card, and no second one."""

REBOOTS_MAX: Final = 3


REBOOTS: Final = "the node reboots"
REBOOTS_WITH_ANOTHER: Final = "the node reboots with another model in a slot"
"""It counts as a reboot as well."""

OTHER_MODEL: Final = "20b0"

_AFTER_REBOOT: Final = {
    Flag.KUBELET_RUNS: True,
    Flag.ONE_SERVES: True,
    Flag.TWO_SERVE: False,
    Flag.UEVENTS_ARE_LATE: False,
    Flag.MODE_IS_SET: False,
    Flag.ATTRIBUTES_ARE_BROKEN: False,
    Flag.NVIDIA_IS_UNLOADED: False,
    Flag.VFIO_IS_UNLOADED: False,
    Flag.CDI_FILES_STAY: False,
    Flag.SPECS_ARE_UNWRITABLE: False,
    Flag.ANOTHER_HAS_A_SPEC: False,
}


async def _reboots(world: World, slot: int) -> None:
    """As `_reboot`, with the same cards."""
    await _reboot(world, slot, {})


async def _reboots_with_another(world: World, slot: int) -> None:
    """In the card's slot is another model now, or again the first one."""
    world.counts[REBOOTS] += 1
    address = world.address(slot)
    model = world.tree.functions[address].device
    await _reboot(world, slot, {address: OTHER_MODEL if model == MODEL else MODEL})


async def _reboot(world: World, slot: int, models: Mapping[str, str]) -> None:
    """No process outlives it; the cards come back in other IOMMU groups, each in one that another had. Kubelet has its
    file, gets its pods from the API server, and starts their containers with what Allocate returned before."""
    for daemon in list(world.daemons):
        await world.kill_daemon(daemon)
    world.end_older()
    if world.kubelet_runs:
        await world.kubelet.stop()
    world.kubelet.power_off()
    world.renumber(models)
    if detail_of(slot) % 2:
        await world.start_kubelet()
        await world.start_daemon()
    else:
        await world.start_daemon()
        await world.start_kubelet()


def _can_reboot(world: World, _slot: int) -> bool:
    return world.counts[REBOOTS] < REBOOTS_MAX and not world.changing


def _select(world: World, _slot: int) -> None:
    whole = world.next_options.selectors is SELECTORS
    world.next_options = replace(world.next_options, selectors=NARROWED if whole else SELECTORS)


def _rename(world: World, _slot: int) -> None:
    world.has_other_names = True
    world.next_options = replace(world.next_options, renamed=not world.next_options.renamed)


# --- older plugins ----------------------------------------------------------------------------------------


def _could_be_older(world: World, slot: int) -> bool:
    """No daemon runs, and no pod has the card: a plugin that was there before allocated it, by its group's number."""
    address, group = world.address(slot), world.group(slot)
    return (
        world.kubelet_runs
        and not world.daemons
        and world.is_bound(address)
        and world.is_plugged(slot)
        and world.tree.functions[address].device == MODEL
        and world.address(slot, SECOND) not in world.tree.functions
        and not world.is_held(slot)
        and world.is_viable(group)
        and address not in {g.card for g in given_by_us(world)}
        and not any(pod.phase is Phase.ADMITTING for pod in world.kubelet.view.pods.values())
    )


def _older(world: World, slot: int) -> None:
    """Its virtual machine has the group open, or has not opened it yet."""
    resource, group = world.next_options.names[MODEL], world.group(slot)
    world.others += 1
    world.older[resource, str(group)] = world.address(slot)
    world.disturbed.add(str(group))  # it may be a card that no selector of our daemon matches
    nodes = (f"/dev/vfio/{group}",) if detail_of(slot) % 2 else ()
    world.kubelet.adopt(f"{OLDER_POD}{world.others}", {resource: (str(group),)}, nodes=nodes)


def _comes_back_elsewhere(world: World, slot: int) -> None:
    world.groups[card_of(slot)] = world.new_group()
    world.tell(world.tree.plug(world.card(slot, MODEL, "vfio-pci")))


def _is_free_place(world: World, slot: int) -> bool:
    return (
        not any(world.address(slot, function) in world.tree.functions for function in range(3))
        and card_of(slot) not in world.changing
    )


NODE_KINDS: Final = (
    Kind(REBOOTS, _can_reboot, _reboots, leaves=_AFTER_REBOOT),
    Kind(
        REBOOTS_WITH_ANOTHER,
        lambda w, s: _can_reboot(w, s) and w.is_plugged(s),
        _reboots_with_another,
        leaves=_AFTER_REBOOT,
    ),
    Kind("the next daemon selects other cards", always, _select),
    Kind("the next daemon has another pci.ids", always, _rename),
    Kind(
        "an older plugin has given a card away",
        _could_be_older,
        _older,
        needs={Flag.ONE_SERVES: False, Flag.TWO_SERVE: False, Flag.KUBELET_RUNS: True},
    ),
    Kind("a card comes back in another group", _is_free_place, _comes_back_elsewhere),
)
"""Every kind of event that is about the node as a whole, or about what was there before this daemon."""
