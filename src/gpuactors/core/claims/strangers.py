"""Claims of this driver that kubelet lists and that are not here: another program of this name, such as NVIDIA's DRA
driver, has prepared them. Their devices are in use.

Devices by our own names are not included: kubelet's ledger shows these by their PCI addresses.

A file of its own: the claims of GPUs, of compute domains, and the takeover use it.
"""

from __future__ import annotations

from msgspec.structs import replace

from gpuactors.core.state import NodeState
from gpuactors.core.state.claims import Claims
from gpuactors.core.values.claim import ClaimName
from gpuactors.core.values.claim_states import ENDED, OWNING
from gpuactors.core.values.model import ClaimedDevice
from gpuactors.core.values.owner import OwnClaims


def strangers(claims: Claims, state: NodeState) -> tuple[ClaimedDevice, ...]:
    """Return each device with its claim, sorted. For a claim that is here gpuactors' own state is used, as kubelet
    lists the claim until its pod has ended."""
    if claims.settings is None or not state.kubelet.ledger.unplaced:
        return ()
    own = own_claims(claims)
    listed = (c for c in state.kubelet.ledger.unplaced if c.driver == own.driver and not own.knows(c))
    devices = {replace(claimed, pod=None, cdi_ids=()) for claimed in listed}
    return tuple(sorted(devices, key=lambda c: (c.device, c.claim, c.uid)))


def is_of(device: ClaimedDevice, claim: ClaimName) -> bool:
    """Return whether a listed device belongs to this claim: by its UID, or by its name if it has none."""
    return device.uid == claim.uid if device.uid else device.claim == str(claim)


def own_claims(claims: Claims) -> OwnClaims:
    """Return the claims that are known here; empty where no driver is on."""
    if claims.settings is None:
        return OwnClaims()
    driver, pool = claims.settings.driver, claims.settings.pool
    records = [e for e in claims.entries.values() if e.state in OWNING or e.state in ENDED]
    return OwnClaims(
        driver,
        frozenset(e.name.uid for e in records),
        frozenset(str(e.name) for e in records),
        tuple(
            ClaimedDevice(driver, pool, device, str(e.name) if e.name.is_known else "", None, e.name.uid)
            for e in records
            if e.state in OWNING
            for device in e.unplaced
        ),
    )
