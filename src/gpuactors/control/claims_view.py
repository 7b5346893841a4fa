"""The operator's view of claims: the claims of a node, its slices, and what claims may do with a device.

Derived from the state, never kept; a part of `view.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gpuactors.core.assessment.assessments import assessments_of
from gpuactors.core.dra.offered import device_name
from gpuactors.core.dra.report import claim_reports, device_of_claims
from gpuactors.core.model import PciAddress
from gpuactors.core.state import NodeState


@dataclass(frozen=True, slots=True)
class ClaimView:
    """One claim."""

    namespace: str
    name: str
    uid: str
    state: str
    """Of `core/dra/table.py`."""
    age_s: float
    """Seconds since it came to this state, as far as this daemon has seen it."""
    devices: tuple[str, ...]
    """PCI addresses: those that it has for itself, or waits for."""
    admin_devices: tuple[str, ...]
    """Those to which it has admin access."""
    problem: str
    """Why it is not further, as a sentence."""
    waiting_calls: int
    """Calls of kubelet that wait for an answer about it."""

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True)
class BlockedView:
    """A device that must not be given to a claim now."""

    name: str
    """As the slice names it; of one that is never offered the PCI address."""
    reason: str


@dataclass(frozen=True, slots=True)
class SlicesView:
    """What the API server has of our devices."""

    slices: int
    generation: int
    settled: bool
    """All is stored as it should be."""
    tainted: tuple[BlockedView, ...]
    withdrawn: tuple[BlockedView, ...]
    """Not offered, as the server keeps no taints."""
    left_out: tuple[BlockedView, ...]
    """Never offered."""
    problem: str
    keeps_taints: str
    """Whether the server does: `yes`, `no`, `unknown`."""


@dataclass(frozen=True, slots=True)
class ClaimsView:
    """All of a node that has to do with claims."""

    driver: str
    """The name of the DRA driver."""
    problem: str
    """Why no claim is served, or why the checkpoint cannot be written; empty if all is well."""
    claims: tuple[ClaimView, ...]
    """In the order in which they came."""
    slices: SlicesView | None
    """None while nothing is known of them."""

    def of(self, uid: str | None) -> ClaimView | None:
        """The claim of this UID."""
        return next((claim for claim in self.claims if claim.uid == uid), None)


@dataclass(frozen=True, slots=True)
class FirstDriverView:
    """The first driver of a function in this boot, before any act of ours; None: it had none."""

    address: str
    driver: str | None


@dataclass(frozen=True, slots=True)
class DeviceOfClaimsView:
    """What claims may do with one device; as `core.dra.report.DeviceOfClaims`."""

    claim_uid: str | None
    stays: bool
    rule: str
    why: str
    first_drivers: tuple[FirstDriverView, ...]
    offer: str


def claims_view(state: NodeState, at: float) -> ClaimsView | None:
    """None while DRA is off."""
    claims = state.claims
    if claims.settings is None:
        return None
    unread = "" if claims.loaded else "the checkpoint of the claims has not been read yet"
    return ClaimsView(
        driver=claims.settings.driver,
        problem=claims.unserved or claims.unwritten or unread,
        claims=tuple(
            ClaimView(
                namespace=found.name.namespace,
                name=found.name.name,
                uid=found.name.uid,
                state=str(found.state),
                age_s=max(0.0, at - found.changed_at),
                devices=found.devices,
                admin_devices=found.admin_devices,
                problem=found.problem,
                waiting_calls=found.waiting_calls,
            )
            for found in claim_reports(state)
        ),
        slices=_slices(state),
    )


def _slices(state: NodeState) -> SlicesView | None:
    if (published := state.claims.publication) is None:
        return None
    return SlicesView(
        slices=published.slices,
        generation=published.generation,
        settled=published.settled,
        tainted=_blocked(state, published.tainted),
        withdrawn=_blocked(state, published.withdrawn),
        left_out=tuple(BlockedView(a, reason) for a, reason in sorted(published.left_out.items())),
        problem=published.problem,
        keeps_taints=str(published.keeps_taints),
    )


def _blocked(state: NodeState, names: Iterable[str]) -> tuple[BlockedView, ...]:
    """With the reason of the device's health; one that changed since it was published has none."""
    offer, assessments = state.offered.offer, assessments_of(state).of
    devices = offer.devices if offer is not None else ()
    addresses = {device_name(d.address): d.address for d in devices if d.blocked is not None}
    reasons = {
        name: found.status.message
        for name, address in addresses.items()
        if (found := assessments.get(address)) is not None
    }
    return tuple(BlockedView(name, reasons.get(name, "")) for name in names)


def device_of_claims_view(state: NodeState, address: PciAddress) -> DeviceOfClaimsView | None:
    """None while DRA is off."""
    found = device_of_claims(state, address)
    if found is None:
        return None
    return DeviceOfClaimsView(
        claim_uid=found.claim,
        stays=found.stays,
        rule=str(found.rule) if found.rule is not None else "",
        why=found.why,
        first_drivers=tuple(FirstDriverView(f.address, f.driver) for f in found.first_drivers),
        offer=found.offer,
    )
