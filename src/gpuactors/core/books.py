"""The two sides of the books that sysfs does not show: kubelet's ledger, and who uses a group in the kernel.

Theory of operation. Reads of the ledger and polls of the groups' use are asked for by number, from the same counter as
inspections (see `inspections.py`), so that "known after" can be told across all three. At most one of each is
outstanding. A device that leaves the ledger is remembered as departed until a later poll finds its group free: a forced
deletion leaves the ledger within milliseconds while the process lives on. A group that is found in use and that nobody
was given leads to another read of the ledger before anybody is called a stranger. Every group is polled in turn; what
waits for a few of them (a call, a driver that has come or gone) has these polled alone, and nothing is known anew of
the others.

Must not judge: what these facts mean for a device is decided in `assessment/`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

from gpuactors import limits
from gpuactors.core import bindings, inspections
from gpuactors.core.events import GroupsObserved, LedgerRead, LedgerUnreadable, SomeGroupsObserved
from gpuactors.core.identity import claimed_address, resolved
from gpuactors.core.index import changed_keys, index_of, indexed, other_keys
from gpuactors.core.model import (
    ClaimedDevice,
    DeviceId,
    GroupUse,
    Holder,
    Ledger,
    Observed,
    Orphan,
    PciAddress,
    PciFunction,
    Pod,
    Polls,
    ResourceName,
    Role,
)
from gpuactors.core.refresh import Refresh
from gpuactors.core.state import NodeState


def first_ledger(number: int) -> Ledger:
    """At start: one read is outstanding."""
    return Ledger(
        read=0,
        entries={},
        claims={},
        problem=None,
        tried=False,
        refresh=Refresh().asked(number),
    )


def first_polls() -> Polls:
    """At start: nothing is known to be polled yet."""
    return Polls(groups={}, baselines={}, done=0, refresh=Refresh())


def ask_ledger(state: NodeState, at: float) -> NodeState:
    """Asks for a read of kubelet's ledger; if one is outstanding, for another one after it."""
    state, refresh = _asked(state, state.ledger.refresh)
    asked_at = at if refresh.outstanding != state.ledger.outstanding else state.ledger.asked_at
    return replace(state, ledger=replace(state.ledger, refresh=refresh, asked_at=asked_at))


def ask_poll(state: NodeState, groups: frozenset[int] | None = None) -> NodeState:
    """Asks for a poll of these groups, or of every group that matters; if one is outstanding, for another one after it,
    which is of all that are asked for meanwhile."""
    polls = state.polls
    state, refresh = _asked(state, polls.refresh)
    if groups is not None:  # all are due as before
        refresh = refresh.due_by(polls.due_at)
    if refresh.outstanding != polls.outstanding:
        return replace(state, polls=replace(polls, refresh=refresh, of=groups, again_of=None))
    if polls.refresh.again:
        groups = None if groups is None or polls.again_of is None else groups | polls.again_of
    return replace(state, polls=replace(polls, refresh=refresh, again_of=groups))


def _asked(state: NodeState, refresh: Refresh) -> tuple[NodeState, Refresh]:
    last, refresh = inspections.asked(state.inspections.last, refresh)
    return replace(state, inspections=replace(state.inspections, last=last)), refresh


# --- kubelet's ledger -------------------------------------------------------------------------------------


def ledger_read(state: NodeState, event: LedgerRead, at: float) -> NodeState:
    """The ledger as it is. Who left it may still hold its device."""
    before = state.ledger
    if event.read != before.outstanding:
        return state
    # The very ones that are known, if they are what they were: what follows from them is then told by identity.
    entries, claims = _entries(before.entries, event), _claims(event.claims)
    ledger = replace(
        before,
        read=event.read,
        entries=entries,
        claims=claims if claims != before.claims else before.claims,
        problem=None,
        tried=True,
        refresh=before.refresh.answered(),
        read_at=before.asked_at,
        done=event.read,
        complete=not (event.settling and event.cached is None),
    )
    after = replace(state, ledger=_with_answers(ledger, event))
    after = resolved(state, replace(after, pending_allocations=_still_pending(after, event, at)))
    left = _left(state, entries, event.read)
    orphans = {**_still_orphans(after), **left}
    state = replace(
        after,
        orphans=orphans if orphans != after.orphans else after.orphans,
        served=_still_served(after, event.settling),
    )
    period_s = limits.LEDGER_SETTLING_S if event.settling else limits.LEDGER_S
    due_at = at + (period_s if _matters(state) else limits.LEDGER_QUIET_S)
    wished = before.due_at if before.due_at > at else math.inf
    refresh = state.ledger.refresh.due_by(min(due_at, wished))
    state = replace(state, ledger=replace(state.ledger, refresh=refresh))
    functions = index_of(state).functions
    if groups := {f.iommu_group for a in left if (f := functions.get(a)) is not None} - {None}:
        state = ask_poll(state, frozenset(g for g in groups if g is not None))
    return ask_ledger(state, at) if before.refresh.again else state


