"""The questions of a read of kubelet's ledger.

Theory of operation. PodResources' List has an effect on kubelet: it frees the devices of ended pods, and if there is
such a pod, rebuilds its set of allocated devices from the pods that have them. The device of an Allocate in flight is
not among those yet, so kubelet forgets it, and gives it to the next pod while the first one runs
(pkg/kubelet/cm/devicemanager/manager.go, UpdateAllocatedDevices; kubernetes pull request 137534). Get,
GetAllocatableResources and the ledger file have no such effect.

So a read asks for List only if there is something that only List shows, and never while kubelet may be in the middle of
an Allocate of gpuactors. Allocates of other plugins cannot be seen, so List is rare in general. Only List shows:

- the names of pods: the file has UIDs. Get asks for a pod by its name, so one List is for all pods since the last one;
- DRA claims of other drivers: asked for when a pod has come (its cgroup), a group is in use without a known owner, or
  a claim of gpuactors is to get a GPU;
- whether a kubelet that has just started knows its pods (`ledger/kubelet_startup.py`);
- whether kubelet still has a pod without a known name for which a call would be refused: it has come just now, and may
  have been force-deleted while its process runs on. This one List is during an Allocate. At the beginning of that one
  kubelet has freed the devices of ended pods, so it forgets only if another pod has ended since.

Must not decide when the ledger is read: `schedule.py` does that.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

from msgspec.structs import replace

from gpuactors import limits
from gpuactors.core.state import NodeState
from gpuactors.core.values.model import Asking, Call, CallKind, DeviceKey, Pod, Role, device_key
from gpuactors.core.values.owner import Owner

GETS_MAX: Final = 8
"""The maximum number of pods that one read asks for: kubelet allows a burst of 10 questions, and 100 a second, to all
clients of PodResources together."""

LIST_S: Final = 3600.0
"""The maximum time between two Lists, if no pod has come and nothing else leads to one. Not harmless, see above."""

LIST_UNSEEN_S: Final = 300.0
"""The same time if pods' cgroups cannot be seen: the delay until it is noticed that another DRA driver has a GPU that
nothing opens."""

LIST_NAMES_S: Final = 10.0
"""The minimum time between two Lists because a pod has come: the delay until its name is known, and that it has a GPU
by another driver's claim. On a kubelet without Get also the delay until a forced deletion is noticed."""

LIST_SOON_S: Final = 5.0
"""The same time for the first pod after twice LIST_NAMES_S without List."""

LIST_AGAIN_S: Final = 1.0
"""The minimum time between two Lists, if no claim waits for one."""


def question(state: NodeState, at: float) -> Asking:
    """Return what a read that is requested at `at` asks kubelet."""
    asking = state.kubelet.ledger.asking
    doubted = [call for call in state.calls.waiting.values() if call.doubted is not None]
    is_due = may_list(state, at) and list_due_at(state) <= at
    if is_due or (asking.has_get and _is_refused_by_unnamed(state, doubted)):
        asking = replace(asking, lists=True, wanted=False, listed_at=at, gap_s=at - asking.listed_at)
    else:
        asking = replace(asking, lists=False)
    if not asking.has_get:
        return replace(asking, pods=())
    if doubted:
        return replace(asking, pods=tuple(_named(_owners_of(state, doubted))[:GETS_MAX]))
    if state.calls.waiting:
        return replace(asking, pods=())
    unplaced = (c.pod for c in state.kubelet.ledger.unplaced if c.pod is not None)
    named = _named([*_ours(state), *unplaced])
    pods = tuple(_next(named, asking.last_pod))
    return replace(asking, pods=pods, last_pod=_name(pods[-1]) if pods else asking.last_pod)


def _is_refused_by_unnamed(state: NodeState, doubted: Iterable[Call]) -> bool:
    """Return whether an Allocate would be refused because of a pod that Get cannot ask for. A call of
    PreStartContainer can wait for the name, and one of a daemon that does not serve is nobody's answer."""
    allocates = [call for call in doubted if call.kind is CallKind.ALLOCATE]
    return state.daemon.role is Role.SERVING and not all(pod.name for pod in _owners_of(state, allocates))


