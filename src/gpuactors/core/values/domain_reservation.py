"""The reservation of a claim of a compute domain. In the checkpoint with its entry."""

from __future__ import annotations

from msgspec.structs import replace

from gpuactors.core.values.claim import Claim
from gpuactors.core.values.domain import (
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


def claimed_domain(
    claim: Claim, config: DomainConfig, domain: ComputeDomain, imex: ImexFacts, settings: DomainSettings
) -> ClaimedDomain:
    """Return the claim's domain and devices, to be reserved."""
    devices = devices_wanted(claim, config, settings)
    every = config.kind is DeviceKind.CHANNEL and config.mode is AllocationMode.ALL
    own = imex_of_claim(imex, config.kind)
    return ClaimedDomain(domain.uid, domain.name, domain.namespace, devices, own, every=every)


def imex_of_claim(imex: ImexFacts, kind: DeviceKind) -> ImexFacts:
    """Reduce the facts to those that the files and the answer of a claim of this kind depend on."""
    management = imex.management if kind is DeviceKind.DAEMON else ""
    reduced = replace(imex, clique_source="", clique_is_past=False, unknown="")
    return replace(reduced, host_problem="", management=management, unmanaged="")


def devices_wanted(claim: Claim, config: DomainConfig, settings: DomainSettings) -> tuple[DomainDevice, ...]:
    """Return the devices that a claim is to have for itself: the allocated ones, or every offered channel. With
    `allocationMode: All` its container also gets the nodes of the channels that are not offered."""
    if config.kind is DeviceKind.CHANNEL and config.mode is AllocationMode.ALL:
        return tuple(DomainDevice(DeviceKind.CHANNEL, number) for number in range(settings.channels))
    named = (device_of(result.device) for result in claim.results or ())
    return tuple(dict.fromkeys(device for device in named if device is not None))
