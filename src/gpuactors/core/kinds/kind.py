"""The questions that the core asks of a kind of device. Every answer follows from the arguments; none does anything."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import StrEnum
from types import MappingProxyType
from typing import Protocol

from msgspec import Struct

from gpuactors.core.values.claim import AllocatedDevice, BoundFunction, DeviceEdits
from gpuactors.core.values.inventory import Device, KindName
from gpuactors.core.values.mediated import MediatedDevices
from gpuactors.core.values.model import DeviceKey, Functions, Observed, PciAddress, PciFunction
from gpuactors.core.values.selector import Selector
from gpuactors.core.values.slices import OfferedDevice
from gpuactors.core.values.status import Reason
from gpuactors.core.values.vfio import VfioConfig
from gpuactors.core.values.vgpu import CardTypes, OwnVgpuType


class HostFacts(Struct, frozen=True, gc=False):
    """The inputs of the devices of the node."""

    functions: Functions
    """The functions of the host, sorted by address."""
    groups: Mapping[int, tuple[PciFunction, ...]]
    """The functions of each IOMMU group, sorted by address."""
    selectors: tuple[Selector, ...]
    """The operator's selectors, which choose the offered devices."""
    mediated: MediatedDevices = MappingProxyType({})
    """The mediated devices of the host, sorted by key."""
    vgpu_types: Mapping[PciAddress, CardTypes] = MappingProxyType({})
    """The same as `Host.vgpu_types`."""
    own_vgpu_types: tuple[OwnVgpuType, ...] = ()
    """The operator's names of vGPU types."""


class Act(StrEnum):
    """An act that makes a device usable for a claim."""

    BIND = "bind"
    """Bind its functions and their companions to a vfio driver, and return them when the claim ends."""


class Kind(Protocol):
    """A kind of device."""

    @property
    def name(self) -> KindName:
        """The value of `Device.kind`."""

    @property
    def acts(self) -> frozenset[Act]:
        """The acts that a claim of its devices needs; empty if they are usable as they are."""

    # --- names ---

    def is_key(self, text: str) -> bool:
        """Return whether `text` has the form of a key of this kind, whether the device is there or not."""

    def slice_name(self, key: DeviceKey) -> str:
        """Return the name of a device in its ResourceSlice, a DNS label. It depends only on the key: it survives a
        restart, and a hot-plug of another device."""

    def key_of(self, slice_name: str) -> DeviceKey | None:
        """Return the key of the device with this name; None if it is no name of this kind."""

    # --- the devices, and why one cannot be opened ---

    def devices(self, facts: HostFacts) -> Iterable[Device]:
        """Return every device of this kind that is there, chosen by a selector or not, sorted by key."""

    def blocker(self, device: Device, use: Observed | None) -> Reason | None:
        """Return why a virtual machine could not open the device, whoever has it; None if it could. `use` is the last
        polled use of its IOMMU group; None before the first poll."""

    def not_backed(self, device: Device) -> Reason:
        """Return why the device is not advertised to kubelet at all."""

    def never_given(self, device: Device) -> Reason | None:
        """Return why no claim can have the device, whatever driver it is on; None if one can."""

    def to_bind(self, device: Device) -> tuple[PciFunction, ...]:
        """Return the functions that Act.BIND binds for the device, sorted by address."""

    def not_viable(self, device: Device, to_bind: Collection[PciFunction]) -> Reason | None:
        """Return why Act.BIND would not make the device usable: the host uses its IOMMU group. None if it would.
        `to_bind` has the functions that the claim binds, also those of its other devices."""

    def of_the_hosts_fabric(self, device: Device, fabric: str) -> Reason | None:
        """Return why Act.BIND must not take the device from its host's driver: the host runs an NVLink fabric across
        such devices. None if it may. `fabric` is the sign of that fabric, in words; empty if there is none."""

    # --- how a device is allocated ---

    @property
    def env_prefix(self) -> str:
        """The prefix of the variable that names a container its devices of one resource. KubeVirt looks a device up by
        the variable of its kind (pkg/virt-launcher/virtwrap/device/hostdevice/gpu/hostdev.go)."""

    def offer(self, device: Device, *, claimed: bool) -> OfferedDevice:
        """Return the device in a ResourceSlice: type, attributes and capacity. `claimed`: a live claim has it. Whether
        it may be allocated now is decided by `gpus/offer.py`."""

    def edits(
        self,
        result: AllocatedDevice,
        device: Device | None,
        bound: Sequence[BoundFunction],
        config: VfioConfig,
    ) -> DeviceEdits:
        """Return the device in the files of its claim. `device` is None if it is not there, or its container gets no
        node (a claim with admin access). `bound` is what Act.BIND has bound for it, the device itself first."""
