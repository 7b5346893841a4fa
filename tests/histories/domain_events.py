"""Events of compute domains: the pods of their channels and daemons, the node's label, the domains themselves, NVIDIA's
controller, and the host's IMEX.

Only on a node with compute domains (`World.domains`). What a history draws from besides is in `BESIDE`, and of the
kinds of claims those that are of any driver (`claim_events.OF_ANY_DRIVER`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from gpuactors.core.values.domain import AllocationMode
from gpuactors_simulation.kube.server import ApiFault
from gpuactors_simulation.kubelet.values import Phase
from tests.histories.claim_events import CLAIM_POD, claim_pods
from tests.histories.domains import NAMES, STRANGER, DomainsNode
from tests.histories.kinds import Flag, Kind, KindsOn, detail_of
from tests.histories.kubelet_events import PODS_MAX
from tests.histories.world import World

FIRST_OF_DOMAINS: Final = "a pod with a channel comes"
"""Without it most of the others cannot happen."""

DAEMON_DIES_LATE_S: Final = 9.0

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
    "reads of the ledger fail",
    "the node reboots",
)
"""The kinds that are drawn beside those of compute domains and of claims."""

Do = Callable[[World, DomainsNode, int], object]

_kind: Final[KindsOn[DomainsNode]] = KindsOn(lambda world: world.domains)
"""On a node with compute domains."""


def _state(
    begins: str,
    ends: str,
    flag: Flag,
    is_so: Callable[[DomainsNode], bool],
    change: Callable[[DomainsNode, bool], object],
) -> tuple[Kind, Kind]:
    """The events that begin and end a state of the whole node."""

    def to(name: str, *, value: bool) -> Kind:
        return _kind(
            name,
            lambda _w, n, _s: change(n, value),
            lambda _w, n, _s: is_so(n) is not value,
            needs={flag: not value},
            leaves={flag: value},
        )

    return to(begins, value=True), to(ends, value=False)


# --- pods -------------------------------------------------------------------------------------------------


def _free_channels(node: DomainsNode) -> list[str]:
    """Those that the scheduler may give to a claim."""
    return [name for name in node.channel_names() if name not in node.allocated()]


def _domain(node: DomainsNode, slot: int) -> str:
    """The UID of the domain that a step is about: mostly the first one."""
    uids = [uid for _, uid in sorted(node.domains.items())]
    return uids[-1] if detail_of(slot) % 4 == 3 else uids[0]


def _can_come(world: World, node: DomainsNode, _slot: int) -> bool:
    return world.pods < PODS_MAX and bool(node.domains) and bool(_free_channels(node))


def _comes(mode: AllocationMode) -> Do:
    def act(world: World, node: DomainsNode, slot: int) -> None:
        _start(world, node, _domain(node, slot), _free_channels(node)[0], mode)

    return act


def _start(world: World, node: DomainsNode, domain: str, channel: str, mode: AllocationMode) -> None:
    world.pods += 1
    name = f"{CLAIM_POD}{world.pods}"
    node.allocate(name, domain, channel, mode)
    world.kubelet.submit(name, {}, uses=(name,))


def _of_two_domains(world: World, node: DomainsNode, slot: int) -> bool:
    return len(node.domains) > 1 and bool(claim_pods(world))


def _changes_domain(world: World, node: DomainsNode, slot: int) -> None:
    """The channel goes to a pod of another domain, whose prepare comes before the old claim's unprepare."""
    names = claim_pods(world)
    old = names[slot % len(names)]
    uid = node.claims.get(old)
    world.kubelet.force_delete(old, dies_after_s=float(detail_of(slot) % 3))
    node.delete(old)
    if uid is not None and node.given[uid][0] in _free_channels(node):
        claim = node.made[uid]
        other = next(d for d in node.domains.values() if d != claim.domain)
        _start(world, node, other, claim.device, claim.mode)


def _daemon_pods(world: World, node: DomainsNode) -> list[str]:
    pods = world.kubelet.view.pods.values()
    return sorted(p.name for p in pods if p.name in node.controller.pods and p.phase is not Phase.TERMINATING)


