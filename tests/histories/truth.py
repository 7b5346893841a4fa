"""The device lists that kubelet should have, by a naive reading of the fake node and of kubelet's ledger.

It knows the rules of the lists and not how the daemon follows them: which pod has a device by which name, what is
bound, which process has a group open. Must not wait and must not judge: `check.py` compares.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from gpuactors.core.state.claims import gpus_of
from gpuactors.core.values.claim_states import OWNING
from gpuactors.core.values.model import PciAddress
from gpuactors.core.values.selector import matches
from gpuactors_simulation.host.tree import PciSpec
from gpuactors_simulation.kubelet.values import Phase
from tests.histories import vgpus
from tests.histories.other_driver import DRIVER
from tests.histories.world import GPU_CLASS, World, states_of

HEALTHY: Final = "Healthy"
UNHEALTHY: Final = "Unhealthy"

NOT_OFFERED: Final = "Unhealthy, or not listed"
"""A card that is counted under another name."""

ANY: Final = "anything"
"""No rule decides."""

_CLAIMED: Final = re.compile(r"gpu-([0-9a-f]{4})-([0-9a-f]{2})-([0-9a-f]{2})-([0-7])")

ENDED_PHASES: Final = (Phase.FAILED, Phase.SUCCEEDED)
"""Kubelet lists no pod in them."""

Lists = dict[str, dict[str, str]]
"""By resource, by device ID: one of the words above."""


@dataclass(frozen=True, slots=True)
class Given:
    """One device of one pod that has not ended, as kubelet's ledger has it."""

    pod: str
    resource: str
    device: str
    card: str | None
    """The PCI address that the ID means; None if it means nothing here."""


def given_by_us(world: World) -> list[Given]:
    """The devices of our resources that pods have, by any ID."""
    return [g for g in _given(world) if world.is_ours(g.resource)]


def others_cards(world: World) -> dict[str, str]:
    """The cards that another plugin, or another driver's claim, has given to a pod: by address, the pod. A claim that
    its driver has prepared has its card before kubelet lists it for the pod."""
    pods = [p for p in world.kubelet.view.pods.values() if p.phase not in ENDED_PHASES]
    claims = {a: pod.name for pod in pods for c in pod.claims if (a := _claimed(c.device)) is not None}
    for name, claim in world.other_driver.claims.items():
        # A container gets the group that its file has, whatever is in that group by now.
        members = world.tree.group_members(claim.group) if claim.has_file else ()
        claims |= {PciAddress(a): name for a in members if world.tree.functions[a].class_code == GPU_CLASS}
    return claims | {g.card: g.pod for g in _given(world) if g.card and not world.is_ours(g.resource)}


def is_any_withheld(world: World) -> bool:
    """Kubelet lists a claim of another driver, and nothing says which card it has: it may be each that is no other
    owner's."""
    placed = {claim.listed for claim in world.other_driver.claims.values() if claim.has_file}
    pods = (pod for pod in world.kubelet.view.pods.values() if pod.phase not in ENDED_PHASES)
    listed = {claim for pod in pods for claim in pod.claims if claim.driver == DRIVER}
    return any(_claimed(claim.device) is None for claim in listed - placed)


def claimed_cards(world: World) -> tuple[set[str], set[str]]:
    """The cards of claims that kubelet has prepared, and those of claims that kubelet or the daemon is about: they may
    be the claim's or nobody's."""
    if world.claims is None:
        return set(), set()
    node, known = world.claims, world.kubelet.view.dra.claims
    prepared = {
        card for info in known if info.prepared and not info.unpreparing for card in node.given[info.uid]
    }
    others = {card for info in known for card in node.given[info.uid]}
    others |= {
        gpu.key
        for state in states_of(world.daemons)
        for entry in state.gpus.claims.entries.values()
        if entry.state in OWNING
        for gpu in gpus_of(entry).gpus
    }
    return prepared, others - prepared


def _given(world: World) -> Iterator[Given]:
    for (pod, resource), entry in world.kubelet.view.holdings.items():
        for device in entry.devices:
            yield Given(pod, resource, device, world.meaning(resource, device))


def _claimed(device: str) -> PciAddress | None:
    match = _CLAIMED.fullmatch(device)
    return None if match is None else PciAddress("{}:{}:{}.{}".format(*match.groups()))


