"""The operator's view of claims of GPUs: each claim, and what happens to each device when its claim ends.

Derived each time, never kept. Must not decide anything again: what a claim does at its end was decided when it reserved
its devices.
"""

from __future__ import annotations

from msgspec import Struct

from gpuactors.core.claims.report import ClaimReport, claim_report
from gpuactors.core.gpus.exclusion import with_companions
from gpuactors.core.gpus.offer import why_blocked
from gpuactors.core.kinds.kind import Act
from gpuactors.core.kinds.table import key_of, kind_named, slice_name
from gpuactors.core.state import NodeState
from gpuactors.core.state.claims import ClaimedGpu, ClaimRecord, gpus_of
from gpuactors.core.values import prebound
from gpuactors.core.values.claim import ClaimUid, OriginalDriver
from gpuactors.core.values.claim_states import OWNING
from gpuactors.core.values.model import DeviceKey, function_address
from gpuactors.core.values.reported import CLAIMED, OFFERED


def claim_reports(state: NodeState) -> tuple[ClaimReport, ...]:
    """Report every claim of GPUs, in the order of arrival."""
    claims = state.gpus.claims
    return tuple(
        claim_report(claims, entry, devices_of(entry), admin_devices=_named(entry, admin=True))
        for entry in claims.entries.values()
    )


def devices_of(entry: ClaimRecord) -> tuple[DeviceKey, ...]:
    """Return the devices of a claim of GPUs (`ClaimReport.devices`)."""
    if gpus_of(entry).gpus:
        return tuple(gpu.key for gpu in gpus_of(entry).gpus)
    return _named(entry, admin=False)


def _named(entry: ClaimRecord, *, admin: bool) -> tuple[DeviceKey, ...]:
    results = entry.claim.results or () if entry.claim is not None else ()
    named = (key_of(r.device) for r in results if r.admin_access is admin)
    return tuple(dict.fromkeys(address for address in named if address is not None))


class DeviceOfClaims(Struct, frozen=True, gc=False):
    """The ways in which claims may use one device."""

    claim: ClaimUid | None
    """The claim that has it."""
    keep_on_vfio: bool
    """True if it stays on its vfio driver when a claim ends; else it is returned to its original driver."""
    rule: prebound.Rule | None
    """The rule that decided `keep_on_vfio`; None if an earlier daemon decided, and the rules would now decide
    otherwise."""
    why: str
    """That decision, as a sentence."""
    original_drivers: tuple[OriginalDriver, ...]
    """The known drivers of this boot before any act of gpuactors: the device's own, then its companions'."""
    offer: str
    """`offered`, `claimed`, or why it must not be given to a claim now (`BlockKind`); empty while it is not known."""
    blocked: str
    """Why it must not be given to a claim now, as a sentence; empty if it may, or a claim has it."""


def device_of_claims(state: NodeState, device: DeviceKey) -> DeviceOfClaims | None:
    """Report how claims may use this device; None while DRA is off."""
    settings, original_drivers = state.gpus.settings, state.gpus.original_drivers
    if state.gpus.claims.settings is None:
        return None
    entry, gpu = _owner_of(state, device)
    address = function_address(device)
    decided = prebound.decide(
        address,
        original_drivers.get(address),
        operator=settings.operator,
        hints=settings.hints,
        function=state.host.functions.get(address),
    )
    keep_on_vfio, why, rule = decided.is_prebound, decided.sentence, decided.rule
    originals = [
        original_drivers[f.address] for f in with_companions(state, device) if f.address in original_drivers
    ]
    if gpu is not None:
        keep_on_vfio, originals = (
            bool(gpu.keep_on_vfio),
            [original_drivers.get(f.address, f) for f in gpu.functions],
        )
        if keep_on_vfio != decided.is_prebound:
            original = next((f for f in gpu.functions if f.address == address), None)
            why = (
                gpu.keep_on_vfio
                or prebound.decide(address, original, operator=prebound.OperatorsList()).sentence
            )
        elif keep_on_vfio:
            why = gpu.keep_on_vfio
    if Act.BIND not in kind_named(slice_name(device)).acts:
        keep_on_vfio, why = True, "it is usable as it is, and no claim binds it"
    return DeviceOfClaims(
        claim=entry.name.uid if entry is not None else None,
        keep_on_vfio=keep_on_vfio,
        rule=rule if keep_on_vfio == decided.is_prebound else None,
        why=why,
        original_drivers=tuple(sorted(originals, key=lambda f: (f.address != address, f.address))),
        offer=_offer_of(state, device),
        blocked=why_blocked(state, device) if entry is None else "",
    )


def _owner_of(state: NodeState, address: DeviceKey) -> tuple[ClaimRecord, ClaimedGpu] | tuple[None, None]:
    """Return the claim that has the device for itself, and the device as it was reserved."""
    for entry in state.gpus.claims.entries.values():
        for gpu in gpus_of(entry).gpus if entry.state in OWNING else ():
            if gpu.key == address:
                return entry, gpu
    return None, None


def _offer_of(state: NodeState, address: DeviceKey) -> str:
    if address in state.gpus.reserved:
        return CLAIMED
    offered = state.offered.devices.get(address)
    if offered is None:
        return ""
    return OFFERED if offered.blocked is None else str(offered.blocked.kind)
