"""The custom resource KubeVirt, as `kubectl get -o yaml` or `-o json` prints it: what of it decides over devices.

Must not judge: that is `checks/kubevirt.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from gpuactors.cli.doctor.facts import KubeVirt, PermittedDevice
from gpuactors.config import strict_yaml

_KEEPS_MEDIATED: Final = "DisableMDEVConfiguration"
"""KubeVirt's feature gate with which virt-handler neither makes nor deletes mediated devices."""


def parse(text: str) -> KubeVirt:
    """Read one object of the kind KubeVirt, or a list with one. Raises ValueError for anything else."""
    content = strict_yaml.load(text)
    items = content.get("items") if isinstance(content, Mapping) else None
    if isinstance(items, list):
        if len(items) != 1:
            raise ValueError(f"it is a list of {len(items)} objects; name one")
        (content,) = items
    if not isinstance(content, Mapping) or content.get("kind") != "KubeVirt":
        raise ValueError("it is no object of the kind KubeVirt")
    configuration = _mapping(_mapping(content, "spec"), "configuration")
    gates = _mapping(configuration, "developerConfiguration").get("featureGates")
    devices = configuration.get("permittedHostDevices")
    permitted = _mapping(configuration, "permittedHostDevices")
    return KubeVirt(
        pci=_entries(permitted, "pciHostDevices", "pciVendorSelector"),
        mediated=_entries(permitted, "mediatedDevices", "mdevNameSelector"),
        permits_by_list=devices is not None,
        deletes_mediated=not (isinstance(gates, list) and _KEEPS_MEDIATED in gates),
    )


def _mapping(of: Mapping[str, object], key: str) -> Mapping[str, object]:
    value = of.get(key)
    if isinstance(value, Mapping):
        return value
    if value is None:
        return {}
    raise ValueError(f"{key} is no mapping")


def _entries(of: Mapping[str, object], key: str, selector: str) -> tuple[PermittedDevice, ...]:
    entries = of.get(key)
    if entries is None:
        return ()
    if not isinstance(entries, list) or not all(isinstance(entry, Mapping) for entry in entries):
        raise ValueError(f"{key} is no list of mappings")
    return tuple(
        PermittedDevice(
            str(entry.get("resourceName", "")),
            str(entry.get(selector, "")),
            is_external=entry.get("externalResourceProvider") is True,
        )
        for entry in entries
    )