def _daemon_goes(world: World, node: DomainsNode, slot: int) -> None:
    """The DaemonSet makes a new pod at once: its claim is prepared before the old one is unprepared."""
    late_s = DAEMON_DIES_LATE_S if detail_of(slot) % 2 else 0.0
    world.kubelet.force_delete(_daemon_pods(world, node)[0], dies_after_s=late_s)


# --- the label --------------------------------------------------------------------------------------------


def _names_another(_world: World, node: DomainsNode, slot: int) -> None:
    """An operator sets the label to a domain that is not there now."""
    node.set_label(next(uid for uid in (*node.domains.values(),) if uid != node.label))


def _names_stranger(_world: World, node: DomainsNode, slot: int) -> None:
    node.set_label(f"{STRANGER}{detail_of(slot) % 2}")


def is_strangers(label: str | None) -> bool:
    """No claim here ever has this value."""
    return label is not None and label.startswith(STRANGER)


def _patch(fault: ApiFault, times: int = 1) -> Do:
    return lambda _w, n, _s: n.api.order(fault, times, "PATCH")


# --- domains, and the host --------------------------------------------------------------------------------


def _is_missing(node: DomainsNode) -> bool:
    return len(node.domains) < len(NAMES)


def _make(_world: World, node: DomainsNode, _slot: int) -> None:
    node.make_domain(next(name for name in NAMES if name not in node.domains))


def _delete(_world: World, node: DomainsNode, slot: int) -> None:
    names = sorted(node.domains)
    node.delete_domain(names[slot % len(names)])


DOMAIN_KINDS: Final = (
    _kind(FIRST_OF_DOMAINS, _comes(AllocationMode.SINGLE), _can_come),
    _kind("a pod with all channels comes", _comes(AllocationMode.ALL), _can_come),
    _kind(
        "a pod with a channel is force-deleted and another domain gets it", _changes_domain, _of_two_domains
    ),
    _kind(
        "the daemon pod of a domain is force-deleted",
        _daemon_goes,
        lambda w, n, _s: bool(_daemon_pods(w, n)),
    ),
    _kind(
        "somebody removes the label of the node",
        lambda _w, n, _s: n.set_label(None),
        lambda _w, n, _s: n.label is not None,
    ),
    _kind(
        "somebody sets the label to another domain",
        _names_another,
        lambda _w, n, _s: any(uid != n.label for uid in n.domains.values()),
    ),
    _kind("somebody sets the label to what no claim has", _names_stranger),
    _kind(
        "whoever set the label removes it",
        lambda _w, n, _s: n.set_label(None),
        lambda _w, n, _s: is_strangers(n.label),
    ),
    _kind("a patch takes long", _patch(ApiFault.SLOW)),
    _kind("a patch fails", _patch(ApiFault.BROKEN, 2)),
    _kind("the answer to a patch is lost", _patch(ApiFault.ANSWER_LOST)),
    *_state(
        "the controller of compute domains stops",
        "the controller of compute domains goes on",
        Flag.CONTROLLER_STOPS,
        lambda n: n.controller.is_held,
        lambda n, stops: n.controller.hold() if stops else n.controller.go_on(),
    ),
    *_state(
        "the daemons of domains are not ready",
        "the daemons of domains are ready again",
        Flag.DOMAINS_ARE_NOT_READY,
        lambda n: n.controller.is_ill,
        lambda n, ill: n.controller.say(ready=not ill),
    ),
    _kind("a compute domain is deleted", _delete, lambda _w, n, _s: bool(n.domains)),
    _kind("a compute domain is made", _make, lambda _w, n, _s: _is_missing(n)),
    *_state(
        "the host loses IMEX",
        "the host has IMEX again",
        Flag.IMEX_IS_MISSING,
        lambda n: not n.has_imex,
        lambda n, lost: n.set_imex(there=not lost),
    ),
)
"""Every kind of event about compute domains."""
