"""The one owner of `Partitions`: what each event changes, and when a partition is queried or acted on (ADR 0025).

A partition is wanted while an owner has exactly its devices. Each function ends with the same fixpoint, `_settled`, so
no caller needs to know an order. One witness alone is never believed: two queries in a row must show it, or the exit of
the act and one query.

Must not know who the owners are: the device plugin and the claims say that by `users_changed`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Final, TypeAlias

from msgspec.structs import replace

from gpuactors.core.events.partitions import (
    PartitionActDone,
    PartitionIntentsRead,
    PartitionIntentsUnwritten,
    PartitionIntentsWritten,
    PartitionQueryFailed,
)
from gpuactors.core.state.partitions import PartitionRecord, Partitions, Users
from gpuactors.core.values.partition import (
    INTENTS,
    Goal,
    Intent,
    PartitionId,
    PartitionRequest,
    PartitionState,
    PartitionTrigger,
    ShownPartition,
    follow,
)

RETRY_S: Final = 5.0
"""The pause before an act that changed nothing, or a query that failed, is repeated."""

QUERY_S: Final = 60.0
"""The interval of queries while nothing waits for one: how late it is known that the fabric manager was restarted."""

WITNESSES: Final = 2
"""How many witnesses must agree: queries in a row, or a query and the exit of the act."""

_S, _E = PartitionState, PartitionTrigger

Applied: TypeAlias = (
    PartitionIntentsRead
    | PartitionIntentsWritten
    | PartitionIntentsUnwritten
    | PartitionQueryFailed
    | PartitionActDone
)
"""The events that mean the same on every host; `queried` has the other one."""

_UNDECIDED: Final = frozenset({_S.CHECKING, _S.VERIFYING, _S.ACTIVATING, _S.DEACTIVATING})
"""The states that only a query ends, or an act and a query."""

_EXPECTED: Final = {_S.ACTIVE: True, _S.LOST: False}
"""The activity that a query is expected to show in these states."""

_UNTOUCHED: Final = frozenset({_S.CHECKING, _S.RESERVED})
"""The states in which no act has been requested: whether a process has its devices open does not matter."""

_NOT_LET_GO: Final = frozenset({_S.RELEASING, _S.DEACTIVATING})
"""The states of a release, which goes on also for an owner that comes now."""


def users_changed(partitions: Partitions, users: Users | None, at: float) -> Partitions:
    """Return the partitions after a change of their users; None if they are not known."""
    return _settled(with_users(partitions, users), at)


def with_users(partitions: Partitions, users: Users | None) -> Partitions:
    """Return the partitions with these users, each call with the first query that is requested after it."""
    if users is None:
        return replace(partitions, users=None)
    tokens = {owner.asks for owner in users.owners.values() if owner.asks}
    # A query that is under way may have been answered by the fabric manager before its restart.
    asked = {token: partitions.asked.get(token, partitions.query + 1) for token in sorted(tokens)}
    return replace(partitions, users=users, asked=asked)


def stepped(partitions: Partitions, event: Applied, at: float) -> Partitions:
    """Return the partitions after an event, at the monotonic time `at` in seconds."""
    match event:
        case PartitionIntentsRead(intents):
            after = _restored(partitions, intents)
        case PartitionIntentsWritten(number):
            after = replace(partitions, durable=max(partitions.durable, number), file_problem="")
        case PartitionIntentsUnwritten(reason):
            after = replace(partitions, file_problem=reason)
        case PartitionQueryFailed(query, reason):
            if query <= partitions.answered:
                return partitions
            pause = at + RETRY_S
            after = replace(partitions, answered=query, query_problem=reason, query_at=pause)
        case PartitionActDone():
            after = _act_done(partitions, event, at)
    return _settled(after, at)


def queried(
    partitions: Partitions, query: int, shown: Mapping[PartitionId, ShownPartition], at: float
) -> Partitions:
    """Return the partitions after query number `query` has shown these, and those that only an earlier one has
    shown."""
    if query <= partitions.answered:
        return partitions
    after = replace(partitions, answered=query, shown=shown, query_problem="")
    acting = partitions.act[1] if partitions.act is not None else None
    records = {
        key: record if key == acting or query < record.since else _observed(record, query, shown)
        for key, record in partitions.records.items()
    }
    is_blocked = any(r.state is _S.CHECKING and (r.seen or not _is_shown(shown, r)) for r in records.values())
    return _settled(replace(after, records=records, query_at=at + (RETRY_S if is_blocked else QUERY_S)), at)


def ticked(partitions: Partitions, at: float) -> Partitions:
    """Return the partitions after what is due by `at`."""
    return _settled(partitions, at)


def handed_over(partitions: Partitions) -> Partitions:
    """Return the partitions of a daemon that does not serve: another one has the file of intents now. The numbers go
    on, so that no late answer is taken for that of a new request."""
    return Partitions(
        query=partitions.query,
        answered=partitions.query,
        acts=partitions.acts,
        intents=partitions.intents,
        durable=partitions.intents,
    )


def deadline(partitions: Partitions) -> float:
    """Return when `ticked` is to be called next; infinite if nothing is due by the clock."""
    if not partitions.is_loaded:
        return math.inf
    is_querying = partitions.query > partitions.answered
    acts = (record.retry_at for record in partitions.records.values() if _may_act(partitions, record))
    return min(math.inf if is_querying else partitions.query_at, *acts, math.inf)


# --- events -----------------------------------------------------------------------------------------------------------


def _restored(partitions: Partitions, intents: Iterable[Intent]) -> Partitions:
    """Return the partitions with the intents of an earlier daemon. One that was to be deactivated never had an owner
    since: its release goes on."""
    if partitions.is_loaded:
        return partitions
    restored = {
        intent.id: PartitionRecord(
            intent.id,
            intent.devices,
            _S.VERIFYING if intent.goal is Goal.ACTIVATE else _S.DEACTIVATING,
            since=partitions.query + 1,
        )
        for intent in intents
    }
    return replace(partitions, is_loaded=True, records=restored, file_problem="")


def _observed(
    record: PartitionRecord, query: int, shown: Mapping[PartitionId, ShownPartition]
) -> PartitionRecord:
    """Return the record with one more query."""
    if not _is_shown(shown, record):
        return record
    if record.state is _S.CHECKING:
        seen = any(p.is_active and (p.id == record.id or p.devices & record.devices) for p in shown.values())
    else:
        seen = shown[record.id].is_active is True
    if seen is record.seen:
        return replace(record, seen_by=query, seen_before=record.seen_by, votes=record.votes + 1)
    return replace(record, seen=seen, seen_by=query, seen_before=0, votes=1)


def _is_shown(shown: Mapping[PartitionId, ShownPartition], record: PartitionRecord) -> bool:
    """Return whether a query shows whether the partition is active. A list without it shows nothing of it."""
    return record.id in shown and shown[record.id].is_active is not None


def _act_done(partitions: Partitions, event: PartitionActDone, at: float) -> Partitions:
    if partitions.act is None or event.act != partitions.act[0]:
        return partitions
    _, key, goal = partitions.act
    after = replace(partitions, act=None)
    if (record := partitions.records.get(key)) is None:
        return after
    ended = replace(
        record,
        since=partitions.query + 1,
        seen=None,
        votes=0,
        succeeded=None if event.problem else goal,
        problem=event.problem,
        retry_at=at + RETRY_S,
    )
    return _with(after, ended)


# --- the fixpoint -----------------------------------------------------------------------------------------------------


def _settled(partitions: Partitions, at: float) -> Partitions:
    """Return the partitions when no transition is due any more, with the act and the query that are then due."""
    if not partitions.is_loaded:
        return partitions
    partitions = _with_owners(partitions)
    while (due := _next(partitions)) is not None:
        partitions = _with_owners(_moved(partitions, *due))
    return _query_requested(_act_requested(partitions, at), at)


def _with_owners(partitions: Partitions) -> Partitions:
    """Return the partitions with their present owners, and a record for each that is wanted now."""
    if partitions.users is None:
        return partitions
    owners = partitions.users.owners
    records = dict(partitions.records)
    for shown in (partitions.shown or {}).values():
        if shown.id not in records and any(o.devices == shown.devices for o in owners.values()):
            state, _ = follow(_S.ABSENT, _E.WANTED)
            records[shown.id] = PartitionRecord(shown.id, shown.devices, state, since=partitions.query + 1)
    for key, record in records.items():
        present = frozenset(
            name
            for name, owner in owners.items()
            if owner.devices == record.devices or (name in record.owners and owner.devices & record.devices)
        )
        records[key] = replace(record, owners=present)
    return replace(partitions, records=records)


def _next(partitions: Partitions) -> tuple[PartitionRecord, PartitionTrigger] | None:
    """Return the first transition that is due; None without one."""
    for record in partitions.records.values():
        trigger = _use(partitions, record) or _durable(partitions, record) or _shown(partitions, record)
        if trigger is not None:
            return record, trigger
    return None


def _use(partitions: Partitions, record: PartitionRecord) -> PartitionTrigger | None:
    """Return the trigger by who uses the partition."""
    users = partitions.users
    if users is None or record.state in _NOT_LET_GO:
        return None
    is_held = not users.held.isdisjoint(record.devices)
    if not record.owners:
        if record.state in _UNTOUCHED:
            return _E.UNWANTED
        is_decided = record.state in (_S.ACTIVATING, _S.ACTIVE) or _is_lost(record)
        return _E.UNWANTED if is_decided and not is_held else None
    starts = any(users.owners[name].asks for name in record.owners)
    return _E.START if _is_lost(record) and starts and not is_held else None


def _is_lost(record: PartitionRecord) -> bool:
    return record.state is _S.LOST and record.seen is False


def _durable(partitions: Partitions, record: PartitionRecord) -> PartitionTrigger | None:
    is_written = record.state in (_S.RESERVED, _S.RELEASING) and partitions.durable >= record.intent
    return _E.DURABLE if is_written else None


def _shown(partitions: Partitions, record: PartitionRecord) -> PartitionTrigger | None:
    """Return the trigger by what queries show, where enough witnesses agree and it changes the state."""
    if record.seen is None or record.act_due or _EXPECTED.get(record.state) is record.seen:
        return None
    goal = Goal.ACTIVATE if record.seen else Goal.DEACTIVATE
    by_exit = record.state in _UNDECIDED and record.succeeded is goal
    if record.votes + by_exit < WITNESSES:
        return None
    if record.state is _S.CHECKING:
        is_clear = not record.seen and not _overlapping(partitions, record)
        return _E.CLEAR if is_clear else None
    if record.state in _UNDECIDED or record.state in _EXPECTED:
        return _E.SHOWN_ACTIVE if record.seen else _E.SHOWN_INACTIVE
    return None


def _overlapping(partitions: Partitions, record: PartitionRecord) -> tuple[PartitionRecord, ...]:
    """Return the other partitions with an intent of ours that have one of its devices."""
    return tuple(
        other
        for other in partitions.records.values()
        if other.id != record.id and other.state is not _S.CHECKING and other.devices & record.devices
    )


def _moved(partitions: Partitions, record: PartitionRecord, trigger: PartitionTrigger) -> Partitions:
    """Return the partitions after one transition of a record."""
    state, request = follow(record.state, trigger)
    number = partitions.intents
    if request is PartitionRequest.WRITE:
        number += 1
    partitions = replace(partitions, intents=number)
    if state is _S.ABSENT:
        left = {key: other for key, other in partitions.records.items() if key != record.id}
        return replace(partitions, records=left)
    is_act = request is PartitionRequest.ACT
    after = replace(
        record,
        state=state,
        intent=number if request is PartitionRequest.WRITE else record.intent,
        act_due=is_act,
        # The first act of a goal is due at once; a repeated one after the pause.
        retry_at=record.retry_at if state is record.state else -math.inf,
    )
    return _with(partitions, after)


def _with(partitions: Partitions, record: PartitionRecord) -> Partitions:
    return replace(partitions, records={**partitions.records, record.id: record})


# --- what is requested ------------------------------------------------------------------------------------------------


def _may_act(partitions: Partitions, record: PartitionRecord) -> bool:
    """Return whether its act is due and may begin: none is being done, and no process has a device open. Not while that
    is unknown."""
    users = partitions.users
    is_free = users is not None and users.held.isdisjoint(record.devices)
    return record.act_due and partitions.act is None and is_free


def _act_requested(partitions: Partitions, at: float) -> Partitions:
    """Return the partitions with the next act, if one may begin."""
    for record in partitions.records.values():
        if record.retry_at <= at and _may_act(partitions, record):
            goal = INTENTS[record.state]
            act = (partitions.acts + 1, record.id, goal)
            begun = replace(record, act_due=False, succeeded=None, seen=None, votes=0)
            return _with(replace(partitions, acts=partitions.acts + 1, act=act), begun)
    return partitions


def _query_requested(partitions: Partitions, at: float) -> Partitions:
    """Return the partitions with a query, where one is due and none is under way."""
    if partitions.query > partitions.answered or (partitions.query_problem and partitions.query_at > at):
        return partitions
    is_due = partitions.query_at <= at or _needs_list(partitions)
    if is_due or any(_needs_query(partitions, r, at) for r in partitions.records.values()):
        return replace(partitions, query=partitions.query + 1)
    return partitions


def _needs_list(partitions: Partitions) -> bool:
    """Return whether the last list is empty, and is older than a call that waits: a fabric manager that has just
    started may not list its partitions yet."""
    is_empty = partitions.shown is not None and not partitions.shown
    return is_empty and any(query > partitions.answered for query in partitions.asked.values())


def _needs_query(partitions: Partitions, record: PartitionRecord, at: float) -> bool:
    if partitions.shown is not None and not _is_shown(partitions.shown, record):
        return False  # it is queried by the clock
    if record.state is _S.CHECKING:
        return record.votes < WITNESSES  # then the clock, as somebody else has it
    if record.state in _UNDECIDED:
        is_acting = partitions.act is not None and partitions.act[1] == record.id
        return not (record.act_due or is_acting)
    if record.state in _EXPECTED:
        is_new = all(is_fresh(partitions, record, name) for name in record.owners)
        return record.seen is not _EXPECTED[record.state] or not is_new
    return False


def is_fresh(partitions: Partitions, record: PartitionRecord, name: str) -> bool:
    """Return whether enough witnesses are of after the owner's call; true without a call. Of one from before, the
    fabric manager may have been restarted since, and then a single one would be left."""
    owner = partitions.users.owners.get(name) if partitions.users is not None else None
    if owner is None or not owner.asks:
        return True
    first = partitions.asked[owner.asks]
    queries = (record.seen_by >= first) + (record.seen_before >= first)
    by_exit = record.succeeded is (Goal.ACTIVATE if record.seen else Goal.DEACTIVATE) and record.since > first
    return queries > 0 and queries + by_exit >= WITNESSES
