"""What a transition of a claim requests: the number of a read, of a checkpoint, or of acts.

Every change of an entry's state goes through `moved`, and so through the table. An act gets its number only in a
transition that follows the checkpoint with its intent (ADR 0009).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from itertools import count

from gpuactors.core.assessment.cause import Cause
from gpuactors.core.dra.claim import ClaimUid
from gpuactors.core.dra.entries import FILES, Claims, Entry, one_of_each_group, with_entry
from gpuactors.core.dra.offered import device_name
from gpuactors.core.dra.table import ENDED, OWNING, ClaimState, NoTransitionError, On, Request, follow
from gpuactors.core.effects import Effect, Field, Level, Log, Refusal, Refused
from gpuactors.core.identity import claimed_address
from gpuactors.core.model import AdminAccess, ClaimedDevice, PciAddress
from gpuactors.core.state import NodeState

Stepped = tuple[NodeState, list[Effect]]


def with_claims(state: NodeState, claims: Claims) -> NodeState:
    return replace(state, claims=claims) if claims is not state.claims else state


def moved(claims: Claims, entry: Entry, on: On, at: float = 0.0) -> Claims:
    """`claims` after a transition of one entry, with what that requests. Raises `NoTransitionError`."""
    try:
        after, request = follow(entry.state, on)
    except NoTransitionError as error:
        error.uid = entry.name.uid
        raise
    if after in ENDED and after is not entry.state:
        entry, claims = replace(blank(entry), retry_at=math.inf), read_over(claims, entry.name.uid)
    entry = replace(entry, state=after, broken="")
    match request:
        case Request.NOTHING:
            return with_entry(claims, entry)
        case Request.FETCH:
            entry = replace(blank(entry), retry_at=math.inf)
            return with_read(with_entry(claims, entry), entry.name.uid)
        case Request.CHECKPOINT | Request.FORGET:
            number = claims.last + 1
            entry = replace(entry, intent=number, acts={}, retry_at=math.inf, collect_at=math.inf, problem="")
            claims = read_over(claims, entry.name.uid)
            return with_entry(replace(claims, last=number, checkpoint=number), entry)
        case Request.BIND:
            acts = [str(gpu.address) for gpu in one_of_each_group(entry.gpus)]
            # Why the last try failed stays known until it is done: it is the error if the wait lasts too long.
            entry = replace(entry, retry_at=math.inf)
            return with_acts(claims, entry, acts) if acts else moved(claims, entry, On.DONE)
        case Request.WRITE:
            return with_acts(claims, replace(entry, problem="", retry_at=math.inf), [FILES])
        case Request.CLEAR:
            return with_acts(claims, replace(entry, retry_at=math.inf), [FILES])
        case Request.UNDO:  # which devices are returned follows from the whole state: `_undone`
            return with_entry(claims, entry)


def set_aside(state: NodeState, error: NoTransitionError) -> Stepped:
    """`state` with the claim set aside for which the table lacks a row: what it has stays its own, no act of it stands,
    it goes on by itself no further, and a call about it is another try. The other claims are served. Under tests and
    simulation raises `error`."""
    if state.daemon.settings.strict:
        raise error
    sentence = f"{error}, which is a bug of gpuactors: report it with the journal. The claim is left as it is"
    claims, entry = state.claims, state.claims.entries.get(ClaimUid(error.uid))
    fields: dict[str, Field] = {"uid": error.uid, "reason": sentence}
    if entry is not None:
        fields["claim"] = str(entry.name)
        claims = with_entry(claims, replace(entry, broken=sentence, acts={}, retry_at=math.inf))
    return with_claims(state, claims), [Log(Level.ERROR, "claim.broken", fields)]


def attempted(state: NodeState, entry: Entry, on: On) -> Stepped:
    """`state` after a transition of one entry, or with that set aside. Raises as `set_aside`."""
    try:
        return with_claims(state, moved(state.claims, entry, on)), []
    except NoTransitionError as error:
        return set_aside(with_claims(state, with_entry(state.claims, entry)), error)


def blank(entry: Entry) -> Entry:
    """The entry of a claim that has nothing here (any more)."""
    return Entry(entry.name, entry.state, entry.order)


def with_read(claims: Claims, uid: ClaimUid) -> Claims:
    number = claims.last + 1
    return replace(claims, last=number, reads={**claims.reads, uid: number})


def read_over(claims: Claims, uid: ClaimUid) -> Claims:
    return replace(claims, reads={u: n for u, n in claims.reads.items() if u != uid})


def with_acts(claims: Claims, entry: Entry, keys: Iterable[str]) -> Claims:
    acts = dict(zip(keys, count(claims.last + 1), strict=False))
    return with_entry(replace(claims, last=claims.last + len(acts)), replace(entry, acts=acts))


def with_reserved(claims: Claims) -> Claims:
    """`claims` with the devices that belong to claims; the same object while these are the same."""
    if (settings := claims.settings) is None:
        return claims
    owning = [entry for entry in claims.entries.values() if entry.state in OWNING]
    owners = {a: r.claim for a, r in claims.returned.items()}
    owners |= {gpu.address: entry.name for entry in owning for gpu in entry.gpus}
    reserved = {
        a: ClaimedDevice(settings.driver, settings.pool, device_name(a), str(name), None)
        for a, name in owners.items()
    }
    admin = frozenset(
        ((settings.driver, str(entry.name)), address)
        for entry in owning
        for address in _with_admin_access(entry)
    ) | _still_listed(claims)
    if reserved == claims.reserved and admin == claims.admin:
        return claims
    return replace(claims, reserved=claims.reserved if reserved == claims.reserved else reserved, admin=admin)


def _still_listed(claims: Claims) -> frozenset[AdminAccess]:
    """Admin access that has ended: kubelet lists it a little longer."""
    ended = {str(e.name) for e in claims.entries.values() if e.state is ClaimState.TOMBSTONE}
    return frozenset(access for access in claims.admin if access[0][1] in ended)


def _with_admin_access(entry: Entry) -> set[PciAddress]:
    results = entry.claim.results or () if entry.claim is not None else ()
    named = {address for r in results if (address := claimed_address(r.device)) is not None}
    return named - {gpu.address for gpu in entry.gpus}


def refusal(reason: str) -> Refused:
    return Refused(Refusal.FAILED_PRECONDITION, reason, (Cause.CLAIMED_ELSEWHERE,))