def _owners_of(state: NodeState, calls: Iterable[Call]) -> list[Pod]:
    devices = [device for call in calls for device in call.seen]
    return list(_pods(_of_groups(state, devices)))


def may_list(state: NodeState, at: float) -> bool:
    """Return whether kubelet is in no Allocate of gpuactors: none waits for its answer here, and kubelet has had time
    to record the last answers. It does so at once, whatever the other resources of the container wait for
    (`allocateContainerResources`). A daemon that does not serve does not know the calls of the one that does."""
    if state.daemon.role is not Role.SERVING:
        return False
    if any(call.kind is CallKind.ALLOCATE for call in state.calls.waiting.values()):
        return False
    return all(listed_at(until) <= at for until in state.kubelet.pending_allocations.values())


def listed_at(until: float) -> float:
    """Return from when on a requested List has the pending allocation that ends at `until`, if a pod has the device.
    Both in seconds of the core's clock."""
    return until - limits.GRANT_GRACE_S + limits.GRANT_LEDGER_S


def written_at(until: float) -> float:
    """Return from when on kubelet's file has the pending allocation that ends at `until`, if a pod has the device. Both
    in seconds of the core's clock."""
    return until - limits.GRANT_GRACE_S + limits.GRANT_FILE_S


def list_due_at(state: NodeState) -> float:
    """Return from when on there may be something that only List shows."""
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
        # Kubelet may not know its pods while the API server is away: the longer that lasts, the rarer List is.
        after.append(max(LIST_NAMES_S, asking.listed_at - ledger.young.since))
    pods = _ours(state)
    is_new = ledger.books.came != asking.came or not all(pod.name for pod in pods)
    if is_new or (pods and not asking.has_get):  # without Get nothing else shows a forced deletion
        was_quiet = asking.gap_s >= 2 * LIST_NAMES_S
        after.append(LIST_SOON_S if was_quiet else LIST_NAMES_S)
    return asking.listed_at + min(after)


def _has_unknown_user(state: NodeState) -> bool:
    """Return whether a group without a known owner, or former owner, came into use since kubelet last listed its
    pods."""
    index, listed = state.index, state.kubelet.ledger.asking.listed
    unowned = index.in_use - index.owned.keys()
    if not unowned:
        return False
    orphaned = index.group_numbers(state.kubelet.orphans)
    return any(state.host.polls.groups[group].since > listed for group in unowned - orphaned)


def _of_groups(state: NodeState, devices: Iterable[DeviceKey]) -> list[Owner]:
    """Return the owners of these devices and of the others of their groups."""
    index = state.index
    groups = index.group_numbers(devices)
    members = [device_key(f.address) for group in groups for f in index.groups.get(group, ())]
    return [owner for d in {*devices, *members} if (owner := index.owners.get(d)) is not None]


def _ours(state: NodeState) -> list[Pod]:
    """Return the pods that have a device here, or a resource of gpuactors by an ID that is no device's."""
    index, lists = state.index, state.published.device_lists
    entries = state.kubelet.ledger.entries.items()
    unresolved = (pod for (resource, _), pod in entries if resource in lists or resource in index.by_id)
    return [*_pods(index.owners.values()), *unresolved]


def _pods(owners: Iterable[Owner]) -> Iterable[Pod]:
    return (e.pod for owner in owners for e in owner.entries if e.pod is not None)


def _named(pods: Iterable[Pod]) -> list[Pod]:
    """Return the pods with names, each once, in the order of their names."""
    by_name = {_name(pod): pod for pod in pods if pod.name}
    return [by_name[name] for name in sorted(by_name)]


def _next(pods: list[Pod], last: tuple[str, str]) -> list[Pod]:
    """Return the next pods to ask for, at most GETS_MAX: those after `last`, then from the first one on."""
    later = [pod for pod in pods if _name(pod) > last]
    return [*later, *(pod for pod in pods if _name(pod) <= last)][:GETS_MAX]


def _name(pod: Pod) -> tuple[str, str]:
    return pod.namespace, pod.name
