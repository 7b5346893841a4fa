"""How kubelet calls a device, and which device kubelet means.

Kubelet's ledger is by ID string. Ours is the PCI address. NVIDIA's plugin up to 1.4 and KubeVirt's built-in one use the
IOMMU group number: a device that the ledger knows by such an ID keeps it until its pod ends, so that an older plugin
can be replaced on a busy node. Never both IDs in one frame.
"""

from __future__ import annotations

import re

from gpuactors.core.inventory import devices_of
from gpuactors.core.model import DeviceId, NodeState, PciAddress, ResourceName, pci_address

_CLAIMED = re.compile(r"(?:gpu|vfio)-([0-9a-f]{4,8})-([0-9a-f]{2})-([01][0-9a-f])-([0-7])")


def device_ids(state: NodeState) -> dict[PciAddress, DeviceId]:
    """The ID of every selected device: its PCI address, or the older ID that kubelet's ledger knows."""
    ids: dict[PciAddress, DeviceId] = {}
    taken: set[tuple[ResourceName, DeviceId]] = set()
    for device in devices_of(state.facts, state.settings.selectors):
        older = (device.resource, DeviceId(str(device.function.iommu_group)))
        known = _is_given(state, older) or _is_listed(state, *older)
        by_address = (device.resource, DeviceId(device.function.address))
        if known and older not in taken and not _is_given(state, by_address):
            taken.add(older)
            ids[device.function.address] = older[1]
        else:
            ids[device.function.address] = DeviceId(device.function.address)
    return ids


def _is_given(state: NodeState, named: tuple[ResourceName, DeviceId]) -> bool:
    return named in state.ledger.entries or named in state.granted


def _is_listed(state: NodeState, resource: ResourceName, device: DeviceId) -> bool:
    """The older ID stands in the present list, and the list must not change under a call."""
    held = resource in state.no_shrink_until or any(c.resource == resource for c in state.calls.values())
    return held and any(a.id == device for a in state.frames.get(resource, ()))


def address_of(state: NodeState, resource: ResourceName, device: DeviceId) -> PciAddress | None:
    """The function that kubelet means by an ID: a PCI address, or an IOMMU group number of one of our devices.

    IDs are compared, never computed with: who calls, or another plugin, may send `²` or a number of 5,000 digits.
    """
    try:
        return pci_address(device)
    except ValueError:
        pass
    listed = next((a.address for a in state.frames.get(resource, ()) if a.id == device), None)
    if listed is not None:
        return listed
    return next(
        (
            d.function.address
            for d in devices_of(state.facts, state.settings.selectors)
            if d.resource == resource and str(d.function.iommu_group) == device
        ),
        None,
    )


def claimed_address(name: str) -> PciAddress | None:
    """The function that a device's name in a ResourceSlice stands for: `gpu-0000-23-00-0`."""
    match = _CLAIMED.fullmatch(name)
    return None if match is None else PciAddress("{}:{}:{}.{}".format(*match.groups()))
