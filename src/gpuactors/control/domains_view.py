"""The operator's view of compute domains: each domain, the node's label, the host's IMEX, and the claims.

Copied from the report of the core (`core/domains/report.py`), which decides what is said; a part of `view.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

from gpuactors.control.claims_view import ClaimsView, ClaimView, ago, of_claims
from gpuactors.core.state import NodeState

if TYPE_CHECKING:
    from gpuactors.core.domains.report import DomainReport, ImexReport


class ImexView(Struct, frozen=True):
    """The host's state of IMEX; as `report.ImexReport`."""

    known: bool
    present: bool
    clique_id: str
    reason: str
    host_problem: str
    problem: str


class LabelView(Struct, frozen=True):
    """The node's label; as `report.LabelReport`."""

    status: str
    """A `LabelStatus`."""
    value: str | None
    said: str
    """Both in words."""
    problem: str


class DomainView(Struct, frozen=True):
    """One compute domain; as `report.DomainReport`."""

    uid: str
    name: str
    namespace: str
    status: str
    """A `DomainStatus`."""
    missing: str
    labelled: bool
    daemon_uid: str | None
    readiness: str | None
    """A `Readiness`."""
    problem: str
    since_s: float | None = None
    """Seconds since it has had this status, as far as this daemon has seen it; None: not known, as below."""
    read_s: float | None = None
    """Seconds since the API server was last heard of it."""

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}" if self.name else self.uid


class DomainsView(Struct, frozen=True):
    """All of a node that has to do with compute domains."""

    mode: str
    """`on` or `host-managed`."""
    claims: ClaimsView
    """Of channels and daemons."""
    imex: ImexView
    label: LabelView
    domains: tuple[DomainView, ...]
    """In the order in which their claims came."""

    def of(self, claim: ClaimView) -> DomainView | None:
        """The domain that a claim is for."""
        return next((domain for domain in self.domains if domain.uid == claim.domain), None)


def domains_view(state: NodeState, at: float) -> DomainsView | None:
    """None while compute domains are off."""
    domains = state.domains_part
    if domains is None or (settings := domains.settings) is None:
        return None
    from gpuactors.core.domains import report  # a node without compute domains has none of it

    reasons = {device.device: device.message for device in domains.offered.health}
    label = report.label_report(domains)
    return DomainsView(
        mode=str(settings.mode),
        claims=of_claims(domains.claims, settings.driver, report.claim_reports(domains), reasons, at),
        imex=_imex(report.imex_report(domains)),
        label=LabelView(str(label.status), label.value, str(label), label.problem),
        domains=tuple(_domain(found, at) for found in report.domain_reports(domains)),
    )


def _imex(found: ImexReport) -> ImexView:
    return ImexView(
        known=found.known,
        present=found.present,
        clique_id=found.clique_id,
        reason=found.reason,
        host_problem=found.host_problem,
        problem=found.problem,
    )


def _domain(found: DomainReport, at: float) -> DomainView:
    return DomainView(
        uid=found.uid,
        name=found.name,
        namespace=found.namespace,
        status=str(found.status),
        missing=found.missing,
        labelled=found.labelled,
        daemon_uid=found.daemon,
        readiness=found.readiness,
        problem=found.problem,
        since_s=ago(found.changed_at, at) if found.changed_at is not None else None,
        read_s=ago(found.read_at, at),
    )
