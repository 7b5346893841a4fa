"""When kubelet's ledger is read and the groups' use is polled: on request, by the clock, and sooner than by the clock.

Theory of operation. Both are requested by number, from the same counter as inspections (`host/inspections.py`), so the
numbers of all three show which fact is newer. At most one of each is outstanding. By the clock every group is polled;
for a call, or after a bind or unbind, only the groups concerned are polled.

Must not read an answer: `ledger/ledger.py` and `usage.py` do that.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable
from typing import Final, TypeGuard

from msgspec.structs import replace

from gpuactors import limits
from gpuactors.core.host import bindings
from gpuactors.core.host.asking import listed_at
from gpuactors.core.host.asking import question as asking_now
from gpuactors.core.requests import Refresh, asked
from gpuactors.core.state import NodeState, with_inspections, with_ledger, with_polls
from gpuactors.core.values.inventory import may_be_unbinding
from gpuactors.core.values.model import Observed, PciFunction, device_key

POLL_FAST_S: Final = 0.25
"""The interval of polls while the release of a group is expected (for POLL_FAST_FOR_S), or a container waits to start:
how soon a release is seen."""

POLL_FAST_FOR_S: Final = 30.0
"""How long after the last change of holders (a holder comes or goes, a pod leaves kubelet's ledger, a device is
allocated) the poll runs every POLL_FAST_S; then every POLL_S (`usage.py`). A pod has 30 s to end by default
(terminationGracePeriodSeconds), and a process that holds a GPU for longer may hold it for hours."""


def ask_ledger(state: NodeState, at: float, *, lists: bool = False) -> NodeState:
    """Request a read of kubelet's ledger; if one is outstanding, another one after it. `lists`: with kubelet's list of
    its pods, by this read or the first one that may ask for it."""
    if lists:
        asking = replace(state.kubelet.ledger.asking, wanted=True)
        state = with_ledger(state, replace(state.kubelet.ledger, asking=asking))
    ledger = state.kubelet.ledger
    state, refresh = _asked(state, ledger.refresh)
    if refresh.outstanding != ledger.refresh.outstanding:
        ledger = replace(ledger, asked_at=at, asking=asking_now(state, at))
    return with_ledger(state, replace(ledger, refresh=refresh))


def ask_poll(state: NodeState, groups: frozenset[int] | None = None) -> NodeState:
    """Request a poll of these groups, or of every group in `Index.polled`; if one is outstanding, another one after it,
    of all groups that are requested meanwhile."""
    polls = state.host.polls
    state, refresh = _asked(state, polls.refresh)
    if groups is not None:  # the poll of all groups stays due
        refresh = refresh.due_by(polls.refresh.due_at)
    if refresh.outstanding != polls.refresh.outstanding:
        return with_polls(state, replace(polls, refresh=refresh, asked_groups=groups, again_groups=None))
    if polls.refresh.again:
        groups = None if groups is None or polls.again_groups is None else groups | polls.again_groups
    return with_polls(state, replace(polls, refresh=refresh, again_groups=groups))


def _asked(state: NodeState, refresh: Refresh) -> tuple[NodeState, Refresh]:
    last, refresh = asked(state.host.inspections.last, refresh)
    return with_inspections(state, replace(state.host.inspections, last=last)), refresh


# --- sooner than by the clock -----------------------------------------------------------------------------


def poll_brought_forward(before: NodeState, state: NodeState, at: float) -> NodeState:
    """Request reads at once after an event: of the ledger if an allocated function lost its driver, as its pod may have
    ended just before; a poll of the groups that are new, or of which a function lost its driver."""
    moved = bindings.changed_functions(before, state)
    state = bindings.rebound(before, state, moved)
    if _has_changed(before, state):
        state = with_polls(state, replace(state.host.polls, fast_until=at + POLL_FAST_FOR_S))
    functions_before, functions = before.host.functions, state.host.functions
    unbound = [
        f for a in moved if _is_bound(f := functions_before.get(a)) and not _is_bound(functions.get(a))
    ]
    if any(device_key(function.address) in state.index.owners for function in unbound):
        state = ask_ledger(state, at)
    if ended := _uses_that_are_over(state):
        polls = state.host.polls
        groups, last = dict(polls.groups), dict(polls.seen)
        for group in ended:
            del groups[group], last[group]
        state = with_polls(state, replace(polls, groups=groups, seen=last))
    ledger = state.kubelet.ledger
    inspected = state.host.seen is not before.host.seen  # also an inspection that found nothing new
    if inspected and ledger.refresh.due_at > at + limits.LEDGER_S and matters(state):
        # The ledger was read before a device was known, for instance at the daemon's start.
        state = with_ledger(state, replace(ledger, refresh=ledger.refresh.due_by(at + limits.LEDGER_S)))
    if inspected and state.host.scanned:
        polled, seen = state.index.polled, state.host.polls.groups
        unpolled = set() if polled.keys() <= seen.keys() else polled.keys() - seen.keys()
        if unseen := unpolled | _taken(state, unbound):
            return ask_poll(state, frozenset(unseen) if unseen != polled.keys() else None)
    return state


def polled_soon(state: NodeState, at: float, *, waited_for: bool) -> NodeState:
    """Make the next poll due soon if a release is expected.

    One is expected while a call waits for a poll (`waited_for`), else for POLL_FAST_FOR_S after the last change: an
    external holder that stays costs no more polls than a free group.
    """
    polls = state.host.polls
    fast = waited_for or (at < polls.fast_until and _is_wrongly_held(state))
    if fast:
        return with_polls(state, replace(polls, refresh=polls.refresh.due_by(at + POLL_FAST_S)))
    return state


def _has_changed(before: NodeState, state: NodeState) -> bool:
    """Return whether holders or owners changed; the numbers of polls and reads are not compared."""
    kubelet_before, kubelet = before.kubelet, state.kubelet
    if any(kubelet_before.orphans.get(address) != orphan for address, orphan in kubelet.orphans.items()):
        return True
    if kubelet_before.pending_allocations.keys() != kubelet.pending_allocations.keys():
        return True
    if (
        kubelet.ledger.entries != kubelet_before.ledger.entries
        or kubelet.ledger.claims.keys() != kubelet_before.ledger.claims.keys()
    ):
        return True
    groups, groups_before = state.host.polls.groups, before.host.polls.groups
    return groups != groups_before and (
        groups.keys() != groups_before.keys()
        or any(
            use != groups_before[group] and _use(use) != _use(groups_before[group])
            for group, use in groups.items()
        )
    )


def _use(use: Observed) -> tuple[object, ...]:
    """Return the parts of a group's use that change when a process opens or closes it."""
    return use.since, use.open, use.closing_at, {h.pid for h in use.holders}


