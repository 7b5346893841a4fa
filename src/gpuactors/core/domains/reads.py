"""Reads of compute domains at the API server, and of IMEX on the host: when one is outstanding, and what its result
changes.

A claim asks for both anew when it comes, and while it waits they are read again: soon after somebody has touched the
objects, else every DOMAIN_READ_S. The domain of a label that lingers is read once, and when somebody has touched it.
Must not decide what a result means for a claim.
"""

from __future__ import annotations

import math
from typing import Final

from msgspec.structs import replace

from gpuactors.core.domains import label
from gpuactors.core.events.domains import DomainRead
from gpuactors.core.requests import Failure, Refresh, asked
from gpuactors.core.state.claims import Claims, ClaimSettings, domain_of
from gpuactors.core.state.domains import Domains, DomainView, ImexView
from gpuactors.core.values.claim_states import ClaimState
from gpuactors.core.values.domain import DomainMode, DomainSettings, DomainUid, ImexFacts
from gpuactors.core.values.effects import Effect, Level, Log

IMEX_RETRY_S: Final = 60.0
"""How often a node without IMEX is asked again, in seconds: its driver may be loaded later."""

DOMAIN_READ_S: Final = 2.0
"""How often a compute domain is read by itself while a claim waits for it, in seconds: a watch may have been lost."""

_WAIT: Final = (ClaimState.WAITING, ClaimState.BINDING, ClaimState.VERIFYING)
"""The states in which a claim waits for these reads."""


def first_domains(settings: DomainSettings) -> Domains:
    """Return the domains at the start: ask the host about IMEX. The rest is read after the checkpoint."""
    claims = ClaimSettings(settings.driver, settings.node, side_by_side=settings.side_by_side)
    return imex_asked(Domains(settings, Claims(claims)))


def domain_asked(domains: Domains, uid: DomainUid) -> Domains:
    """Request a read of a domain, now or after the outstanding one."""
    view = domains.views.get(uid, DomainView())
    last, refresh = asked(domains.last, view.refresh)
    return replace(domains, last=last, views={**domains.views, uid: replace(view, refresh=refresh)})


def imex_asked(domains: Domains) -> Domains:
    """Request a read of the host's IMEX, now or after the outstanding one."""
    last, refresh = asked(domains.last, domains.imex.refresh)
    return replace(domains, last=last, imex=replace(domains.imex, refresh=refresh))


def touched(domains: Domains) -> Domains:
    """Read the domains that are of interest again, as a ComputeDomain or a clique was touched."""
    for uid in watched(domains):
        domains = domain_asked(domains, uid)
    return domains


def domain_read(domains: Domains, read: DomainRead, at: float) -> tuple[Domains, list[Effect]]:
    """Handle the API server's answer about a domain. Nothing follows from a failure but another try."""
    uid, domain = read.uid, read.domain
    view = domains.views.get(uid)
    if view is None or view.refresh.outstanding != read.number:
        return domains, []
    if not isinstance(domain, Failure):
        now = DomainView(read.number, domain, read.clique, "", view.refresh, at)
        assert domains.settings is not None
        if now.clique is not None and not now.is_ready_by_clique(domains.settings.node):
            now = replace(now, unready_since=at if view.unready_since == -math.inf else view.unready_since)
        return _answered(domains, uid, now), []
    level = Level.DEBUG if domain == view.problem else Level.WARNING
    line = Log(level, "domain.unreadable", {"domain": uid, "reason": domain})
    return _answered(domains, uid, replace(view, problem=domain)), [line]


def _answered(domains: Domains, uid: DomainUid, view: DomainView) -> Domains:
    after = replace(domains, views={**domains.views, uid: replace(view, refresh=Refresh())})
    return domain_asked(after, uid) if view.refresh.again else after


def imex_read(domains: Domains, number: int, facts: ImexFacts | Failure) -> tuple[Domains, list[Effect]]:
    """Handle the answer of the host's driver. Log a node without IMEX or without a fabric once."""
    imex = domains.imex
    if imex.refresh.outstanding != number:
        return domains, []
    lines: list[Effect] = []
    if isinstance(facts, Failure):
        level = Level.DEBUG if facts == imex.problem else Level.WARNING
        lines.append(Log(level, "imex.unreadable", {"reason": facts}))
        after = replace(domains, imex=replace(imex, problem=facts, refresh=Refresh()))
        return imex_asked(after) if imex.refresh.again else after, lines
    after = replace(domains, imex=ImexView(number, facts))
    if imex.facts is None or _told(imex.facts) != _told(facts):
        fields = {
            "clique": facts.clique_id,
            "source": facts.clique_source,
            "reason": without_nodes(facts) or facts.unmanaged,
        }
        is_odd = facts.absent or facts.unknown or facts.unmanaged or facts.clique_is_past
        level = Level.WARNING if is_odd else Level.INFO
        lines.append(Log(level, "imex.read", {k: v for k, v in fields.items() if v}))
    return imex_asked(after) if imex.refresh.again else after, lines


