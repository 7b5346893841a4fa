"""What must hold of claims, after every step and at the end: by a naive reading of the node, of kubelet and of the API
server. Only on a node with claims (`World.claims`)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Final, final

import trio

from gpuactors import limits
from gpuactors.core.dra.offered import device_name
from gpuactors.core.dra.table import OWNING
from gpuactors.core.model import PciAddress
from gpuactors.simulation.histories.claims import CHECKPOINT, DRIVER, ClaimsNode
from gpuactors.simulation.histories.truth import given_by_us
from gpuactors.simulation.histories.world import World, states_of
from gpuactors.simulation.kubelet.values import Phase, Pod

RUNS_WITHIN_S: Final = limits.CLAIM_FOUND_S + 400.0
"""A pod whose claim nobody stands in the way of runs: kubelet repeats a prepare after 90 s, twice at most where its
call was cut off. A claim that kubelet has lost stands in the way until it is collected: about one whose unprepare never
comes the daemon asks the API server twice, 60 s apart, and CLAIM_FOUND_S after an answer that it exists."""

ENDS_WITHIN_S: Final = limits.CLAIM_FOUND_S + 600.0
"""Nothing of claims is left after all pods are gone. Claims are collected as above; a failed act is repeated each
minute."""

SLICES_SETTLE_S: Final = 120.0
"""What the API server has follows so late after it was away: longer than the publisher's longest backoff."""

CALM_S: Final = 6.0
"""What is as it was at first stays so for so long: longer than every period of a read or a poll."""

LONG_CALM_S: Final = 90.0
"""The slices stay as they are for so long, and nothing is sent to kubelet: longer than the longest pause between two
restorations of a slice (limits.RESTORE_BACKOFF_S)."""

CHECK_EVERY_S: Final = 1.0

LIVE: Final = "a live claim lost its card"

Problem = tuple[str, str]
"""The name of a check, and what does not hold."""


@final
class ClaimSafety:
    """What must hold at every moment."""

    def __init__(self, world: World, node: ClaimsNode) -> None:
        self._world = world
        self._node = node

    def problem(self) -> Problem | None:
        """The first thing that does not hold."""
        return self._two_owners() or self._live_claim() or self._prebound()

    def _two_owners(self) -> Problem | None:
        world, node = self._world, self._node
        for state in states_of(d for d in world.daemons if d.is_serving):
            owners = Counter(
                gpu.address
                for entry in state.claims.entries.values()
                if entry.state in OWNING
                for gpu in entry.gpus
            )
            if doubles := sorted(card for card, number in owners.items() if number > 1):
                return "two owners", f"two claims have {doubles[0]}"
        known = world.kubelet.view.dra.claims
        live = [
            card for info in known if info.prepared and not info.unpreparing for card in node.given[info.uid]
        ]
        pods = {g.card: g.pod for g in given_by_us(world) if g.card is not None}
        for card in live:
            if live.count(card) > 1:
                return "two owners", f"kubelet has two claims prepared with {card}"
            if card in pods:
                return "two owners", f"{card} is of a claim, and of pod {pods[card]} by the device plugin"
        return None

    def _live_claim(self) -> Problem | None:
        """The cards of a pod that runs stay on vfio-pci. An unbind that waits for the pod's process is one already: the
        kernel asks the process to let go (drivers/vfio/vfio_main.c, vfio_unregister_group_dev)."""
        world = self._world
        for pod in world.kubelet.containers:
            for card in self._cards(pod):
                if not world.is_bound(card):
                    return LIVE, f"{card} of pod {pod.name} is not on vfio-pci"
                group = world.tree.functions[card].group
                assert group is not None
                members = world.tree.group_members(group)
                if leaving := sorted(a for a in members if world.tree.is_waiting(a)):
                    return LIVE, f"{leaving[0]}, with {card} of pod {pod.name}, is being unbound"
        return None

    def _cards(self, pod: Pod) -> list[str]:
        infos = [i for i in self._world.kubelet.view.dra.claims if i.name in pod.uses and i.prepared]
        return [card for info in infos if not info.unpreparing for card in self._node.given[info.uid]]

    def _prebound(self) -> Problem | None:
        prebound = {card for card, driver in self._node.home.items() if driver == "vfio-pci"}
        for path, text in self._node.writes.written:
            if path.endswith("/vfio-pci/unbind") and text.strip() in prebound:
                return "a pre-bound card was unbound", text.strip()
        return None


def end_faults(world: World, node: ClaimsNode) -> None:
    """What is broken is repaired."""
    node.api.end_faults()
    node.api.away = False
    node.disk.full = False
    node.kernel.forget_plans()
    node.kernel.release()
    for address in list(node.users):
        node.end_user(address)


async def all_run(world: World, node: ClaimsNode, check: Callable[[], None]) -> Problem | None:
    """Every pod runs whose claim nobody stands in the way of. `check` as of `nothing_is_left`."""
    deadline = trio.current_time() + RUNS_WITHIN_S
    while waiting := [pod for pod in _claim_pods(world) if _should_run(world, node, pod)]:
        check()
        if trio.current_time() >= deadline:
            pod = waiting[0]
            return "a pod with a claim does not run", f"{pod.name} is {pod.phase}: {pod.message}"
        await trio.sleep(CHECK_EVERY_S)
    return None


