"""The first holder of a device: an owner, or a process that has its IOMMU group open.

The assessment uses the first holder; a call of kubelet and a claim use the first one that is not their own. A device
held by the pod that kubelet gave it to is Healthy, and counted once; one held by any other process is Unhealthy, and
the holder is named (docs/dev/architecture.md, "Which devices are Healthy").
"""

from __future__ import annotations

from collections.abc import Callable

from gpuactors.core.values.cause import Cause
from gpuactors.core.values.group import GroupInputs, UnownedUse
from gpuactors.core.values.inventory import described
from gpuactors.core.values.model import DeviceKey, Observed, ResourceName
from gpuactors.core.values.owner import Allocation, Owner
from gpuactors.core.values.status import Holding, Reason

IsOwn = Callable[[DeviceKey, Allocation], bool]
"""A function that returns whether an owner's entry, for a device, belongs to the pod or claim that asks."""


def holding_of(
    key: DeviceKey, resource: ResourceName, inputs: GroupInputs, is_own: IsOwn = lambda *_: False
) -> Holding | None:
    """Return the first holder of a device, in a list of `resource`: its own owner, an owner of another device of its
    group, the owner of a relative, a pod that has left kubelet's ledger, a process. None if the device is free."""
    for owned, owner in sorted(inputs.owners, key=lambda pair: pair[0] != key):
        foreign = tuple([e for e in owner.entries if not is_own(owned, e)])
        if not foreign:
            continue
        owner_left = owner if len(foreign) == len(owner.entries) else Owner(foreign)
        cause, message = owner_left.cause(resource), owner_left.message(resource)
        if owned != key:
            cause = Cause.GROUP_IN_USE
            message = f"IOMMU group {inputs.group} is in use: {owned} is {message}"
        return Holding(owner_left, owned, Reason(cause, message))
    for related in inputs.relatives:
        foreign = tuple([e for e in related.owner.entries if not is_own(related.relative, e)])
        if related.device == key and foreign:
            message = Owner(foreign).message(resource)
            subject = described(key, related.relative, is_part=related.is_part)
            return Holding(
                Owner(foreign), related.relative, Reason(Cause.CARD_IN_USE, f"{subject} is {message}")
            )
    use, unowned = inputs.use, inputs.unowned
    if use is None or unowned is None:
        return None
    return Holding(unowned.departed or use.holders, key, _by_use(inputs, use, unowned))


def _by_use(inputs: GroupInputs, use: Observed, unowned: UnownedUse) -> Reason:
    is_used = f"IOMMU group {inputs.group} is {use.evidence}"
    if (pod := unowned.departed) is not None:
        if not unowned.is_settled:
            return Reason(Cause.HOLDER_UNKNOWN, f"{is_used}; pod {pod} has just left kubelet's ledger")
        is_still_used = f"IOMMU group {inputs.group} is still {use.evidence}"
        return Reason(
            Cause.ORPHANED, f"{is_still_used}: pod {pod} is gone from kubelet's ledger, its process is not"
        )
    if unowned.is_settled:
        # An old ledger is no fact: a device that it lacks may have been allocated since.
        other = "other " if inputs.owners else ""
        allocation = (
            f"no {other}pod had it when kubelet's ledger was last readable"
            if unowned.problem is not None
            else f"kubelet has given it to no {other}pod"
        )
        return Reason(Cause.HELD_BY_OTHER, f"{is_used}, and {allocation}")
    unread = f"; kubelet's ledger cannot be read: {unowned.problem}" if unowned.problem else ""
    return Reason(Cause.HOLDER_UNKNOWN, f"{is_used}{unread}")
