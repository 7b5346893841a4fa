"""The sets of claims that a node may have, each with the answers of its DRA driver.

A file of its own: the only one that knows both kinds of claims; neither kind imports the other. A driver is imported
when it is first asked for.
"""

from __future__ import annotations

from gpuactors.core.claims.driver import Driver
from gpuactors.core.state import NodeState
from gpuactors.core.values.claim import ClaimsOf


def driver_of(of: ClaimsOf) -> Driver:
    """The driver of these claims, also on a node where it is off."""
    match of:
        case ClaimsOf.GPUS:
            from gpuactors.core.gpus.driver import GPUS

            return GPUS
        case ClaimsOf.DOMAINS:
            from gpuactors.core.domains.driver import DOMAINS

            return DOMAINS


def drivers_of(state: NodeState) -> list[Driver]:
    """Those that are on, in the order in which they go on after each event."""
    claims = {ClaimsOf.GPUS: state.gpus.claims, ClaimsOf.DOMAINS: state.domains.claims}
    return [driver_of(kind) for kind, of_kind in claims.items() if of_kind.settings is not None]
