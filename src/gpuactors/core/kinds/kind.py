"""The questions that the core asks of a kind of device. Every answer follows from the arguments; none does anything."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from msgspec import Struct

from gpuactors.core.values.effects import Grant
from gpuactors.core.values.inventory import Device, KindName
from gpuactors.core.values.model import DeviceKey, Observed, PciAddress, PciFunction
from gpuactors.core.values.selector import Selector
from gpuactors.core.values.status import Reason


class HostFacts(Struct, frozen=True, gc=False):
    """All that the devices of the node follow from."""

    functions: Mapping[PciAddress, PciFunction]
    """The functions of the host, sorted by address."""
    groups: Mapping[int, tuple[PciFunction, ...]]
    """By the number of their IOMMU group; each sorted by address."""
    selectors: tuple[Selector, ...]
    """The operator's, which choose what is offered."""
    before: Mapping[DeviceKey, Device]
    """The devices by earlier facts and the same selectors. One that is still the same is returned again."""


class Kind(Protocol):
    """A kind of device."""

    @property
    def name(self) -> KindName:
        """`Device.kind` of its devices."""

    def devices(self, facts: HostFacts) -> Iterable[Device]:
        """Every device of this kind that is there, chosen by a selector or not, sorted by key."""

    def blocker(self, device: Device, use: Observed | None) -> Reason | None:
        """Why a virtual machine could not open the device, whoever has it; None if it could. `use` is that of its IOMMU
        group, as last polled; None: it was not polled yet."""

    def not_backed(self, device: Device) -> Reason:
        """Why the device is not advertised to kubelet at all."""

    def grant(self, devices: Sequence[Device]) -> Grant:
        """The grant of a container with these devices, one at least, all of one resource: variables and nodes."""
