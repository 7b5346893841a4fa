"""Whether a device is still the same: gone, another device, not offered, changed since. Decided only here.

Must not decide on a device that is present: that is `assessment/blockers.py`.
"""

from __future__ import annotations

from typing import Final

from gpuactors.core.values.cause import Cause
from gpuactors.core.values.model import PciFunction
from gpuactors.core.values.quote import quoted_id
from gpuactors.core.values.status import Reason

NO_GPU_HERE: Final = "this node has no GPU to offer, as no PCI function matches the selectors"

GONE: Final = Reason(Cause.GONE, "the PCI function is gone from this node")


def not_offered(function: PciFunction) -> Reason:
    """Why a function is not advertised to kubelet at all."""
    if function.vfio_bound:
        return Reason(
            Cause.NOT_SELECTED, "no selector matches it under this name any more (--select, pci.ids)"
        )
    if function.driver is None:
        return Reason(Cause.NOT_BOUND, "bound to no driver; bind it to vfio-pci to offer it")
    return Reason(
        Cause.NOT_BOUND,
        f"bound to {quoted_id(function.driver)}, which is no vfio driver; bind it to vfio-pci to offer it",
    )


def changed(seen: PciFunction, now: PciFunction | None) -> Reason | None:
    """Why a function that was `seen` when a call came is no longer the one of the call; None if it is."""
    if now is None:
        return GONE
    if now.fault is not None and not (now.vendor and now.device):
        return Reason(Cause.UNREADABLE, now.fault)
    if (now.vendor, now.device) != (seen.vendor, seen.device):
        return another(f"{now.vendor}:{now.device}, not {seen.vendor}:{seen.device}")
    if now.iommu_group != seen.iommu_group:
        return Reason(
            Cause.GROUP_CHANGED,
            f"its IOMMU group changed from {seen.iommu_group} to {now.iommu_group}; ask again",
        )
    return None


def another(what: str) -> Reason:
    return Reason(Cause.REPLACED_BY_ANOTHER, f"another device is there now ({what})")
