"""When kubelet's ledger is read and the groups' use is polled: on request, by the clock, and sooner than by the clock.

Theory of operation. Both are requested by number, from the same counter as inspections (see `host/inspections.py`),
so that the numbers show across all three which fact is newer. At most one of each is outstanding. By the clock every
group is polled; for a call, or after a driver has come or gone, only the groups concerned are polled, and nothing new
is known of the others.

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
    """Requests a read of kubelet's ledger; if one is outstanding, another one after it. `lists`: kubelet's list of its
    pods is wanted, with this read or the first one that may ask for it."""
    if lists:
        asking = replace(state.kubelet.ledger.asking, wanted=True)
        state = with_ledger(state, replace(state.kubelet.ledger, asking=asking))
    ledger = state.kubelet.ledger
    state, refresh = _asked(state, ledger.refresh)
    if refresh.outstanding != ledger.refresh.outstanding:
        ledger = replace(ledger, asked_at=at, asking=asking_now(state, at))
    return with_ledger(state, replace(ledger, refresh=refresh))


def ask_poll(state: NodeState, groups: frozenset[int] | None = None) -> NodeState:
    """Requests a poll of these groups, or of every group that matters; if one is outstanding, another one after it, of
    all groups that are requested meanwhile."""
    polls = state.host.polls
    state, refresh = _asked(state, polls.refresh)
    if groups is not None:  # all are due as before
        refresh = refresh.due_by(polls.refresh.due_at)
    if refresh.outstanding != polls.refresh.outstanding:
        return with_polls(state, replace(polls, refresh=refresh, of=groups, again_of=None))
    if polls.refresh.again:
        groups = None if groups is None or polls.again_of is None else groups | polls.again_of
    return with_polls(state, replace(polls, refresh=refresh, again_of=groups))


def _asked(state: NodeState, refresh: Refresh) -> tuple[NodeState, Refresh]:
    last, refresh = asked(state.host.inspections.last, refresh)
    return with_inspections(state, replace(state.host.inspections, last=last)), refresh


# --- sooner than by the clock -----------------------------------------------------------------------------


def poll_brought_forward(before: NodeState, state: NodeState, at: float) -> NodeState:
    """After an event: a read of the ledger at once where an allocated function lost its driver, as its pod may have
    ended just before; a poll at once of the groups that appeared and were never polled, or lost a driver."""
    moved = bindings.changed_functions(before, state)
    state = bindings.rebound(before, state, moved)
    if _has_changed(before, state):
        state = with_polls(state, replace(state.host.polls, fast_until=at + POLL_FAST_FOR_S))
    was, now = before.host.functions, state.host.functions
    unbound = [f for a in moved if _is_bound(f := was.get(a)) and not _is_bound(now.get(a))]
    if any(device_key(function.address) in state.index.owners for function in unbound):
        state = ask_ledger(state, at)
    if over := _uses_that_are_over(state):
        polls = state.host.polls
        groups, last = dict(polls.groups), dict(polls.seen)
        for group in over:
            del groups[group], last[group]
        state = with_polls(state, replace(polls, groups=groups, seen=last))
    ledger = state.kubelet.ledger
    inspected = state.host.seen is not before.host.seen  # a result that is equal, too
    if inspected and ledger.refresh.due_at > at + limits.LEDGER_S and matters(state):
        # It was read before a device of ours was known, at the daemon's start for instance.
        state = with_ledger(state, replace(ledger, refresh=ledger.refresh.due_by(at + limits.LEDGER_S)))
    if inspected and state.host.scanned:
        polled, seen = state.index.polled, state.host.polls.groups
        never = set() if polled.keys() <= seen.keys() else polled.keys() - seen.keys()
        if unseen := never | _taken(state, unbound):
            return ask_poll(state, frozenset(unseen) if unseen != polled.keys() else None)
    return state


def polled_soon(state: NodeState, at: float, *, waited_for: bool) -> NodeState:
    """After an event, while no poll is outstanding: a poll soon where a release is expected.

    `waited_for`: a call waits for the result of a poll. Without such a call a release is expected only for
    POLL_FAST_FOR_S after the last change: an external holder that stays costs no more polls than a free group.
    """
    polls = state.host.polls
    fast = waited_for or (at < polls.fast_until and _is_wrongly_held(state))
    if fast:
        return with_polls(state, replace(polls, refresh=polls.refresh.due_by(at + POLL_FAST_S)))
    return state


def _has_changed(before: NodeState, state: NodeState) -> bool:
    """Holders or owners changed; the numbers of polls and reads are not compared."""
    was, now = before.kubelet, state.kubelet
    if any(was.orphans.get(address) != orphan for address, orphan in now.orphans.items()):
        return True
    if was.pending_allocations.keys() != now.pending_allocations.keys():
        return True
    if now.ledger.entries != was.ledger.entries or now.ledger.claims.keys() != was.ledger.claims.keys():
        return True
    groups, known = state.host.polls.groups, before.host.polls.groups
    return groups != known and (
        groups.keys() != known.keys()
        or any(use != known[group] and _use(use) != _use(known[group]) for group, use in groups.items())
    )


def _use(use: Observed) -> tuple[object, ...]:
    """The parts of a group's use that change when a process opens or closes it."""
    return use.since, use.open, use.closing_at, {h.pid for h in use.holders}


