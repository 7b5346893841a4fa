"""The devices that the node offers to claims of compute domains: its channels, and one daemon."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gpuactors.core.domains.model import DeviceKind, DomainDevice, DomainMode
from gpuactors.core.domains.state import Domains
from gpuactors.core.dra.claim import DeviceHealth, DraHealth
from gpuactors.core.dra.slices import AnyOffer, Attribute, Blocked, Offer
from gpuactors.core.dra.table import OWNING


@dataclass(frozen=True, slots=True)
class OfferedChannel:
    """A channel or the daemon, as `dra/slices.py` has an offered device. Nothing of it is ever wrong."""

    device: DomainDevice
    claimed: bool

    @property
    def name(self) -> str:
        """As in the ResourceSlice."""
        return str(self.device)

    @property
    def attributes(self) -> Mapping[str, Attribute]:
        """As NVIDIA's driver has them: its DeviceClasses select by `type`."""
        return {
            "type": Attribute("string", str(self.device.kind)),
            "id": Attribute("int", self.device.id),
        }

    @property
    def unfit(self) -> str:
        """Each fits into a slice."""
        return ""

    @property
    def blocked(self) -> Blocked | None:
        """Who has it is a claim, which the scheduler knows."""
        return None


def offer_of(domains: Domains) -> AnyOffer | None:
    """What is offered; None while it is not known. A node without IMEX offers nothing: its claims would be refused."""
    settings, facts, claims = domains.settings, domains.imex.facts, domains.claims
    if settings is None or claims.settings is None or facts is None or not claims.loaded:
        return None
    channels = tuple(DomainDevice(DeviceKind.CHANNEL, number) for number in range(settings.channels))
    daemons = (DomainDevice(DeviceKind.DAEMON, 0),) if settings.mode is DomainMode.ON else ()
    owning = (e.domain for e in claims.entries.values() if e.state in OWNING and e.domain is not None)
    taken = {device for own in owning for device in own.devices}
    offered = () if facts.absent else channels + daemons
    return Offer(
        claims.settings.driver,
        claims.settings.pool,
        tuple(OfferedChannel(device, device in taken) for device in offered),
    )


def health_of(offer: AnyOffer) -> tuple[DeviceHealth, ...]:
    """The health of each offered device, for kubelet's stream."""
    return tuple(DeviceHealth(offer.node, d.name, DraHealth.HEALTHY, "") for d in offer.devices)
