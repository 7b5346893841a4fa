"""The reasons that block a claim of a compute domain: another claim that has its channel or the node, the label, or a
missing domain. And the unmet prerequisites of a channel that is reserved.

Every entry that owns a device is considered, in whatever state it is.
"""

from __future__ import annotations

import math
from typing import Final

from gpuactors.core.claims.report import belongs
from gpuactors.core.domains import label
from gpuactors.core.state.claims import ClaimRecord, domain_of
from gpuactors.core.state.domains import Domains, DomainView
from gpuactors.core.values.cause import Cause
from gpuactors.core.values.claim_states import OWNING, ClaimState
from gpuactors.core.values.domain import (
    ClaimedDomain,
    DeviceKind,
    DomainConfig,
    DomainDevice,
    DomainMode,
    DomainUid,
    device_of,
)
from gpuactors.core.values.domain_reservation import devices_wanted
from gpuactors.core.values.quote import quoted
from gpuactors.core.values.reported import Readiness
from gpuactors.core.values.status import Conflict, Reason

DAEMON_SETTLES_S: Final = 10.0
"""How long a daemon that was there before the label was added does not count, in seconds. Kubernetes' DaemonSet
controller ends it within a second, if it has seen that the label was away."""

STATUS_SETTLES_S: Final = 5.0
"""How long the status of a ComputeDomain does not count, in seconds, after the daemon was prepared or a clique came to
lack this node. NVIDIA's controller writes the status every 2 s."""


def conflict(domains: Domains, entry: ClaimRecord) -> Conflict | None:
    """Return the first reason why the claim cannot reserve its devices now; None if it can."""
    config, settings = domain_of(entry).config, domains.settings
    assert config is not None
    assert entry.claim is not None
    assert settings is not None
    if (unknown := unseen(domains, entry, config)) is not None:
        return Conflict(unknown)
    if (refused := _refused(domains, entry, config)) is not None:
        return Conflict(refused, is_final=True)
    if (incomplete := _incomplete(domains, config.kind)) is not None:
        return Conflict(incomplete)
    wanted = devices_wanted(entry.claim, config, settings)
    if owner := _by_another_claim(domains, entry, config.domain, wanted) or _by_strangers(
        domains, entry, wanted
    ):
        return Conflict(owner, is_owner=True)
    if domains.strangers is None:
        return Conflict(Reason(Cause.LEDGER_LATE, "kubelet has not returned its ledger yet"))
    if config.kind is DeviceKind.DAEMON or settings.mode is not DomainMode.ON:
        return None
    if owner := _by_another_domain(domains, entry, config.domain):
        return Conflict(owner, is_owner=True)
    if (not domains.label.is_read or domains.label.value is not None) and (
        why := label.conflict(domains, config.domain)
    ) is not None:
        return Conflict(why, is_owner=domains.label.is_read)
    return None


def unseen(domains: Domains, entry: ClaimRecord, config: DomainConfig) -> Reason | None:
    """Return which facts have not been read since the claim came, as an older view is no fact; None if all have."""
    view = domains.views.get(config.domain)
    if view is None or view.number <= entry.since:
        why = f": {view.problem}" if view is not None and view.problem else ""
        unread = f"the ComputeDomain {config.domain} has not been read yet{why}"
        return Reason(Cause.API_SERVER_FAILED, unread)
    if domains.imex.number <= entry.since:
        why = f": {domains.imex.problem}" if domains.imex.problem else ""
        return Reason(Cause.IMEX_MISSING, f"the host's driver has not reported IMEX yet{why}")
    return None


def _refused(domains: Domains, entry: ClaimRecord, config: DomainConfig) -> Reason | None:
    """Return why waiting is of no use; None if it may be."""
    if (reason := _without_domain(domains, config.domain)) is not None:
        return reason
    domain = domains.views[config.domain].domain
    if config.kind is DeviceKind.CHANNEL and domain is not None and entry.name.namespace != domain.namespace:
        return Reason(
            Cause.INVALID_CONFIGURATION,
            f"the ComputeDomain {domain} is in another namespace than the claim {entry.name}: a claim can have a "
            "channel of a domain of its own namespace only",
        )
    return _without_imex(domains, config.kind)


