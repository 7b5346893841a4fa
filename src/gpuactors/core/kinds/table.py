"""Which kinds of devices there are, and in which order they are asked what is there.

A file of its own: the only one that knows every kind.
"""

from __future__ import annotations

from collections.abc import Mapping

from gpuactors.core.kinds.kind import HostFacts, Kind
from gpuactors.core.kinds.pci_function import PCI_FUNCTION
from gpuactors.core.values.inventory import Device
from gpuactors.core.values.model import DeviceKey

KINDS: tuple[Kind, ...] = (PCI_FUNCTION,)
"""Of two kinds that have a device of the same key the first one has it."""


def kind_of(device: Device) -> Kind:
    """The kind of a device."""
    return next(kind for kind in KINDS if kind.name == device.kind)


def is_key(text: str) -> bool:
    """Whether `text` has the form of a device's key, whether that is there or not."""
    return any(kind.is_key(text) for kind in KINDS)


def slice_name(key: DeviceKey) -> str:
    """The name of a device in its ResourceSlice."""
    return next(kind.slice_name(key) for kind in KINDS if kind.is_key(key))


def key_of(slice_name: str) -> DeviceKey | None:
    """The device of a name in a ResourceSlice; None if it names none."""
    return next((key for kind in KINDS if (key := kind.key_of(slice_name)) is not None), None)


def kind_named(slice_name: str) -> Kind:
    """The kind of a device by its name in a ResourceSlice; of a name that is none of ours, which a claim of NVIDIA's
    driver has, whole PCI functions."""
    return next((kind for kind in KINDS if kind.key_of(slice_name) is not None), PCI_FUNCTION)


def devices(facts: HostFacts) -> Mapping[DeviceKey, Device]:
    """Every device that is there, of all kinds, sorted by key."""
    found: dict[DeviceKey, Device] = {}
    for kind in KINDS:
        for device in kind.devices(facts):
            found.setdefault(device.key, device)
    return found if len(KINDS) == 1 else dict(sorted(found.items()))
