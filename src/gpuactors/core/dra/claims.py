"""The claims of this node: what each event means for them.

What follows from the state by itself after each event, the answers included, is in `progress.py`; what a transition
requests in `transitions.py`; the transitions themselves in `table.py`. Must not touch anything: the actors do.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from gpuactors import limits
from gpuactors.core import inspections, schedule
from gpuactors.core.dra import config, prebound
from gpuactors.core.dra.claim import (
    ActFault,
    BoundFunction,
    Claim,
    ClaimName,
)
from gpuactors.core.dra.entries import (
    ClaimCall,
    ClaimedGpu,
    Claims,
    ClaimSettings,
    Entry,
    Returned,
    load_of,
    with_entry,
)
from gpuactors.core.dra.exclusion import (
    allocated_devices,
    exclusive_devices,
    not_given,
    with_companions,
)
from gpuactors.core.dra.names import is_subdomain, is_uid
from gpuactors.core.dra.progress import not_prepared
from gpuactors.core.dra.slices import Publication
from gpuactors.core.dra.table import OWNING, ClaimState, On
from gpuactors.core.dra.transitions import (
    attempted,
    moved,
    read_over,
    refusal,
    with_claims,
    with_read,
    with_reserved,
)
from gpuactors.core.effects import Effect, Field, Level, Log, Refused, Reply
from gpuactors.core.events import (
    ActDone,
    ActFailed,
    CheckpointRead,
    CheckpointRefused,
    CheckpointUnwritten,
    CheckpointWritten,
    ClaimMissing,
    ClaimRead,
    ClaimUnreadable,
    PrepareAsked,
    UnprepareAsked,
)
from gpuactors.core.identity import claimed_address
from gpuactors.core.model import PciAddress, Role, Token
from gpuactors.core.quote import quoted_id
from gpuactors.core.state import NodeState, with_inspections

Stepped = tuple[NodeState, list[Effect]]


_COLLECTED: Final = OWNING - {ClaimState.RELEASING}
"""The states in which a claim has its devices until an unprepare comes: also one that is never prepared, as a process
has its GPU open, or the disk is full."""


_TRIED_AGAIN: Final = (
    ClaimState.RELEASING,
    ClaimState.CLEARING,
    ClaimState.PREPARED,
    ClaimState.VERIFYING,
)
"""The states in which an act that failed is tried again, whatever failed."""


_PASSING: Final = (ActFault.BLOCKED, ActFault.HANGS, ActFault.IN_USE)
"""Why an act could not be done yet."""


def checkpoint_read(state: NodeState, event: CheckpointRead) -> Stepped:
    """At the daemon's start, and again when a predecessor has handed over. Of a claim that was under way it is not
    known how far its act came: it is requested again, and goes on from what it finds."""
    settings = state.claims.settings
    if settings is None or event.load < load_of(state.daemon.role):
        return state, []
    claims = replace(
        state.claims,
        loaded=True,
        unserved="",
        entries={},
        reads={},
        first_drivers={f.address: f for f in event.first_drivers},
        acted=frozenset(f.address for f in event.first_drivers),
    )
    state, lines = with_claims(state, claims), list[Effect]()
    for stored in event.entries:
        claims = replace(state.claims, last=state.claims.last + 1)
        entry = Entry(
            stored.name,
            stored.state,
            order=claims.last,
            claim=stored.claim,
            gpus=tuple(_with_operators_word(settings, gpu) for gpu in stored.gpus),
            bound=stored.bound,
        )
        if stored.claim is None and stored.state is not ClaimState.RELEASING:
            # The checkpoint is lost, and it was found out from its files.
            stopped = replace(entry, state=ClaimState.STOPPED, problem="the checkpoint is lost")
            state = with_claims(state, with_read(with_entry(claims, stopped), entry.name.uid))
        else:
            state, broken = attempted(with_claims(state, claims), entry, On.RESTORED)
            lines += broken
    level = Level.WARNING if event.warning else Level.INFO
    fields: dict[str, Field] = {"claims": len(event.entries)}
    if event.warning:
        fields["reason"] = event.warning
    return with_claims(state, with_reserved(state.claims)), [Log(level, "checkpoint.read", fields), *lines]


def _with_operators_word(settings: ClaimSettings, gpu: ClaimedGpu) -> ClaimedGpu:
    """What the operator names now stays on vfio, also where the claim was prepared before."""
    functions = tuple(replace(f, vfio=f.vfio or f.address in settings.operator) for f in gpu.functions)
    if gpu.stays or gpu.address not in settings.operator:
        return replace(gpu, functions=functions)
    decided = prebound.decide(gpu.address, None, operator=settings.operator)
    return replace(gpu, functions=functions, stays=decided.sentence)


def checkpoint_refused(state: NodeState, event: CheckpointRefused) -> Stepped:
    """No claim is served, and nothing is touched. Other claims' devices are known from kubelet's ledger only."""
    level = Level.DEBUG if state.claims.unserved == event.reason else Level.ERROR
    claims = replace(state.claims, loaded=True, unserved=event.reason)
    return with_claims(state, claims), [Log(level, "claims.unserved", {"reason": event.reason})]


# --- calls ------------------------------------------------------------------------------------------------


def prepare_asked(state: NodeState, event: PrepareAsked, at: float) -> Stepped:
    """Kubelet wants a claim prepared. A repeated call joins what is under way."""
    if (refused := _refused_at_once(state, event.claim)) is not None:
        return state, [Reply(event.token, refused)]
    claims = _with_call(
        state.claims, event.token, ClaimCall(event.claim.uid, True, at + limits.CLAIM_ANSWER_S)
    )
    entry = _entry_of(claims, event.claim)
    if entry.state is ClaimState.STOPPED and entry.claim is None:
        return with_claims(
            state, claims if entry.name.uid in claims.reads else with_read(claims, entry.name.uid)
        ), []
    if entry.state is ClaimState.PREPARED:
        entry = replace(entry, since=state.host.inspections.last)
        return _looked_at_again(with_claims(state, moved(claims, entry, On.PREPARE)), entry, at), []
    return with_claims(state, moved(claims, entry, On.PREPARE)), []


def unprepare_asked(state: NodeState, event: UnprepareAsked, at: float) -> Stepped:
    """Kubelet wants nothing to be left of a claim. It ends the prepares of this claim that came before it."""
    if (refused := _refused_at_once(state, event.claim)) is not None:
        return state, [Reply(event.token, refused)]
    over = refusal("it was unprepared while it was being prepared")
    waiting = {t: c for t, c in state.claims.calls.items() if c.uid == event.claim.uid and c.prepares}
    claims = replace(state.claims, calls={t: c for t, c in state.claims.calls.items() if t not in waiting})
    claims = _with_call(claims, event.token, ClaimCall(event.claim.uid, False, at + limits.CLAIM_ANSWER_S))
    claims = moved(claims, _entry_of(claims, event.claim), On.UNPREPARE, at)
    return with_claims(state, claims), [Reply(token, over) for token in waiting]


def abandoned(state: NodeState, token: Token) -> NodeState:
    """No caller waits for this answer any more. What is under way goes on."""
    if token not in state.claims.calls:
        return state
    calls = {t: c for t, c in state.claims.calls.items() if t != token}
    return with_claims(state, replace(state.claims, calls=calls))


def handed_over(state: NodeState) -> Stepped:
    """Refuses every call that still waits: kubelet asks the successor."""
    refused = refusal("gpuactors is handing over to its successor: ask again")
    replies: list[Effect] = [Reply(token, refused) for token in state.claims.calls]
    return with_claims(state, replace(state.claims, calls={})) if replies else state, replies


def _refused_at_once(state: NodeState, claim: ClaimName) -> Refused | None:
    if state.claims.settings is None:
        return refusal("this daemon serves no claims (--dra off)")
    if state.claims.unserved:
        return refusal(state.claims.unserved)
    if state.daemon.stopping or state.daemon.role is not Role.SERVING:
        return refusal("gpuactors is stopping: ask again")
    if not state.claims.loaded:
        return refusal("the checkpoint of the claims is being read: ask again")
    if not (is_uid(claim.uid) and is_subdomain(claim.name) and is_subdomain(claim.namespace)):
        return refusal(
            f"no claim is named {quoted_id(claim.namespace)}/{quoted_id(claim.name)}, UID {quoted_id(claim.uid)}: "
            "no path can be made of that"
        )
    return None


def _entry_of(claims: Claims, name: ClaimName) -> Entry:
    known = claims.entries.get(name.uid)
    return known if known is not None else Entry(name, ClaimState.ABSENT, order=claims.last + 1)


def _with_call(claims: Claims, token: Token, call: ClaimCall) -> Claims:
    return replace(claims, calls={**claims.calls, token: call})


# --- what the API server says -------------------------------------------------------------------------------


def read(state: NodeState, event: ClaimRead, at: float) -> Stepped:
    """The API server has the claim, by the UID that was asked for."""
    if (entry := _of_read(state.claims, event.number)) is None:
        return state, []
    claims = read_over(state.claims, entry.name.uid)
    if entry.claim is None and entry.state is ClaimState.STOPPED:
        return with_claims(state, _found_again(state, claims, entry, event.claim)), []
    if entry.state is not ClaimState.FETCHING:  # whether it still exists was asked
        again = replace(entry, missing=0, collect_at=at + limits.CLAIM_FOUND_S)
        return with_claims(state, with_entry(claims, again)), []
    wanted = _refused_by_content(state, event.claim)
    if wanted:
        return not_prepared(with_claims(state, claims), entry, wanted)
    since = state.host.inspections.last
    claims = moved(claims, replace(entry, claim=event.claim, since=since, problem=""), On.FETCHED)
    return _looked_at(with_claims(state, claims), event.claim, at), []


def _found_again(state: NodeState, claims: Claims, entry: Entry, claim: Claim) -> Claims:
    """A claim whose entry was found out from its files. These name devices with admin access as well."""
    if wanted := _refused_by_content(state, claim):
        return with_entry(claims, replace(entry, problem=wanted))
    own = {claimed_address(name) for name in exclusive_devices(claim)}
    gpus = tuple(gpu for gpu in entry.gpus if gpu.address in own)
    return moved(claims, replace(entry, claim=claim, gpus=gpus), On.FETCHED)


def missing(state: NodeState, event: ClaimMissing, at: float) -> Stepped:
    """The API server has no such claim, or another one of that name."""
    if (entry := _of_read(state.claims, event.number)) is None:
        return state, []
    claims = read_over(state.claims, entry.name.uid)
    if entry.state is ClaimState.FETCHING:
        return not_prepared(with_claims(state, claims), entry, event.reason)
    if entry.state not in _COLLECTED:
        return with_claims(state, claims), []
    if entry.missing == 0 or not _is_unlisted(state, entry):
        counted = int(_is_unlisted(state, entry))
        again = replace(entry, missing=counted, collect_at=at + limits.CLAIM_COLLECT_S)
        return with_claims(state, with_entry(claims, again)), []
    line = Log(
        Level.WARNING,
        "claim.collected",
        {
            "claim": str(entry.name),
            "uid": entry.name.uid,
            "reason": f"{event.reason}, twice, and kubelet lists it for no pod; its unprepare never came",
        },
    )
    return with_claims(state, moved(claims, entry, On.UNPREPARE, at)), [line]


def unreadable(state: NodeState, event: ClaimUnreadable, at: float) -> NodeState:
    """The API server did not answer, or not with the claim: nothing follows from that but another try."""
    if (entry := _of_read(state.claims, event.number)) is None:
        return state
    if entry.claim is None:
        entry = replace(entry, problem=event.reason, retry_at=at + limits.CLAIM_READ_RETRY_S)
    else:
        entry = replace(entry, collect_at=at + limits.CLAIM_COLLECT_S)
    return with_claims(state, with_entry(read_over(state.claims, entry.name.uid), entry))


def _of_read(claims: Claims, number: int) -> Entry | None:
    uid = next((u for u, n in claims.reads.items() if n == number), None)
    return claims.entries.get(uid) if uid is not None else None


def _refused_by_content(state: NodeState, claim: Claim) -> str:
    """Why a claim cannot be prepared whatever else happens, as a sentence; empty if it can."""
    if claim.results is None:
        return "the claim is not allocated"
    if not claim.results:
        return "the claim has no device of this driver on this node"
    found = config.chosen(claim)
    if isinstance(found, config.ConfigFault):
        return found.sentence
    return not_given(state, allocated_devices(claim)) if state.host.scanned else ""


def _looked_at(state: NodeState, claim: Claim, at: float) -> NodeState:
    """`state` with fresh inspections, polls and a read of the ledger requested for the claim's devices."""
    addresses = [a for name in exclusive_devices(claim) if (a := claimed_address(name)) is not None]
    return _looked(state, addresses, frozenset(), at)


