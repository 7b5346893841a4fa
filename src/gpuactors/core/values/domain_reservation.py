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
    """Reserve for the claim."""
    devices = devices_wanted(claim, config, settings)
    every = config.kind is DeviceKind.CHANNEL and config.mode is AllocationMode.ALL
    own = imex_of_claim(imex, config.kind)
    return ClaimedDomain(domain.uid, domain.name, domain.namespace, devices, own, every=every)


def imex_of_claim(imex: ImexFacts, kind: DeviceKind) -> ImexFacts:
    """The facts that the files and the answer of a claim of this kind say."""
    of_daemon = imex.management if kind is DeviceKind.DAEMON else ""
    said = replace(imex, clique_source="", clique_is_past=False, unknown="")
    return replace(said, host_problem="", management=of_daemon, unmanaged="")


def devices_wanted(claim: Claim, config: DomainConfig, settings: DomainSettings) -> tuple[DomainDevice, ...]:
    """The devices that a claim is to have for itself: those allocated, or every channel that is offered. Its container
    gets the node of every other channel as well, which nobody can be allocated."""
    if config.kind is DeviceKind.CHANNEL and config.mode is AllocationMode.ALL:
        return tuple(DomainDevice(DeviceKind.CHANNEL, number) for number in range(settings.channels))
    named = (device_of(result.device) for result in claim.results or ())
    return tuple(dict.fromkeys(device for device in named if device is not None))
