"""The operator's view of compute domains: each domain, the node's label, the host's IMEX, and the claims.

Copied from the report of the core (`core/domains/report.py`), which decides what is said; a part of
`node_view.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpuactors.control.claims_view import ago, of_claims
from gpuactors.control.view import DomainsView, DomainView, LabelView
from gpuactors.core.state import NodeState

if TYPE_CHECKING:
    from gpuactors.core.domains.report import DomainReport


def domains_view(state: NodeState, at: float) -> DomainsView | None:
    """Return the view of the node's compute domains; None while they are off."""
    domains = state.domains
    if (settings := domains.settings) is None:
        return None
    from gpuactors.core.domains import report  # a node without compute domains has none of it

    reasons = {device.device: device.message for device in domains.offered.health}
    label = report.label_report(domains)
    return DomainsView(
        mode=str(settings.mode),
        claims=of_claims(domains.claims, settings.driver, report.claim_reports(domains), reasons, at),
        imex=report.imex_report(domains),
        label=LabelView(str(label.status), label.value, str(label), label.problem),
        domains=tuple(_domain(domain, at) for domain in report.domain_reports(domains)),
    )


def _domain(domain: DomainReport, at: float) -> DomainView:
    return DomainView(
        uid=domain.uid,
        name=domain.name,
        namespace=domain.namespace,
        status=str(domain.status),
        missing=domain.missing,
        labelled=domain.labelled,
        daemon_uid=domain.daemon,
        readiness=domain.readiness,
        problem=domain.problem,
        since_s=ago(domain.changed_at, at) if domain.changed_at is not None else None,
        read_s=ago(domain.read_at, at),
    )
