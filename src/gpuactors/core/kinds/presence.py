"""Whether a device is still the same, or gone, replaced or changed. Decided only here.

A file of its own: commands import it, without the kinds.
Must not decide on a device that is present: that is `assessment/`.
"""

from __future__ import annotations

from typing import Final

from gpuactors.core.values.cause import Cause
from gpuactors.core.values.claim import BoundFunction
from gpuactors.core.values.model import PciFunction, is_pci_address
from gpuactors.core.values.status import Reason

NO_GPU_HERE: Final = "this node has no GPU to offer, as no PCI function matches the selectors"


def gone(key: str) -> Reason:
    """Return that a device of this key is gone."""
    what = "PCI function" if is_pci_address(key) else "mediated device"
    return Reason(Cause.GONE, f"the {what} is gone from this node")


def changed(seen: PciFunction, now: PciFunction | None) -> Reason | None:
    """Return why a function is no longer the one that was `seen` when a call came; None if it is."""
    if now is None:
        return gone(seen.address)
    if now.fault is not None and not (now.vendor and now.device):
        return Reason(Cause.UNREADABLE, now.fault)
    if (now.vendor, now.device) != (seen.vendor, seen.device):
        return another(f"{now.vendor}:{now.device}, not {seen.vendor}:{seen.device}")
    if (type_ := _vgpu_type(seen)) and _vgpu_type(now) != type_:
        return another(f"vGPU type {_vgpu_type(now) or 'none'}, not {type_}")
    if now.iommu_group != seen.iommu_group:
        return Reason(
            Cause.GROUP_CHANGED,
            f"its IOMMU group changed from {seen.iommu_group} to {now.iommu_group}; ask again",
        )
    return None


def made_by_another(program: str) -> Reason | None:
    """Return that this program has made the device for a claim of its own; None if `program` is empty."""
    if not program:
        return None
    return Reason(
        Cause.CLAIMED_ELSEWHERE,
        f"{program} has made it for a claim of its own, and removes it when that ends",
    )


def _vgpu_type(function: PciFunction) -> int | None:
    return function.vgpu.type if function.vgpu is not None else None


def another(what: str) -> Reason:
    """Return that another device is there; `what` describes the difference."""
    return Reason(Cause.REPLACED_BY_ANOTHER, f"another device is there now ({what})")


def moved(bound: BoundFunction, now: PciFunction | None) -> Reason | None:
    """Return why a function no longer has the group or node that an act has read; None if it has."""
    if now is None:
        return Reason(Cause.GONE, f"{bound.address} is gone from this node")
    if now.iommu_group != bound.iommu_group:
        where = f"in IOMMU group {now.iommu_group}, and no longer in {bound.iommu_group}"
        return Reason(Cause.GROUP_CHANGED, f"{bound.address} is {where}")
    node = f"/dev/vfio/devices/{bound.cdev}"
    if bound.cdev is not None and now.fault is None and node not in now.nodes:
        return Reason(Cause.GROUP_CHANGED, f"{bound.address} no longer has the node {node}")
    return None