def _claim_pods(world: World) -> list[Pod]:
    return [pod for pod in world.kubelet.view.pods.values() if pod.uses]


def _should_run(world: World, node: ClaimsNode, pod: Pod) -> bool:
    if pod.phase not in (Phase.PENDING, Phase.ADMITTING, Phase.STARTING):
        return pod.phase is Phase.TERMINATING
    if pod.name not in node.claims:
        return False
    uid = node.claims[pod.name]
    cards = node.given[uid]
    others = {c for i in world.kubelet.view.dra.claims if i.uid != uid for c in node.given[i.uid]}
    others |= {g.card for g in given_by_us(world) if g.card is not None}
    groups = {world.tree.functions[card].group for card in cards}
    held = any(group is not None and world.tree.holder_of(group) is not None for group in groups)
    return not held and others.isdisjoint(cards)


async def nothing_is_left(
    world: World, node: ClaimsNode, check: Callable[[], None], *, long: bool = False
) -> Problem | None:
    """All pods go, and everything is as it was at first. `long` watches for longer afterwards: nothing is written any
    more. `check` is called meanwhile, and raises what it finds."""
    for external in list(world.external):
        world.end_external(external)
    for name in list(world.kubelet.view.pods):
        world.kubelet.delete(name, dies_after_s=0.0)
    for pod in list(world.kubelet.containers):
        world.kubelet.end_process(pod.name)
    deadline = trio.current_time() + ENDS_WITHIN_S
    if (problem := await _returned(world, node, check, deadline)) is not None or not long:
        return problem
    if (problem := await _unrest(world, node)) is not None:
        return problem
    left = _left(world, node)
    return ("something of a claim is left", f"again: {'; '.join(left)}") if left else None


async def _returned(
    world: World, node: ClaimsNode, check: Callable[[], None], deadline: float
) -> Problem | None:
    """Nothing is left, and stays so for CALM_S: kubelet may delete the slices once more 30 s after its start."""
    calm_since = math.inf
    while trio.current_time() - calm_since < CALM_S:
        check()
        left = _left(world, node)
        if left and trio.current_time() >= deadline:
            return "something of a claim is left", "; ".join(left)
        calm_since = math.inf if left else min(calm_since, trio.current_time())
        await trio.sleep(CHECK_EVERY_S)
    return None


async def _unrest(world: World, node: ClaimsNode) -> Problem | None:
    """What is still written while nothing happens."""
    await trio.sleep(SLICES_SETTLE_S)
    writes, view = _slice_writes(node), world.kubelet.view
    await trio.sleep(LONG_CALM_S)
    after = world.kubelet.view
    if (after.registrations, after.lists) != (view.registrations, view.lists):
        lists, registrations = after.lists - view.lists, after.registrations - view.registrations
        return (
            "the daemon does not rest",
            f"{lists} lists, {registrations} registrations in {LONG_CALM_S:g} s",
        )
    if (more := _slice_writes(node) - writes) > 0:
        return "the slices do not rest", f"{more} writes within {LONG_CALM_S:g} s in which nothing happened"
    return None


def _slice_writes(node: ClaimsNode) -> int:
    """Dry runs change nothing: a publisher that finds the API server again asks by one whether that keeps taints."""
    return sum(
        method != "GET" and "/resourceslices" in target and "dryRun" not in target
        for method, target in node.api.requests
    )


def _left(world: World, node: ClaimsNode) -> list[str]:
    """What is not as it was at first, as sentences."""
    left = [f"kubelet knows the claim {info}" for info in world.kubelet.view.dra.claims]
    left += [f"pod {name} is there" for name in world.kubelet.view.pods]
    left += [f"the file {path}" for path in node.left_over()]
    for state in states_of(d for d in world.daemons if d.is_serving):
        left += [
            f"the claim {e.name} is {e.state} ({e.problem})"
            for e in state.claims.entries.values()
            if e.state in OWNING
        ]
    content = node.disk.files.get(CHECKPOINT, b"")
    if node.boot_id.encode() in content:  # else it is of another boot, and counts for nothing
        left += [f"the checkpoint has {uid}" for uid in node.given if uid.encode() in content]
    for address, home in node.home.items():
        driver, override = world.tree.driver_of(address), node.kernel.override(address).strip()
        # An unbind or an override of the daemon before the loss is, for the next one, what it found.
        forgotten = address in node.forgotten
        if driver != home and not (forgotten and driver in (None, "vfio-pci")):
            left.append(f"{address} is on {driver}, not on {home}")
        if override and not (forgotten and override == "vfio-pci"):
            left.append(f"the driver_override of {address} is {override!r}")
    return left + _not_offered(node)


def _not_offered(node: ClaimsNode) -> list[str]:
    """At rest every card is offered, once, without a taint."""
    devices = [d for s in node.api.slices(DRIVER) for d in s["spec"].get("devices") or ()]
    names = Counter(d["name"] for d in devices)
    wanted = Counter(device_name(PciAddress(card)) for card in node.cards)
    found = [] if names == wanted else [f"the slices offer {sorted(names)}, not {sorted(wanted)}"]
    return found + [f"{d['name']} has the taints {d['taints']}" for d in devices if d.get("taints")]
