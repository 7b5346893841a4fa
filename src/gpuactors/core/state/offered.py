"""The devices offered to claims of GPUs, as the state carries them: data only. `core/gpus/offer.py` derives it.

A file of its own: the state carries this data, and must not import what derives it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from msgspec import Struct, field

from gpuactors.core.values.claim import DeviceHealth
from gpuactors.core.values.inventory import Device
from gpuactors.core.values.model import ClaimedDevice, DeviceKey, PciFunction
from gpuactors.core.values.slices import Offer, OfferedDevice
from gpuactors.core.values.status import Assessment, Reason

OfferRow = tuple[
    Device | None,
    Assessment | None,
    bool,
    ClaimedDevice | None,
    Reason | None,
    bool,
    bool,
    tuple[PciFunction, ...],
]
"""The inputs of the offer of a device, and of the health of a claim's device: the device, its assessment, whether a
selector chooses it, the claim that has it, what the last look found, whether it is in `Offered.placed`, whether it
is there; and of the whole node, the NVSwitches on a driver of the host."""


class Offered(Struct, frozen=True, gc=False):
    """The offer, preceded by the values that it is derived from."""

    made_of: tuple[object, ...] = ()
    """Compared by identity."""
    placed: frozenset[DeviceKey] = frozenset()
    """The devices of prepared claims, once an inspection has seen them since they were bound."""

    rows: Mapping[DeviceKey, OfferRow] = field(default_factory=dict)
    of_devices: Mapping[DeviceKey, tuple[OfferedDevice | None, DeviceHealth]] = field(default_factory=dict)
    """None: a claim has it, and it was never offered."""

    offer: Offer | None = None
    """None while DRA is off, or the node has not been read."""
    health: tuple[DeviceHealth, ...] = ()
    """Of every device that is offered or that a claim has, sorted by address."""


NOTHING_OFFERED: Final = Offered()
