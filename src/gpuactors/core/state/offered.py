"""What is offered to claims of GPUs, as the state carries it: data only. `core/dra/offer.py` derives it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from gpuactors.core.assessment.status import Assessment
from gpuactors.core.dra.claim import DeviceHealth
from gpuactors.core.dra.entries import Look
from gpuactors.core.dra.offered import OfferedGpu
from gpuactors.core.dra.slices import Offer
from gpuactors.core.inventory import Device
from gpuactors.core.model import ClaimedDevice, PciAddress, ResourceName


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
