"""The kinds of devices.

A file of its own: the only one that knows every kind.
"""

from __future__ import annotations

from collections.abc import Mapping

from gpuactors.core.kinds.kind import HostFacts, Kind
from gpuactors.core.kinds.mediated_device import MEDIATED_DEVICE
from gpuactors.core.kinds.pci_function import PCI_FUNCTION
from gpuactors.core.kinds.vgpu import VGPU
from gpuactors.core.kinds.virtual_function import VIRTUAL_FUNCTION
from gpuactors.core.values.inventory import Device
from gpuactors.core.values.model import DeviceKey

KINDS: tuple[Kind, ...] = (VGPU, VIRTUAL_FUNCTION, PCI_FUNCTION, MEDIATED_DEVICE)
"""Every kind. If two kinds have a device of the same key, it belongs to the first one."""


def kind_of(device: Device) -> Kind:
    """Return the kind of a device."""
    return next(kind for kind in KINDS if kind.name == device.kind)


def is_key(text: str) -> bool:
    """Return whether `text` has the form of a device's key, whether the device is there or not."""
    return any(kind.is_key(text) for kind in KINDS)


def slice_name(key: DeviceKey) -> str:
    """Return the name of a device in its ResourceSlice."""
    return next(kind.slice_name(key) for kind in KINDS if kind.is_key(key))


def key_of(slice_name: str) -> DeviceKey | None:
    """Return the key of the device with this name in a ResourceSlice; None if it names none."""
    return next((key for kind in KINDS if (key := kind.key_of(slice_name)) is not None), None)


def kind_named(slice_name: str) -> Kind:
    """Return the kind of a device that is not there, by its name in a ResourceSlice. The name of a PCI function, which
    may be of any kind of these, and an unknown name, such as that of a claim of NVIDIA's driver, mean a whole one."""
    return next((kind for kind in reversed(KINDS) if kind.key_of(slice_name) is not None), PCI_FUNCTION)


def devices(facts: HostFacts) -> Mapping[DeviceKey, Device]:
    """Return every device that is there, of all kinds, sorted by key."""
    by_key: dict[DeviceKey, Device] = {}
    for kind in KINDS:
        for device in kind.devices(facts):
            by_key.setdefault(device.key, device)
    return dict(sorted(by_key.items()))