def _without_domain(domains: Domains, uid: DomainUid) -> Reason | None:
    domain = domains.views[uid].domain
    if domain is not None and domain.is_deleted:
        deleted = f"the ComputeDomain {domain} is being deleted: delete the pod"
        return Reason(Cause.DOMAIN_NOT_FOUND, deleted)
    if domain is not None:
        return None
    absent = f"there is no ComputeDomain with the UID {uid}: correct domainID in the claim"
    return Reason(Cause.DOMAIN_NOT_FOUND, absent)


def _without_imex(domains: Domains, kind: DeviceKind) -> Reason | None:
    imex = domains.imex.facts
    if imex is None:
        return Reason(Cause.IMEX_MISSING, "the host's driver does not report IMEX")
    if imex.absent:
        return Reason(Cause.IMEX_MISSING, imex.absent)
    if kind is DeviceKind.CHANNEL and imex.clique_id and imex.channel_major is None:
        return Reason(
            Cause.IMEX_MISSING,
            "/proc/devices has no nvidia-caps-imex-channels: the host's driver is too old for IMEX, or not loaded",
        )
    return None


def _incomplete(domains: Domains, kind: DeviceKind) -> Reason | None:
    """Return which facts of the host are missing and may come at any time; None if all are there."""
    imex = domains.imex.facts
    assert imex is not None
    if imex.unknown:
        return Reason(Cause.IMEX_MISSING, imex.unknown)
    if kind is DeviceKind.DAEMON and imex.unmanaged:
        return Reason(Cause.IMEX_MISSING, imex.unmanaged)
    return None


def _by_another_claim(
    domains: Domains, entry: ClaimRecord, domain: DomainUid, wanted: tuple[DomainDevice, ...]
) -> Reason | None:
    for other in _others(domains, entry):
        own = domain_of(other).domain
        if other.is_left and own is not None and own.uid != domain:
            continue  # what is left of it is another domain's directory
        if own is None:
            why = f" ({other.problem})" if other.problem else ""
            unknown = f"the devices of the claim {other.name} are not known yet{why}"
            return Reason(Cause.CLAIMED_ELSEWHERE, unknown)
        for device in wanted:
            if device in own.devices:
                return Reason(Cause.CLAIMED_ELSEWHERE, f"{device}: it {belongs(other)}")
    return None


def _by_strangers(domains: Domains, entry: ClaimRecord, wanted: tuple[DomainDevice, ...]) -> Reason | None:
    """Return the claim that kubelet lists and that is not here, if its pod has one of the devices. Under the claim's
    own name it is the claim itself: kubelet has one of a name."""
    for stranger in domains.strangers or ():
        if stranger.claim != str(entry.name) and device_of(stranger.device) in wanted:
            return Reason(
                Cause.CLAIMED_ELSEWHERE,
                f"{stranger.device}: kubelet lists it for the claim {quoted(stranger.claim)}, which another program "
                "has prepared: it is free when the pod of that claim has ended",
            )
    return None


def _by_another_domain(domains: Domains, entry: ClaimRecord, domain: DomainUid) -> Reason | None:
    """Return the claim of another domain that the node takes part in: it takes part in one at a time, as its label has
    one value."""
    for other in _others(domains, entry):
        own = domain_of(other).domain
        if own is not None and own.uid != domain and own.devices[0].kind is DeviceKind.CHANNEL:
            return Reason(
                Cause.OTHER_DOMAIN,
                f"the node takes part in another ComputeDomain, {_in_words(own)}: one of its channels "
                f"{belongs(other)}",
            )
    return None


def _in_words(own: ClaimedDomain) -> str:
    """Return the domain's name with its UID: a domain that was deleted and created again under its name is another
    one."""
    return f"{own.namespace}/{own.name} with the UID {own.uid}" if own.name else own.uid


def _others(domains: Domains, entry: ClaimRecord) -> list[ClaimRecord]:
    entries = domains.claims.entries.values()
    return [other for other in entries if other.name.uid != entry.name.uid and other.state in OWNING]


def unmet_prerequisite(domains: Domains, entry: ClaimRecord) -> Reason | None:
    """Return why the container of a reserved claim may not start yet; None if it may. Only a domain that is gone, or is
    being deleted, does not come (DOMAIN_NOT_FOUND)."""
    own, config = domain_of(entry).domain, domain_of(entry).config
    assert own is not None
    assert config is not None
    if (why := unseen(domains, entry, config) or _refused(domains, entry, config)) is not None:
        return why
    if (why := _incomplete(domains, config.kind)) is not None:
        return why
    return None if config.kind is DeviceKind.DAEMON else channels_lack(domains, own.uid)


