"""Kubelet's ledger: which pod has which device, by the reads of it that came back.

Theory of operation. A device that leaves the ledger is an orphan until a later poll finds its group free, or in use by
another process than its pod's: after a forced deletion the pod leaves the ledger within milliseconds while the process
runs on. A device that Allocate granted is a pending allocation until the ledger lists it. Entries that did not change
stay the same objects: derived values then need only a comparison by identity (see `devices/index.py`).

Must not judge: what this means for a device is decided in `assessment/`.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping
from operator import attrgetter
from typing import Final

from msgspec.structs import replace

from gpuactors import limits
from gpuactors.core.events.kubelet import LedgerRead, LedgerUnreadable
from gpuactors.core.host import asking, schedule
from gpuactors.core.kinds.table import key_of
from gpuactors.core.ledger import books as file_books
from gpuactors.core.ledger import kubelet_startup
from gpuactors.core.ledger.identity import resolved
from gpuactors.core.requests import Refresh
from gpuactors.core.state import NodeState, with_ledger
from gpuactors.core.values.cdi import CdiSpecs
from gpuactors.core.values.model import (
    Asking,
    ClaimedDevice,
    DeviceId,
    DeviceKey,
    Ledger,
    LedgerEntry,
    LedgerFile,
    Orphan,
    Pod,
    PodClaim,
    ResourceName,
    Role,
)

LIST_HELD_S: Final = 1.0
"""How often it is checked whether List may be asked for, in seconds, while one is wanted and an Allocate is in
flight."""

LEDGER_SETTLING_S: Final = 1.0
"""How often kubelet's ledger is read while a kubelet that has just started does not list everything that its file
names: a device that it has listed once counts as ended as soon as it is missing, so each read leaves less to the
file."""


def first_ledger(number: int, *, lists: bool) -> Ledger:
    """Return the ledger at the start: one read is outstanding. `lists`: it may ask for List."""
    return Ledger(
        read=0,
        entries={},
        claims={},
        problem=None,
        tried=False,
        refresh=Refresh().asked(number),
        asking=Asking(lists=lists, wanted=not lists),
    )


def ledger_read(state: NodeState, event: LedgerRead, at: float) -> NodeState:
    """Record a read of the ledger. A pod that left it may still hold its device."""
    before = state.kubelet.ledger
    if event.read != before.refresh.outstanding:
        return state
    # The known objects, if they are equal: so derived values need only a comparison by identity.
    counted = kubelet_startup.counted(
        before,
        state.kubelet.pending_allocations,
        event,
        at,
        device_plugin=state.daemon.settings.device_plugin,
    )
    entries = _entries(before.entries, counted.entries)
    is_settling = counted.source.is_settling
    names_owners = not event.passive or event.file is not None
    ledger = replace(
        _with_dynamic_resources(before, event, at),
        read=event.read,
        entries=entries,
        tried=True,
        names_owners=before.names_owners or names_owners,
        refresh=before.refresh.answered(),
        read_at=before.asked_at,
        done=event.read,
        source=counted.source,
        young=counted.young,
        books=counted.books,
    )
    ledger = replace(ledger, asking=replace(ledger.asking, has_get=event.has_get and before.asking.has_get))
    if not event.passive:
        listed = replace(ledger.asking, listed=event.read, done=event.read, came=counted.books.came)
        if event.kubelet is not None and listed.listed_at < before.asked_at:
            listed = replace(listed, listed_at=before.asked_at)
        elif listed.listed_at == -math.inf:  # the first one, which was requested before there was a time
            listed = replace(listed, listed_at=at)
        ledger = replace(ledger, problem=None, asking=listed)
    if event.file is not None:
        ledger = _with_answers(ledger, event.file)
    ledger = _with_cdi(ledger, event.cdi)
    after = with_ledger(state, ledger)
    pending = _still_pending(after, is_settling, at)
    after = resolved(state, replace(after, kubelet=replace(after.kubelet, pending_allocations=pending)))
    new_orphans = _new_orphans(state, entries, event.read)
    orphans = {**_still_orphans(after), **new_orphans}
    if names_owners:  # else nobody has said which pods there are
        state = replace(after, published=replace(after.published, served=_still_served(after, is_settling)))
    else:
        state = after
    if orphans != state.kubelet.orphans:
        state = replace(state, kubelet=replace(state.kubelet, orphans=orphans))
    period_s = LEDGER_SETTLING_S if is_settling else limits.LEDGER_S
    due_at = at + (period_s if schedule.matters(state) else limits.LEDGER_QUIET_S)
    due_at = min(due_at, max(asking.list_due_at(state), at + LIST_HELD_S))
    wished = before.refresh.due_at if before.refresh.due_at > at else math.inf
    refresh = state.kubelet.ledger.refresh.due_by(min(due_at, wished))
    state = with_ledger(state, replace(state.kubelet.ledger, refresh=refresh))
    if groups := state.index.group_numbers(new_orphans):
        state = schedule.ask_poll(state, groups)
    return schedule.ask_ledger(state, at) if before.refresh.again else state


def ledger_unreadable(state: NodeState, event: LedgerUnreadable, at: float) -> NodeState:
    """Handle a failed read: keep the last known entries. Take the file's answers to Allocate, and whether its pods
    live, if the file could be read."""
    before = state.kubelet.ledger
    if event.read != before.refresh.outstanding:
        return state
    ledger = replace(
        before,
        problem=event.reason,
        tried=True,
        refresh=before.refresh.answered(at + limits.LEDGER_RETRY_S),
        done=event.read,
    )
    if before.asking.lists:
        ledger = replace(ledger, asking=replace(before.asking, done=event.read, wanted=True))
    if event.file is not None:
        # What kubelet answered to Get once is older than what the kernel shows now.
        books = replace(ledger.books, confirmed=frozenset())
        books = file_books.with_lives(books, event.file, event.pods, at, asked_at=before.asked_at)
        ledger = _with_answers(replace(ledger, books=books), event.file)
    ledger = _with_cdi(ledger, event.cdi)
    state = with_ledger(state, ledger)
    return schedule.ask_ledger(state, at) if before.refresh.again else state


def allocated_ids(
    state: NodeState, resources: Container[ResourceName]
) -> Mapping[ResourceName, frozenset[DeviceId]]:
    """Return the IDs of these resources that are allocated to pods, by kubelet's ledger or an answer of gpuactors."""
    by_resource: dict[ResourceName, frozenset[DeviceId]] = {
        r: ids for r, ids in state.index.given.items() if r in resources
    }
    pending = state.kubelet.pending_allocations
    for resource in {resource for resource, _ in pending if resource in resources}:
        granted = {device_id for named, device_id in pending if named == resource}
        by_resource[resource] = by_resource.get(resource, frozenset()) | granted
    return by_resource


