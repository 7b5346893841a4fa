"""The part of a step about claims and compute domains, for each DRA driver that is on.

Called by `step.py`, which imports it for the first step of a node that serves claims, or for the first event about one.
The only file that knows both kinds of claims; neither kind imports the other. A driver is imported when it is first
asked for.
"""

from __future__ import annotations

import math
from typing import TypeAlias, assert_never

from msgspec.structs import replace

from gpuactors.core.claims import machine as claims
from gpuactors.core.claims import progress, recovery
from gpuactors.core.claims.answers import declined
from gpuactors.core.claims.driver import Driver
from gpuactors.core.claims.transitions import quarantine, refusal
from gpuactors.core.claims.view import DriverView, view_of
from gpuactors.core.events import Event
from gpuactors.core.events.claims import (
    ActDone,
    ActFailed,
    CheckpointRead,
    CheckpointRefused,
    CheckpointWritten,
    ClaimEvent,
    ClaimRead,
    FilesTouched,
    FitnessChecked,
    PrepareAsked,
    SlicesPublished,
    UnprepareAsked,
)
from gpuactors.core.events.daemon import HandOverRequested, PredecessorGone, Ticked
from gpuactors.core.events.deviceplugin import CallAbandoned
from gpuactors.core.events.domains import DomainEvent
from gpuactors.core.events.kubelet import LedgerRead
from gpuactors.core.ledger import ledger
from gpuactors.core.state import NodeState
from gpuactors.core.state.claims import Claims, ClaimSettings
from gpuactors.core.state.gpus import Gpus, GpuSettings
from gpuactors.core.values.cause import Cause
from gpuactors.core.values.claim import ClaimsOf
from gpuactors.core.values.claim_states import NoTransitionError
from gpuactors.core.values.domain import DomainSettings
from gpuactors.core.values.effects import Effect
from gpuactors.core.values.model import Role

Stepped = tuple[NodeState, list[Effect]]

AboutClaims: TypeAlias = ClaimEvent | FitnessChecked | DomainEvent


def driver_of(kind: ClaimsOf) -> Driver:
    """Return the driver of these claims, also on a node where it is off."""
    match kind:
        case ClaimsOf.GPUS:
            from gpuactors.core.gpus.driver import GPUS

            return GPUS
        case ClaimsOf.DOMAINS:
            from gpuactors.core.domains.driver import DOMAINS

            return DOMAINS


def _drivers_of(state: NodeState) -> list[Driver]:
    """Return the drivers that are on, in the order of their work after each event."""
    claims = {ClaimsOf.GPUS: state.gpus.claims, ClaimsOf.DOMAINS: state.domains.claims}
    return [driver_of(kind) for kind, of_kind in claims.items() if of_kind.settings is not None]


def with_claims_served(
    state: NodeState,
    claim_settings: ClaimSettings | None,
    gpu_settings: GpuSettings | None,
    domain_settings: DomainSettings | None,
) -> NodeState:
    """Add to the state at start the part of each DRA driver that has settings, with a read of its checkpoint wanted."""
    if claim_settings is not None:
        gpus = Gpus(gpu_settings or GpuSettings(), Claims(claim_settings))
        state = replace(state, gpus=gpus)
    if domain_settings is not None:
        from gpuactors.core.domains.reads import first_domains

        state = replace(state, domains=first_domains(domain_settings))
    return state


def applied(state: NodeState, event: AboutClaims, at: float) -> Stepped:
    """Apply an event about claims or compute domains. Where they are off, only a call gets an answer."""
    if isinstance(event, ClaimEvent):
        return _claim(state, event, at)
    if isinstance(event, FitnessChecked):
        if state.gpus.claims.settings is None:
            return state, []
        from gpuactors.core.gpus import fitness

        gpus, effects = fitness.checked(state.gpus, event, at)
        return replace(state, gpus=gpus), effects
    if isinstance(event, DomainEvent):
        if state.domains.settings is None:
            return state, []
        from gpuactors.core.domains import step as domains

        return domains.applied(state, event, at)
    assert_never(event)