def _uses_that_are_over(state: NodeState) -> set[int]:
    """Return the groups of which no function is on a vfio driver, or leaving one, any more: their last seen use is
    over."""
    index = state.index
    gone = state.host.polls.groups.keys() - index.polled.keys()
    return {g for g in gone if not any(may_be_unbinding(f) for f in index.groups.get(g, ()))}


def _taken(state: NodeState, unbound: Iterable[PciFunction]) -> set[int]:
    """Return the groups of which a function has just lost its driver: a new poll must show whether it is open.
    `unbound` has the functions that left a vfio driver, as they were."""
    index, groups = state.index, set[int]()
    for was in unbound:
        now, group = state.host.functions.get(was.address), index.group_number(device_key(was.address))
        if (
            now is not None
            and now.driver is None
            and group is not None
            and was.address in index.polled.get(group, ())
        ):
            groups.add(group)
    return groups


def _is_bound(function: PciFunction | None) -> TypeGuard[PciFunction]:
    return function is not None and function.vfio_bound


def _is_wrongly_held(state: NodeState) -> bool:
    """Return whether a group is held by an external process, or by that of a pod that is gone."""
    if state.kubelet.orphans:
        return True
    index = state.index
    return not index.in_use <= index.owned.keys()


def matters(state: NodeState) -> bool:
    """Return whether a device is allocated or in use: then the ledger may change without notice."""
    index, kubelet, lists = state.index, state.kubelet, state.published.device_lists
    if kubelet.pending_allocations or kubelet.orphans or not index.devices.keys().isdisjoint(index.owners):
        return True
    unresolved = any(r in lists or r in index.by_id for r, _ in kubelet.ledger.entries)
    return unresolved or bool(index.in_use)


# --- by the clock -----------------------------------------------------------------------------------------


def due(state: NodeState, at: float) -> NodeState:
    """Request the read and the poll that are due. Only the ledger shows that a granted device was not allocated."""
    if _ledger_due_at(state) <= at:
        state = ask_ledger(state, at)
    if state.host.polls.refresh.due_at <= at:
        state = ask_poll(state)
    return state


def deadline(state: NodeState) -> float:
    """Return when `due` next has something to do."""
    return min(_ledger_due_at(state), state.host.polls.refresh.due_at)


def _ledger_due_at(state: NodeState) -> float:
    ledger = state.kubelet.ledger
    if ledger.refresh.outstanding is not None:
        return math.inf
    if ledger.problem is not None or not state.kubelet.pending_allocations:
        return ledger.refresh.due_at
    # Each event calls this, and a burst of calls leaves hundreds of grants: only the first of each kind matters.
    grants = sorted(state.kubelet.pending_allocations.values())
    read = bisect_right(grants, ledger.read_at, key=listed_at)
    ends = grants[:1] if read else []
    # One read is for all grants of a burst of calls.
    listed = [
        max(listed_at(until), ledger.asked_at + limits.LEDGER_FRESH_S) for until in grants[read : read + 1]
    ]
    return min(ledger.refresh.due_at, *ends, *listed)
