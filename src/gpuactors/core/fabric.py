"""The part of a step about partitions of the NVLink fabric (ADR 0025): the list that names them, who uses them, and
what is logged.

Called by `step.py`; it changes nothing on a node where gpuactors activates no partitions. Must not decide when one is
activated: that is `partitions/machine.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from msgspec.structs import replace

from gpuactors.core.events import Event
from gpuactors.core.events.daemon import Ticked
from gpuactors.core.events.host import SetsObserved
from gpuactors.core.events.partitions import PartitionEvent, PartitionQueryFailed, PartitionsQueried
from gpuactors.core.host import sets
from gpuactors.core.host.usage import use_of
from gpuactors.core.kinds.sets import NO_SETS, KnownSets, SetsOfSource, SetSource
from gpuactors.core.partitions import machine
from gpuactors.core.partitions.outputs import call_owner, claim_owner
from gpuactors.core.state import NodeState
from gpuactors.core.state.claims import Claims, gpus_of
from gpuactors.core.state.partitions import PartitionOwner, Partitions, Users
from gpuactors.core.values.claim import ClaimUid
from gpuactors.core.values.claim_states import OWNING, ClaimState
from gpuactors.core.values.effects import Effect, Field, Level, Log
from gpuactors.core.values.inventory import orphans_of
from gpuactors.core.values.model import DeviceId, DeviceKey, Pod, Role
from gpuactors.core.values.owner import Allocation
from gpuactors.core.values.partition import INTENTS, PartitionId, PartitionState, ShownPartition
from gpuactors.core.values.quote import first_of

Stepped = tuple[NodeState, list[Effect]]


def applied(state: NodeState, event: PartitionEvent, at: float) -> Stepped:
    """Apply an event about partitions. A query names the sets of the fabric manager as well."""
    before, partitions, effects = state, state.partitions, list[Effect]()
    if partitions is None:
        return state, []
    match event:
        case PartitionsQueried(query, known):
            state, effects = sets.observed(state, SetsObserved(SetSource.FABRIC_MANAGER, known))
            partitions = _queried(state, partitions, query, known, at)
            # At once: which of their devices are in a partition follows from the list, and a call may go on now.
            partitions = _with_users(state, partitions, at)
        case PartitionQueryFailed(_, reason):
            state, effects = sets.observed(state, SetsObserved(SetSource.FABRIC_MANAGER, reason))
            partitions = machine.stepped(partitions, event, at)
        case _:
            partitions = machine.stepped(partitions, event, at)
    return replace(state, partitions=partitions), [*effects, *sets.refused(before, state)]


def followed(before: NodeState, state: NodeState, event: Event, at: float) -> Stepped:
    """Tell the partitions who uses them now, and what is due. `before` is the state before the event."""
    if state.partitions is None or before.partitions is None:
        return state, []
    partitions = state.partitions
    # Which GPUs a partition has depends on which are there: one may be bound after the list was read.
    if state.host.functions is not before.host.functions and (shown := _shown(state)) != partitions.shown:
        partitions = replace(partitions, shown=shown or None, query_problem="", query_at=at)
    if state.daemon.role is not Role.SERVING:
        if not partitions.is_loaded:
            return state, []
        return replace(state, partitions=machine.handed_over(partitions)), []
    partitions = _with_users(state, partitions, at)
    if isinstance(event, Ticked) and machine.deadline(partitions) <= at:
        partitions = machine.ticked(partitions, at)
    if partitions is state.partitions is before.partitions:
        return state, []
    return replace(state, partitions=partitions), [*_logged(before.partitions, partitions)]


def deadline(state: NodeState) -> float:
    """Return when a `Ticked` is due for partitions if nothing else happens; infinite if never."""
    return machine.deadline(state.partitions) if state.partitions is not None else math.inf


def _queried(state: NodeState, partitions: Partitions, query: int, known: KnownSets, at: float) -> Partitions:
    """Return the partitions after a query. A list of which no partition can be used is not empty: it shows nothing."""
    shown = _shown(state)
    if shown or not (known.partitions or known.problems):
        if partitions.users is not None:
            # First: only devices in a known partition count, and the list may name more of an owner's.
            partitions = machine.with_users(partitions, _users(state, replace(partitions, shown=shown)))
        return machine.queried(partitions, query, shown, at)
    reason = "; ".join(first_of(state.known_sets.problems))
    return machine.stepped(partitions, PartitionQueryFailed(query, reason), at)


def _shown(state: NodeState) -> Mapping[PartitionId, ShownPartition]:
    """Return the partitions of the last list whose GPUs are there, and those that were named earlier.

    One that gpuactors has an intent for is known by its number, whatever GPUs are there now."""
    assert state.partitions is not None
    records, found = state.partitions.records, dict[PartitionId, ShownPartition]()
    listed = state.host.sets.get(SetSource.FABRIC_MANAGER, SetsOfSource()).known or NO_SETS
    is_active = {PartitionId(str(one.partition_id)): one.is_active for one in listed.partitions}
    for key, earlier in (state.partitions.shown or {}).items():
        is_ours = key in records and records[key].state in INTENTS
        found[key] = replace(earlier, is_active=is_active.get(key) if is_ours else None)
    for known in state.known_sets.sets:
        if known.source is SetSource.FABRIC_MANAGER:
            key = PartitionId(known.name)
            found[key] = ShownPartition(key, frozenset(known.devices), known.is_active)
    return found


# --- who uses them ----------------------------------------------------------------------------------------------------


def _with_users(state: NodeState, partitions: Partitions, at: float) -> Partitions:
    """Return the partitions with their present users; the same object if nothing has changed."""
    users = _users(state, partitions)
    return partitions if users == partitions.users else machine.users_changed(partitions, users, at)


def _users(state: NodeState, partitions: Partitions) -> Users | None:
    """Return the users of all devices of partitions; None while not all of them are known. Without a list an owner of
    two devices may look like that of a partition of one."""
    ledger = state.kubelet.ledger
    is_known = ledger.read > 0 and ledger.source.is_whole and state.gpus.claims.is_known
    if not (is_known and state.host.scanned) or partitions.shown is None:
        return None
    devices = frozenset[DeviceKey]().union(
        *(partition.devices for partition in partitions.shown.values()),
        *(record.devices for record in partitions.records.values()),
    )
    owners = dict([*_calls(state, devices), *_pods(state, devices), *_claims(state, devices)])
    return Users(owners, frozenset(key for key in devices if _is_held(state, key)))


def _calls(state: NodeState, devices: frozenset[DeviceKey]) -> Iterator[tuple[str, PartitionOwner]]:
    """Yield each container for which a call waits."""
    for token, call in state.calls.waiting.items():
        by_id = state.index.by_id.get(call.resource, {})
        for number, request in enumerate(call.requests):
            keys = frozenset(by_id[i].key for i in request if i in by_id)
            yield call_owner(token, number), PartitionOwner(keys & devices, token)


def _pods(state: NodeState, devices: frozenset[DeviceKey]) -> Iterator[tuple[str, PartitionOwner]]:
    """Yield each pod that has devices by the device plugin API, and each grant that kubelet does not list yet."""
    having: dict[str, set[DeviceKey]] = {}
    for key in devices:
        owner = state.index.owners.get(key)
        for entry in owner.entries if owner is not None else ():
            if (name := _name(state, entry)) is not None:
                having.setdefault(name, set()).add(key)
    for name in sorted(having):
        yield name, PartitionOwner(frozenset(having[name]))


def _name(state: NodeState, entry: Allocation) -> str | None:
    """Return the name of a pod or grant; None for a claim. Kubelet admits one pod at a time, so the grants of one
    moment are of one."""
    if isinstance(entry.to, Pod):
        return f"pod {entry.to}"
    if entry.to is None and entry.resource is not None:
        until = state.kubelet.pending_allocations.get((entry.resource, DeviceId(entry.device)))
        return f"grant until {until}"
    return None


def _claims(state: NodeState, devices: frozenset[DeviceKey]) -> Iterator[tuple[str, PartitionOwner]]:
    """Yield each claim from its reservation until its devices have been returned. What NVIDIA's driver has prepared, it
    has activated as well."""
    claims = state.gpus.claims
    for uid, entry in claims.entries.items():
        if entry.state in OWNING and entry.state is not ClaimState.TAKEN_OVER:
            keys = frozenset(gpu.key for gpu in gpus_of(entry).gpus)
            yield claim_owner(uid), PartitionOwner(keys & devices, _asks(claims, uid))


def _asks(claims: Claims, uid: ClaimUid) -> int:
    """Return the last prepare that waits for a claim; 0 without."""
    return max(
        (token for token, call in claims.calls.items() if call.uid == uid and call.prepares), default=0
    )


def _is_held(state: NodeState, key: DeviceKey) -> bool:
    """Return whether a process has the device's group open, or that is not known: it was not polled, or its pod has
    left since the last poll. A group that is on no vfio driver cannot be opened."""
    device = state.index.present.get(key)
    if device is None or device.group not in state.index.polled:
        return False
    use = use_of(state, device)
    return use is None or use.in_use or bool(orphans_of(device, state.kubelet.orphans))


# --- what is logged ---------------------------------------------------------------------------------------------------


def _logged(before: Partitions, partitions: Partitions) -> Iterator[Effect]:
    for key, record in {**before.records, **partitions.records}.items():
        was, now = before.records.get(key), partitions.records.get(key)
        state = now.state if now is not None else PartitionState.ABSENT
        if state is not (was.state if was is not None else PartitionState.ABSENT):
            fields: dict[str, Field] = {"partition": key, "devices": tuple(sorted(record.devices))}
            if state is PartitionState.LOST:
                yield Log(Level.WARNING, "partition.lost", fields)
            else:
                is_over = now is None and was is not None and was.state in INTENTS
                is_news = is_over or state is PartitionState.ACTIVE
                level = Level.INFO if is_news else Level.DEBUG
                yield Log(level, "partition.changed", {**fields, "state": str(state)})
        if now is not None and now.problem and (was is None or was.problem != now.problem):
            yield Log(Level.WARNING, "partition.failed", {"partition": str(key), "reason": now.problem})
    if partitions.file_problem and partitions.file_problem != before.file_problem:
        yield Log(Level.WARNING, "partitions.unwritten", {"reason": partitions.file_problem})
