"""The devices offered to claims of compute domains, as the state carries them: data only. `domains/offer.py` derives
it.

A file of its own: the state carries this data, and must not import what derives it.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from gpuactors.core.values.claim import DeviceHealth
from gpuactors.core.values.domain import ClaimedDomain
from gpuactors.core.values.slices import Offer


class OfferedDomains(Struct, frozen=True, gc=False):
    """The devices offered, preceded by what they are derived from."""

    absent: str | None = None
    """See `ImexFacts.absent`; None while the host has not said whether it has IMEX, and nothing is offered."""
    claimed: tuple[ClaimedDomain, ...] = ()

    offer: Offer | None = None
    health: tuple[DeviceHealth, ...] = ()
    """Of each device that is offered: the health that kubelet shows in the status of the pod that has it."""


NOTHING_OFFERED: Final = OfferedDomains()
