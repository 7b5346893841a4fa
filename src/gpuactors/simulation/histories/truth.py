"""What kubelet should have been told, by a naive reading of the fake node and of kubelet's own books.

It knows the rules of the books and nothing of how the daemon comes to follow them: who was given a device by which
name, what is bound, who has a group open. Must not wait and must not judge: `check.py` compares.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from gpuactors.core.model import PciAddress
from gpuactors.core.selector import matches
from gpuactors.simulation.histories.world import GPU_CLASS, World
from gpuactors.simulation.host.tree import PciSpec
from gpuactors.simulation.kubelet.values import Phase

HEALTHY: Final = "Healthy"
UNHEALTHY: Final = "Unhealthy"

NOT_OFFERED: Final = "Unhealthy, or not listed"
"""A card that is counted under another name."""

UNTOLD: Final = "whatever"
"""What no rule says."""

_CLAIMED: Final = re.compile(r"gpu-([0-9a-f]{4})-([0-9a-f]{2})-([0-9a-f]{2})-([0-7])")

Told = dict[str, dict[str, str]]
"""By resource, by device ID: one of the words above."""


@dataclass(frozen=True, slots=True)
class Given:
    """One device in the hands of one pod that has not ended, as kubelet's ledger has it."""

    pod: str
    resource: str
    device: str
    card: str | None
    """The PCI address that the ID means; None if it means nothing here."""


def given_by_us(world: World) -> list[Given]:
    """What pods have of our resources, under whatever ID."""
    return [g for g in _given(world) if world.is_ours(g.resource)]


def others_cards(world: World) -> dict[str, str]:
    """The cards that another plugin, or another driver's claim, has given to a pod: by address, the pod."""
    pods = [p for p in world.kubelet.view.pods.values() if p.phase not in (Phase.FAILED, Phase.SUCCEEDED)]
    claims = {a: pod.name for pod in pods for c in pod.claims if (a := _claimed(c.device)) is not None}
    return claims | {g.card: g.pod for g in _given(world) if g.card and not world.is_ours(g.resource)}


def _given(world: World) -> Iterator[Given]:
    for (pod, resource), entry in world.kubelet.view.holdings.items():
        for device in entry.devices:
            yield Given(pod, resource, device, world.meaning(resource, device))


def _claimed(device: str) -> PciAddress | None:
    match = _CLAIMED.fullmatch(device)
    return None if match is None else PciAddress("{}:{}:{}.{}".format(*match.groups()))


def expected(world: World) -> Told:
    """What kubelet should have been told of each resource, and no more.

    Given to a pod by a resource of ours: listed by the name and ID it was given by, Healthy if it is on vfio-pci and
    the model that it was, whoever else names it and whatever is selected now. Else, if it is selected and on vfio-pci:
    listed, and Healthy if a virtual machine could open it: nobody was given it or another card of its group, nobody
    holds the group, and no function of the group is on a host driver. Being unbound or unplugged while somebody has it
    open: listed, Unhealthy. An ID of ours that means no card: listed, Unhealthy, as long as a pod has it.
    """
    given = given_by_us(world)
    owned = {g.card for g in given if g.card is not None} | others_cards(world).keys()
    unsure = _unsure(world, given)
    told: Told = {}
    for address, spec in world.tree.functions.items():
        bound, waiting = world.is_bound(address), world.tree.is_waiting(address)
        if spec.class_code != GPU_CLASS:
            continue
        if not (bound or waiting):
            if spec.group is not None and world.is_taken_for_open(spec.group):
                told.setdefault(world.resource(spec.device), {})[address] = UNTOLD
            continue
        assert spec.group is not None
        own = world.resource(spec.device)
        names = {(g.resource, g.device) for g in given if g.card == address}
        for resource, device in names:
            healthy = bound and world.model_of(resource) == spec.device
            told.setdefault(resource, {})[device] = HEALTHY if healthy else UNHEALTHY
        if is_selected(world, spec) and own not in {resource for resource, _ in names}:
            openable = (
                owned.isdisjoint(world.tree.group_members(spec.group))
                and world.tree.holder_of(spec.group) is None
                and world.is_viable(spec.group)
            )
            renamed = any(world.model_of(resource) == spec.device for resource, _ in names)
            free = HEALTHY if bound and openable else UNHEALTHY
            told.setdefault(own, {})[address] = NOT_OFFERED if renamed else free
        if not unsure.isdisjoint({address, *world.tree.group_members(spec.group)}):
            told.setdefault(own, {})[address] = UNTOLD
        if not names and world.is_taken_for_open(spec.group):
            told.setdefault(own, {})[address] = UNTOLD
    for g in given:
        told.setdefault(g.resource, {}).setdefault(g.device, UNHEALTHY)
        if g.card in unsure:
            told[g.resource][g.device] = UNTOLD
    nothing = {g.device for g in given if g.card is None}
    for devices in told.values():
        # Nobody need serve a resource for IDs alone that mean nothing, or nothing that can be known, or for cards
        # that are counted under another name.
        if all(device in nothing or health in (NOT_OFFERED, UNTOLD) for device, health in devices.items()):
            devices.update(dict.fromkeys(nothing & devices.keys(), UNTOLD))
    return told


def _unsure(world: World, given: Iterable[Given]) -> set[str]:
    """Cards that were given away by an older ID which a daemon cannot know the meaning of."""
    functions = world.tree.functions
    unsure = set()
    for g in given:
        if g.card is None or g.card == g.device:
            continue
        selected = g.card in functions and is_selected(world, functions[g.card])
        if not (selected and world.is_sure(g.resource, g.device)):
            unsure |= {g.card, *(a for a, spec in functions.items() if str(spec.group) == g.device)}
    return unsure


def is_selected(world: World, spec: PciSpec) -> bool:
    """The daemon that serves has been told to look after it."""
    return any(
        matches(
            selector,
            vendor=spec.vendor,
            device=spec.device,
            class_code=spec.class_code,
            address=spec.address,
        )
        for selector in world.options.selectors
    )


def agree(told: dict[str, str], wanted: dict[str, str]) -> bool:
    """Whether kubelet was told of one resource what is wanted."""
    return all(_agrees(told.get(device), wanted.get(device)) for device in told.keys() | wanted.keys())


def _agrees(said: str | None, wanted: str | None) -> bool:
    if wanted == UNTOLD:
        return True
    return said != HEALTHY if wanted == NOT_OFFERED else said == wanted