def _entries(
    before: Mapping[tuple[ResourceName, DeviceId], Pod], event: LedgerRead
) -> Mapping[tuple[ResourceName, DeviceId], Pod]:
    """What was read; the very ones that are known where they are what they were."""
    entries: dict[tuple[ResourceName, DeviceId], Pod] = {}
    same = True
    for entry in event.entries:
        name = entry.resource, entry.device
        if (known := before.get(name)) == entry.pod and known is not None:
            entries[name] = known
        else:
            entries[name], same = entry.pod, False
    return before if same and len(entries) == len(before) else entries


def _still_served(state: NodeState, settling: bool) -> Mapping[ResourceName, frozenset[str]]:
    """The resources that are ours: those of the lists, and of what a daemon before this served those that a pod has
    something of, which a kubelet that has just started may not know yet."""
    if settling or state.role is not Role.SERVING:  # who serves may give more of them away until we take over
        return state.served
    if state.served.keys() <= state.device_lists.keys():
        return state.served
    had = {resource for resource, _ in state.ledger.entries}
    served = {r: models for r, models in state.served.items() if r in had or r in state.device_lists}
    return served if served != state.served else state.served


def _left(
    state: NodeState, entries: Mapping[tuple[ResourceName, DeviceId], Pod], read: int
) -> dict[PciAddress, Orphan]:
    """The devices that had a pod in the ledger of `state`, and have none or another one by these entries."""
    had = state.ledger.entries
    # Of a ledger's entries most are other plugins' and mean nothing here.
    names = sorted(
        n
        for n in changed_keys(had, entries)
        if n in had and n in state.resolved and _is_gone(had[n], entries.get(n))
    )
    return {
        (address := state.resolved[name].address): Orphan(had[name], read, _use_of_pod(state, address))
        for name in names
    }


def _still_orphans(state: NodeState) -> dict[PciAddress, Orphan]:
    """Those who left and have not come back by any ID."""
    if not state.orphans:
        return {}
    pods: dict[PciAddress, list[Pod]] = {}
    for name, meant in state.resolved.items():
        if (pod := state.ledger.entries.get(name)) is not None:
            pods.setdefault(meant.address, []).append(pod)
    return {a: d for a, d in state.orphans.items() if all(_is_gone(d.pod, pod) for pod in pods.get(a, ()))}


def _still_pending(
    state: NodeState, event: LedgerRead, at: float
) -> dict[tuple[ResourceName, DeviceId], float]:
    """What Allocate handed out and kubelet does not list yet.

    Kubelet lists it as soon as Allocate is answered: one that it did not list some time after that was taken back, or
    its pod has ended already. A kubelet that has just started may not know its pods yet.
    """
    return {
        given: until
        for given, until in state.pending_allocations.items()
        if given not in state.ledger.entries
        and until > at
        and (event.settling or state.ledger.read_at < listed_at(until))
    }


def listed_at(until: float) -> float:
    """From when on a read of the ledger has what is believed to be handed out `until` then, if a pod has it."""
    return until - limits.GRANT_GRACE_S + limits.GRANT_LEDGER_S


def _is_gone(before: Pod, now: Pod | None) -> bool:
    """The device has no pod any more, or another one. PodResources gives names, the checkpoint file UIDs: where the
    two cannot be compared it is the same pod."""
    if now is None:
        return True
    if before.uid and now.uid:
        return before.uid != now.uid
    names = (before.namespace, before.name), (now.namespace, now.name)
    return bool(before.name and now.name) and names[0] != names[1]


def _matters(state: NodeState) -> bool:
    """Something of ours is given away or in use, so that the ledger may change without our hearing of it."""
    index = index_of(state)
    if state.pending_allocations or state.orphans or not index.devices.keys().isdisjoint(index.owners):
        return True
    lost = any(r in state.device_lists or r in index.by_id for r, _ in state.ledger.entries)
    return lost or any(o.in_use for o in state.polls.groups.values())