def _looked_at_again(state: NodeState, entry: Entry, at: float) -> NodeState:
    """The same of a claim that has its devices: also of a function that was not there when it was last looked for."""
    functions = frozenset(f.address for gpu in entry.gpus for f in gpu.functions)
    return _looked(state, [gpu.address for gpu in entry.gpus], functions, at)


def _looked(
    state: NodeState, addresses: list[PciAddress], others: frozenset[PciAddress], at: float
) -> NodeState:
    """`state` with fresh inspections of these devices, their companions and others requested, polls of their groups
    and a read of the ledger."""
    if not addresses:
        return state
    functions = [f for a in addresses for f in with_companions(state, a)]
    looked_for = {f.address for f in functions} | others
    state = with_inspections(state, inspections.ask_inspections(state.host.inspections, sorted(looked_for)))
    groups = frozenset(f.iommu_group for f in functions if f.iommu_group is not None)
    return schedule.ask_ledger(schedule.ask_poll(state, groups) if groups else state, at)


# --- the disk and the acts ----------------------------------------------------------------------------------


def checkpoint_written(state: NodeState, event: CheckpointWritten) -> Stepped:
    """Every checkpoint up to this number is on disk."""
    claims = state.claims
    if event.number <= claims.durable:
        return state, []
    lines: list[Effect] = [Log(Level.INFO, "checkpoint.written", {})] if claims.unwritten else []
    return with_claims(state, replace(claims, durable=event.number, unwritten="")), lines


