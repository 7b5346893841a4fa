"""What a claim of a compute domain reserves. In the checkpoint with its entry."""

from __future__ import annotations

from dataclasses import replace

from gpuactors.core.domains.model import (
    AllocationMode,
    ClaimedDomain,
    ComputeDomain,
    DeviceKind,
    DomainConfig,
    DomainDevice,
    DomainSettings,
    ImexFacts,
    device_of,
)
from gpuactors.core.dra.claim import Claim


def claimed_domain(
    claim: Claim, config: DomainConfig, domain: ComputeDomain, imex: ImexFacts, settings: DomainSettings
) -> ClaimedDomain:
    """What the claim reserves now."""
    devices = devices_wanted(claim, config, settings)
    return ClaimedDomain(domain.uid, domain.name, domain.namespace, devices, replace(imex, host_problem=""))


def devices_wanted(claim: Claim, config: DomainConfig, settings: DomainSettings) -> tuple[DomainDevice, ...]:
    """The devices that a claim is to have for itself: those allocated, or every channel of the node."""
    if config.kind is DeviceKind.CHANNEL and config.mode is AllocationMode.ALL:
        return tuple(DomainDevice(DeviceKind.CHANNEL, number) for number in range(settings.channels))
    named = (device_of(result.device) for result in claim.results or ())
    return tuple(dict.fromkeys(device for device in named if device is not None))