def _with_answers(ledger: Ledger, event: LedgerRead | LedgerUnreadable) -> Ledger:
    """What kubelet's file says of Allocate's answers; what it said last, if it could not be read."""
    if event.cached is None:
        return ledger
    cached = {(answer.resource, answer.device): answer.nodes for answer in event.cached}
    return replace(ledger, cached=cached, damaged=event.damaged)


def _claims(claimed: Iterable[ClaimedDevice]) -> dict[PciAddress, ClaimedDevice]:
    return {address: c for c in claimed if (address := claimed_address(c.device)) is not None}


def ledger_unreadable(state: NodeState, event: LedgerUnreadable, at: float) -> NodeState:
    """What was known last stays known; what the file says of Allocate's answers is known anew if it could be read."""
    if event.read != state.ledger.outstanding:
        return state
    again = state.ledger.refresh.again
    ledger = replace(
        state.ledger,
        problem=event.reason,
        tried=True,
        refresh=state.ledger.refresh.answered(at + limits.LEDGER_RETRY_S),
        done=event.read,
    )
    state = replace(state, ledger=_with_answers(ledger, event))
    return ask_ledger(state, at) if again else state


# --- the use of the groups --------------------------------------------------------------------------------


def observed(state: NodeState, event: GroupsObserved | SomeGroupsObserved, at: float) -> NodeState:
    """A poll came back. Changes lead to a read of the ledger: a release, or somebody who may be a stranger.

    Of a group that it does not tell of everything stays as it was, whether it was asked about or not.
    """
    before = state.polls
    if event.poll != before.outstanding:
        return state
    index = index_of(state)
    uses = [bindings.only(state, use) for use in event.uses if use.group in index.polled]
    enabled = {a: n for use in uses for a, n in use.enabled.items()}
    learned = bindings.learned(before, enabled, frozenset(a for use in uses for a in use.active))
    groups = {g: o for g, o in before.groups.items() if g in index.polled}
    for use in uses:
        was = before.groups.get(use.group)
        groups[use.group] = _observed(use, event.poll, at, learned.baselines, index.functions, was)
    changed = any(
        groups[g].since != was.since if (was := before.groups.get(g)) is not None else groups[g].in_use
        for g in (use.group for use in uses)
    )
    due_at = at + limits.POLL_S if index.polled else math.inf
    of_all = before.of is None
    polls = replace(
        learned,
        groups=groups,
        done=event.poll if of_all else before.done,
        refresh=before.refresh.answered(due_at if of_all else min(due_at, before.due_at)),
        of=None,
        again_of=None,
    )
    state = replace(state, polls=polls, orphans=_still_there(state, groups))
    if changed:
        state = ask_ledger(state, at)
    return ask_poll(state, before.again_of) if before.refresh.again else state


def _observed(
    use: GroupUse,
    poll: int,
    at: float,
    baselines: Mapping[PciAddress, int],
    functions: Mapping[PciAddress, PciFunction],
    before: Observed | None,
) -> Observed:
    evidence, closing_at = _evidence(use, baselines), None
    if evidence is None and before is not None and before.in_use:
        closing_at = at if before.closing_at is None else before.closing_at
        closes = at - closing_at < limits.CLOSING_S
        evidence = _closing(use, _whole_slots(functions) & before.idle_functions) if closes else None
    if evidence is None and use.unseen and before is not None and before.in_use:
        evidence, closing_at = before.evidence, before.closing_at  # what cannot be seen has not ended
    in_use = evidence is not None
    idle_functions = before.idle_functions if before is not None else frozenset()
    holders = use.holders or ()
    same = before is not None and before.in_use == in_use and not _others(before.holders, holders)
    return Observed(
        poll=poll,
        in_use=in_use,
        since=before.since if before is not None and same else poll,
        evidence=evidence or "",
        holders=holders,
        open=_open(use, baselines, before),
        idle_functions=idle_functions if in_use else frozenset(use.enabled) - use.active,
        closing_at=closing_at if in_use else None,
        unseen=use.unseen,
    )


def _open(
    use: GroupUse, baselines: Mapping[PciAddress, int], before: Observed | None
) -> frozenset[PciAddress]:
    """The functions that are open; those that cannot be read are as they were."""
    unseen = before.open - use.enabled.keys() if before is not None and use.unseen else frozenset()
    return frozenset(a for a, n in use.enabled.items() if n > baselines.get(a, 0)) | unseen