def checkpoint_unwritten(state: NodeState, event: CheckpointUnwritten) -> Stepped:
    """It could not be written: nothing that follows from it happens, and the actor tries again."""
    level = Level.DEBUG if event.reason == state.claims.unwritten else Level.ERROR
    line = Log(level, "checkpoint.unwritten", {"reason": event.reason})
    return with_claims(state, replace(state.claims, unwritten=event.reason)), [line]


def act_done(state: NodeState, event: ActDone) -> NodeState:
    """An act reached its goal."""
    entry = _of_act(state.claims, event.number)
    if entry is None:  # another one has been requested since
        return state
    return _act_over(_to_be_seen(state, entry, event), entry, event.number, event.bound)


def _to_be_seen(state: NodeState, entry: Entry, event: ActDone) -> NodeState:
    """`state` with an inspection requested of what an act has bound. A device that was returned was last seen on vfio,
    and belongs to nobody any more: it is not offered before that inspection."""
    changed = sorted(b.address for b in event.bound)
    claims, since = state.claims, state.host.inspections.last
    if entry.state is ClaimState.RELEASING and changed:
        given = [g.address for g in entry.gpus if g.address in changed]
        returned = dict.fromkeys(given, Returned(entry.name, since))
        claims = replace(claims, returned={**claims.returned, **returned})
    wanted = inspections.ask_inspections(state.host.inspections, changed)
    return with_inspections(with_claims(state, claims), wanted)


