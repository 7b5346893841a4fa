"""The devices offered to claims of compute domains, as the state carries them: data only. `domains/offer.py` derives
it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from msgspec import Struct

from gpuactors.core.values.claim import DeviceHealth
from gpuactors.core.values.domain import ClaimedDomain, DomainDevice
from gpuactors.core.values.slices import Attribute, BlockReason, Offer


class OfferedImexDevice(Struct, frozen=True, gc=False):
    """An IMEX device in a slice; see `slices.OfferedDevice`."""

    device: DomainDevice
    blocked: BlockReason | None = None
    claimed: bool = False

    @property
    def name(self) -> str:
        """Its name in its slice."""
        return str(self.device)

    @property
    def attributes(self) -> Mapping[str, Attribute]:
        """DeviceClasses select by `type`."""
        return {
            "type": Attribute("string", str(self.device.kind)),
            "id": Attribute("int", self.device.id),
        }

    @property
    def capacity(self) -> Mapping[str, str]:
        """A channel has none."""
        return {}

    @property
    def invalid(self) -> str:
        """A slice can have each of them."""
        return ""


class OfferedDomains(Struct, frozen=True, gc=False):
    """The devices offered, preceded by what they are derived from."""

    absent: str | None = None
    """See `ImexFacts.absent`; None while the host has not said whether it has IMEX, and nothing is offered."""
    claimed: tuple[ClaimedDomain, ...] = ()

    offer: Offer[OfferedImexDevice] | None = None
    health: tuple[DeviceHealth, ...] = ()
    """Of each device that is offered: the health that kubelet shows in the status of the pod that has it."""


NOTHING_OFFERED: Final = OfferedDomains()
