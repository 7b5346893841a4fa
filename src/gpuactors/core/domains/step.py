"""The handling of each event about the node's label and the facts about compute domains; and the consequences after
each event. Their claims are the machine's (`dra.py`), with the answers of `driver.py`."""

from __future__ import annotations

import math
from typing import assert_never

from msgspec.structs import replace

from gpuactors.core.domains import label, reads
from gpuactors.core.domains.offer import offered
from gpuactors.core.domains.report import statuses
from gpuactors.core.events.domains import (
    DomainEvent,
    DomainRead,
    DomainsTouched,
    ImexRead,
    LabelPatched,
    LabelRead,
    NodeTouched,
)
from gpuactors.core.state import NodeState
from gpuactors.core.state.domains import Domains, Label
from gpuactors.core.values.effects import Effect
from gpuactors.core.values.model import Role

Stepped = tuple[NodeState, list[Effect]]


def applied(state: NodeState, event: DomainEvent, at: float) -> Stepped:
    """Handle an event about the label, a domain or IMEX."""
    domains, effects = _applied(state.domains, event, at)
    return _with(state, domains), effects


def _applied(domains: Domains, event: DomainEvent, at: float) -> tuple[Domains, list[Effect]]:
    match event:
        case LabelRead(number, answer):
            return label.read(domains, number, answer, at)
        case LabelPatched():
            return label.patched(domains, event, at)
        case NodeTouched():
            return label.touched(domains), []
        case DomainRead():
            return reads.domain_read(domains, event, at)
        case DomainsTouched():
            return reads.touched(domains), []
        case ImexRead(number, facts):
            return reads.imex_read(domains, number, facts)
        case _:
            assert_never(event)


def on_state_changed(before: NodeState, state: NodeState, at: float) -> Stepped:
    """Apply the consequences of each event, after the claims have gone on as far as they can. `before` is the state
    that the event met."""
    domains = state.domains
    if not is_serving(state):  # another daemon may change the label: what is known of it is of no use
        return _with(state, replace(domains, label=Label())), []
    domains, effects = label.decided(reads.on_state_changed(domains, at), at)
    domains = reads.lingering_read(domains)
    state = _with(state, domains)
    if (after := offered(state.domains)) is not state.domains:
        state = replace(state, domains=after)
    if state.domains != before.domains:
        state = _with(state, _dated(state.domains, at))
    return state, effects


def _dated(domains: Domains, at: float) -> Domains:
    """Record when each domain came to its status."""
    since = {
        uid: was if (was := domains.since.get(uid)) is not None and was[0] == status else (status, at)
        for uid, status in statuses(domains).items()
    }
    return replace(domains, since=since)


def due(state: NodeState, at: float) -> NodeState:
    """Request what is due at this time."""
    if not is_serving(state):
        return state
    return _with(state, reads.due(label.due(state.domains, at), at))


def deadline(state: NodeState) -> float:
    """Return when `due` is next due; infinite if never, and while another daemon serves."""
    if not is_serving(state):
        return math.inf
    return min(label.deadline(state.domains), reads.deadline(state.domains))


def is_serving(state: NodeState) -> bool:
    """Return whether this daemon knows which claims are here, and no other one handles them."""
    claims = state.domains.claims
    return state.daemon.role is Role.SERVING and claims.loaded and not claims.unserved


def _with(state: NodeState, domains: Domains) -> NodeState:
    return replace(state, domains=domains) if domains != state.domains else state