def _claim(state: NodeState, event: ClaimEvent, at: float) -> Stepped:
    """Apply an event about claims. A transition that the table of claims lacks is a bug in gpuactors: in production
    this claim is quarantined, and the others are served."""
    try:
        return _of_claim(state, event, at)
    except NoTransitionError as error:
        view, lines = quarantine(view_of(state, driver_of(event.driver_kind)), error)
        if isinstance(event, PrepareAsked | UnprepareAsked):
            answer = refusal(Cause.SET_ASIDE, str(error))
            lines += declined(event.token, event.claim.uid, str(event.claim), answer)
        return view.state, lines


def _of_claim(state: NodeState, event: ClaimEvent, at: float) -> Stepped:
    if isinstance(event, PrepareAsked):
        state = ledger.called(state, at)
    view, effects = _applied_to(view_of(state, driver_of(event.driver_kind)), event, at)
    return view.state, effects


def _applied_to(view: DriverView, event: ClaimEvent, at: float) -> tuple[DriverView, list[Effect]]:
    match event:
        case PrepareAsked():
            return claims.prepare_asked(view, event, at)
        case UnprepareAsked():
            return claims.unprepare_asked(view, event, at)
        case _ if view.claims.settings is None:
            return view, []
        case ClaimRead():
            return claims.read(view, event, at)
        case CheckpointRead():
            return claims.checkpoint_read(view, event, at)
        case CheckpointRefused():
            return claims.checkpoint_refused(view, event)
        case CheckpointWritten():
            return claims.checkpoint_written(view, event)
        case ActDone():
            return claims.act_done(view, event, at)
        case ActFailed():
            return claims.act_failed(view, event, at)
        case FilesTouched():
            return claims.files_touched(view, event)
        case SlicesPublished(publication):
            return claims.published(view, publication)


def advanced(before: NodeState, state: NodeState, event: Event, at: float) -> Stepped:
    """Apply to claims an event about the rest of the node, then make every transition that is possible now. `before` is
    the state before the event."""
    state, effects = _followed(before, state, event, at)
    for driver in _drivers_of(state):
        view, lines = progress.advanced(view_of(state, driver), before, at)
        state, effects = view.state, effects + lines
    if state.domains.settings is not None:
        from gpuactors.core.domains import step as domains

        state, lines = domains.on_state_changed(before, state, at)
        effects += lines
    return state, effects


def _followed(before: NodeState, state: NodeState, event: Event, at: float) -> Stepped:
    effects: list[Effect] = []
    match event:
        case LedgerRead(read, passive=passive) if read == before.kubelet.ledger.refresh.outstanding:
            for driver in _drivers_of(state):
                view = view_of(state, driver)
                if not passive:
                    view, lines = recovery.ledger_read(view, at)
                    effects += lines
                state = claims.ledger_read(view, at).state
        case PredecessorGone() if before.daemon.role is not Role.SERVING:
            for driver in _drivers_of(state):  # the predecessor wrote the checkpoint until now: read it again
                view = view_of(state, driver)
                state = view.with_claims(replace(view.claims, loaded=False)).state
        case HandOverRequested():
            for driver in _drivers_of(state):
                view, replies = claims.handed_over(view_of(state, driver), at)
                state, effects = view.state, effects + replies
        case CallAbandoned(token):
            for driver in _drivers_of(state):
                state = claims.abandoned(view_of(state, driver), token).state
        case Ticked():
            return _due(state, at)
        case _:
            pass
    return state, effects


def _due(state: NodeState, at: float) -> Stepped:
    effects: list[Effect] = []
    if state.domains.settings is not None:
        from gpuactors.core.domains import step as domains

        state = domains.due(state, at)
    for driver in _drivers_of(state):
        view, lines = progress.due(view_of(state, driver), at)
        state, effects = view.state, effects + lines
    return state, effects


def deadline(state: NodeState) -> float:
    """Return when a `Ticked` is due for claims if nothing else happens; infinite if never."""
    claims_deadline = min(
        (progress.deadline(view_of(state, d)) for d in _drivers_of(state)), default=math.inf
    )
    if state.domains.settings is None:
        return claims_deadline
    from gpuactors.core.domains import step as domains

    return min(claims_deadline, domains.deadline(state))
