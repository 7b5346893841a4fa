"""What kubelet is asked with a read of its ledger.

Theory of operation. PodResources' List has an effect on kubelet: it frees the devices of pods that have ended, and if
there is such a pod, makes its set of allocated devices anew from the pods that have them. The device of an Allocate in
flight is not among those yet, so kubelet forgets it, and gives it to the next pod while the first one runs
(pkg/kubelet/cm/devicemanager/manager.go, UpdateAllocatedDevices; kubernetes pull request 137534). Get,
GetAllocatableResources and the ledger file have no such effect.

So a read asks for List only if there is something that only List shows, and never while kubelet may be in the middle of
an Allocate of ours. Allocates of other plugins cannot be seen; therefore it is seldom asked in general. What only List
shows:

- the names of pods: the file has UIDs. Get asks for a pod by its name, so one List is for all pods since the last one;
- DRA claims of other drivers: asked for when a pod has come (its cgroup), a group is in use and nobody known has it, or
  a claim of ours is to get a GPU;
- whether a kubelet that has just started knows its pods (`ledger/kubelet_startup.py`).

Must not decide when the ledger is read: `schedule.py` does that.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

from msgspec.structs import replace

from gpuactors import limits
from gpuactors.core.state import NodeState
from gpuactors.core.values.model import Asking, CallKind, DeviceKey, Pod, Role, device_key
from gpuactors.core.values.owner import Owner

GETS_MAX: Final = 8
"""Pods that kubelet is asked for with one read of its ledger: it allows a burst of 10 questions, and 100 a second, to
all clients of PodResources together."""

LIST_S: Final = 3600.0
"""How often kubelet is asked to list its pods where no pod has come and nothing else leads to it. Not harmless, as said
above."""

LIST_UNSEEN_S: Final = 300.0
"""The same where no pod's cgroup is seen: how late it is noticed that another DRA driver has a GPU, if nothing opens
it."""

LIST_NAMES_S: Final = 10.0
"""The least time from one List to the next because a pod has come: how late its name is known, and that it has a GPU by
another driver's claim. On a kubelet without Get also how late a forced deletion is noticed."""

LIST_SOON_S: Final = 5.0
"""The same for the first pod after twice that time without List."""

LIST_AGAIN_S: Final = 1.0
"""The least time from one List to the next, if no claim waits for it."""


def question(state: NodeState, at: float) -> Asking:
    """What the read that is requested at `at` asks."""
    asking = state.kubelet.ledger.asking
    if may_list(state, at) and list_due_at(state) <= at:
        asking = replace(asking, lists=True, wanted=False, listed_at=at, gap_s=at - asking.listed_at)
    else:
        asking = replace(asking, lists=False)
    if not asking.has_get:
        return replace(asking, pods=())
    if doubted := [a for call in state.calls.waiting.values() if call.doubted is not None for a in call.seen]:
        return replace(asking, pods=tuple(_named(_pods(_of_groups(state, doubted)))[:GETS_MAX]))
    if state.calls.waiting:
        return replace(asking, pods=())
    unplaced = (c.pod for c in state.kubelet.ledger.unplaced if c.pod is not None)
    named = _named([*_ours(state), *unplaced])
    pods = tuple(_next(named, asking.last_pod))
    return replace(asking, pods=pods, last_pod=_name(pods[-1]) if pods else asking.last_pod)


def may_list(state: NodeState, at: float) -> bool:
    """Kubelet is in no Allocate of ours: none waits for its answer here, and kubelet has had the time to take what was
    answered. It does so at once, whatever the other resources of the container wait for (`allocateContainerResources`).
    A daemon that does not serve does not know of those of the one that does."""
    if state.daemon.role is not Role.SERVING:
        return False
    if any(call.kind is CallKind.ALLOCATE for call in state.calls.waiting.values()):
        return False
    return all(listed_at(until) <= at for until in state.kubelet.pending_allocations.values())


def listed_at(until: float) -> float:
    """From when on a requested List has the pending allocation that ends at `until`, if a pod has the device. Both in
    seconds of the core's clock."""
    return until - limits.GRANT_GRACE_S + limits.GRANT_LEDGER_S


def written_at(until: float) -> float:
    """From when on kubelet's file has the pending allocation that ends at `until`, if a pod has the device. Both in
    seconds of the core's clock."""
    return until - limits.GRANT_GRACE_S + limits.GRANT_FILE_S


def list_due_at(state: NodeState) -> float:
    """From when on there may be something that only List shows."""
    ledger, asking = state.kubelet.ledger, state.kubelet.ledger.asking
    if asking.wanted:
        return -math.inf
    after = [LIST_S if ledger.books.came else LIST_UNSEEN_S]
    if _has_unknown_user(state):
        after.append(LIST_AGAIN_S)
    if ledger.source.is_settling and asking.listed:
        is_early = asking.listed_at < ledger.young.since + limits.LEDGER_SETTLE_S
        after.append(limits.LEDGER_S if is_early else LIST_NAMES_S)
    if ledger.young.socket is not None and ledger.young.settled_at == math.inf:
        # It may not know its pods, for as long as the API server is away: asked as seldom as it has been so.
        after.append(max(LIST_NAMES_S, asking.listed_at - ledger.young.since))
    ours = _ours(state)
    is_new = ledger.books.came != asking.came or not all(pod.name for pod in ours)
    if is_new or (ours and not asking.has_get):  # without Get nothing else shows a forced deletion
        was_quiet = asking.gap_s >= 2 * LIST_NAMES_S
        after.append(LIST_SOON_S if was_quiet else LIST_NAMES_S)
    return asking.listed_at + min(after)


def _has_unknown_user(state: NodeState) -> bool:
    """A group is in use since kubelet last listed its pods, and nobody known has it, or had it."""
    index, listed = state.index, state.kubelet.ledger.asking.listed
    unknown = index.in_use - index.owned.keys()
    if not unknown:
        return False
    left = index.group_numbers(state.kubelet.orphans)
    return any(state.host.polls.groups[group].since > listed for group in unknown - left)


def _of_groups(state: NodeState, devices: Iterable[DeviceKey]) -> list[Owner]:
    """The owners of these devices and of the others of their groups."""
    index = state.index
    groups = index.group_numbers(devices)
    others = [device_key(f.address) for group in groups for f in index.groups.get(group, ())]
    return [owner for d in {*devices, *others} if (owner := index.owners.get(d)) is not None]


def _ours(state: NodeState) -> list[Pod]:
    """The pods that have a device here, or one of our resources by an ID that is no device's."""
    index, lists = state.index, state.published.device_lists
    entries = state.kubelet.ledger.entries.items()
    unknown = (pod for (resource, _), pod in entries if resource in lists or resource in index.by_id)
    return [*_pods(index.owners.values()), *unknown]


def _pods(owners: Iterable[Owner]) -> Iterable[Pod]:
    return (e.pod for owner in owners for e in owner.entries if e.pod is not None)


def _named(pods: Iterable[Pod]) -> list[Pod]:
    """Those with names, each once, in the order of their names."""
    found = {_name(pod): pod for pod in pods if pod.name}
    return [found[name] for name in sorted(found)]


def _next(pods: list[Pod], last: tuple[str, str]) -> list[Pod]:
    """The next ones that are asked for by the clock: a few at a time, as kubelet allows a burst of ten questions to all
    its clients together."""
    later = [pod for pod in pods if _name(pod) > last]
    return [*later, *(pod for pod in pods if _name(pod) <= last)][:GETS_MAX]


def _name(pod: Pod) -> tuple[str, str]:
    return pod.namespace, pod.name