def expected(world: World) -> Lists:
    """The device list of each resource that kubelet should have, and no more.

    "On vfio-pci" is a vGPU as well, whose type is its model; a mediated device that is being removed is gone. Given to
    a pod by a resource of gpuactors: listed by the name and ID it was given by, Healthy if it is on vfio-pci
    and the model that it was, whatever other owners name it and whatever is selected now. Else, if it is selected and
    on vfio-pci: listed, and Healthy if a virtual machine could open it: no pod has it or another card of its group, no
    process holds the group, no function of the group is on a host driver, SR-IOV does not keep it
    (`World.can_be_opened`), and it is not dead (`World.is_dead`). Being unbound or unplugged while a
    process has it open: listed, Unhealthy. An ID of gpuactors that means no card: listed, Unhealthy, as long as a pod
    has it."""
    given = given_by_us(world)
    owned = {g.card for g in given if g.card is not None} | others_cards(world).keys()
    prepared, doubtful = claimed_cards(world)
    owned |= prepared
    if is_any_withheld(world):
        owned |= world.tree.functions.keys()
    unsure = _unsure(world, given) | doubtful
    lists: Lists = {}
    for key in (*world.tree.functions, *vgpus.mediated(world.tree)):
        spec, group = world.tree.functions.get(key), world.group_of(key)
        bound, waiting = world.is_bound(key), spec is not None and world.tree.waits_for_holder(key)
        if spec is not None and spec.class_code != GPU_CLASS:
            continue
        if not (bound or waiting):
            if group is not None and world.is_taken_for_open(group):
                lists.setdefault(world.resource_of(key), {})[key] = ANY
            continue
        assert group is not None
        own, model = world.resource_of(key), world.model(key)
        names = {(g.resource, g.device) for g in given if g.card == key}
        for resource, device in names:
            healthy = bound and world.model_of(resource) == model
            lists.setdefault(resource, {})[device] = HEALTHY if healthy else UNHEALTHY
        chosen = spec or world.tree.functions[vgpus.parent_of(world.tree, key)]
        if is_selected(world, chosen) and own not in {resource for resource, _ in names}:
            openable = (
                owned.isdisjoint(world.tree.group_members(group))
                and world.tree.holder_of(group) is None
                and world.is_viable(group)
                and world.can_be_opened(key)
                and not world.is_dead(key)
            )
            renamed = any(world.model_of(resource) == model for resource, _ in names)
            is_found = world.kata is None or world.kata.can_offer(own, key)
            free = HEALTHY if bound and openable and is_found else UNHEALTHY
            if free == HEALTHY and world.is_doubtful(key):
                free = ANY
            lists.setdefault(own, {})[key] = NOT_OFFERED if renamed else free
        if key in world.unlinked and world.is_unlinked(key):
            # A daemon that has never read its link does not know of which card it is, and lists it only for its pod.
            lists.setdefault(own, {})[key] = ANY
        if not unsure.isdisjoint({key, *world.tree.group_members(group), *card_of_part(world, key)}):
            lists.setdefault(own, {})[key] = ANY
        if not names and (world.is_taken_for_open(group) or world.is_held_unseen(key)):
            lists.setdefault(own, {})[key] = ANY
    for g in given:
        lists.setdefault(g.resource, {}).setdefault(g.device, UNHEALTHY)
        if g.card in unsure:
            lists[g.resource][g.device] = ANY
    nothing = {g.device for g in given if g.card is None}
    for devices in lists.values():
        # A resource need not be served if all its IDs mean nothing, or nothing that can be known, or cards that are
        # counted under another name.
        if all(device in nothing or health in (NOT_OFFERED, ANY) for device, health in devices.items()):
            devices.update(dict.fromkeys(nothing & devices.keys(), ANY))
    return lists


def _unsure(world: World, given: Iterable[Given]) -> set[str]:
    """Cards that pods have by an older ID whose meaning a daemon cannot know."""
    functions = world.tree.functions
    unsure = set()
    for g in given:
        if g.card is None or g.card == g.device:
            continue
        selected = g.card in functions and is_selected(world, functions[g.card])
        if not (selected and world.is_sure(g.resource, g.device)):
            unsure |= {g.card, *(a for a, spec in functions.items() if str(spec.group) == g.device)}
    return unsure


def card_of_part(world: World, key: str) -> set[str]:
    """The function that a virtual function or mediated device is a part of: its owner keeps it from everybody else."""
    card = (
        world.tree.physical_function(key) if key in world.tree.functions else vgpus.parent_of(world.tree, key)
    )
    return set() if card is None else {card}


def is_selected(world: World, spec: PciSpec) -> bool:
    """A selector of the daemon that serves matches it."""
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


def agree(listed: dict[str, str], wanted: dict[str, str]) -> bool:
    """Whether kubelet's list of one resource is as wanted."""
    return all(_agrees(listed.get(device), wanted.get(device)) for device in listed.keys() | wanted.keys())


def _agrees(health: str | None, wanted: str | None) -> bool:
    if wanted == ANY:
        return True
    return health != HEALTHY if wanted == NOT_OFFERED else health == wanted
