"""Healthy or Unhealthy, and the one reason for it.

The sentence made here is the one that appears everywhere: in the log, in `inspect`, in the refusal of a call. What a
device's files say is judged here; whose it is comes from `standing.py`.
"""

from __future__ import annotations

from typing import Final, assert_never

from gpuactors.core.inventory import Device, ids_of, named
from gpuactors.core.model import Advertised, Health, PciAddress, PciFunction, ResourceName
from gpuactors.core.quote import quoted_id
from gpuactors.core.standing import Stand, Standing
from gpuactors.core.state import NodeState

HARMLESS_DRIVERS: Final = frozenset({"pci-stub", "pcieport", "shpchp"})
"""Drivers beside which the kernel still calls a group viable: they do no DMA of their own (`driver_managed_dma` in
drivers/pci/pci-stub.c and drivers/pci/pcie/portdrv.c; before Linux 6.0 vfio_dev_viable in drivers/vfio/vfio.c)."""


_SWITCH_ON: Final = (
    "switch the IOMMU on in the firmware and on the kernel command line (intel_iommu=on or amd_iommu=on)"
)

_VMD_DOMAINS: Final = 0x10000
"""The first PCI domain behind a VMD controller: ACPI's have 16 bits (drivers/pci/controller/vmd.c,
vmd_find_free_domain)."""


def _is_behind_vmd(function: PciFunction) -> bool:
    return int(function.address.partition(":")[0], 16) >= _VMD_DOMAINS


def not_offered(function: PciFunction) -> str:
    """Why a function is not offered to kubelet at all."""
    if function.vfio_bound:
        return "no selector chooses it by this name any more (--select, pci.ids)"
    if function.driver is None:
        return "bound to no driver; bind it to vfio-pci to offer it"
    return f"bound to {quoted_id(function.driver)}, which is no vfio driver; bind it to vfio-pci to offer it"


def why_gone(state: NodeState, resource: ResourceName, address: PciAddress) -> str:
    """Why what is at an address now is no device of a resource."""
    fact = state.facts.get(address)
    if fact is None or fact.function is None:
        return "the PCI function is gone from this node"
    if fact.function.vfio_bound and named(fact.function) == resource:
        return "no selector chooses it any more (--select)"
    if fact.function.vfio_bound and ids_of(fact.function) not in state.served.get(resource, ()):
        return f"another device is there now ({fact.function.vendor}:{fact.function.device})"
    return not_offered(fact.function)


def verdict(device: Device, stand: Stand, before: Advertised | None) -> tuple[Health, str]:
    """What kubelet is told about a device, and why. `before` is what it was told last.

    A shortage of ours changes nothing but the words: it is no device's fault, and Allocate waits for a look.
    """
    health, reason = _verdict(device, stand, before)
    if stand.short:
        return health, f"{reason}; so it was seen last, and cannot be looked at now: {stand.short}"
    return health, reason


def _verdict(device: Device, stand: Stand, before: Advertised | None) -> tuple[Health, str]:
    function = device.function
    if stand.standing is Standing.ALLOCATED:
        # It is counted in `allocated` already; Unhealthy would subtract it twice. Only a lost one is Unhealthy.
        if function.vfio_bound:
            return Health.HEALTHY, stand.reason
        if stand.unbinding:
            return Health.UNHEALTHY, _unbinding(function, stand)
        return Health.UNHEALTHY, f"{stand.reason}, but {not_offered(function)}"
    if (reason := obstacle(device, stand)) is not None:
        return Health.UNHEALTHY, reason
    match stand.standing:
        case Standing.FREE:
            return Health.HEALTHY, stand.reason
        case Standing.UNDECIDED:
            # Never guessed away: if kubelet has given it to a pod, Unhealthy would subtract it twice. It is not handed
            # out either, because Allocate looks again.
            return (before.health, stand.reason) if before is not None else (Health.HEALTHY, stand.reason)
        case Standing.CLAIMED | Standing.GROUP_IN_USE | Standing.LEFT_HELD | Standing.FOREIGN:
            return Health.UNHEALTHY, stand.reason
        case _:
            assert_never(stand.standing)


def offending(device: Device) -> PciFunction | None:
    """The function that makes the device's group not viable: bound to a host driver beside a vfio driver."""
    return next(
        (m for m in device.group if m.driver and not m.vfio_bound and m.driver not in HARMLESS_DRIVERS), None
    )


def _unbinding(function: PciFunction, stand: Stand) -> str:
    """Whom it waits for, and what to do. To bind it is no remedy: that would wait as well."""
    return (
        f"{stand.reason}; its unbind or unplug waits in the kernel until nobody has it open: "
        f"end whoever has /dev/vfio/{function.iommu_group} open, nothing can be bound to it before"
    )


def obstacle(device: Device, stand: Stand) -> str | None:
    """What of its files would stop a VM from opening it; None if nothing."""
    function = device.function
    if function.fault is not None:
        return function.fault
    if stand.unbinding:
        return _unbinding(function, stand)
    if not function.vfio_bound:
        return not_offered(function)
    if function.without_iommu:
        return (
            f"vfio drives it without an IOMMU (/dev/vfio/noiommu-{function.iommu_group}): nothing would keep a "
            f"VM's GPU out of the node's memory, and QEMU refuses it; {_SWITCH_ON}, and leave the parameter "
            "enable_unsafe_noiommu_mode of the module vfio out"
        )
    if function.iommu_group is None and _is_behind_vmd(function):
        return (
            "in no IOMMU group: it is behind an Intel VMD controller (its PCI domain is "
            f"{function.address.partition(':')[0]}), whose devices cannot be given to VMs; switch VMD off for its slot "
            "in the firmware"
        )
    if function.iommu_group is None:
        return f"in no IOMMU group; {_SWITCH_ON}"
    if (other := offending(device)) is not None:
        return (
            f"IOMMU group {function.iommu_group} is not viable: {other.address} is bound to "
            f"{quoted_id(other.driver or '')}; bind it to vfio-pci or to no driver"
        )
    if not function.has_node and "/dev/vfio/vfio" not in function.nodes:
        return (
            f"neither /dev/vfio/{function.iommu_group} nor /dev/vfio/vfio exists; is /dev of the host visible to "
            "gpuactors, and are the modules vfio and vfio_pci loaded?"
        )
    if not function.has_node:
        return (
            f"/dev/vfio/{function.iommu_group} does not exist; is /dev of the host visible to gpuactors, "
            "and the module vfio_pci loaded?"
        )
    if stand.unseen:
        return f"it cannot be seen whether IOMMU group {function.iommu_group} is in use: {stand.unseen}"
    return None