def called(state: NodeState, at: float) -> NodeState:
    """Record that kubelet asks for a claim: it knows its pods."""
    young = kubelet_startup.called(state.kubelet.ledger.young, at)
    if young is state.kubelet.ledger.young:
        return state
    return with_ledger(state, replace(state.kubelet.ledger, young=young))


def _entries(
    before: Mapping[tuple[ResourceName, DeviceId], Pod], counted: Iterable[LedgerEntry]
) -> Mapping[tuple[ResourceName, DeviceId], Pod]:
    """Return the valid entries, with the objects of `before` where they are equal."""
    entries: dict[tuple[ResourceName, DeviceId], Pod] = {}
    is_same = True
    for entry in counted:
        name = entry.resource, entry.device
        if (pod := before.get(name)) == entry.pod and pod is not None:
            entries[name] = pod
        else:
            entries[name], is_same = entry.pod, False
    return before if is_same and len(entries) == len(before) else entries


def _with_dynamic_resources(ledger: Ledger, event: LedgerRead, at: float) -> Ledger:
    """Record the claims that kubelet lists for pods. A read without List keeps those of the last List, except those
    that a pod no longer has by kubelet's answer to Get; then a List is wanted, for what follows of that."""
    if not event.passive:
        unplaced = frozenset([claim for claim in event.claims if key_of(claim.device) is None])
        return replace(
            ledger,
            claims=_claims(event.claims),
            claimed=frozenset((claim.driver, claim.claim) for claim in event.claims),
            unplaced=unplaced,
            without_gpu=frozenset(
                (*event.waiting, *(PodClaim(c.claim, c.pod) for c in unplaced if c.pod is not None))
            ),
        )
    answers = {answer.pod: answer.claims for answer in event.answers}
    listed = [*(claim for of_device in ledger.claims.values() for claim in of_device), *ledger.unplaced]
    remaining = [c for c in listed if c.pod is None or c.pod not in answers or c in answers[c.pod]]
    if len(remaining) == len(listed) or at < ledger.young.settled_at:
        return ledger
    return replace(
        ledger,
        claims=_claims(remaining),
        unplaced=frozenset([c for c in remaining if c in ledger.unplaced]),
        asking=replace(ledger.asking, wanted=True),
    )


