"""The operator's view of compute domains: each domain with claims here and what its channels lack, the node's label,
the host's IMEX, and the claims.

Derived each time, never kept. `exclusion.py` says what is missing, as in a prepare: a domain that a claim still waits
for is not shown as Ready.
"""

from __future__ import annotations

import math
from typing import Final, assert_never

from msgspec import Struct

from gpuactors.core.claims.report import ClaimReport, claim_report
from gpuactors.core.domains import exclusion, label, reads
from gpuactors.core.state.claims import ClaimRecord, domain_of
from gpuactors.core.state.domains import Domains
from gpuactors.core.values.claim import ClaimUid
from gpuactors.core.values.claim_states import OWNING, ClaimState
from gpuactors.core.values.domain import DeviceKind, DomainDevice, DomainMode, DomainUid
from gpuactors.core.values.domain_reservation import devices_wanted
from gpuactors.core.values.quote import quoted_id
from gpuactors.core.values.reported import DomainStatus, ImexReport, LabelStatus, Readiness

_HERE: Final = OWNING | {ClaimState.WAITING}
"""The states in which a claim takes part in its domain."""


class DomainReport(Struct, frozen=True, gc=False):
    """One compute domain."""

    uid: DomainUid
    name: str
    """The domain's name; empty while unknown, like the namespace."""
    namespace: str
    status: DomainStatus
    missing: str
    """Why its channels are not usable, as a sentence: the error of a claim that waits for it. Empty unless it is not
    ready."""
    labelled: bool
    """True if the node's label is known to name it."""
    daemon: ClaimUid | None
    """The claim of its daemon here, prepared or not."""
    readiness: Readiness | None
    """The API server's last answer; None in mode host-managed."""
    problem: str
    """Why the last read failed, as a sentence; empty if it did not."""
    changed_at: float | None
    """When it came to its status, as far as this daemon has seen it, in seconds of the events' clock; None while it
    does not serve."""
    read_at: float
    """When the API server last answered about it, in seconds of the events' clock; minus infinity if never."""

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}" if self.name else self.uid


def domain_reports(domains: Domains) -> tuple[DomainReport, ...]:
    """Return every domain that a claim here is for, in the order in which their claims came."""
    if domains.settings is None:
        return ()
    return tuple(_report(domains, uid) for uid in _uids(domains))


def statuses(domains: Domains) -> dict[DomainUid, DomainStatus]:
    """Return the status of each domain that a claim here is for."""
    of_all = domains.claims.entries.values()
    return {
        uid: _status(domains, uid, [e for e in of_all if _takes_part(e, uid, DeviceKind.CHANNEL)])[0]
        for uid in _uids(domains)
    }


def _uids(domains: Domains) -> dict[DomainUid, None]:
    """Return the domains, in the order in which their claims came."""
    configs = (domain_of(entry).config for entry in domains.claims.entries.values())
    return dict.fromkeys(config.domain for config in configs if config is not None)


def _takes_part(entry: ClaimRecord, uid: DomainUid, kind: DeviceKind) -> bool:
    config = domain_of(entry).config
    return config is not None and config.domain == uid and config.kind is kind and entry.state in _HERE


def _report(domains: Domains, uid: DomainUid) -> DomainReport:
    assert domains.settings is not None
    claims = [
        e
        for e in domains.claims.entries.values()
        if (config := domain_of(e).config) is not None and config.domain == uid
    ]
    daemons = [e.name.uid for e in claims if _takes_part(e, uid, DeviceKind.DAEMON)]
    view = domains.views.get(uid)
    namespace, name = _name(domains, uid, claims)
    status, missing = _status(domains, uid, [e for e in claims if _takes_part(e, uid, DeviceKind.CHANNEL)])
    return DomainReport(
        uid=uid,
        name=name,
        namespace=namespace,
        status=status,
        missing=missing,
        labelled=label.conflict(domains, uid) is None,
        daemon=daemons[-1] if daemons else None,
        readiness=exclusion.readiness(domains, uid) if domains.settings.mode is DomainMode.ON else None,
        problem=view.problem if view is not None else "",
        changed_at=domains.since[uid][1] if uid in domains.since else None,
        read_at=view.read_at if view is not None else -math.inf,
    )


