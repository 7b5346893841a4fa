"""The devices of compute domains that the node offers to claims: channels, and the daemon of a domain.

A node without IMEX offers nothing, but what a claim has: a pool never has less than what is held. Derived when one of
the two changes, and carried in the state with what it is derived from (as that of GPUs is, `gpus/offer.py`).
"""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from gpuactors.core.state.claims import domain_of
from gpuactors.core.state.domains import Domains
from gpuactors.core.values.claim import DeviceHealth, DraHealth
from gpuactors.core.values.claim_states import OWNING
from gpuactors.core.values.domain import ClaimedDomain, DeviceKind, DomainDevice, DomainMode, DomainSettings
from gpuactors.core.values.offered_domains import OfferedDomains
from gpuactors.core.values.slices import Attribute, BlockKind, BlockReason, Offer, OfferedDevice

NO_IMEX: Final = "NoImex"
"""The taint of a device that a claim has on a node which has lost its IMEX."""


def offered(domains: Domains) -> Domains:
    """Derive what the domains' ResourceSlice offers; return the same object if that has not changed."""
    settings, claim_settings, facts = domains.settings, domains.claims.settings, domains.imex.facts
    if settings is None or claim_settings is None or facts is None or not domains.claims.loaded:
        return domains
    before, claimed = domains.offered, _claimed(domains)
    if (before.absent, before.claimed) == (facts.absent, claimed):
        return domains
    held = {device for own in claimed for device in own.devices}
    blocked = BlockReason(BlockKind.UNHEALTHY, NO_IMEX) if facts.absent else None
    health = DraHealth.UNHEALTHY if facts.absent else DraHealth.HEALTHY
    names = sorted(held if facts.absent else held | set(_devices(settings)), key=str)
    offer = Offer(
        claim_settings.driver,
        claim_settings.pool,
        tuple(offered_device(device, blocked, claimed=device in held) for device in names),
    )
    of_each = tuple(DeviceHealth(offer.node, str(device), health, facts.absent) for device in names)
    return replace(domains, offered=OfferedDomains(facts.absent, claimed, offer, of_each))


def offered_device(
    device: DomainDevice, blocked: BlockReason | None = None, *, claimed: bool = False
) -> OfferedDevice:
    """Return an IMEX device for a slice. DeviceClasses select by `type`."""
    attributes = {"type": Attribute("string", str(device.kind)), "id": Attribute("int", device.id)}
    return OfferedDevice(str(device), attributes, blocked=blocked, claimed=claimed)


def _devices(settings: DomainSettings) -> tuple[DomainDevice, ...]:
    channels = tuple(DomainDevice(DeviceKind.CHANNEL, number) for number in range(settings.channels))
    daemons = (DomainDevice(DeviceKind.DAEMON, 0),) if settings.mode is DomainMode.ON else ()
    return channels + daemons


def _claimed(domains: Domains) -> tuple[ClaimedDomain, ...]:
    """Return the devices that claims have."""
    owning = (domain_of(entry).domain for entry in domains.claims.entries.values() if entry.state in OWNING)
    return tuple(own for own in owning if own is not None)