def _others(before: tuple[Holder, ...], now: tuple[Holder, ...]) -> bool:
    """None of those who hold it now held it before, as far as both are known."""
    return bool(before and now) and {h.pid for h in before}.isdisjoint(h.pid for h in now)


def _evidence(use: GroupUse, baselines: Mapping[PciAddress, int]) -> str | None:
    """How the group is in use, in words; None if nothing shows that it is."""
    if use.holders:
        return f"held by {', '.join(map(str, use.holders))}"
    for address, count in sorted(use.enabled.items()):
        if count > baselines.get(address, 0):
            return f"in use (enable of {address} is {count})"
    return "in use (opening it says EBUSY)" if use.open_refused else None


def _whole_slots(functions: Mapping[PciAddress, PciFunction]) -> frozenset[PciAddress]:
    """The functions of slots whose functions are all on a vfio driver: of no other slot resets vfio the whole."""
    split = {_slot(a) for a, f in functions.items() if not f.vfio_bound}
    return frozenset(a for a in functions if _slot(a) not in split)


def _slot(address: PciAddress) -> str:
    return address.partition(".")[0]


def _closing(use: GroupUse, waited_for: frozenset[PciAddress]) -> str | None:
    """How a use that nothing else shows any more is not over yet, in words.

    A function is disabled first and suspended last. In between the kernel resets the whole slot where none of its
    functions can be reset alone, which takes seconds, and the group opens for nobody until that is done
    (drivers/vfio/pci/vfio_pci_core.c, vfio_pci_core_disable). Only a use that was seen is made longer by this: reading
    the configuration space of a free function (lspci) wakes it for a moment as well. What was not suspended before
    (vfio-pci with `disable_idle_d3`) is not waited for, nor what is kept awake by a neighbour on no or another driver,
    as a GPU is by its audio function (drivers/pci/quirks.c, quirk_gpu_hda), nor anything for ever.
    """
    awake = sorted(waited_for & use.active)
    return f"being closed ({awake[0]} is not suspended yet)" if awake else None


def _still_there(state: NodeState, groups: Mapping[int, Observed]) -> Mapping[PciAddress, Orphan]:
    """Who left the ledger and may still hold a device: until a poll asked for after that finds its group free, or held
    by somebody who cannot be that pod. Nobody holds a device of a group that there is no reason to poll any more."""
    rest, matter = {}, index_of(state).polled
    for address, orphans in state.orphans.items():
        fact = state.facts.get(address)
        group = fact.function.iommu_group if fact is not None and fact.function is not None else None
        if group is None or group not in matter:
            continue
        now = groups.get(group)
        if now is None or now.poll <= orphans.read or (now.in_use and _may_be(orphans, now)):
            rest[address] = orphans
    return rest if len(rest) != len(state.orphans) else state.orphans


def _may_be(orphans: Orphan, use: Observed) -> bool:
    """Whether a group's use may be that of the pod that was.

    Not if the use began later and its holders are in no pod. Being in no pod alone says nothing: some runtimes keep a
    pod's virtual machine in a cgroup outside the pod's (Kata Containers without `sandbox_cgroup_only`).
    """
    same = use.since == orphans.use
    return same or not use.holders or any(_is_in(orphans.pod, h) for h in use.holders)


def _is_in(pod: Pod, holder: Holder) -> bool:
    """A process is in that pod, or in some pod where this one's UID is not known."""
    return holder.pod_uid is not None and pod.uid in ("", holder.pod_uid)


def _use_of_pod(state: NodeState, address: PciAddress) -> int | None:
    fact = state.facts.get(address)
    group = fact.function.iommu_group if fact is not None and fact.function is not None else None
    use = state.polls.groups.get(group) if group is not None else None
    return use.since if use is not None and use.in_use and use.since < state.ledger.read else None


# --- sooner than by the clock -----------------------------------------------------------------------------


