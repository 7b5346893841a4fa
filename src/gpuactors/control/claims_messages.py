"""Between the view of claims and the messages of the control socket; a part of `messages.py`."""

from __future__ import annotations

from gpuactors.control.claims_view import (
    BlockedView,
    ClaimsView,
    ClaimView,
    DeviceOfClaimsView,
    FirstDriverView,
    SlicesView,
)
from gpuactors.control.pb.control import v1 as pb


def claims_message(view: ClaimsView) -> pb.Claims:
    """The claims and the slices of one DRA driver."""
    return pb.Claims(
        driver=view.driver,
        problem=view.problem,
        claims=[
            pb.Claim(
                namespace=claim.namespace,
                name=claim.name,
                uid=claim.uid,
                state=claim.state,
                age_s=claim.age_s,
                devices=[*claim.devices],
                admin_devices=[*claim.admin_devices],
                problem=claim.problem,
                waiting_calls=claim.waiting_calls,
                domain=claim.domain,
            )
            for claim in view.claims
        ],
        slices=_slices_message(view.slices) if view.slices is not None else None,
    )


def claims_view(message: pb.Claims) -> ClaimsView:
    """As `claims_message`, received."""
    return ClaimsView(
        driver=message.driver,
        problem=message.problem,
        claims=tuple(
            ClaimView(
                namespace=claim.namespace,
                name=claim.name,
                uid=claim.uid,
                state=claim.state,
                age_s=claim.age_s,
                devices=tuple(claim.devices),
                admin_devices=tuple(claim.admin_devices),
                problem=claim.problem,
                waiting_calls=claim.waiting_calls,
                domain=claim.domain,
            )
            for claim in message.claims
        ),
        slices=_slices_view(message.slices) if message.slices is not None else None,
    )


def _slices_message(view: SlicesView) -> pb.Slices:
    return pb.Slices(
        slices=view.slices,
        generation=view.generation,
        settled=view.settled,
        tainted=[pb.Blocked(name=b.name, reason=b.reason) for b in view.tainted],
        withdrawn=[pb.Blocked(name=b.name, reason=b.reason) for b in view.withdrawn],
        left_out=[pb.Blocked(name=b.name, reason=b.reason) for b in view.left_out],
        problem=view.problem,
        keeps_taints=view.keeps_taints,
    )


def _slices_view(message: pb.Slices) -> SlicesView:
    return SlicesView(
        slices=message.slices,
        generation=message.generation,
        settled=message.settled,
        tainted=tuple(BlockedView(b.name, b.reason) for b in message.tainted),
        withdrawn=tuple(BlockedView(b.name, b.reason) for b in message.withdrawn),
        left_out=tuple(BlockedView(b.name, b.reason) for b in message.left_out),
        problem=message.problem,
        keeps_taints=message.keeps_taints,
    )


def device_of_claims_message(view: DeviceOfClaimsView) -> pb.DeviceOfClaims:
    """What claims may do with one device."""
    return pb.DeviceOfClaims(
        claim_uid=view.claim_uid,
        stays=view.stays,
        rule=view.rule,
        why=view.why,
        first_drivers=[pb.Member(address=f.address, driver=f.driver) for f in view.first_drivers],
        offer=view.offer,
        blocked=view.blocked,
    )


def device_of_claims_view(message: pb.DeviceOfClaims) -> DeviceOfClaimsView:
    """As `device_of_claims_message`, received."""
    return DeviceOfClaimsView(
        claim_uid=message.claim_uid,
        stays=message.stays,
        rule=message.rule,
        why=message.why,
        first_drivers=tuple(FirstDriverView(f.address, f.driver) for f in message.first_drivers),
        offer=message.offer,
        blocked=message.blocked,
    )