def channels_lack(domains: Domains, uid: DomainUid) -> Reason | None:
    """Return why the channels of a domain are not usable on this node, as far as it has been read; None if they are."""
    if (why := daemon_lacks(domains, uid)) is not None:
        return why
    settings, view = domains.settings, domains.views.get(uid)
    assert settings is not None
    if settings.mode is not DomainMode.ON or readiness(domains, uid) is Readiness.READY:
        return None
    problem = f": {view.problem}" if view is not None and view.problem else ""
    return Reason(
        Cause.API_SERVER_FAILED if problem else Cause.DOMAIN_NOT_READY,
        f"{_named(domains, uid)} does not say yet that the node {settings.node} is Ready{problem}",
    )


def daemon_lacks(domains: Domains, uid: DomainUid) -> Reason | None:
    """Return why the domain's daemon cannot be Ready here: the domain, IMEX, the label, then its own claim. For one
    that the host manages, return why it is not ready. None if nothing is missing."""
    settings, view = domains.settings, domains.views.get(uid)
    assert settings is not None
    if view is not None and view.number and (reason := _without_domain(domains, uid)) is not None:
        return reason
    absent = _without_imex(domains, DeviceKind.CHANNEL) or _incomplete(domains, DeviceKind.CHANNEL)
    if absent is not None:
        return absent
    if settings.mode is not DomainMode.ON:
        assert domains.imex.facts is not None
        problem = domains.imex.facts.host_problem
        return Reason(Cause.DOMAIN_NOT_READY, problem) if problem else None
    if (why := label.conflict(domains, uid)) is not None:
        return why
    if not has_daemon(domains, uid):
        unclaimed = f"the daemon of {_named(domains, uid)} has no prepared claim on this node yet"
        return Reason(Cause.DOMAIN_NOT_READY, unclaimed)
    return None


def _named(domains: Domains, uid: DomainUid) -> str:
    view = domains.views.get(uid)
    return f"the ComputeDomain {view.domain if view is not None and view.domain is not None else uid}"


def readiness(domains: Domains, uid: DomainUid) -> Readiness:
    """Return the daemon's readiness by the clique or the ComputeDomain, as last read. NVIDIA's plugin takes either:
    while its driver changes from one to the other (an upgrade, a rollback, a gate), a clique may be there that this
    node's daemon does not write."""
    view, settings = domains.views.get(uid), domains.settings
    assert settings is not None
    if view is None or view.number <= domains.label.added:
        return Readiness.UNREAD
    is_ready = view.is_ready_by_clique(settings.node) or (
        view.is_ready_by_status(settings.node) and _is_of_now(domains, uid, view)
    )
    return Readiness.READY if is_ready else Readiness.NOT_READY


def _is_of_now(domains: Domains, uid: DomainUid, view: DomainView) -> bool:
    """Return whether a status is about the present daemon: it may be about the one before, or made of a clique that has
    lost this node since, until NVIDIA's controller writes it again. Off the fabric no clique is ever made, and no
    daemon waits for another one."""
    facts = domains.imex.facts
    if facts is not None and not facts.clique_id:
        return True
    prepared_at = max((entry.changed_at for entry in _daemons(domains, uid)), default=math.inf)
    return view.read_at >= max(prepared_at, view.unready_since) + STATUS_SETTLES_S


def has_daemon(domains: Domains, domain: DomainUid) -> bool:
    """Return whether the claim of the domain's daemon on this node is prepared. A daemon that was there before the
    label is being ended, unless it is still there some time later."""
    view, label_now = domains.views.get(domain), domains.label
    is_settled = view is not None and view.read_at >= label_now.added_at + DAEMON_SETTLES_S
    return any(is_settled or entry.name.uid not in label_now.before for entry in _daemons(domains, domain))


def _daemons(domains: Domains, domain: DomainUid) -> list[ClaimRecord]:
    """Return the prepared claims of the domain's daemon. The daemon of a claim that is being released ends."""
    return [
        entry
        for entry in domains.claims.entries.values()
        if entry.state in (ClaimState.PREPARED, ClaimState.VERIFYING, ClaimState.TAKEN_OVER)
        and (own := domain_of(entry).domain) is not None
        and own.uid == domain
        and own.devices[0].kind is DeviceKind.DAEMON
    ]
