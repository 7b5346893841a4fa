"""Claims of this driver that kubelet lists and that are not here: another program of this name, such as NVIDIA's DRA
driver, has prepared them. Their devices are in use.

Devices by our own names are not included: kubelet's ledger shows these by their PCI addresses.

A file of its own: the claims of GPUs, of compute domains, and the takeover use it.
"""

from __future__ import annotations

from gpuactors.core.state import NodeState
from gpuactors.core.state.claims import Claims
from gpuactors.core.values.claim_states import ENDED, OWNING
from gpuactors.core.values.model import ClaimedDevice


def strangers(claims: Claims, state: NodeState) -> tuple[ClaimedDevice, ...]:
    """Each device with its claim, sorted. Of a claim that is here our own state knows better, as kubelet lists it until
    its pod has ended."""
    if claims.settings is None or not state.kubelet.ledger.unplaced:
        return ()
    known = {str(e.name) for e in claims.entries.values() if e.state in OWNING or e.state in ENDED}
    driver = claims.settings.driver
    found = (c for c in state.kubelet.ledger.unplaced if c.driver == driver and c.claim not in known)
    return tuple(sorted(found, key=lambda c: (c.device, c.claim)))