def _told(facts: ImexFacts) -> tuple[str, ...]:
    """Return the facts whose change is logged."""
    return facts.absent, facts.clique_id, facts.clique_source, facts.unknown, facts.unmanaged


def without_nodes(facts: ImexFacts) -> str:
    """Return why no container gets the node of a channel here, as a sentence; empty if it does."""
    if facts.absent or facts.unknown or facts.clique_id:
        return facts.absent or facts.unknown
    return "the node is on no NVLink fabric: claims are prepared without channel device nodes"


def on_state_changed(domains: Domains, at: float) -> Domains:
    """Forget domains without a claim or label, and read what is of interest now or soon."""
    entries = domains.claims.entries.values()
    uids = {config.domain for entry in entries if (config := domain_of(entry).config) is not None}
    if (lingering := label.lingering(domains)) is not None:
        uids.add(lingering)
    if not domains.views.keys() <= uids:
        domains = replace(domains, views={u: v for u, v in domains.views.items() if u in uids})
    waited = waited_for(domains)
    for uid in waited:
        view = domains.views.get(uid, DomainView())
        is_old = view.number <= max(domains.label.added, domains.label.absent)
        if view.refresh.outstanding is None and is_old and not view.problem:
            domains = domain_asked(domains, uid)
        elif view.refresh.outstanding is None and view.refresh.due_at == math.inf:
            soon = view.refresh.due_by(at + DOMAIN_READ_S)
            domains = replace(domains, views={**domains.views, uid: replace(view, refresh=soon)})
    imex = domains.imex
    if waited and not imex.number and not imex.problem and imex.refresh.outstanding is None:
        return imex_asked(domains)
    wait_s = _imex_look_s(domains, is_waited_for=bool(waited))
    if imex.refresh.outstanding is not None or imex.refresh.due_at <= at + wait_s:
        return domains
    return replace(domains, imex=replace(imex, refresh=imex.refresh.due_by(at + wait_s)))


def lingering_read(domains: Domains) -> Domains:
    """Read the domain of a label that lingers, once after that began: it may have ended before it was watched."""
    uid = label.lingering(domains)
    if uid is None:
        return domains
    view = domains.views.get(uid, DomainView())
    is_read = view.number > domains.label.lingers_from or view.refresh.outstanding is not None or view.problem
    return domains if is_read else domain_asked(domains, uid)


def _imex_look_s(domains: Domains, *, is_waited_for: bool) -> float:
    """Return when the host is asked again by itself, in seconds from now; infinite if not. A driver that is loaded
    later is offered then."""
    settings, imex = domains.settings, domains.imex
    is_host = settings is not None and settings.mode is DomainMode.HOST_MANAGED
    is_incomplete = imex.facts is not None and (imex.facts.unknown or imex.facts.unmanaged)
    if is_waited_for and (is_host or imex.problem or is_incomplete):
        return DOMAIN_READ_S
    is_missing = imex.problem or is_incomplete or (imex.facts is not None and imex.facts.absent)
    return IMEX_RETRY_S if is_missing else math.inf


def due(domains: Domains, at: float) -> Domains:
    """Request the reads that are due."""
    for uid, view in domains.views.items():
        if view.refresh.deadline <= at:
            domains = domain_asked(domains, uid)
    return imex_asked(domains) if domains.imex.refresh.deadline <= at else domains


def deadline(domains: Domains) -> float:
    """Return when the next read is due; infinite if never."""
    views = (view.refresh.deadline for view in domains.views.values())
    return min(min(views, default=math.inf), domains.imex.refresh.deadline)


def waited_for(domains: Domains) -> tuple[DomainUid, ...]:
    """Return the domains that a claim waits for, or the label, which is added only if the domain is there."""
    waiting = (domain_of(e).config for e in domains.claims.entries.values() if e.state in _WAIT)
    uids = [config.domain for config in waiting if config is not None]
    if (needed := label.wanted_of(domains)) is not None and not label.is_gone(domains, needed):
        uids.append(needed)
    return tuple(dict.fromkeys(uids))


def watched(domains: Domains) -> tuple[DomainUid, ...]:
    """Return the domains whose changes are of interest: those that are waited for, and that of a label that
    lingers."""
    lingering = label.lingering(domains)
    return tuple(dict.fromkeys([*waited_for(domains), *([lingering] if lingering is not None else [])]))
