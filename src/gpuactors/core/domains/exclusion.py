"""Who stands in the way of a claim of a compute domain: another claim that has its channel or the node, the label, or
that the domain is not there. And what a channel that is reserved still lacks.

Every entry that owns a device counts, whatever it is doing.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

from gpuactors.core.assessment.cause import Cause
from gpuactors.core.assessment.status import Obstacle
from gpuactors.core.domains import label
from gpuactors.core.domains.model import DeviceKind, DomainMode, DomainUid
from gpuactors.core.domains.reservation import devices_wanted
from gpuactors.core.dra.exclusion import InTheWay
from gpuactors.core.dra.table import OWNING, ClaimState

if TYPE_CHECKING:
    from gpuactors.core.domains.model import ClaimedDomain, DomainConfig, DomainDevice
    from gpuactors.core.domains.state import Domains
    from gpuactors.core.dra.entries import Entry


def in_the_way(domains: Domains, entry: Entry) -> InTheWay | None:
    """The first reason why the claim cannot reserve its devices now; None if it can."""
    config, settings = entry.config, domains.settings
    assert config is not None
    assert entry.claim is not None
    assert settings is not None
    if (unknown := unseen(domains, entry, config)) is not None:
        return InTheWay(unknown)
    if (refused := _refused(domains, entry, config)) is not None:
        return InTheWay(refused, is_final=True)
    if owner := _by_another_claim(domains, entry, devices_wanted(entry.claim, config, settings)):
        return InTheWay(owner, is_owner=True)
    if config.kind is DeviceKind.DAEMON or settings.mode is not DomainMode.ON:
        return None
    if owner := _by_another_domain(domains, entry, config.domain):
        return InTheWay(owner, is_owner=True)
    if (not domains.label.known or domains.label.value is not None) and (
        why := label.obstacle(domains, config.domain)
    ) is not None:
        return InTheWay(why, is_owner=domains.label.known)
    return None


def unseen(domains: Domains, entry: Entry, config: DomainConfig) -> Obstacle | None:
    """What has not been read since the claim came: an older view is no fact."""
    view = domains.known.get(config.domain)
    if view is None or view.number <= entry.since:
        why = f": {view.problem}" if view is not None and view.problem else ""
        unread = f"the ComputeDomain {config.domain} has not been read yet{why}"
        return Obstacle(Cause.API_SERVER_FAILED, unread)
    if domains.imex.number <= entry.since:
        why = f": {domains.imex.problem}" if domains.imex.problem else ""
        return Obstacle(Cause.IMEX_MISSING, f"the host's driver has not said yet what it has of IMEX{why}")
    return None


def _refused(domains: Domains, entry: Entry, config: DomainConfig) -> Obstacle | None:
    """Why waiting is of no use; None if it may be."""
    if (gone := _without_domain(domains, config.domain)) is not None:
        return gone
    domain = domains.known[config.domain].domain
    if config.kind is DeviceKind.CHANNEL and domain is not None and entry.name.namespace != domain.namespace:
        return Obstacle(
            Cause.INVALID_CONFIGURATION,
            f"the ComputeDomain {domain} is in another namespace than the claim {entry.name}: a claim can have a "
            "channel of a domain of its own namespace only",
        )
    return _without_imex(domains, config.kind)


def _without_domain(domains: Domains, uid: DomainUid) -> Obstacle | None:
    if domains.known[uid].domain is not None:
        return None
    absent = f"there is no ComputeDomain with the UID {uid}: correct domainID in the claim"
    return Obstacle(Cause.DOMAIN_NOT_FOUND, absent)


def _without_imex(domains: Domains, kind: DeviceKind) -> Obstacle | None:
    imex = domains.imex.facts
    if imex is None:
        return Obstacle(Cause.IMEX_MISSING, "the host's driver does not say what it has of IMEX")
    if imex.absent:
        return Obstacle(Cause.IMEX_MISSING, imex.absent)
    if kind is DeviceKind.CHANNEL and imex.clique_id and imex.channel_major is None:
        return Obstacle(
            Cause.IMEX_MISSING,
            "/proc/devices has no nvidia-caps-imex-channels: the host's driver is too old for IMEX, or not loaded",
        )
    return None


def _by_another_claim(domains: Domains, entry: Entry, wanted: tuple[DomainDevice, ...]) -> Obstacle | None:
    for other in _others(domains, entry):
        if other.domain is None:
            unknown = f"what the claim {other.name} has is not known yet{_why(other)}"
            return Obstacle(Cause.CLAIMED_ELSEWHERE, unknown)
        for device in wanted:
            if device in other.domain.devices:
                owned = f"{device}: it {_doing(other)} the claim {other.name}{_why(other)}"
                return Obstacle(Cause.CLAIMED_ELSEWHERE, owned)
    return None


def _by_another_domain(domains: Domains, entry: Entry, domain: DomainUid) -> Obstacle | None:
    """A node takes part in one domain at a time: its label has one value."""
    for other in _others(domains, entry):
        own = other.domain
        if own is not None and own.uid != domain and own.devices[0].kind is DeviceKind.CHANNEL:
            return Obstacle(
                Cause.OTHER_DOMAIN,
                f"the node takes part in another ComputeDomain, {_in_words(own)}: one of its channels "
                f"{_doing(other)} the claim {other.name}{_why(other)}",
            )
    return None


def _in_words(own: ClaimedDomain) -> str:
    """With its UID: one that was deleted and made anew under its name is another one."""
    return f"{own.namespace}/{own.name} with the UID {own.uid}" if own.name else own.uid


def _others(domains: Domains, entry: Entry) -> list[Entry]:
    entries = domains.claims.entries.values()
    return [other for other in entries if other.name.uid != entry.name.uid and other.state in OWNING]


def _doing(other: Entry) -> str:
    return "is being released from" if other.state is ClaimState.RELEASING else "belongs to"


def _why(other: Entry) -> str:
    return f" ({other.problem})" if other.problem else ""


def lacking(domains: Domains, entry: Entry) -> Obstacle | None:
    """What a reserved claim lacks until its container may start; None if nothing."""
    own, config = entry.domain, entry.config
    assert own is not None
    assert config is not None
    if (why := unseen(domains, entry, config) or _refused(domains, entry, config)) is not None:
        return why
    return None if config.kind is DeviceKind.DAEMON else channels_lack(domains, own.uid)


def channels_lack(domains: Domains, uid: DomainUid) -> Obstacle | None:
    """What the channels of a domain lack on this node, as far as it has been read; None if nothing."""
    if (why := daemon_lacks(domains, uid)) is not None:
        return why
    settings, view = domains.settings, domains.known.get(uid)
    assert settings is not None
    if settings.mode is not DomainMode.ON or readiness(domains, uid) is Readiness.READY:
        return None
    problem = f": {view.problem}" if view is not None and view.problem else ""
    return Obstacle(
        Cause.API_SERVER_FAILED if problem else Cause.DOMAIN_NOT_READY,
        f"{_named(domains, uid)} does not say yet that the node {settings.node} is Ready{problem}",
    )


def daemon_lacks(domains: Domains, uid: DomainUid) -> Obstacle | None:
    """What the domain's daemon lacks until it can be Ready here: the domain, IMEX, the label, then its own claim. Of
    one that the host manages: why it is not ready. None if nothing."""
    settings, view = domains.settings, domains.known.get(uid)
    assert settings is not None
    if view is not None and view.number and (gone := _without_domain(domains, uid)) is not None:
        return gone
    if (absent := _without_imex(domains, DeviceKind.CHANNEL)) is not None:
        return absent
    if settings.mode is not DomainMode.ON:
        assert domains.imex.facts is not None
        problem = domains.imex.facts.host_problem
        return Obstacle(Cause.DOMAIN_NOT_READY, problem) if problem else None
    if (why := label.obstacle(domains, uid)) is not None:
        return why
    if not has_daemon(domains, uid):
        unclaimed = f"the daemon of {_named(domains, uid)} has no prepared claim on this node yet"
        return Obstacle(Cause.DOMAIN_NOT_READY, unclaimed)
    return None


def _named(domains: Domains, uid: DomainUid) -> str:
    view = domains.known.get(uid)
    return f"the ComputeDomain {view.domain if view is not None and view.domain is not None else uid}"


class Readiness(StrEnum):
    """What the API server says of the daemon of a domain on this node."""

    READY = "Ready"
    NOT_READY = "NotReady"
    UNREAD = "Unread"
    """It has not been read since the label was added: what was read before is no fact of this daemon."""


def readiness(domains: Domains, uid: DomainUid) -> Readiness:
    """By the ComputeDomain or its clique, as last read."""
    view, settings = domains.known.get(uid), domains.settings
    assert settings is not None
    if view is None or view.number <= domains.label.added:
        return Readiness.UNREAD
    return Readiness.READY if view.is_ready(settings.node) else Readiness.NOT_READY


def has_daemon(domains: Domains, domain: DomainUid) -> bool:
    """The claim of the domain's daemon on this node is prepared."""
    return any(
        entry.state in (ClaimState.PREPARED, ClaimState.VERIFYING)
        and entry.domain is not None
        and entry.domain.uid == domain
        and entry.domain.devices[0].kind is DeviceKind.DAEMON
        for entry in domains.claims.entries.values()
    )
