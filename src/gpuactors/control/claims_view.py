"""The operator's view of the claims of one DRA driver, of its slices, and of what claims may do with a device.

Derived from the state, never kept; a part of `node_view.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from gpuactors.control.view import (
    BlockedView,
    ClaimsView,
    ClaimView,
    DeviceOfClaimsView,
    OriginalDriverView,
    SlicesView,
)
from gpuactors.core.state import NodeState
from gpuactors.core.values.model import DeviceKey

if TYPE_CHECKING:
    from gpuactors.core.claims.report import ClaimReport
    from gpuactors.core.state.claims import Claims
    from gpuactors.core.values.slices import Publication


def ago(since: float, at: float) -> float | None:
    """Return the seconds from `since` to `at`; None if `since` is not known."""
    return max(0.0, at - since) if since != -math.inf else None


def claims_view(state: NodeState, at: float) -> ClaimsView | None:
    """Return the view of the claims of GPUs; None while DRA is off."""
    claims = state.gpus.claims
    if (settings := claims.settings) is None:
        return None
    from gpuactors.core.gpus.report import claim_reports  # a node without claims has none of it

    published = claims.publication
    reasons = _reasons(state) if published is not None and (published.tainted or published.withdrawn) else {}
    return of_claims(claims, settings.driver, claim_reports(state), reasons, at)


def of_claims(
    claims: Claims, driver: str, reports: Iterable[ClaimReport], reasons: Mapping[str, str], at: float
) -> ClaimsView:
    """Return the view of one driver's claims. `reasons`: why a device must not be given to a claim now, by its name in
    the slice."""
    unread = "" if claims.loaded else "the checkpoint of the claims has not been read yet"
    published = claims.publication
    return ClaimsView(
        driver=driver,
        problem=claims.unserved or claims.unwritten or unread,
        claims=tuple(
            ClaimView(
                namespace=claim.name.namespace,
                name=claim.name.name,
                uid=claim.name.uid,
                state=str(claim.state),
                age_s=max(0.0, at - claim.changed_at),
                devices=claim.devices,
                admin_devices=claim.admin_devices,
                problem=claim.problem,
                waiting_calls=claim.waiting_calls,
                domain=claim.domain,
            )
            for claim in reports
        ),
        slices=_slices(published, reasons) if published is not None else None,
    )


def _slices(published: Publication, reasons: Mapping[str, str]) -> SlicesView:
    """Return the view of the published slices. A device whose health has changed since has no reason."""
    return SlicesView(
        slices=published.slices,
        generation=published.generation,
        settled=published.settled,
        tainted=tuple(BlockedView(name, reasons.get(name, "")) for name in published.tainted),
        withdrawn=tuple(BlockedView(name, reasons.get(name, "")) for name in published.withdrawn),
        left_out=tuple(BlockedView(name, reason) for name, reason in sorted(published.left_out.items())),
        problem=published.problem,
        keeps_taints=str(published.keeps_taints),
        keeps_counters=str(published.keeps_counters),
    )


def _reasons(state: NodeState) -> dict[str, str]:
    """Return why GPUs must not be given to a claim now, by their names in the slice."""
    from gpuactors.core.gpus.offer import why_blocked

    return {
        device.name: why_blocked(state, key)
        for key, device in state.offered.devices.items()
        if device.blocked is not None
    }


def device_of_claims_view(state: NodeState, device: DeviceKey) -> DeviceOfClaimsView | None:
    """Return how claims may use the device; None while DRA is off."""
    if state.gpus.claims.settings is None:
        return None
    from gpuactors.core.gpus.report import device_of_claims

    report = device_of_claims(state, device)
    if report is None:
        return None
    return DeviceOfClaimsView(
        claim_uid=report.claim,
        stays=report.keep_on_vfio,
        rule=str(report.rule) if report.rule is not None else "",
        why=report.why,
        first_drivers=tuple(OriginalDriverView(f.address, f.driver) for f in report.original_drivers),
        offer=report.offer,
        blocked=report.blocked,
    )
