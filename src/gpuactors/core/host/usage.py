"""The use of each group in the kernel, as last polled.

Theory of operation. A poll shows `enable` of a group's functions, their power state, and where that may be read the
processes that have it open. A use begins when one of these shows it, and is over when none does: not while a function
that was suspended before is still awake, as vfio resets the whole slot after the last close. A change leads to a read
of kubelet's ledger before a use without a pod is reported as external.

Must not judge: `assessment/` decides the status of a device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from msgspec.structs import replace

from gpuactors.core.events.host import GroupsObserved, SomeGroupsObserved
from gpuactors.core.host import bindings, schedule
from gpuactors.core.requests import Refresh
from gpuactors.core.state import NodeState
from gpuactors.core.values.inventory import Device
from gpuactors.core.values.model import (
    DeviceKey,
    Functions,
    GroupUse,
    Holder,
    LastPoll,
    Observed,
    Orphan,
    PciAddress,
    Pod,
    Polls,
)

POLL_S: Final = 2.0
"""The interval of polls: how long another process can hold a free GPU before it is listed Unhealthy. One poll reads two
small files per GPU."""

CLOSING_S: Final = 10.0
"""The time that a closed function gets to be suspended again. The reset of a slot takes 2 to 3 s; a function that is
active for longer has another reason (`power/control`), and can be opened."""


def first_polls() -> Polls:
    """Return the polls at start: no group to poll is known yet."""
    return Polls(groups={}, seen={}, baselines={}, done=0, refresh=Refresh())


def use_of(state: NodeState, device: Device) -> Observed | None:
    """Return the use of the device's group, as last polled."""
    return state.host.polls.groups.get(device.group) if device.group is not None else None


def last_poll(state: NodeState, device: Device) -> LastPoll | None:
    """Return the last poll that saw the device's group."""
    return state.host.polls.seen.get(device.group) if device.group is not None else None


def observed(state: NodeState, event: GroupsObserved | SomeGroupsObserved, at: float) -> NodeState:
    """Record a poll. A change leads to a read of the ledger: after a release, or for a holder that may be external.

    A group that is not in the result stays as it was, whether it was polled or not.
    """
    before = state.host.polls
    if event.poll != before.refresh.outstanding:
        return state
    index = state.index
    uses = bindings.only(state, (use for use in event.uses if use.group in index.polled))
    enabled = {a: n for use in uses for a, n in use.enabled.items()}
    learned = bindings.learned(before, enabled, frozenset(a for use in uses for a in use.active))
    changed_uses, changed = dict[int, Observed](), False
    for use in uses:
        earlier = before.groups.get(use.group)
        if earlier is not None and earlier.in_use and _shows_nothing(use) and use.group not in index.owned:
            continue  # it was not opened this time: the last known use applies
        now = _observed(use, event.poll, at, learned.baselines, state.host.functions, earlier)
        if earlier is None or now != earlier:
            changed_uses[use.group] = now
            changed = changed or (now.since != earlier.since if earlier is not None else now.in_use)
    groups, seen = {**before.groups, **changed_uses}, dict(before.seen)
    seen.update(dict.fromkeys([use.group for use in uses], LastPoll(event.poll, at)))
    for group in groups.keys() - index.polled.keys():
        del groups[group], seen[group]
    due_at = at + POLL_S if index.polled else math.inf
    polled_all = before.asked_groups is None
    polls = replace(
        learned,
        groups=groups if changed_uses or len(groups) != len(before.groups) else before.groups,
        seen=seen,
        done=event.poll if polled_all else before.done,
        refresh=before.refresh.answered(due_at if polled_all else min(due_at, before.refresh.due_at)),
        asked_groups=None,
        again_groups=None,
    )
    state = replace(
        state,
        host=replace(state.host, polls=polls),
        kubelet=replace(state.kubelet, orphans=_still_there(state, polls)),
    )
    if changed:
        state = schedule.ask_ledger(state, at)
    return schedule.ask_poll(state, before.again_groups) if before.refresh.again else state


def _observed(
    use: GroupUse,
    poll: int,
    at: float,
    baselines: Mapping[PciAddress, int],
    functions: Functions,
    before: Observed | None,
) -> Observed:
    evidence, closing_at = _evidence(use, baselines), None
    if evidence is None and before is not None and before.in_use:
        closing_at = at if before.closing_at is None else before.closing_at
        closes = at - closing_at < CLOSING_S
        evidence = _closing(use, _whole_slots(functions) & before.idle_functions) if closes else None
    if evidence is None and use.unseen and before is not None and before.in_use:
        evidence, closing_at = before.evidence, before.closing_at  # an unreadable use has not ended
    in_use = evidence is not None
    idle_functions = before.idle_functions if before is not None else frozenset()
    holders = use.holders or ()
    is_same_use = before is not None and before.in_use == in_use and not _are_others(before.holders, holders)
    return Observed(
        in_use=in_use,
        since=before.since if before is not None and is_same_use else poll,
        evidence=evidence or "",
        holders=holders,
        open=_open(use, baselines, before),
        idle_functions=idle_functions if in_use else frozenset(use.enabled) - use.active,
        closing_at=closing_at if in_use else None,
        unseen=use.unseen,
    )


