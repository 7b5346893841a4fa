"""Entries of others in kubelet's ledger: other plugins' pods, other drivers' claims, IDs that mean nothing to
gpuactors.

Kubelet's ledger is input. A name in it may be one of our GPUs that another plugin has allocated, or nothing at all.
"""

from __future__ import annotations

from typing import Final

from gpuactors_simulation.kubelet.values import Claim, Phase
from tests.histories.kinds import Flag, Kind, detail_of
from tests.histories.truth import given_by_us, others_cards
from tests.histories.world import MODEL, SECOND, World

OTHERS_MAX: Final = 12
"""Pods of other plugins in one history."""

OTHER_DRIVER: Final = "driver"
"""The beginning of the names of pods with a claim of another driver."""

OTHER: Final = "other"
"""The beginning of their pods' names."""

RESOURCES: Final = ("vendor.example/gpu", "nvidia.com/gpu", "devices.kubevirt.io/kvm")

ODD: Final = (
    "1",
    "²",
    "051",
    "9" * 5000,
    "１",
    "",
    "0000:99:00.0",
    "01:00.0",
    "0x1",
    "-1",
    "a\nb\x1b[2J",
    "1 ",
)
"""Group numbers, which mean nothing in another plugin's resource; what Python takes for a digit or a number; no
address."""

ODD_OF_OURS: Final = ("²", "051", "9" * 5000, "１", "0000:99:00.0", "0x1")
"""The same under our own resource; none is a group's number here, or a card's address."""


def _has_room(world: World, _slot: int) -> bool:
    """Kubelet gets a pod: none comes to it while the API server is away."""
    return world.kubelet_runs and world.kubelet.has_api_server and world.others < OTHERS_MAX


def _name(world: World) -> str:
    world.others += 1
    return f"{OTHER}-{world.others}"


def _card(world: World, slot: int) -> tuple[str, str]:
    """The resource and the ID that another plugin gives away."""
    second = world.address(slot, SECOND)
    is_second = second in world.tree.functions and detail_of(slot) % 2
    return RESOURCES[detail_of(slot) % len(RESOURCES)], second if is_second else world.address(slot)


def _could_take_a_card(world: World, slot: int) -> bool:
    resource, card = _card(world, slot)
    return _has_room(world, slot) and not world.has_given(resource, (card,))


def _takes_a_card(world: World, slot: int) -> None:
    """A pod may have it by another resource: kubelet compares no IDs of two resources."""
    resource, card = _card(world, slot)
    world.kubelet.adopt(_name(world), {resource: (card,)})


def _odd(slot: int) -> tuple[str, tuple[str, ...]]:
    """The resource and the IDs of an odd allocation of another plugin."""
    first = detail_of(slot) % len(ODD)
    return RESOURCES[slot % len(RESOURCES)], ODD[first : first + 3]


def _could_be_odd(world: World, slot: int) -> bool:
    return _has_room(world, slot) and not world.has_given(*_odd(slot))


def _odd_ids(world: World, slot: int) -> None:
    resource, ids = _odd(slot)
    world.kubelet.adopt(_name(world), {resource: ids})


def _odd_ids_of_ours(world: World, slot: int) -> None:
    """Make IDs of gpuactors as an operator, a damaged file or an unknown plugin leaves them."""
    first = detail_of(slot) % len(ODD_OF_OURS)
    given = {g.device for g in given_by_us(world)}
    device = next(i for i in (*ODD_OF_OURS[first:], *ODD_OF_OURS) if i not in given)
    world.disturbed.add(device)
    world.kubelet.adopt(_name(world), {world.resource(MODEL): (device,)})


def _is_served(world: World, slot: int) -> bool:
    """There is a card of that model, and a plugin has listed it: no pod can have a device of a resource that was never
    served."""
    given, resource = {g.device for g in given_by_us(world)}, world.resource(MODEL)
    return (
        _has_room(world, slot)
        and not given.issuperset(ODD_OF_OURS)
        and any(world.is_bound(a) and spec.device == MODEL for a, spec in world.tree.functions.items())
        and any(r.resource == resource and r.health != "not listed" for r in world.kubelet.view.devices)
    )


def _claim(world: World, slot: int) -> None:
    """By the device's name in a ResourceSlice, as DRA drivers for GPUs make it of the address."""
    name = _name(world)
    device = "gpu-" + world.address(slot).replace(":", "-").replace(".", "-")
    claim = Claim(f"claim-{name}", "gpu.vendor.example", "node-1", device)
    world.kubelet.adopt(name, {}, claims=(claim,))


def _is_free(world: World, slot: int) -> bool:
    """The driver gives a card to one claim, and to none while a pod has it."""
    address = world.address(slot)
    spec = world.tree.functions.get(address)
    if not (
        _has_room(world, slot) and world.is_bound(address) and spec is not None and spec.group is not None
    ):
        return False
    owned = {given.card for given in given_by_us(world)} | others_cards(world).keys() | world.claimed()
    is_admitting = any(pod.phase is Phase.ADMITTING for pod in world.kubelet.view.pods.values())
    return owned.isdisjoint(world.tree.group_members(spec.group)) and not is_admitting


def _driver_prepares(world: World, slot: int) -> None:
    """Kubelet lists the claim for its pod, or not yet; one file in six is removed by somebody."""
    world.others += 1
    name, address = f"{OTHER_DRIVER}-{world.others}", world.address(slot)
    group = world.tree.functions[address].group
    assert group is not None
    has_file = bool(detail_of(slot) % 6)
    claim = world.other_driver.prepare(name, address, group, has_file=has_file)
    if not has_file or detail_of(slot) % 2:
        world.kubelet.adopt(name, {}, claims=(claim,))


def _driver_unprepares(world: World, slot: int) -> None:
    names = sorted(world.other_driver.claims)
    name = names[slot % len(names)]
    world.other_driver.unprepare(name)
    if name in world.kubelet.view.pods:
        world.kubelet.delete(name)


def _others(world: World) -> list[str]:
    pods = world.kubelet.view.pods
    return sorted(n for n, pod in pods.items() if n.startswith(OTHER) and pod.phase is Phase.RUNNING)


def _ends(world: World, slot: int) -> None:
    names = _others(world)
    world.kubelet.delete(names[slot % len(names)])


_RUNS: Final = {Flag.KUBELET_RUNS: True}

LEDGER_KINDS: Final = (
    Kind("another plugin gives a card away", _could_take_a_card, _takes_a_card, needs=_RUNS),
    Kind("another plugin has odd IDs", _could_be_odd, _odd_ids, needs=_RUNS),
    Kind("our resource has an odd ID", _is_served, _odd_ids_of_ours, needs=_RUNS),
    Kind("a claim takes a card", _has_room, _claim, needs=_RUNS),
    Kind("another driver prepares a card for a claim", _is_free, _driver_prepares, needs=_RUNS),
    Kind(
        "another driver unprepares its claim", lambda w, _s: bool(w.other_driver.claims), _driver_unprepares
    ),
    Kind("a pod of another plugin ends", lambda w, _s: bool(_others(w)), _ends),
)
"""Every kind of event in kubelet's ledger that is not ours."""
