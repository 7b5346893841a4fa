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


def devices(facts: HostFacts) -> Mapping[DeviceKey, Device]:
    """Every device that is there, of all kinds, sorted by key."""
    found: dict[DeviceKey, Device] = {}
    for kind in KINDS:
        for device in kind.devices(facts):
            found.setdefault(device.key, device)
    return found if len(KINDS) == 1 else dict(sorted(found.items()))
