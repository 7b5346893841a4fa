"""What is offered to claims of GPUs, as the state carries it: data only. `core/gpus/offer.py` derives it.

A file of its own: the state carries this data, and must not import what derives it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from gpuactors.core.state.claims import Look
from gpuactors.core.values.claim import DeviceHealth
from gpuactors.core.values.inventory import Device
from gpuactors.core.values.model import ClaimedDevice, PciAddress, ResourceName
from gpuactors.core.values.offered_gpu import OfferedGpu
from gpuactors.core.values.slices import Offer
from gpuactors.core.values.status import Assessment


@dataclass(frozen=True, slots=True)
class Offered:
    """What is offered, preceded by the values that it is derived from."""

    devices: Mapping[PciAddress, Device] = field(default_factory=dict)
    assessments: Mapping[PciAddress, Assessment] = field(default_factory=dict)
    names: Mapping[PciAddress, ResourceName] = field(default_factory=dict)
    reserved: Mapping[PciAddress, ClaimedDevice] = field(default_factory=dict)
    switches: frozenset[PciAddress] = frozenset()
    iommufd: bool = False
    """As `Index.iommufd`."""
    placed: frozenset[PciAddress] = frozenset()
    """The devices of prepared claims, once an inspection has seen them since they were bound."""

    looks: Mapping[PciAddress, Look] = field(default_factory=dict)

    offer: Offer[OfferedGpu] | None = None
    """None while DRA is off, or the node has not been read."""
    health: tuple[DeviceHealth, ...] = ()
    """Of every device that is offered or that a claim has, sorted by address."""


NOTHING_OFFERED: Final = Offered()
