"""The devices offered to claims of compute domains. `domains/offer.py` derives them.

A file of its own: the state has this data, and must not import the module that derives it.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from gpuactors.core.values.claim import DeviceHealth
from gpuactors.core.values.domain import ClaimedDomain
from gpuactors.core.values.slices import Offer


class OfferedDomains(Struct, frozen=True, gc=False):
    """The offered devices, preceded by the inputs that they are derived from."""

    absent: str | None = None
    """The same as `ImexFacts.absent`; None before IMEX was read, while nothing is offered."""
    claimed: tuple[ClaimedDomain, ...] = ()

    offer: Offer | None = None
    health: tuple[DeviceHealth, ...] = ()
    """The health of each offered device, as kubelet shows it in the status of the pod that has the device."""


NOTHING_OFFERED: Final = OfferedDomains()
