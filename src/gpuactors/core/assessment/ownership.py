"""The owner or holder of a device, by kubelet, the kernel and the other members of its group.

A device held by the pod that kubelet gave it to is Healthy, and counted once; one held by any other process is
Unhealthy, and the holder named (docs/architecture.md, "Which devices are Healthy").
"""

from __future__ import annotations

from gpuactors.core.values.cause import Cause
from gpuactors.core.values.group import GroupInputs, Holding, other_holding
from gpuactors.core.values.inventory import Device
from gpuactors.core.values.model import Observed
from gpuactors.core.values.status import Ownership, Reason


def ownership_of(device: Device, inputs: GroupInputs) -> Ownership:
    """The ownership of a device of the group."""
    holding = other_holding(inputs.owners, device.function.address)
    if holding is None:
        return _by_use(device, inputs)
    if holding.function != device.function.address:
        why = group_in_use(device, holding)
        return Ownership(why.cause, why.message)
    owner = holding.owner
    return Ownership(owner.cause(device.resource), owner.message(device.resource), owner)


def group_in_use(device: Device, holding: Holding) -> Reason:
    """Why a device cannot be had of which another function of its group is held."""
    group, owner = device.function.iommu_group, holding.owner
    return Reason(
        Cause.GROUP_IN_USE, f"IOMMU group {group} is in use: {holding.function} is {owner.message()}"
    )


def may_be_a_pods(use: Observed) -> bool:
    """Whether a pod's process may use the group: the holders are not known, or one of them is in a pod."""
    return not use.holders or any(holder.pod_uid is not None for holder in use.holders)


def _by_use(device: Device, inputs: GroupInputs) -> Ownership:
    use, unowned = inputs.use, inputs.unowned
    if use is None or unowned is None:
        return Ownership(Cause.FREE, "free")
    is_used = f"IOMMU group {device.function.iommu_group} is {use.evidence}"
    if (pod := unowned.left) is not None:
        if not unowned.is_settled:
            return Ownership(Cause.HOLDER_UNKNOWN, f"{is_used}; pod {pod} has just left kubelet's ledger")
        is_still_used = f"IOMMU group {device.function.iommu_group} is still {use.evidence}"
        return Ownership(
            Cause.ORPHANED, f"{is_still_used}: pod {pod} is gone from kubelet's ledger, its process is not"
        )
    if unowned.is_settled:
        # An old view is no fact: a device that it lacks may have been allocated since.
        given = (
            "no pod had it when kubelet's ledger was last readable"
            if unowned.problem is not None
            else "kubelet has given it to no pod"
        )
        return Ownership(Cause.HELD_BY_OTHER, f"{is_used}, and {given}")
    unread = f"; kubelet's ledger cannot be read: {unowned.problem}" if unowned.problem else ""
    return Ownership(Cause.HOLDER_UNKNOWN, f"{is_used}{unread}")