def act_failed(state: NodeState, event: ActFailed, at: float) -> Stepped:
    """An act did not reach its goal. The devices stay as they are."""
    entry = _of_act(state.claims, event.number)
    if entry is None:
        return state, []
    if entry.state is ClaimState.RELEASING and event.fault is ActFault.GONE:
        return _act_over(state, entry, event.number, ()), []  # nothing is left to be returned
    delayed = entry.state is ClaimState.BINDING and event.fault in _PASSING
    by_itself = delayed or entry.state in _TRIED_AGAIN
    again_at = at + limits.CLAIM_RETRY_S if by_itself else math.inf
    level = Level.DEBUG if entry.problem == event.reason else Level.WARNING
    line = Log(
        level,
        "claim.act_failed",
        {"claim": str(entry.name), "uid": entry.name.uid, "state": str(entry.state), "reason": event.reason},
    )
    stopped = replace(entry, acts={}, problem=event.reason, retry_at=again_at)
    on = On.DELAYED if delayed else On.FAILED
    return with_claims(state, moved(state.claims, stopped, on)), [line]


def files_touched(state: NodeState) -> Stepped:
    """The files of every prepared claim are looked at, and written where they are missing: a container that restarts is
    started with what is there, without a call to us. What is right is left alone, and so touches nothing. One that is
    under way may have looked before: then another one follows."""
    effects: list[Effect] = []
    for entry in state.claims.entries.values():
        if entry.state in (ClaimState.PREPARED, ClaimState.VERIFYING):
            state, lines = attempted(state, entry, On.RETRY)
            effects += lines
    return state, effects


