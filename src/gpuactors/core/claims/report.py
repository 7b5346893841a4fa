"""How a claim is reported: to an operator, and to another claim that waits for what it has.

Derived each time, never kept.
"""

from __future__ import annotations

from msgspec import Struct

from gpuactors.core.state.claims import ClaimRecord, Claims
from gpuactors.core.values.claim import ClaimName
from gpuactors.core.values.claim_states import ClaimState


class ClaimReport(Struct, frozen=True, gc=False):
    """One claim as an operator sees it."""

    name: ClaimName
    state: ClaimState
    changed_at: float
    devices: tuple[str, ...]
    """The devices that it has for itself; before it is reserved, those that it waits for. GPUs by PCI address, devices
    of a compute domain by their names in the slice."""
    admin_devices: tuple[str, ...]
    """The devices that it has admin access to."""
    problem: str
    waiting_calls: int
    """The number of kubelet's calls that wait for an answer about it."""
    domain: str = ""
    """The UID of the compute domain that it is for; empty for a claim of GPUs, and while unknown."""


def claim_report(
    claims: Claims,
    entry: ClaimRecord,
    devices: tuple[str, ...],
    *,
    admin_devices: tuple[str, ...] = (),
    domain: str = "",
) -> ClaimReport:
    """Report one claim of any driver; the names of its devices are the driver's."""
    return ClaimReport(
        name=entry.name,
        state=entry.state,
        changed_at=entry.changed_at,
        devices=devices,
        admin_devices=admin_devices,
        problem=entry.broken or entry.problem,
        waiting_calls=sum(call.uid == entry.name.uid for call in claims.calls.values()),
        domain=domain,
    )


def belongs(entry: ClaimRecord, of_pods: str = "") -> str:
    """Return how a device is tied to a claim that has it, as the predicate of a sentence: `belongs to the claim
    ns/name`, with what that claim waits for. `of_pods`: its pods, as a part of the sentence."""
    why = f" ({entry.problem})" if entry.problem else ""
    return f"{_tie(entry.state)} the claim {entry.name}{of_pods}{why}"


def _tie(state: ClaimState) -> str:
    match state:
        case ClaimState.RELEASING:
            return "is being released from"
        case ClaimState.TAKEN_OVER:
            return "belongs, by NVIDIA's driver, to"
        case _:
            return "belongs to"
