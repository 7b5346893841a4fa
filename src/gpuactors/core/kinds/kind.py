"""The questions that the core asks of a kind of device. Every answer follows from the arguments; none does anything."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Protocol

from msgspec import Struct

from gpuactors.core.values.claim import AllocatedDevice, BoundFunction, DeviceEdits
from gpuactors.core.values.effects import Grant
from gpuactors.core.values.inventory import Device, KindName
from gpuactors.core.values.model import DeviceKey, Functions, Observed, PciFunction
from gpuactors.core.values.selector import Selector
from gpuactors.core.values.slices import OfferedDevice
from gpuactors.core.values.status import Reason
from gpuactors.core.values.vfio import VfioConfig


class HostFacts(Struct, frozen=True, gc=False):
    """All that the devices of the node follow from."""

    functions: Functions
    """Those of the host, sorted by address."""
    groups: Mapping[int, tuple[PciFunction, ...]]
    """By the number of their IOMMU group; each sorted by address."""
    selectors: tuple[Selector, ...]
    """The operator's, which choose what is offered."""


class Act(StrEnum):
    """An act that makes a device usable for the claim that it is given to."""

    BIND = "bind"
    """Its functions, and their companions, are bound to a vfio driver, and returned when the claim ends."""


class Kind(Protocol):
    """A kind of device."""

    @property
    def name(self) -> KindName:
        """`Device.kind` of its devices."""

    @property
    def acts(self) -> frozenset[Act]:
        """The acts that a claim of its devices needs; empty: they are usable as they are."""

    # --- names ---

    def is_key(self, text: str) -> bool:
        """Whether `text` has the form of a key of its devices, whether one is there or not."""

    def slice_name(self, key: DeviceKey) -> str:
        """The name of a device in its ResourceSlice, a DNS label. It follows from the key alone: it survives a restart,
        and a hot-plug of another device."""

    def key_of(self, slice_name: str) -> DeviceKey | None:
        """The device of such a name; None if no device of this kind is named so."""

    # --- what is there, and who could open it ---

    def devices(self, facts: HostFacts) -> Iterable[Device]:
        """Every device of this kind that is there, chosen by a selector or not, sorted by key."""

    def blocker(self, device: Device, use: Observed | None) -> Reason | None:
        """Why a virtual machine could not open the device, whoever has it; None if it could. `use` is that of its IOMMU
        group, as last polled; None: it was not polled yet."""

    def not_backed(self, device: Device) -> Reason:
        """Why the device is not advertised to kubelet at all."""

    def never_given(self, device: Device) -> Reason | None:
        """Why no claim can have the device, whatever driver it is on; None if one can."""

    def to_bind(self, device: Device) -> tuple[PciFunction, ...]:
        """The functions that Act.BIND binds for the device, sorted by address."""

    def not_viable(self, device: Device, to_bind: Collection[PciFunction]) -> Reason | None:
        """Why Act.BIND would not make the device usable: the host uses its IOMMU group; None if it would. `to_bind`:
        the functions that the claim binds, of its other devices as well."""

    def of_the_hosts_fabric(self, device: Device, switches: Sequence[PciFunction]) -> Reason | None:
        """Why Act.BIND must not take the device from its host's driver: the host runs an NVLink fabric across such
        devices; None if it may. `switches`: the NVSwitches that are on a driver of the host, sorted by address."""

    # --- how it is given away ---

    def grant(self, devices: Sequence[Device]) -> Grant:
        """The grant of a container with these devices, one at least, all of one resource: variables and nodes."""

    def offer(self, device: Device, *, claimed: bool) -> OfferedDevice:
        """The device in a ResourceSlice: type, attributes and capacity. `claimed`: a live claim has it. Whether it must
        not be given away now is decided by others."""

    def edits(
        self,
        result: AllocatedDevice,
        device: Device | None,
        bound: Sequence[BoundFunction],
        config: VfioConfig,
    ) -> DeviceEdits:
        """The device in the files of its claim. `device`: None: it is not there, or its container gets no node (a claim
        with admin access, while another claim or pod has the device). `bound`: what Act.BIND has bound for it, the
        device itself first."""
