"""SR-IOV virtual functions as devices, of any vendor. All but what their physical function decides is as for a whole
function (`pci_function.py`).

Must not decide who has a device: that is `assessment/holding.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, final

from msgspec.structs import replace

from gpuactors.core.kinds.kind import HostFacts, Kind
from gpuactors.core.kinds.pci_function import PciFunctions, device_of, has_iommufd, members_of
from gpuactors.core.values.cause import Cause
from gpuactors.core.values.inventory import Device, KindName, named_virtual
from gpuactors.core.values.memo import memoized_each
from gpuactors.core.values.model import Observed, PciFunction
from gpuactors.core.values.quote import quoted_id
from gpuactors.core.values.selector import Selector
from gpuactors.core.values.slices import OfferedDevice, attribute
from gpuactors.core.values.status import Reason

_NVIDIA: Final = "nvidia"
"""NVIDIA's driver, whose virtual functions are vGPUs: vfio-pci's probe of one fails (EINVAL)."""

_OF_NVIDIA: Final = (
    "a virtual function on NVIDIA's driver, which makes a vGPU of it: gpuactors never unbinds it"
)


@final
class VirtualFunctions(PciFunctions):
    """The kind of the devices that are SR-IOV virtual functions."""

    name = KindName("virtual-function")

    def devices(self, facts: HostFacts) -> Iterable[Device]:
        iommufd = has_iommufd(facts)
        return _virtual(
            {
                address: (
                    function,
                    None if function.physical is None else facts.functions.get(function.physical),
                    members_of(function, facts),
                    facts.selectors,
                    iommufd,
                )
                for address, function in facts.functions.items()
                if function.is_virtual
            }
        ).values()

    def blocker(self, device: Device, use: Observed | None) -> Reason | None:
        return _left_alone(device) or without_physical(device) or super().blocker(device, use)

    def not_backed(self, device: Device) -> Reason:
        if device.has_backing:
            return super().not_backed(device)
        return _left_alone(device) or without_physical(device) or super().not_backed(device)

    def never_given(self, device: Device) -> Reason | None:
        return super().never_given(device) or _left_alone(device) or without_physical(device)

    def of_the_hosts_fabric(self, device: Device, fabric: str) -> Reason | None:
        """Allow it: the physical function stays on its host's driver, which the fabric manager knows."""
        return None

    def offer(self, device: Device, *, claimed: bool) -> OfferedDevice:
        """Add the names `isVF`, as AMD's driver has it, and `parent`, the physical function's address. One on NVIDIA's
        driver is left out: a card has dozens."""
        offered = super().offer(device, claimed=claimed)
        own = {"isVF": attribute(value=True), "parent": attribute(device.parent or "")}
        left_out = "" if claimed or device.driver != _NVIDIA else f"{device.key} is {_OF_NVIDIA}"
        return replace(offered, attributes={**offered.attributes, **own}, invalid=offered.invalid or left_out)


_Inputs = tuple[PciFunction, PciFunction | None, tuple[PciFunction, ...], tuple[Selector, ...], bool]
"""The inputs of such a device: the function, its physical function if known, all known functions of its IOMMU group,
the operator's selectors, and `Device.iommufd`."""


@memoized_each
def _virtual(inputs: _Inputs) -> Device:
    """Return the device that is a virtual function."""
    function, physical, members, selectors, iommufd = inputs
    device = device_of(
        (function,) if physical is None else (function, physical),
        members,
        selectors,
        kind=VIRTUAL_FUNCTION.name,
        resource=named_virtual(function, physical, selectors),
        iommufd=iommufd,
    )
    return replace(
        device,
        # Without its link nothing says of which card it is, nor, where that has the same ids, of which resource.
        is_selected=device.is_selected and function.physical is not None,
        # NVIDIA's driver registers it with vfio before it has a type, and a card has dozens of these.
        has_backing=device.has_backing and function.driver != _NVIDIA,
    )


VIRTUAL_FUNCTION: Final[Kind] = VirtualFunctions()


def _left_alone(device: Device) -> Reason | None:
    """Return why a virtual function on NVIDIA's driver is given to nobody: it has no vGPU type, else it would be of
    the kind in `vgpu.py`. None on any other driver."""
    function = device.units[0]
    if function.driver != _NVIDIA:
        return None
    untyped = "; no vGPU type is set (nvidia/current_vgpu_type is 0)" if function.vgpu is not None else ""
    return Reason(Cause.VIRTUAL_FUNCTION, f"{_OF_NVIDIA}{untyped}")


def without_physical(device: Device) -> Reason | None:
    """Return why its physical function keeps it from every virtual machine; None if it does not.

    Who opens a virtual function of a physical one that is on a vfio driver must present the token that the user of that
    one has set (drivers/vfio/pci/vfio_pci_core.c, vfio_pci_validate_vf_token; since Linux 5.7). Neither KubeVirt nor
    Kata can.
    """
    function, *known = device.units
    if function.physical is None:
        return Reason(
            Cause.PHYSICAL_FUNCTION_NOT_READY,
            "a virtual function without a link to its physical one (physfn), as it is being removed or was just added: "
            "its removal waits in the kernel until no process has it open",
        )
    if not known:
        return Reason(
            Cause.PHYSICAL_FUNCTION_NOT_READY,
            f"a virtual function of {function.physical}, which cannot be found: look for it with "
            f"lspci -s {function.physical}",
        )
    physical = known[0]
    if physical.vfio_bound:
        return Reason(
            Cause.PHYSICAL_FUNCTION_ON_VFIO,
            f"a virtual function of {physical.address}, which is on {quoted_id(physical.driver or '')}: a VM would "
            "need the token of who uses that one, which neither KubeVirt nor Kata can give; bind "
            f"{physical.address} to its host's driver, and create the virtual functions by that",
        )
    if physical.fault is not None:
        return Reason(
            Cause.PHYSICAL_FUNCTION_NOT_READY,
            f"a virtual function of {physical.address}, which cannot be read: {physical.fault}",
        )
    if physical.driver is None:
        return Reason(
            Cause.PHYSICAL_FUNCTION_NOT_READY,
            f"a virtual function of {physical.address}, which is bound to no driver: bind that to its host's driver",
        )
    return None