def _claims(claimed: Iterable[ClaimedDevice]) -> dict[DeviceKey, tuple[ClaimedDevice, ...]]:
    """Return the claims of each device, sorted: a device may have several, of other drivers or with admin access."""
    by_device: dict[DeviceKey, list[ClaimedDevice]] = {}
    for claim in sorted({*claimed}, key=lambda c: (c.driver, c.claim, str(c.pod))):
        if (address := key_of(claim.device)) is not None:
            by_device.setdefault(address, []).append(claim)
    return {address: tuple(claims) for address, claims in by_device.items()}


def _with_answers(ledger: Ledger, file: LedgerFile) -> Ledger:
    """Record the answers to Allocate in kubelet's file. While it cannot be read, its last contents are used."""
    nodes = {(answer.resource, answer.device): answer.nodes for answer in file.cached}
    return replace(ledger, cached=nodes, damaged=file.damaged)


def _with_cdi(ledger: Ledger, read: CdiSpecs | None) -> Ledger:
    """Record what was read of the CDI directory. Keep a removed file while kubelet lists its claim: the removal does
    not show that the claim has ended."""
    if read is None:
        return ledger
    there = {spec.path for spec in read.specs}
    listed = {cdi_id for claim in ledger.unplaced for cdi_id in claim.cdi_ids}
    removed = [s for s in ledger.cdi.specs if s.path not in there and not listed.isdisjoint(s.devices)]
    specs = tuple(sorted((*read.specs, *removed), key=attrgetter("path"))) if removed else read.specs
    return replace(ledger, cdi=CdiSpecs(specs, read.problem))


def _still_served(state: NodeState, is_settling: bool) -> Mapping[ResourceName, frozenset[str]]:
    """Return the resources that are ours: those that are listed, and those that an earlier daemon served while a pod
    has a device of them. All of them stay after a kubelet's start: it may not know its pods yet."""
    before, lists = state.published.served, state.published.device_lists
    if is_settling or state.daemon.role is not Role.SERVING:
        return before  # the daemon that serves may allocate more of them until this one takes over
    if before.keys() <= lists.keys():
        return before
    had = {resource for resource, _ in state.kubelet.ledger.entries}
    return {r: models for r, models in before.items() if r in had or r in lists}


def _new_orphans(
    state: NodeState, entries: Mapping[tuple[ResourceName, DeviceId], Pod], read: int
) -> dict[DeviceKey, Orphan]:
    """Return the devices that had a pod in the ledger of `state`, and by these entries have none or another one."""
    had = state.kubelet.ledger.entries
    # Most entries of a ledger are other plugins' and mean no device here.
    names = sorted(
        n for n, pod in had.items() if n in state.kubelet.resolved and _is_gone(pod, entries.get(n))
    )
    return {
        (address := state.kubelet.resolved[name].key): Orphan(had[name], read, _use_of_pod(state, address))
        for name in names
    }


def _use_of_pod(state: NodeState, device: DeviceKey) -> int | None:
    group = state.index.group_number(device)
    use = state.host.polls.groups.get(group) if group is not None else None
    return use.since if use is not None and use.in_use and use.since < state.kubelet.ledger.read else None


def _still_orphans(state: NodeState) -> dict[DeviceKey, Orphan]:
    """Return the orphans whose pod has not come back to the ledger by any ID of the device."""
    if not state.kubelet.orphans:
        return {}
    pods: dict[DeviceKey, list[Pod]] = {}
    for name, target in state.kubelet.resolved.items():
        if (pod := state.kubelet.ledger.entries.get(name)) is not None:
            pods.setdefault(target.key, []).append(pod)
    return {
        a: d for a, d in state.kubelet.orphans.items() if all(_is_gone(d.pod, pod) for pod in pods.get(a, ()))
    }


def _still_pending(
    state: NodeState, is_settling: bool, at: float
) -> dict[tuple[ResourceName, DeviceId], float]:
    """Return the devices that Allocate granted and that kubelet does not list yet.

    Kubelet lists a device as soon as Allocate is answered: one that it does not list some time after that was released
    again, or its pod has ended already. Its file has it only when the container has all its devices, which may take
    another plugin some time. A kubelet that has just started may not know its pods yet.
    """
    ledger = state.kubelet.ledger
    listed = asking.listed_at if ledger.asking.listed == ledger.read else asking.written_at
    return {
        name: until
        for name, until in state.kubelet.pending_allocations.items()
        if name not in ledger.entries and until > at and (is_settling or ledger.read_at < listed(until))
    }


def _is_gone(before: Pod, now: Pod | None) -> bool:
    """Return whether a device has no pod any more, or another one. PodResources gives names, the checkpoint file UIDs:
    where the two cannot be compared it is the same pod."""
    if now is None:
        return True
    if before.uid and now.uid:
        return before.uid != now.uid
    names = (before.namespace, before.name), (now.namespace, now.name)
    return bool(before.name and now.name) and names[0] != names[1]
