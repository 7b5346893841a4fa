"""The conditions on the claims of any DRA driver when a history has settled: pods run, then nothing is left.

What it means for the claims of GPUs is in `claim_check.py`, for compute domains in `domain_check.py`. Only on a node
that serves claims (`World.dra`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final, Protocol

import trio

from gpuactors.core.claims.machine import CLAIM_FOUND_S
from gpuactors.ports.node import Step
from gpuactors_simulation.kubelet.values import Pod
from tests.histories.dra_node import DraNode
from tests.histories.world import World

RUNS_WITHIN_S: Final = CLAIM_FOUND_S + 400.0
"""A pod whose claim nobody stands in the way of runs: kubelet repeats a prepare after 90 s, twice at most where its
call was cut off. A claim that kubelet has lost stands in the way until it is collected: about one whose unprepare never
comes the daemon asks the API server twice, 60 s apart, and CLAIM_FOUND_S after an answer that it exists."""

ENDS_WITHIN_S: Final = CLAIM_FOUND_S + 600.0
"""Nothing of claims is left after all pods are gone. Claims are collected as above; a failed act is repeated each
minute."""

SLICES_SETTLE_S: Final = 120.0
"""Time in which the publisher follows the API server after it was away: longer than its longest backoff."""

CALM_S: Final = 6.0
"""Time without a change after which the node counts as settled: longer than every period of a read or a poll."""

LONG_CALM_S: Final = 90.0
"""The slices stay as they are for so long, and nothing is sent to kubelet: longer than the longest pause between two
restorations of a slice (limits.RESTORE_BACKOFF_S)."""

CHECK_EVERY_S: Final = 1.0

Problem = tuple[str, str]
"""The name of a check, and what does not hold."""


class Rules(Protocol):
    """The conditions on the claims of one driver."""

    @property
    def node(self) -> DraNode:
        """The node of the claims."""
        ...

    def problem(self) -> Problem | None:
        """The first thing that does not hold, and must at every moment."""
        ...

    def stepped(self, daemon: str, step: Step) -> None:
        """A daemon's core took an event."""
        ...

    def end_faults(self) -> None:
        """Repair what is broken."""
        ...

    def should_run(self, pod: Pod) -> bool:
        """Nobody stands in the way of a pod that has a claim and does not run yet."""
        ...

    def unsettled(self) -> list[str]:
        """The differences from the state at rest, with the pods that there are, as sentences."""
        ...

    def left(self) -> list[str]:
        """The differences from the first state, as sentences, when all pods are gone."""
        ...


async def all_run(world: World, rules: Rules, check: Callable[[], None]) -> Problem | None:
    """Every pod runs whose claim nobody stands in the way of, and then all is as it should be at rest. `check` as of
    `nothing_is_left`."""
    deadline = trio.current_time() + RUNS_WITHIN_S
    while waiting := [pod for pod in world.kubelet.view.pods.values() if pod.uses and rules.should_run(pod)]:
        check()
        if trio.current_time() >= deadline:
            pod = waiting[0]
            return "a pod with a claim does not run", f"{pod.name} is {pod.phase}: {pod.message}"
        await trio.sleep(CHECK_EVERY_S)
    while unsettled := rules.unsettled():
        check()
        if trio.current_time() >= deadline:
            return "claims do not settle", "; ".join(unsettled)
        await trio.sleep(CHECK_EVERY_S)
    return None


async def nothing_is_left(
    world: World, rules: Rules, check: Callable[[], None], *, long: bool = False
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
    if (problem := await _returned(world, rules, check, deadline)) is not None or not long:
        return problem
    if (problem := await _unrest(world, rules.node)) is not None:
        return problem
    left = _left(world, rules)
    return ("something of a claim is left", f"again: {'; '.join(left)}") if left else None


async def _returned(world: World, rules: Rules, check: Callable[[], None], deadline: float) -> Problem | None:
    """Nothing is left, and stays so for CALM_S: kubelet may delete the slices once more 30 s after its start."""
    calm_since = math.inf
    while trio.current_time() - calm_since < CALM_S:
        check()
        left = _left(world, rules)
        if left and trio.current_time() >= deadline:
            return "something of a claim is left", "; ".join(left)
        calm_since = math.inf if left else min(calm_since, trio.current_time())
        await trio.sleep(CHECK_EVERY_S)
    return None


def _left(world: World, rules: Rules) -> list[str]:
    left = [f"kubelet knows the claim {info}" for info in world.kubelet.view.dra.claims]
    left += [f"pod {name} is there" for name in world.kubelet.view.pods]
    left += [f"the file {path}" for path in rules.node.left_over()]
    return left + rules.left()


async def _unrest(world: World, node: DraNode) -> Problem | None:
    """The writes that go on while nothing happens. A kubelet that could not reach the API server deletes the slices
    once, minutes later."""
    await trio.sleep(SLICES_SETTLE_S)
    wipes = -1
    while wipes != node.wipes:
        wipes, writes, view = node.wipes, _writes(node), world.kubelet.view
        await trio.sleep(LONG_CALM_S)
    after = world.kubelet.view
    if (after.registrations, after.lists) != (view.registrations, view.lists):
        lists, registrations = after.lists - view.lists, after.registrations - view.registrations
        return (
            "the daemon does not rest",
            f"{lists} lists, {registrations} registrations in {LONG_CALM_S:g} s",
        )
    if (more := _writes(node) - writes) > 0:
        return "the slices do not rest", f"{more} writes within {LONG_CALM_S:g} s in which nothing happened"
    return None


def _writes(node: DraNode) -> int:
    """To slices and nodes. Dry runs change nothing: a publisher that finds the API server again asks by one whether
    that keeps taints."""
    return sum(
        method != "GET" and ("/resourceslices" in target or "/nodes/" in target) and "dryRun" not in target
        for method, target in node.api.requests
    )
