"""vGPUs by NVIDIA's vendor VFIO as devices: virtual functions on NVIDIA's driver that have a vGPU type (vGPU 17 and
newer, without mediated devices). A virtual function without a type is of the kind in `virtual_function.py`.

Nothing here is ever bound, unbound or typed: an administrator sets the type, and may change it at any time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, final

from msgspec.structs import replace

from gpuactors.core.kinds.kind import Act, HostFacts, Kind
from gpuactors.core.kinds.pci_function import PciFunctions, device_of, has_iommufd, members_of, without_group
from gpuactors.core.kinds.presence import made_by_another
from gpuactors.core.kinds.virtual_function import without_physical
from gpuactors.core.values.cause import Cause
from gpuactors.core.values.claim import AllocatedDevice, BoundFunction, DeviceEdits
from gpuactors.core.values.inventory import Device, KindName, named_virtual
from gpuactors.core.values.memo import memoized_each
from gpuactors.core.values.model import Observed, PciFunction
from gpuactors.core.values.naming import profile_resource
from gpuactors.core.values.quote import quoted_id
from gpuactors.core.values.selector import Selector
from gpuactors.core.values.slices import OfferedDevice, known_attributes
from gpuactors.core.values.status import Reason
from gpuactors.core.values.vfio import VfioConfig
from gpuactors.core.values.vgpu import names_of

_CDEVS: Final = "/dev/vfio/devices/"


@final
class Vgpus(PciFunctions):
    """The kind of the devices that are vGPUs by vendor VFIO."""

    name = KindName("vgpu")
    acts = frozenset[Act]()

    def devices(self, facts: HostFacts) -> Iterable[Device]:
        typed = {a: f for a, f in facts.functions.items() if f.vgpu is not None and f.vgpu.is_typed}
        if not typed:
            return ()
        iommufd = has_iommufd(facts)

        def inputs_of(function: PciFunction) -> _Inputs:
            card = function.physical
            physical = facts.functions.get(card) if card is not None else None
            types = facts.vgpu_types.get(card) if card is not None else None
            names = names_of(function.vgpu, card, types, facts.own_vgpu_types)
            return function, physical, members_of(function, facts), names, facts.selectors, iommufd

        return _typed({address: inputs_of(function) for address, function in typed.items()}).values()

    def blocker(self, device: Device, use: Observed | None) -> Reason | None:
        if (reason := _not_ours_to_give(device)) is not None:
            return reason
        if not device.has_backing:
            return self.not_backed(device)
        return super().blocker(device, use)

    def not_backed(self, device: Device) -> Reason:
        if (unnamed := _unnamed(device)) is not None:
            return unnamed
        if device.has_backing:
            return super().not_backed(device)
        return Reason(
            Cause.NOT_BOUND,
            f"{quoted_id(device.driver or '')} has made no vfio device of it (vfio-dev/ is missing): see the kernel's "
            "log, and whether the host has NVIDIA's vGPU driver",
        )

    def never_given(self, device: Device) -> Reason | None:
        return without_group(device.units[0]) or _not_ours_to_give(device)

    def to_bind(self, device: Device) -> tuple[PciFunction, ...]:
        return ()

    def of_the_hosts_fabric(self, device: Device, fabric: str) -> Reason | None:
        """Allow it: the GPU stays on its host's driver, which the fabric manager knows."""
        return None

    def offer(self, device: Device, *, claimed: bool) -> OfferedDevice:
        """Take the names of NVIDIA's driver that are settled; `parent` is ours. `uuid` and `productName` are the
        physical function's, all else the virtual function's own."""
        offered, function = super().offer(device, claimed=claimed), device.units[0]
        physical = device.units[1] if len(device.units) > 1 else None
        own: dict[str, str | int | None] = {
            "type": "vgpu",
            "profile": device.model or None,
            "profileID": function.vgpu.type if function.vgpu is not None else None,
            "vgpuFramework": "vf",
            "uuid": physical.gpu_uuid if physical is not None else None,
            "productName": (physical.model or None) if physical is not None else None,
            "parent": device.parent,
        }
        attributes = {name: value for name, value in offered.attributes.items() if name not in own}
        attributes |= known_attributes(own)
        unnamed = _unnamed(device)
        left_out = f"{device.key}: {unnamed.message}" if unnamed is not None and not claimed else ""
        return replace(offered, attributes=attributes, capacity={}, invalid=offered.invalid or left_out)

    def edits(
        self,
        result: AllocatedDevice,
        device: Device | None,
        bound: Sequence[BoundFunction],
        config: VfioConfig,
    ) -> DeviceEdits:
        """Take the nodes from the last inspection, as no act has read them. KubeVirt reads the qualified `pciBusID`,
        which is the function that QEMU gets."""
        own = () if device is None else (_as_bound(device.units[0]),)
        edits = super().edits(result, device, own, config)
        if device is None or device.parent is None:
            return edits
        return replace(edits, attributes={**edits.attributes, "parent": device.parent})


_Inputs = tuple[
    PciFunction,
    PciFunction | None,
    tuple[PciFunction, ...],
    tuple[str, ...],
    tuple[Selector, ...],
    bool,
]
"""The inputs of such a device: the function, its physical function if known, all known functions of its IOMMU group,
the names of its type, the operator's selectors, and `Device.iommufd`."""


@memoized_each
def _typed(inputs: _Inputs) -> Device:
    """Return the device that is a virtual function with a vGPU type. One without a known name has no model, and the
    resource of the virtual function, whose list it is not in."""
    function, physical, members, names, selectors, iommufd = inputs
    name = names[0] if len(names) == 1 else ""
    device = device_of(
        (function,) if physical is None else (function, physical),
        members,
        selectors,
        kind=VGPU.name,
        resource=profile_resource(function.vendor, name)
        if name
        else named_virtual(function, physical, selectors),
        iommufd=iommufd,
    )
    made_by = function.vgpu.made_by if function.vgpu is not None else ""
    return replace(device, model=name, unnamed="" if name else _why_unnamed(function, names), made_by=made_by)


VGPU: Final[Kind] = Vgpus()


def _why_unnamed(function: PciFunction, names: tuple[str, ...]) -> str:
    """Return why the name of the function's vGPU type is not known, as a sentence."""
    vgpu, card = function.vgpu, function.physical
    assert vgpu is not None
    remedy = f"name it by --vgpu-type='{card}/{vgpu.type}=NAME'"
    if names:
        differing = " and ".join(map(quoted_id, names))
        return f"the lists of {card} have several names for its vGPU type {vgpu.type} ({differing}); {remedy}"
    unlisted = f" ({vgpu.unlisted})" if vgpu.unlisted else ""
    return (
        f"its vGPU type {vgpu.type} has no known name: gpuactors has seen it in no list of {card} since the driver of "
        f"that was bound{unlisted}; {remedy}"
    )


def _not_ours_to_give(device: Device) -> Reason | None:
    return _unnamed(device) or made_by_another(device.made_by) or without_physical(device)


def _unnamed(device: Device) -> Reason | None:
    return Reason(Cause.VGPU_UNNAMED, device.unnamed) if device.unnamed else None


def _as_bound(function: PciFunction) -> BoundFunction:
    """Return the function as an act on it would have read it."""
    cdevs = [node.removeprefix(_CDEVS) for node in function.nodes if node.startswith(_CDEVS)]
    cdev = cdevs[0] if cdevs and function.iommufd else None
    return BoundFunction(function.address, function.driver, function.iommu_group, cdev, vfio=True)