def published(state: NodeState, publication: Publication) -> Stepped:
    """What is published of our devices has changed, or cannot be published."""
    before = state.claims.publication
    problem = before.problem if before is not None else ""
    after = with_claims(state, replace(state.claims, publication=publication))
    if publication.problem:
        level = Level.DEBUG if publication.problem == problem else Level.WARNING
        return after, [Log(level, "slices.unpublished", {"reason": publication.problem})]
    if not publication.settled:
        return after, []
    fields: dict[str, Field] = {
        "slices": publication.slices,
        "tainted": publication.tainted,
        "withdrawn": publication.withdrawn,
        "keeps_taints": str(publication.keeps_taints),
    }
    return after, [Log(Level.INFO, "slices.published", fields)]


def _of_act(claims: Claims, number: int) -> Entry | None:
    return next((e for e in claims.entries.values() if number in e.acts.values()), None)


def _act_over(state: NodeState, entry: Entry, number: int, bound: Iterable[BoundFunction]) -> NodeState:
    left = {key: n for key, n in entry.acts.items() if n != number}
    known = {**entry.bound, **{b.address: b for b in bound}}
    entry = replace(entry, acts=left, bound=known)
    claims = state.claims
    return with_claims(state, with_entry(claims, entry) if left else moved(claims, entry, On.DONE))


def ledger_read(state: NodeState, at: float) -> NodeState:
    """After a read of kubelet's ledger: a prepared claim that kubelet lists for no pod may have lost its unprepare. The
    API server is asked some time later (kubernetes issues 139845, 139876)."""
    claims = state.claims
    if claims.settings is None or not any(e.state in _COLLECTED for e in claims.entries.values()):
        return state
    listed = _listed(state)
    for entry in claims.entries.values():
        if entry.state not in _COLLECTED:
            continue
        is_listed = str(entry.name) in listed
        if is_listed and (entry.missing or entry.collect_at < math.inf):
            claims = with_entry(claims, replace(entry, missing=0, collect_at=math.inf))
        elif not is_listed and entry.collect_at == math.inf and entry.name.uid not in claims.reads:
            claims = with_entry(claims, replace(entry, collect_at=at + limits.CLAIM_COLLECT_S))
    return with_claims(state, claims)


def _listed(state: NodeState) -> set[str]:
    """Our driver's claims in kubelet's list, by namespace and name."""
    settings, of_devices = state.claims.settings, state.kubelet.ledger.claims.values()
    assert settings is not None
    return {c.claim for claims_of in of_devices for c in claims_of if c.driver == settings.driver}


def _is_unlisted(state: NodeState, entry: Entry) -> bool:
    """Kubelet says that it has the claim for no pod. What it said last, or says before it knows its pods, does not
    count."""
    ledger = state.kubelet.ledger
    return ledger.problem is None and not ledger.source.is_settling and str(entry.name) not in _listed(state)


# --- answers ------------------------------------------------------------------------------------------------
