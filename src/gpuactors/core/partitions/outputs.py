"""The outputs of the partitions, for readers outside: orders, answers, conditions. Derived, never kept."""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from gpuactors.core.partitions.machine import WITNESSES, is_fresh
from gpuactors.core.state import NodeState
from gpuactors.core.state.partitions import PartitionRecord, Partitions
from gpuactors.core.values.cause import Cause
from gpuactors.core.values.claim import ClaimUid
from gpuactors.core.values.model import DeviceKey, Token
from gpuactors.core.values.partition import INTENTS, Goal, Intent, PartitionId, PartitionState
from gpuactors.core.values.status import Conflict, Reason

_S = PartitionState


class PartitionAct(Struct, frozen=True, gc=False):
    """Run the operator's command with this goal and id, once for each number."""

    number: int
    id: PartitionId
    goal: Goal


class IntentsWanted(Struct, frozen=True, gc=False):
    """The content of the file of intents."""

    number: int
    intents: tuple[Intent, ...]


class PartitionsWanted(Struct, frozen=True, gc=False):
    """The orders to the actor of partitions. Each number is done once."""

    load: bool = False
    """True if the file of intents is to be read."""
    query: int | None = None
    act: PartitionAct | None = None
    file: IntentsWanted | None = None


NOTHING_WANTED: Final = PartitionsWanted()
"""The orders to a daemon that does not serve."""


def partitions_wanted(partitions: Partitions) -> PartitionsWanted:
    """Return the orders. An act is in them only if its intent is on disk."""
    if not partitions.is_loaded:
        return PartitionsWanted(load=True)
    act = PartitionAct(*partitions.act) if partitions.act is not None else None
    query = partitions.query if partitions.query > partitions.answered else None
    return PartitionsWanted(query=query, act=act, file=_file(partitions))


def _file(partitions: Partitions) -> IntentsWanted | None:
    if partitions.intents <= partitions.durable:
        return None
    intents = (
        Intent(record.id, record.devices, INTENTS[record.state])
        for record in partitions.records.values()
        if record.state in INTENTS
    )
    return IntentsWanted(partitions.intents, tuple(intents))


def unready(state: NodeState, owner: str) -> Conflict | None:
    """Return why a call of this owner must not be answered yet; None if it may be, as on a node where gpuactors
    activates no partitions."""
    return conflict(state.partitions, owner) if state.partitions is not None else None


def call_owner(token: Token, number: int) -> str:
    """Return the name of a call of the device plugin API as an owner, for its request of this number."""
    return f"call {token}.{number}"


def claim_owner(uid: ClaimUid) -> str:
    """Return the name of a claim as an owner."""
    return f"claim {uid}"


def conflict(partitions: Partitions, owner: str) -> Conflict | None:
    """Return why a call of this owner must not be answered yet; None if it may be. An owner whose devices are no
    partition needs none, nor does any where the fabric manager lists none. But no other partition of gpuactors may have
    one of its devices: its deactivation would come under the virtual machine."""
    users = partitions.users
    if not partitions.is_loaded:
        return _unread("the file of the partitions that gpuactors has activated", partitions.file_problem)
    if partitions.shown is None:
        return _unread("the list of the fabric manager's partitions", partitions.query_problem)
    if users is None or owner not in users.owners:
        return _unread("who has the devices of partitions", "")
    if not partitions.shown and not _is_new(partitions, users.owners[owner].asks):
        return _unread("the empty list of the fabric manager's partitions", partitions.query_problem)
    devices = users.owners[owner].devices
    touching = [r for r in partitions.records.values() if r.devices & devices]
    conflicts = [_not_ready(partitions, r, owner) for r in touching if r.devices == devices]
    conflicts += [_late(_still_active(r)) for r in touching if _is_overlapping(r, devices)]
    return next((why for why in conflicts if why is not None), None)


def _is_overlapping(record: PartitionRecord, devices: frozenset[DeviceKey]) -> bool:
    return record.devices != devices and record.state in INTENTS


def _still_active(record: PartitionRecord) -> str:
    return f"partition {record.id} of {', '.join(sorted(record.devices))} has to be deactivated before"


def _is_new(partitions: Partitions, asks: int) -> bool:
    """Return whether the last query was requested after this call had come."""
    return not partitions.query_problem and partitions.answered >= partitions.asked.get(asks, 0)


def _not_ready(partitions: Partitions, record: PartitionRecord, owner: str) -> Conflict | None:
    match record.state:
        case _S.ACTIVE:
            if record.seen and is_fresh(partitions, record, owner):
                return None
            return _late(f"whether partition {record.id} is still active is being checked")
        case _S.CHECKING if record.seen and record.votes >= WITNESSES:
            return _in_use(partitions, record)
        case _S.LOST if record.seen is False:
            return Conflict(_lost(record))
        case _:
            problem = record.problem or partitions.query_problem or partitions.file_problem
            detail = f": {problem}" if problem else ""
            return _late(f"partition {record.id} is {record.state}{detail}")


def _unread(what: str, problem: str) -> Conflict:
    detail = f": {problem}" if problem else ""
    return _late(f"{what} has not been read yet{detail}")


def _late(message: str) -> Conflict:
    return Conflict(Reason(Cause.PARTITION_LATE, message))


def _in_use(partitions: Partitions, record: PartitionRecord) -> Conflict:
    """Return the conflict with an active partition that has one of the devices. Waiting helps if it is ours."""
    active = [p.id for p in (partitions.shown or {}).values() if p.is_active and p.devices & record.devices]
    theirs = [key for key in active if key in of_others(partitions)]
    if not theirs:
        return _late(f"partition {record.id} waits until partition {', '.join(active)} is deactivated")
    return Conflict(
        Reason(
            Cause.PARTITION_IN_USE,
            f"partition {record.id} cannot be activated: partition {', '.join(theirs)} is active, and not by "
            "gpuactors. Deactivate it by the fabric manager's tool if no virtual machine uses it",
        ),
        is_final=True,
    )


def _lost(record: PartitionRecord) -> Reason:
    return Reason(
        Cause.PARTITION_LOST,
        f"partition {record.id} of {', '.join(sorted(record.devices))} is not active any more: the fabric manager was "
        "restarted?",
    )


def of_others(partitions: Partitions) -> tuple[PartitionId, ...]:
    """Return the active partitions that gpuactors has no intent for. It leaves them as they are."""
    ours = {key for key, record in partitions.records.items() if record.state in INTENTS}
    return tuple(key for key, p in (partitions.shown or {}).items() if p.is_active and key not in ours)
