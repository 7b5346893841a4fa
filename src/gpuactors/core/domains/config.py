"""The opaque configurations of claims of compute domains (`resource.nvidia.com/v1beta1`), as NVIDIA's driver has them.

    kind: ComputeDomainChannelConfig        kind: ComputeDomainDaemonConfig
    domainID: <UUID of the ComputeDomain>   domainID: <UUID of the ComputeDomain>
    allocationMode: Single | All

`domainID` is the user's own text, and a directory is named by it: it is a UUID, or the claim is refused before anything
is made of it. A prepare decodes strictly, as that of a GPU does (`gpus/config.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from gpuactors.core.claims.opaque_config import API_VERSION, ConfigFault, all_decoded, covers
from gpuactors.core.values.claim import AllocatedDevice, Claim, Json
from gpuactors.core.values.domain import AllocationMode, DeviceKind, DomainConfig, DomainUid, device_of
from gpuactors.core.values.names import is_domain_id
from gpuactors.core.values.quote import quoted_id, quoted_name

CHANNEL_CONFIG: Final = "ComputeDomainChannelConfig"
DAEMON_CONFIG: Final = "ComputeDomainDaemonConfig"

_FIELDS: Final = {
    CHANNEL_CONFIG: ("apiVersion", "kind", "domainID", "allocationMode"),
    DAEMON_CONFIG: ("apiVersion", "kind", "domainID"),
}
_KINDS: Final = {CHANNEL_CONFIG: DeviceKind.CHANNEL, DAEMON_CONFIG: DeviceKind.DAEMON}


def chosen(claim: Claim) -> DomainConfig | ConfigFault:
    """Return the purpose of a claim with devices of this driver: one kind of device and one domain."""
    configs = all_decoded(claim, decoded)
    if isinstance(configs, ConfigFault):
        return configs
    of_results: dict[DomainConfig, None] = {}
    for result in claim.results or ():
        config = _of_result(result, configs)
        if isinstance(config, ConfigFault):
            return config
        of_results[config] = None
    if len(of_results) != 1:
        return ConfigFault(
            "the claim is for several compute domains or kinds of device: make a claim for each"
        )
    return next(iter(of_results))


def _of_result(
    result: AllocatedDevice, configs: list[tuple[tuple[str, ...], DomainConfig]]
) -> DomainConfig | ConfigFault:
    """Return the last configuration for a result's request: it applies, whole."""
    device = device_of(result.device)
    if device is None:
        return ConfigFault(f"{quoted_id(result.device)} is no device of this driver")
    matching = [config for requests, config in configs if covers(requests, result.request)]
    wanted = CHANNEL_CONFIG if device.kind is DeviceKind.CHANNEL else DAEMON_CONFIG
    if not matching:
        return ConfigFault(f"the claim has no {wanted} for its request {quoted_id(result.request)}")
    if matching[-1].kind is not device.kind:
        return ConfigFault(f"{device} needs a {wanted}, and the claim has another configuration for it")
    return matching[-1]


def decoded(parameters: Json) -> DomainConfig | ConfigFault:
    """Decode one configuration. A null means an absent field, as in Go."""
    if not isinstance(parameters, Mapping):
        return ConfigFault(f"the parameters are no object; one of kind {CHANNEL_CONFIG} is expected")
    api, kind = parameters.get("apiVersion"), parameters.get("kind")
    if api != API_VERSION or not isinstance(kind, str) or kind not in _FIELDS:
        return ConfigFault(
            f"apiVersion {_quoted(api)}, kind {_quoted(kind)} is not known to this driver, which takes {API_VERSION}, "
            f"{CHANNEL_CONFIG} or {DAEMON_CONFIG}"
        )
    if unknown := sorted(name for name in parameters if name not in _FIELDS[kind]):
        return ConfigFault(
            f"unknown field {', '.join(map(quoted_name, unknown[:4]))}; {kind} has the fields "
            f"{', '.join(_FIELDS[kind])}: correct the configuration of the claim or of its device class"
        )
    domain, mode = parameters.get("domainID"), parameters.get("allocationMode")
    if not isinstance(domain, str) or not is_domain_id(domain):
        return ConfigFault(
            f"domainID is {_quoted(domain)}; the UID of a ComputeDomain is expected, a UUID in lower case"
        )
    if mode is None:
        return DomainConfig(_KINDS[kind], DomainUid(domain))
    if not isinstance(mode, str) or mode not in tuple(AllocationMode):
        return ConfigFault(f"allocationMode is {_quoted(mode)}; Single or All is expected")
    return DomainConfig(_KINDS[kind], DomainUid(domain), AllocationMode(mode))


def _quoted(value: Json) -> str:
    return repr(quoted_id(value)) if isinstance(value, str) else ("absent" if value is None else "no text")
