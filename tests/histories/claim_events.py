"""Events of claims: their pods and objects, the API server, slices, the disk, the drivers of their cards.

Only on a node with claims of GPUs (`World.claims`), but for what is of any driver (`OF_ANY_DRIVER`). There the cards
stay where they are, and what a history draws from besides is in `BESIDE`: a driver that is changed by hand, or a card
that is pulled, under a claim is for another day.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any, Final

from gpuactors_simulation.host.kernel import Planned
from gpuactors_simulation.kube.server import ApiFault
from gpuactors_simulation.kubelet.values import Phase
from tests.histories.claims import ClaimsNode
from tests.histories.dra_node import DraNode
from tests.histories.group_events import GROUP_KINDS
from tests.histories.kinds import Flag, KindsOn, card_of, detail_of
from tests.histories.kubelet_events import PODS_MAX
from tests.histories.world import EXTERNAL_PID, MODEL, World

CLAIM_POD: Final = "c-"
"""The beginning of the names of pods with a claim. The claim has the name of its pod."""

FIRST_OF_CLAIMS: Final = "a pod with a claim comes"
"""Without it most of the others cannot happen."""

SLOW_WRITE_S: Final = 3.0

USER_PID: Final = EXTERNAL_PID + 100

BESIDE: Final = (
    "the daemon is told to stop",
    "a daemon starts",
    "a successor starts",
    "the predecessor is told to stop",
    "the successor is told to stop",
    "a daemon crashes",
    "the clock jumps",
    "kubelet stops",
    "kubelet starts",
    "the API server goes away",
    "the API server is back",
    "a stream is lost",
    "reads of the ledger fail",
    "reads of the ledger take long",
    "a pod comes",
    "pods come in a burst",
    "a pod ends",
    "a pod ends slowly",
    "a pod is force-deleted",
    "a pod is force-deleted and dies late",
    "a virtual machine ends by itself",
    "a machine that outlived its pod ends",
    "the node reboots",
    "the node reboots with another model in a slot",
    "the uevent socket overflows",
    "the next uevents are lost",
    "the next uevents are late",
    "late uevents come",
    "inspections and scans take long",
    "inspections fail",
    "polls take long",
    "an external process opens a card",
    "an external process is killed",
    *(kind.name for kind in GROUP_KINDS),
    "another driver prepares a card for a claim",
    "another driver unprepares its claim",
    "the configuration file chooses other cards",
)
"""The kinds that are drawn beside those of claims."""

Do = Callable[[World, ClaimsNode, int], object]
DoAny = Callable[[World, DraNode, int], object]


_any: Final[KindsOn[DraNode]] = KindsOn(lambda world: world.dra)
"""On a node with claims of any driver."""

_kind: Final[KindsOn[ClaimsNode]] = KindsOn(lambda world: world.claims)
"""On a node with claims of GPUs."""


# --- pods and claims --------------------------------------------------------------------------------------


def _is_free(world: World, claims: ClaimsNode, slot: int) -> bool:
    """The scheduler may give the card to a claim."""
    return (
        world.pods < PODS_MAX
        and world.address(slot) in claims.home
        and world.address(slot) not in claims.allocated()
        and not world.has_parts_now(slot)
    )


def _comes(world: World, claims: ClaimsNode, slot: int) -> None:
    world.pods += 1
    name = f"{CLAIM_POD}{world.pods}"
    claims.allocate(name, [world.address(slot)])
    world.kubelet.submit(name, {}, uses=(name,))


def _is_free_for_two(world: World, claims: ClaimsNode, slot: int) -> bool:
    return _is_free(world, claims, slot) and len(_free_cards(world, claims)) > 1


def _free_cards(world: World, claims: ClaimsNode) -> list[str]:
    return [
        card
        for card in claims.cards
        if card not in claims.allocated() and not world.has_parts_now(int(card[5:7], 16) - 1)
    ]


def _comes_for_two(world: World, claims: ClaimsNode, slot: int) -> None:
    world.pods += 1
    name = f"{CLAIM_POD}{world.pods}"
    first = world.address(slot)
    second = next(card for card in _free_cards(world, claims) if card != first)
    claims.allocate(name, [first, second])
    world.kubelet.submit(name, {}, uses=(name,))


def claim_pods(world: World) -> list[str]:
    """The pods that came with a claim and were not told to end."""
    pods = world.kubelet.view.pods.values()
    ours = (pod for pod in pods if pod.uses and pod.name.startswith(CLAIM_POD))
    return sorted(pod.name for pod in ours if pod.phase is not Phase.TERMINATING)


def _has_claim_pod(world: World, _node: DraNode, _slot: int) -> bool:
    return bool(claim_pods(world))


def _one_of(names: list[str], slot: int) -> str:
    return names[slot % len(names)]


def _ends(world: World, _node: DraNode, slot: int) -> None:
    world.kubelet.delete(_one_of(claim_pods(world), slot), dies_after_s=0.0)


def _succeeds(dies_after_s: float | None) -> DoAny:
    """The pod is gone at once, and the next one gets its devices: that is prepared before the old one is unprepared."""

    def act(world: World, node: DraNode, slot: int) -> None:
        old = _one_of(claim_pods(world), slot)
        uid = node.claims.get(old)
        world.kubelet.force_delete(old, dies_after_s=dies_after_s)
        node.delete(old)
        if uid is not None and node.allocated().isdisjoint(node.given[uid]):
            world.pods += 1
            name = f"{CLAIM_POD}{world.pods}"
            node.hand_on(uid, name)
            world.kubelet.submit(name, {}, uses=(name,))

    return act


def _claim_goes(_world: World, node: DraNode, slot: int) -> None:
    node.delete(_one_of(sorted(node.claims), slot))


def _both_race(world: World, claims: ClaimsNode, slot: int) -> None:
    """A pod by the device plugin and one with a claim on a card that both may get."""
    world.pods += 1
    world.kubelet.submit(f"vm-{world.pods}", {world.resource(MODEL): 1})
    _comes(world, claims, slot)


def _can_race(world: World, claims: ClaimsNode, slot: int) -> bool:
    return (
        world.pods + 1 < PODS_MAX
        and _is_free(world, claims, slot)
        and claims.home[world.address(slot)] == "vfio-pci"
    )


# --- kubelet ----------------------------------------------------------------------------------------------


def _loses_claims(world: World, _node: DraNode, _slot: int) -> None:
    world.kubelet.lose_claims()


# --- slices -----------------------------------------------------------------------------------------------


def _edit(_world: World, node: DraNode, slot: int) -> None:
    """An operator takes a device out of a slice, or taints one."""
    found = node.api.slices(node.driver)
    devices = "devices"

    def change(stored: dict[str, Any]) -> None:
        if detail_of(slot) % 2:
            stored["spec"][devices] = stored["spec"][devices][1:]
        else:
            stored["spec"][devices][0]["taints"] = [{"key": "example.com/mine", "effect": "NoSchedule"}]

    node.api.edit_slice(found[slot % len(found)]["metadata"]["name"], change)


def _has_devices(_world: World, node: DraNode, slot: int) -> bool:
    found = node.api.slices(node.driver)
    return bool(found) and bool(found[slot % len(found)]["spec"].get("devices"))


def _fault(fault: ApiFault, times: int) -> DoAny:
    return lambda _w, n, _s: n.api.order(fault, times)


# --- drivers ----------------------------------------------------------------------------------------------


def _write(**planned: Any) -> Do:
    """The next write that binds or unbinds; by the slot which of them."""

    def act(_world: World, claims: ClaimsNode, slot: int) -> None:
        ends = ("/bind", "/unbind", "/drivers_probe", "/driver_override")
        claims.kernel.plan(Planned(ends[detail_of(slot) % len(ends)], **planned))

    return act


def _is_on_host(world: World, claims: ClaimsNode, slot: int) -> bool:
    address = world.address(slot)
    return (
        address in claims.home
        and claims.is_on_host_driver(address)
        and address not in claims.users
        and not claims.kernel.sleeps(address)
    )


CLAIM_KINDS: Final = (
    _kind(FIRST_OF_CLAIMS, _comes, _is_free),
    _kind("a pod with a claim for two cards comes", _comes_for_two, _is_free_for_two),
    _any("a pod with a claim ends", _ends, _has_claim_pod),
    _any("a pod with a claim is force-deleted and has a successor", _succeeds(0.0), _has_claim_pod),
    _any(
        "a pod with a claim is force-deleted, has a successor and dies late", _succeeds(9.0), _has_claim_pod
    ),
    _any("a claim is deleted at the API server", _claim_goes, lambda _w, c, _s: bool(c.claims)),
    _kind("a pod and a claim race for a card", _both_race, _can_race),
    _any(
        "kubelet loses its claims",
        _loses_claims,
        lambda w, _n, _s: not w.kubelet_runs,
        needs={Flag.KUBELET_RUNS: False},
    ),
    _any("the slices are deleted", lambda _w, c, _s: c.api.delete_slices(c.driver)),
    _any("a slice is edited", _edit, _has_devices),
    _any("the API server answers with a conflict", _fault(ApiFault.CONFLICT, 2)),
    _any("the API server fails", _fault(ApiFault.BROKEN, 3)),
    _any("the API server is overloaded", _fault(ApiFault.OVERLOADED, 2)),
    _any("the API server is slow", _fault(ApiFault.SLOW, 3)),
    _any("an answer of the API server is lost", _fault(ApiFault.ANSWER_LOST, 1)),
    _kind("a write to sysfs hangs", _write(hangs=True)),
    _kind("a write to sysfs is slow", _write(slow_s=SLOW_WRITE_S)),
    _kind("a write to sysfs fails with EBUSY", _write(error=errno.EBUSY)),
    _kind("a write to sysfs fails with ENODEV", _write(error=errno.ENODEV)),
    _kind("a write to sysfs fails with EINVAL", _write(error=errno.EINVAL)),
    _kind("a write to sysfs does nothing", _write(nothing=True)),
    _kind("writes that hang go on", lambda _w, c, _s: c.kernel.release()),
    _kind(
        "a process uses a card by its host driver",
        lambda w, c, s: c.use(w.address(s), USER_PID + card_of(s)),
        _is_on_host,
    ),
    _kind(
        "that process ends",
        lambda w, c, s: c.end_user(w.address(s)),
        lambda w, c, s: w.address(s) in c.users,
    ),
    _any(
        "the disk of claims is full",
        lambda _w, c, _s: setattr(c.disk, "full", True),
        lambda _w, c, _s: not c.disk.full,
        needs={Flag.CLAIMS_DISK_IS_FULL: False},
        leaves={Flag.CLAIMS_DISK_IS_FULL: True},
    ),
    _any(
        "the disk of claims has room again",
        lambda _w, c, _s: setattr(c.disk, "full", False),
        lambda _w, c, _s: c.disk.full,
        needs={Flag.CLAIMS_DISK_IS_FULL: True},
        leaves={Flag.CLAIMS_DISK_IS_FULL: False},
    ),
    _any(
        "the checkpoint is lost",
        lambda _w, c, _s: c.lose_checkpoint(),
        lambda w, c, _s: not w.daemons and c.checkpoint in c.disk.files,
        needs={Flag.ONE_SERVES: False, Flag.TWO_SERVE: False},
    ),
    _any(
        "the checkpoint is corrupt",
        lambda _w, c, s: c.spoil_checkpoint(7 * detail_of(s)),
        lambda w, c, _s: not w.daemons and bool(c.disk.files.get(c.checkpoint)),
        needs={Flag.ONE_SERVES: False, Flag.TWO_SERVE: False},
    ),
)
"""Every kind of event about claims."""

OF_ANY_DRIVER: Final = frozenset(
    {
        "a pod with a claim ends",
        "a pod with a claim is force-deleted and has a successor",
        "a pod with a claim is force-deleted, has a successor and dies late",
        "a claim is deleted at the API server",
        "kubelet loses its claims",
        "the slices are deleted",
        "a slice is edited",
        "the API server answers with a conflict",
        "the API server fails",
        "the API server is overloaded",
        "the API server is slow",
        "an answer of the API server is lost",
        "the disk of claims is full",
        "the disk of claims has room again",
        "the checkpoint is lost",
        "the checkpoint is corrupt",
    }
)
"""Those that can happen to claims of compute domains as well."""
