"""Healthy or Unhealthy, and the one reason for it.

The sentence made here is the one that appears everywhere: in the log, in `inspect`, in the refusal of a call. Must not
look at anything but one device and its group: who holds a GPU will be decided from the ledger, in the same place.
"""

from __future__ import annotations

from typing import Final

from gpuactors.core.inventory import Device
from gpuactors.core.model import Health, PciFunction

OFFERED: Final = "free"
"""The reason of a healthy device."""

HARMLESS_DRIVERS: Final = frozenset({"pci-stub", "pcieport", "shpchp"})
"""Drivers beside which the kernel still calls a group viable: they do no DMA of their own (`driver_managed_dma` in
drivers/pci/pci-stub.c and drivers/pci/pcie/portdrv.c; before Linux 6.0 vfio_dev_viable in drivers/vfio/vfio.c)."""


def not_offered(function: PciFunction) -> str:
    """Why a selected function is not offered to kubelet at all."""
    if function.driver is None:
        return "bound to no driver; bind it to vfio-pci to offer it"
    return f"bound to {function.driver}, which is no vfio driver; bind it to vfio-pci to offer it"


def offending(device: Device) -> PciFunction | None:
    """The function that makes the device's group not viable: bound to a host driver beside a vfio driver."""
    return next(
        (m for m in device.group if m.driver and not m.vfio_bound and m.driver not in HARMLESS_DRIVERS), None
    )


def verdict(device: Device) -> tuple[Health, str]:
    """What kubelet is told about a device, and why."""
    function = device.function
    if not function.vfio_bound and function.fault is None:
        return Health.UNHEALTHY, not_offered(function)
    reason = _obstacle(device)
    return (Health.HEALTHY, OFFERED) if reason is None else (Health.UNHEALTHY, reason)


def _obstacle(device: Device) -> str | None:
    """What would stop a VM from opening it, apart from its own driver; None if nothing."""
    function = device.function
    if function.fault is not None:
        return function.fault
    if function.iommu_group is None:
        return (
            "in no IOMMU group; switch the IOMMU on in the firmware and on the kernel command line "
            "(intel_iommu=on or amd_iommu=on)"
        )
    if (other := offending(device)) is not None:
        return (
            f"IOMMU group {function.iommu_group} is not viable: {other.address} is bound to {other.driver}; "
            "bind it to vfio-pci or to no driver"
        )
    if not function.has_node:
        return (
            f"/dev/vfio/{function.iommu_group} does not exist; is /dev of the host visible to gpuactors, "
            "and the module vfio_pci loaded?"
        )
    return None
