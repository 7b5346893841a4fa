"""Blockers in the files of a device and of its group: why a virtual machine cannot open it.

Must not decide on holders: that is `holding.py`.
"""

from __future__ import annotations

from typing import Final

from gpuactors.core.devices.presence import not_offered
from gpuactors.core.devices.viability import not_viable
from gpuactors.core.values.cause import Cause
from gpuactors.core.values.inventory import Device
from gpuactors.core.values.model import Observed, PciFunction
from gpuactors.core.values.status import Holding, Reason

OF_A_PART: Final = frozenset({Cause.VIRTUAL_FUNCTION, Cause.VIRTUAL_FUNCTIONS})
"""The causes of `not_whole`: it is not given away, and who has it keeps it."""

SWITCH_ON: Final = (
    "switch the IOMMU on in the firmware, and with an Intel CPU on the kernel command line (intel_iommu=on)"
)
"""The remedy where there is no IOMMU."""

_VMD_DOMAINS: Final = 0x10000
"""The first PCI domain behind a VMD controller: ACPI's have 16 bits (drivers/pci/controller/vmd.c,
vmd_find_free_domain)."""


def _is_behind_vmd(function: PciFunction) -> bool:
    return int(function.address.partition(":")[0], 16) >= _VMD_DOMAINS


def is_unbinding(device: Device, use: Observed | None) -> bool:
    """Its driver is asked to release it and waits for the process that has it open, as the last poll saw.

    The node counts as well as `enable`, to which any process may have written where there was never a driver
    (`host/bindings.py` decides which count is evidence).
    """
    return device.may_be_unbinding and use is not None and any(u.address in use.open for u in device.units)


def unbinding(device: Device, holding: Holding | None) -> Reason:
    """The process it waits for, and the remedy. Binding it is none: that would wait as well."""
    held = holding.reason.message if holding is not None else "free"
    return Reason(
        Cause.UNBINDING,
        f"{held}; its unbind or unplug waits in the kernel until no process has it open: "
        f"end the process that has /dev/vfio/{device.group} open; nothing can be bound to it before",
    )


def not_backed(device: Device) -> Reason:
    """Why a device that is on no driver by which a VM can open it is not advertised to kubelet."""
    (function,) = device.units
    return not_offered(function)


def blocker_of(device: Device, holding: Holding | None, use: Observed | None) -> Reason | None:
    """The reason why a VM could not open it; None if it could. `use` is its group's, as last polled."""
    (function,) = device.units
    if function.fault is not None:
        return Reason(Cause.UNREADABLE, function.fault)
    if is_unbinding(device, use):
        return unbinding(device, holding)
    if (blocker := not_whole(function)) is not None:
        return blocker
    if not function.vfio_bound:
        return not_offered(function)
    if (blocker := without_group(function)) is not None:
        return blocker
    if (blocker := not_viable(function, function, device.members)) is not None:
        return blocker
    if (blocker := _without_node(function)) is not None:
        return blocker
    if use is not None and use.unseen:
        return Reason(
            Cause.USE_UNREADABLE,
            f"whether IOMMU group {function.iommu_group} is in use cannot be determined: {use.unseen}",
        )
    return None


def not_whole(function: PciFunction) -> Reason | None:
    """Why it is no whole GPU, whatever driver it is on; None if it is one. A pod that has it keeps it all the same."""
    if function.physical is not None:
        return Reason(
            Cause.VIRTUAL_FUNCTION,
            f"a virtual function of {function.physical}, which is no whole GPU: virtual functions are not allocated; "
            f"to allocate {function.physical}, write 0 to its sriov_numvfs",
        )
    if function.has_virtual_functions:
        return Reason(
            Cause.VIRTUAL_FUNCTIONS,
            "its virtual functions are active, so that it is no whole GPU, and they would go with its driver: write 0 "
            "to its sriov_numvfs when nobody uses them",
        )
    return None


def without_group(function: PciFunction) -> Reason | None:
    """Why it is in no IOMMU group of the hardware, whatever driver it is on; None if it is in one."""
    if function.without_iommu:
        return Reason(
            Cause.NO_IOMMU_MODE,
            f"vfio drives it without an IOMMU (/dev/vfio/noiommu-{function.iommu_group}): a VM's GPU "
            f"could access all of the node's memory, and QEMU refuses it; {SWITCH_ON}, and remove the parameter "
            "enable_unsafe_noiommu_mode of the module vfio",
        )
    if function.iommu_group is None and _is_behind_vmd(function):
        return Reason(
            Cause.BEHIND_VMD,
            "in no IOMMU group: it is behind an Intel VMD controller (its PCI domain is "
            f"{function.address.partition(':')[0]}), whose devices cannot be passed through to VMs; switch VMD off for "
            "its slot in the firmware",
        )
    if function.iommu_group is None:
        return Reason(Cause.NO_IOMMU_GROUP, f"in no IOMMU group; {SWITCH_ON}")
    return None


def _without_node(function: PciFunction) -> Reason | None:
    if function.has_node:
        return None
    if "/dev/vfio/vfio" not in function.nodes:
        return Reason(
            Cause.NODE_MISSING,
            f"neither /dev/vfio/{function.iommu_group} nor /dev/vfio/vfio exists; is /dev of the host visible to "
            "gpuactors, and are the modules vfio and vfio_pci loaded?",
        )
    return Reason(
        Cause.NODE_MISSING,
        f"/dev/vfio/{function.iommu_group} does not exist; is /dev of the host visible to gpuactors, "
        "and the module vfio_pci loaded?",
    )