def poll_brought_forward(before: NodeState, state: NodeState, at: float) -> NodeState:
    """After an event: a read of the ledger at once where something was taken from under a pod, which may have ended
    just before; a poll at once of the groups that appeared and were never polled, or lost a driver."""
    moved = changed_keys(index_of(before).functions, index_of(state).functions)
    state = indexed(bindings.rebound(before, state, moved))
    if _has_changed(before, state):
        state = replace(state, polls=replace(state.polls, fast_until=at + limits.POLL_FAST_FOR_S))
    unbound = {a for a in moved if _is_bound(before, a) and not _is_bound(state, a)}
    if not unbound.isdisjoint(index_of(state).owners):
        state = ask_ledger(state, at)
    if state.facts is not before.facts and state.ledger.due_at > at + limits.LEDGER_S and _matters(state):
        # It was read before there was anything of ours in it, at the daemon's start for instance.
        refresh = state.ledger.refresh.due_by(at + limits.LEDGER_S)
        state = replace(state, ledger=replace(state.ledger, refresh=refresh))
    if state.facts is not before.facts and state.scanned:
        polled, seen = index_of(state).polled, state.polls.groups
        never = set() if polled.keys() <= seen.keys() else polled.keys() - seen.keys()
        if unseen := never | _taken(state, unbound):
            return ask_poll(state, frozenset(unseen) if unseen != polled.keys() else None)
    return state


def hurried(state: NodeState, at: float, *, waited_for: bool) -> NodeState:
    """After an event: a poll soon where somebody should let go.

    `waited_for`: a call waits for what a poll tells. Without one a release is expected soon for POLL_FAST_FOR_S after
    the last change only: a stranger who stays costs no more polls than a free group.
    """
    fast = waited_for or (at < state.polls.fast_until and _is_wrongly_held(state))
    if fast and state.polls.outstanding is None:
        refresh = state.polls.refresh.due_by(at + limits.POLL_FAST_S)
        return replace(state, polls=replace(state.polls, refresh=refresh))
    return state


def _has_changed(before: NodeState, state: NodeState) -> bool:
    """Who holds what, or who was given what, is not what it was, the numbers of polls and reads apart."""
    if any(before.orphans.get(address) != orphans for address, orphans in state.orphans.items()):
        return True
    if state.pending_allocations.keys() != before.pending_allocations.keys():
        return True
    if (
        state.ledger.entries is not before.ledger.entries
        or state.ledger.claims.keys() != before.ledger.claims.keys()
    ):
        return True
    now, was = state.polls.groups, before.polls.groups
    return now is not was and (
        now.keys() != was.keys()
        or any(_use(now[group]) != _use(was[group]) for group in other_keys(was, now))
    )


def _use(use: Observed) -> tuple[object, ...]:
    """What of a group's use is somebody's doing."""
    return use.since, use.open, use.closing_at, {h.pid for h in use.holders}


def _taken(state: NodeState, unbound: Iterable[PciAddress]) -> set[int]:
    """The groups of which a function has just lost its driver: whether it is open is not known as of now."""
    index = index_of(state)
    functions = [f for a in unbound if (f := index.functions.get(a)) is not None and f.driver is None]
    groups = {f.iommu_group for f in functions if f.address in index.polled.get(f.iommu_group or -1, ())}
    return {group for group in groups if group is not None}


def _is_bound(state: NodeState, address: PciAddress) -> bool:
    fact = state.facts.get(address)
    return fact is not None and fact.function is not None and fact.function.vfio_bound


def _is_wrongly_held(state: NodeState) -> bool:
    """Somebody holds a group who should not: a stranger, or a pod that is gone."""
    if state.orphans:
        return True
    if not any(o.in_use for o in state.polls.groups.values()):
        return False
    given = {state.facts[a].function for a in index_of(state).owners if a in state.facts}
    groups = {f.iommu_group for f in given if f is not None}
    return any(o.in_use and g not in groups for g, o in state.polls.groups.items())


# --- time -------------------------------------------------------------------------------------------------


def due(state: NodeState, at: float) -> NodeState:
    """Asks for the read and the poll whose time has come. Only the ledger tells what was handed out in vain."""
    if _ledger_due_at(state) <= at:
        state = ask_ledger(state, at)
    if state.polls.due_at <= at:
        state = ask_poll(state)
    return state


def deadline(state: NodeState) -> float:
    """When `due` will next have something to do."""
    return min(_ledger_due_at(state), state.polls.due_at)


def _ledger_due_at(state: NodeState) -> float:
    ledger = state.ledger
    if ledger.outstanding is not None:
        return math.inf
    grants: Iterable[float] = state.pending_allocations.values() if ledger.problem is None else ()
    listed = (until if ledger.read_at >= listed_at(until) else listed_at(until) for until in grants)
    return min([ledger.due_at, *listed])