def _name(domains: Domains, uid: DomainUid, claims: list[ClaimRecord]) -> tuple[str, str]:
    """Return the domain's namespace and name as last read. For one that is gone, or that this daemon has not read,
    return those that its claim has."""
    view = domains.views.get(uid)
    if view is not None and view.domain is not None:
        return view.domain.namespace, view.domain.name
    own = next((own for entry in claims if (own := domain_of(entry).domain) is not None and own.name), None)
    return (own.namespace, own.name) if own is not None else ("", "")


def _status(domains: Domains, uid: DomainUid, channels: list[ClaimRecord]) -> tuple[DomainStatus, str]:
    """Return the domain's status, and what is missing, as a sentence."""
    if not channels:
        return DomainStatus.UNUSED, ""
    waits = next((entry for entry in channels if entry.state is ClaimState.BINDING), None)
    if waits is not None:
        missing = exclusion.unmet_prerequisite(domains, waits)
    elif any(entry.state in OWNING for entry in channels):
        missing = exclusion.channels_lack(domains, uid)
        if (
            missing
            and exclusion.readiness(domains, uid) is Readiness.UNREAD
            and not exclusion.daemon_lacks(domains, uid)
        ):
            return DomainStatus.UNREAD, ""
    else:
        conflict = exclusion.conflict(domains, channels[0])
        missing = conflict.why if conflict is not None else exclusion.channels_lack(domains, uid)
    return (DomainStatus.NOT_READY, missing.message) if missing is not None else (DomainStatus.READY, "")


# --- the label, and the host ----------------------------------------------------------------------------------


class LabelReport(Struct, frozen=True, gc=False):
    """The node's label."""

    status: LabelStatus
    value: str | None
    """Its value, or the one being added or removed; None if it is absent or not known."""
    problem: str
    """Why the last read or patch failed, as a sentence; empty if it did not."""

    def __str__(self) -> str:
        value = quoted_id(self.value or "")
        match self.status:
            case LabelStatus.UNREAD:
                return "not read yet"
            case LabelStatus.UNSURE:
                return "unknown: a patch failed, or found another label"
            case LabelStatus.ABSENT:
                return "absent"
            case LabelStatus.ADDING:
                return f"{value} is being added"
            case LabelStatus.SET:
                return value
            case LabelStatus.REMOVING:
                return f"{value} is being removed"
            case LabelStatus.FOREIGN:
                return f"{value}, set by no claim here"
            case _:
                assert_never(self.status)


def label_report(domains: Domains) -> LabelReport:
    """Return the label without outstanding or unsure parts: those are no facts."""
    node_label = domains.label
    if not node_label.is_read or node_label.unsure:
        status, value = LabelStatus.UNSURE if node_label.is_read else LabelStatus.UNREAD, None
    elif node_label.patch is not None:
        status, value = (
            LabelStatus.REMOVING if node_label.is_going else LabelStatus.ADDING,
            str(node_label.patch.value),
        )
    elif node_label.value is None:
        status, value = LabelStatus.ABSENT, None
    else:
        status, value = LabelStatus.FOREIGN if node_label.foreign else LabelStatus.SET, node_label.value
    return LabelReport(status, value, node_label.problem)


def imex_report(domains: Domains) -> ImexReport:
    """Return the host's state of IMEX as last read."""
    facts, problem = domains.imex.facts, domains.imex.problem
    if facts is None:
        return ImexReport(False, False, "", "", "", problem)
    reason = reads.without_nodes(facts)
    return ImexReport(True, not facts.absent, facts.clique_id, reason, facts.host_problem, problem)


# --- the claims -----------------------------------------------------------------------------------------------


def claim_reports(domains: Domains) -> tuple[ClaimReport, ...]:
    """Return every claim of channels or daemons, in the order in which they came."""
    return tuple(
        claim_report(
            domains.claims,
            entry,
            tuple(map(str, devices_of(domains, entry))),
            domain=config.domain if (config := domain_of(entry).config) is not None else "",
        )
        for entry in domains.claims.entries.values()
    )


def devices_of(domains: Domains, entry: ClaimRecord) -> tuple[DomainDevice, ...]:
    """Return the devices that a claim has for itself; before it is reserved, those that it waits for."""
    config, own = domain_of(entry).config, domain_of(entry).domain
    if own is not None:
        return own.devices
    if entry.claim is None or config is None or domains.settings is None:
        return ()
    return devices_wanted(entry.claim, config, domains.settings)