def _shows_nothing(use: GroupUse) -> bool:
    """Return whether the poll shows neither that the group is in use nor that it is free: sysfs has nothing of a
    mediated device's use, so only its holders or opening it show that."""
    return not use.enabled and not use.unseen and use.holders is None and use.open_refused is None


def _open(
    use: GroupUse, baselines: Mapping[PciAddress, int], before: Observed | None
) -> frozenset[PciAddress]:
    """Return the functions that are open; of functions that cannot be read, those that were open at the last poll."""
    unseen = before.open - use.enabled.keys() if before is not None and use.unseen else frozenset()
    return frozenset(a for a, n in use.enabled.items() if n > baselines.get(a, 0)) | unseen


def _are_others(before: tuple[Holder, ...], now: tuple[Holder, ...]) -> bool:
    """Return whether none of the present holders held the group before, as far as both are known."""
    return bool(before and now) and {h.pid for h in before}.isdisjoint(h.pid for h in now)


def _evidence(use: GroupUse, baselines: Mapping[PciAddress, int]) -> str | None:
    """Return how the group is in use, as a part of a sentence; None if nothing shows that it is."""
    if use.holders:
        return f"held by {', '.join(map(str, use.holders))}"
    for address, count in sorted(use.enabled.items()):
        if count > baselines.get(address, 0):
            return f"in use (enable of {address} is {count})"
    return "in use (opening it fails with EBUSY)" if use.open_refused else None


def _whole_slots(functions: Functions) -> frozenset[PciAddress]:
    """Return the functions of slots whose functions are all on a vfio driver: vfio resets only such a slot as a
    whole."""
    split = {_slot(a) for a, f in functions.items() if not f.vfio_bound}
    return frozenset(a for a in functions if _slot(a) not in split)


def _slot(address: PciAddress) -> str:
    return address.partition(".")[0]


def _closing(use: GroupUse, waited_for: frozenset[PciAddress]) -> str | None:
    """Return why a use that nothing else shows any more is not over yet, as a part of a sentence; None if it is over.

    A function is disabled first and suspended last. In between the kernel resets the whole slot if none of its
    functions can be reset separately, which takes seconds, and until that is done no process can open the group
    (drivers/vfio/pci/vfio_pci_core.c, vfio_pci_core_disable). Only a use that was seen is extended by this: reading the
    configuration space of a free function (lspci) wakes it for a moment as well. It is not extended by a function that
    was not suspended before (vfio-pci with `disable_idle_d3`), nor by one that is kept awake by a neighbour on no or
    another driver, as a GPU is by its audio function (drivers/pci/quirks.c, quirk_gpu_hda), nor for ever.
    """
    awake = sorted(waited_for & use.active)
    return f"being closed ({awake[0]} is not suspended yet)" if awake else None


def _still_there(state: NodeState, polls: Polls) -> Mapping[DeviceKey, Orphan]:
    """Return the orphans that their former pod may still hold: until a poll that was requested after the pod left the
    ledger finds the group free, or held by a process that cannot be that pod's. A group that need not be polled any
    more cannot be open."""
    remaining, index = {}, state.index
    for device, orphan in state.kubelet.orphans.items():
        group = index.group_number(device)
        if group is None or group not in index.polled:
            continue
        now = polls.groups.get(group)
        if now is None or polls.seen[group].poll <= orphan.read or (now.in_use and _may_be(orphan, now)):
            remaining[device] = orphan
    return remaining if len(remaining) != len(state.kubelet.orphans) else state.kubelet.orphans


def _may_be(orphan: Orphan, use: Observed) -> bool:
    """Return whether a group's use may be that of the former pod.

    Not if the use began later and its holders are in no pod. A holder outside all pods is not enough: some runtimes
    keep a pod's virtual machine in a cgroup outside the pod's (Kata Containers without `sandbox_cgroup_only`).
    """
    is_same_use = use.since == orphan.use
    return is_same_use or not use.holders or any(_is_in(orphan.pod, h) for h in use.holders)


def _is_in(pod: Pod, holder: Holder) -> bool:
    """Return whether a process is in the pod, or in any pod if the pod's UID is not known."""
    return holder.pod_uid is not None and pod.uid in ("", holder.pod_uid)