def _uses_that_are_over(state: NodeState) -> set[int]:
    """The groups of which no function is on a vfio driver any more, nor on the way from one: whatever was last seen of
    their use is over."""
    index = state.index
    gone = state.host.polls.groups.keys() - index.polled.keys()
    return {g for g in gone if not any(may_be_unbinding(f) for f in index.groups.get(g, ()))}


def _taken(state: NodeState, unbound: Iterable[PciFunction]) -> set[int]:
    """The groups of which a function has just lost its driver: a new poll must show whether it is open. `unbound`: the
    functions that are on a vfio driver no more, as they were."""
    index, found = state.index, set[int]()
    for was in unbound:
        now, group = state.host.functions.get(was.address), index.group_number(device_key(was.address))
        if (
            now is not None
            and now.driver is None
            and group is not None
            and was.address in index.polled.get(group, ())
        ):
            found.add(group)
    return found


def _is_bound(function: PciFunction | None) -> TypeGuard[PciFunction]:
    return function is not None and function.vfio_bound


def _is_wrongly_held(state: NodeState) -> bool:
    """A group is held by an external process, or by that of a pod that is gone."""
    if state.kubelet.orphans:
        return True
    index = state.index
    return not index.in_use <= index.owned.keys()


def matters(state: NodeState) -> bool:
    """One of our devices is allocated or in use, so the ledger may change without a notice to us."""
    index, kubelet, lists = state.index, state.kubelet, state.published.device_lists
    if kubelet.pending_allocations or kubelet.orphans or not index.devices.keys().isdisjoint(index.owners):
        return True
    lost = any(r in lists or r in index.by_id for r, _ in kubelet.ledger.entries)
    return lost or bool(index.in_use)


# --- by the clock -----------------------------------------------------------------------------------------


def due(state: NodeState, at: float) -> NodeState:
    """Requests the read and the poll that are due. Only the ledger shows that a granted device was not allocated."""
    if _ledger_due_at(state) <= at:
        state = ask_ledger(state, at)
    if state.host.polls.refresh.due_at <= at:
        state = ask_poll(state)
    return state


def deadline(state: NodeState) -> float:
    """When `due` will next have something to do."""
    return min(_ledger_due_at(state), state.host.polls.refresh.due_at)


def _ledger_due_at(state: NodeState) -> float:
    ledger = state.kubelet.ledger
    if ledger.refresh.outstanding is not None:
        return math.inf
    if ledger.problem is not None or not state.kubelet.pending_allocations:
        return ledger.refresh.due_at
    # Asked after every event, and of hundreds of grants after a burst of calls: only the first of each kind matters.
    grants = sorted(state.kubelet.pending_allocations.values())
    read = bisect_right(grants, ledger.read_at, key=listed_at)
    ends = grants[:1] if read else []
    # One read is for all grants of a burst of calls.
    listed = [
        max(listed_at(until), ledger.asked_at + limits.LEDGER_FRESH_S) for until in grants[read : read + 1]
    ]
    return min(ledger.refresh.due_at, *ends, *listed)
