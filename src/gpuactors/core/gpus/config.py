"""The opaque configuration of a claim: `VfioDeviceConfig` of `resource.nvidia.com/v1beta1`, as NVIDIA's driver has it.

    apiVersion: resource.nvidia.com/v1beta1
    kind: VfioDeviceConfig
    iommu: {backendPolicy: LegacyOnly | PreferIommuFD, enableAPIDevice: true | false}

Our defaults are `LegacyOnly` and `enableAPIDevice: true`, as KubeVirt needs /dev/vfio/vfio; NVIDIA's default for the
latter is false, with which such a VM fails (NVIDIA issue 1415).

A prepare decodes strictly: an unknown field would be ignored, and the user would get another device than requested. A
configuration in the checkpoint was accepted once, maybe by a newer daemon, and is decoded leniently.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from msgspec.structs import replace

from gpuactors.core.claims.opaque_config import API_VERSION, ConfigFault, all_decoded, covers
from gpuactors.core.values.claim import Claim, Json
from gpuactors.core.values.quote import quoted_id, quoted_name
from gpuactors.core.values.vfio import BackendPolicy, VfioConfig

KIND: Final = "VfioDeviceConfig"


def chosen(claim: Claim) -> Mapping[str, VfioConfig] | ConfigFault:
    """Return the configuration of each request (by its full name) that was given devices of this driver."""
    configs = all_decoded(claim, decoded)
    if isinstance(configs, ConfigFault):
        return configs
    config_of: dict[str, VfioConfig] = {}
    for result in claim.results or ():
        config_of[result.request] = VfioConfig()
        for requests, config in configs:
            if covers(requests, result.request):
                config_of[result.request] = config
    return config_of


def decoded(parameters: Json, *, strict: bool = True) -> VfioConfig | ConfigFault:
    """Decode one `VfioDeviceConfig`. A null means an absent field, as in Go. Unless `strict`, ignore unknown fields."""
    if not isinstance(parameters, Mapping):
        return ConfigFault(f"the parameters are {_named(parameters)}; an object of kind {KIND} is expected")
    api, kind = parameters.get("apiVersion"), parameters.get("kind")
    if (api, kind) != (API_VERSION, KIND):
        return ConfigFault(
            f"apiVersion {_quoted(api)}, kind {_quoted(kind)} is not known to this driver, which takes {API_VERSION}, "
            f"{KIND}"
        )
    if strict and (unknown := _unknown(parameters, ("apiVersion", "kind", "iommu"))):
        return unknown
    iommu = parameters.get("iommu")
    if iommu is None:
        return VfioConfig()
    if not isinstance(iommu, Mapping):
        return ConfigFault(f"iommu is {_named(iommu)}; an object is expected")
    if strict and (unknown := _unknown(iommu, ("backendPolicy", "enableAPIDevice"), "iommu.")):
        return unknown
    return _iommu(iommu)


def _iommu(iommu: Mapping[str, Json]) -> VfioConfig | ConfigFault:
    config = VfioConfig()
    policy = iommu.get("backendPolicy")
    if policy is not None:
        if not isinstance(policy, str) or policy not in tuple(BackendPolicy):
            return ConfigFault(
                f"iommu.backendPolicy is {_quoted(policy)}; LegacyOnly or PreferIommuFD is expected"
            )
        config = replace(config, backend_policy=BackendPolicy(policy))
    api_device = iommu.get("enableAPIDevice")
    if api_device is not None:
        if not isinstance(api_device, bool):
            return ConfigFault(f"iommu.enableAPIDevice is {_quoted(api_device)}; true or false is expected")
        config = replace(config, enable_api_device=api_device)
    return config


def _unknown(content: Mapping[str, Json], fields: tuple[str, ...], prefix: str = "") -> ConfigFault | None:
    names = [name for name in content if name not in fields]
    if not names:
        return None
    unknown = ", ".join(prefix + quoted_name(name) for name in sorted(names)[:4])
    return ConfigFault(
        f"unknown field {unknown}; {prefix.rstrip('.') or KIND} has the fields {', '.join(fields)}: correct the "
        "configuration of the claim or of its device class"
    )


def _named(value: Json) -> str:
    match value:
        case None:
            return "absent"
        case bool():
            return "true" if value else "false"
        case int() | float():
            return "a number"
        case str():
            return "a string"
        case Mapping():
            return "an object"
        case _:
            return "an array"


def _quoted(value: Json) -> str:
    return repr(quoted_id(value)) if isinstance(value, str) else _named(value)
