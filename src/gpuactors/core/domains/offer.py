"""The devices of compute domains that the node offers to claims: channels, and the daemon of a domain.

A node without IMEX offers nothing, but what a claim has: a pool never has less than what is held.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from gpuactors.core.domains.model import DeviceKind, DomainDevice, DomainMode, DomainSettings
from gpuactors.core.domains.state import Domains
from gpuactors.core.dra.claim import DeviceHealth, DraHealth
from gpuactors.core.dra.slices import Attribute, Blocked, BlockKind, Offer
from gpuactors.core.dra.table import OWNING

NO_IMEX: Final = "NoImex"
"""The taint of a device that a claim has on a node which has lost its IMEX."""


@dataclass(frozen=True, slots=True)
class OfferedImexDevice:
    """As `slices.OfferedDevice`."""

    device: DomainDevice
    blocked: Blocked | None = None
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
    def unfit(self) -> str:
        """A slice can have each of them."""
        return ""


def offer_of(domains: Domains) -> Offer[OfferedImexDevice] | None:
    """What the ResourceSlice is to offer; None while the host has not said whether it has IMEX."""
    settings, claim_settings, facts = domains.settings, domains.claims.settings, domains.imex.facts
    if settings is None or claim_settings is None or facts is None or not domains.claims.loaded:
        return None
    claimed = _claimed(domains)
    blocked = Blocked(BlockKind.UNHEALTHY, NO_IMEX) if facts.absent else None
    devices = claimed if facts.absent else claimed | set(_devices(settings))
    return Offer(
        claim_settings.driver,
        claim_settings.pool,
        tuple(OfferedImexDevice(d, blocked, d in claimed) for d in sorted(devices, key=str)),
    )


def health_of(domains: Domains) -> tuple[DeviceHealth, ...]:
    """Of each device that is offered: the health that kubelet shows in the status of the pod that has it."""
    offer, facts = offer_of(domains), domains.imex.facts
    if offer is None or facts is None:
        return ()
    health = DraHealth.UNHEALTHY if facts.absent else DraHealth.HEALTHY
    return tuple(DeviceHealth(offer.node, device.name, health, facts.absent) for device in offer.devices)


def _devices(settings: DomainSettings) -> tuple[DomainDevice, ...]:
    channels = tuple(DomainDevice(DeviceKind.CHANNEL, number) for number in range(settings.channels))
    daemons = (DomainDevice(DeviceKind.DAEMON, 0),) if settings.mode is DomainMode.ON else ()
    return channels + daemons


def _claimed(domains: Domains) -> set[DomainDevice]:
    """The devices that claims have."""
    owning = (entry for entry in domains.claims.entries.values() if entry.state in OWNING)
    return {device for entry in owning if entry.domain is not None for device in entry.domain.devices}
