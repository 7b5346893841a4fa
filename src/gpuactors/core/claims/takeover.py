"""Claims that NVIDIA's DRA driver has prepared, and that were taken over with its checkpoint (`theirs.py`): what is
found out of them later.

Its checkpoint has only the UID of a claim that is prepared. Kubelet lists the claim by its name, with CDI ids that have
the UID; and says its name when it unprepares it.
"""

from __future__ import annotations

import math

from msgspec.structs import replace

from gpuactors import limits
from gpuactors.core.claims.strangers import strangers
from gpuactors.core.claims.transitions import try_transition
from gpuactors.core.claims.view import DriverView, Stepped
from gpuactors.core.state import NodeState
from gpuactors.core.state.claims import ClaimRecord, Claims
from gpuactors.core.values.claim import ClaimName
from gpuactors.core.values.claim_states import ClaimTrigger
from gpuactors.core.values.effects import Level, Log
from gpuactors.core.values.model import LedgerSource


def named(claims: Claims, state: NodeState, entry: ClaimRecord) -> ClaimRecord:
    """Name a claim as kubelet lists its devices; returns the same record if its name is known, or not listed."""
    if entry.name.is_known:
        return entry
    names = listed_as(claims, state, entry)
    if len(names) != 1:
        return entry
    namespace, _, name = names.pop().partition("/")
    return replace(entry, name=ClaimName(namespace, name, entry.name.uid))


def listed_as(claims: Claims, state: NodeState, entry: ClaimRecord) -> set[str]:
    """Return the claims, by namespace and name, as which kubelet lists a claim without a name: by its UID, or, where
    kubelet's list has none, by its device. One of these is it: of several, as sharers of a GPU are, nothing says
    which."""
    if entry.name.is_known or claims.settings is None:
        return set()
    driver, unplaced = claims.settings.driver, state.kubelet.ledger.unplaced
    if by_uid := {c.claim for c in unplaced if (c.driver, c.uid) == (driver, entry.name.uid)}:
        return by_uid
    own = {(device.pool, device.device) for device in entry.given}
    return {c.claim for c in strangers(claims, state) if not c.uid and (c.pool, c.device) in own}


def unlisted(view: DriverView, entry: ClaimRecord, at: float) -> Stepped:
    """Collect a claim whose name is not known once kubelet lists it for no pod, twice: the API server cannot be
    asked about it."""
    ledger = view.state.kubelet.ledger
    is_unsure = ledger.problem is not None or ledger.source is not LedgerSource.LIST
    if is_unsure or entry.missing == 0:
        missing = entry.missing if is_unsure else 1
        again = replace(entry, missing=missing, collect_at=at + limits.CLAIM_COLLECT_S)
        return view.with_record(again).ask_ledger(at, lists=True), []
    view, lines = try_transition(view, replace(entry, collect_at=math.inf), ClaimTrigger.UNPREPARE)
    reason = "NVIDIA's driver has prepared it, and kubelet lists its devices for no pod, twice; its name is not known"
    fields = {"claim": str(entry.name), "uid": entry.name.uid, "reason": reason}
    return view, [Log(Level.WARNING, "claim.collected", {**fields}), *lines]
