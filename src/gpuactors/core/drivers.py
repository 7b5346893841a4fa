"""The sets of claims that a node may have, each with the answers of its DRA driver.

A file of its own: the only one that knows both kinds of claims; neither kind imports the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from gpuactors.core.claims.driver import ClaimDriver
from gpuactors.core.domains.driver import DOMAINS
from gpuactors.core.gpus.driver import GPUS
from gpuactors.core.values.claim import ClaimsOf

DRIVERS: Final[Mapping[ClaimsOf, ClaimDriver]] = {ClaimsOf.GPUS: GPUS, ClaimsOf.DOMAINS: DOMAINS}
"""In the order in which they go on after each event."""
