"""Whether a device is still the same: gone, another device, not offered, changed since. Decided only here.

Must not decide on a device that is present: that is `assessment/blockers.py`.
"""

from __future__ import annotations

from typing import Final

from gpuactors.core.state import NodeState
from gpuactors.core.values.cause import Cause
from gpuactors.core.values.inventory import ids_of, named
from gpuactors.core.values.model import PciAddress, PciFunction, Resolved, ResourceName
from gpuactors.core.values.quote import quoted_id
from gpuactors.core.values.status import Blocker

GONE: Final = Blocker(Cause.GONE, "the PCI function is gone from this node")


def function_at(state: NodeState, address: PciAddress) -> PciFunction | None:
    """The function that the last inspection found there."""
    return state.host.functions.get(address)


def not_offered(function: PciFunction) -> Blocker:
    """Why a function is not advertised to kubelet at all."""
    if function.vfio_bound:
        return Blocker(
            Cause.NOT_SELECTED, "no selector matches it under this name any more (--select, pci.ids)"
        )
    if function.driver is None:
        return Blocker(Cause.NOT_BOUND, "bound to no driver; bind it to vfio-pci to offer it")
    return Blocker(
        Cause.NOT_BOUND,
        f"bound to {quoted_id(function.driver)}, which is no vfio driver; bind it to vfio-pci to offer it",
    )


def not_listed(state: NodeState, resource: ResourceName, address: PciAddress) -> Blocker:
    """Why the function at an address, if there is one, is no device of a resource."""
    function = function_at(state, address)
    if function is None:
        return GONE
    if function.vfio_bound and named(function) == resource:
        return Blocker(Cause.NOT_SELECTED, "no selector matches it any more (--select)")
    if function.vfio_bound and ids_of(function) not in state.published.served.get(resource, ()):
        return _another(f"{function.vendor}:{function.device}")
    return not_offered(function)


def lost(state: NodeState, resource: ResourceName, meant: Resolved | None) -> Blocker | None:
    """Why a pod can no longer use the device that was allocated to it by an ID: the device is gone, unbound, or another
    model; None if it can. `meant` is the device of the ID.

    A device whose vendor and device ids could never be read is not lost: its model was known when it was allocated. Nor
    is one of the same model that has another name, as pci.ids was renewed, nor one that has not been inspected yet: no
    selector matches it, so that it is in no scan.
    """
    if meant is None:
        return Blocker(Cause.UNKNOWN_ID, f"no device of {resource} on this node is known by this ID")
    function = function_at(state, meant.address)
    if function is None and meant.ids is None:
        return None
    if (
        function is not None
        and function.vfio_bound
        and (ids_of(function) in ("", meant.ids) or named(function) == resource)
    ):
        return None
    return not_listed(state, resource, meant.address)


def changed(seen: PciFunction, now: PciFunction | None) -> Blocker | None:
    """Why a function that was `seen` when a call came is no longer the one of the call; None if it is."""
    if now is None:
        return GONE
    if now.fault is not None and not (now.vendor and now.device):
        return Blocker(Cause.UNREADABLE, now.fault)
    if (now.vendor, now.device) != (seen.vendor, seen.device):
        return _another(f"{now.vendor}:{now.device}, not {seen.vendor}:{seen.device}")
    if now.iommu_group != seen.iommu_group:
        return Blocker(
            Cause.GROUP_CHANGED,
            f"its IOMMU group changed from {seen.iommu_group} to {now.iommu_group}; ask again",
        )
    return None


def _another(what: str) -> Blocker:
    return Blocker(Cause.REPLACED_BY_ANOTHER, f"another device is there now ({what})")
