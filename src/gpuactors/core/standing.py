"""Where a device stands between kubelet, the kernel and the other members of its group: whose is it?

This is the heart of the program (architecture, "The books"). Held by the pod that kubelet gave it to is Healthy and
counted once; held by a stranger is Unhealthy and named.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from gpuactors.core.inventory import Device, may_be_unbinding
from gpuactors.core.model import DeviceId, Observed, PciAddress, Pod, ResourceName
from gpuactors.core.ownership import Given, Owner
from gpuactors.core.state import NodeState


class Standing(StrEnum):
    """Whose a device is."""

    FREE = "free"
    ALLOCATED = "allocated"
    CLAIMED = "claimed"
    """By a DRA claim, or by a pod under another resource's name: kubelet counts it elsewhere."""
    GROUP_IN_USE = "group in use"
    LEFT_HELD = "held by a pod that is gone"
    FOREIGN = "in foreign hands"
    UNDECIDED = "undecided"
    """In use, and kubelet's ledger has not been read since: it stays what it was."""


@dataclass(frozen=True, slots=True)
class Stand:
    """Whose a device is, and the sentence that says so."""

    standing: Standing
    reason: str
    unbinding: bool = False
    """Its driver has been told to let it go, and waits for whoever has it open."""
    unseen: str = ""
    """Why it cannot be seen whether its group is in use; empty if it can."""
    short: str = ""
    """As `Fact.short`."""


def given_away(
    state: NodeState, resources: Container[ResourceName]
) -> dict[tuple[ResourceName, DeviceId], str]:
    """Every device of these resources that kubelet has given to a pod, by its ID, and the words for it."""
    named = {**state.granted, **state.ledger.entries}
    return {n: Given(*n, state.ledger.entries.get(n)).said for n in named if n[0] in resources}


def stand_of(state: NodeState, device: Device, owned: Mapping[PciAddress, Owner]) -> Stand:
    """Whose `device` is."""
    stand, use = _stand_of(state, device, owned), observed_use(state, device)
    unseen = use.unseen if use is not None else ""
    fact = state.facts.get(device.function.address)
    short = fact.short if fact is not None else ""
    return replace(stand, unbinding=is_unbinding(state, device), unseen=unseen, short=short)


def _stand_of(state: NodeState, device: Device, owned: Mapping[PciAddress, Owner]) -> Stand:
    owner = owned.get(device.function.address)
    if owner is not None:
        counted = owner.is_counted_in(device.resource)
        return Stand(Standing.ALLOCATED if counted else Standing.CLAIMED, owner.said(device.resource))
    for member in device.group:
        if (mate := owned.get(member.address)) is not None:
            return Stand(
                Standing.GROUP_IN_USE,
                f"IOMMU group {device.function.iommu_group} is in use: {member.address} is {mate.said()}",
            )
    return _by_use(state, device)


def observed_use(state: NodeState, device: Device) -> Observed | None:
    """The use of its group, as last polled."""
    group = device.function.iommu_group
    return state.polls.groups.get(group) if group is not None else None


def is_offered(state: NodeState, device: Device) -> bool:
    """Whether kubelet is told about it at all: bound to a vfio driver (or not readable just now, but bound before), or
    being unbound or unplugged under somebody who has it open.

    What has lost its driver stays in the list until a poll has seen whether it is open, and as long as it is.
    """
    if device.function.vfio_bound or is_unbinding(state, device):
        return True
    return may_be_unbinding(device.function) and _is_listed(state, device) and not _is_polled(state, device)


def is_unbinding(state: NodeState, device: Device) -> bool:
    """Its driver has been told to let it go and waits for whoever has it open, as the last poll saw.

    The node counts as well as `enable`, to which any process may have written where there was never a driver
    (`bindings.py` says whose count is evidence).
    """
    use = observed_use(state, device)
    return may_be_unbinding(device.function) and use is not None and device.function.address in use.open


def _is_listed(state: NodeState, device: Device) -> bool:
    address = device.function.address
    return any(a.address == address for a in state.frames.get(device.resource, ()))


def _is_polled(state: NodeState, device: Device) -> bool:
    """The last poll saw its group, and none is under way that may see something else."""
    use = observed_use(state, device)
    return state.polls.outstanding is None and use is not None and use.poll == state.polls.done


def departed_pod(state: NodeState, device: Device) -> Pod | None:
    """The pod that had a device of this group, has left kubelet's ledger, and may still hold it."""
    return next((state.departed[m.address].pod for m in device.group if m.address in state.departed), None)


def may_be_a_pods(use: Observed) -> bool:
    """Whether a pod's process may use the group: nothing is known of who does, or one of them is in a pod."""
    return not use.holders or any(holder.pod_uid is not None for holder in use.holders)


def _by_use(state: NodeState, device: Device) -> Stand:
    use = observed_use(state, device)
    if use is None or not use.in_use:
        return Stand(Standing.FREE, "free")
    group = f"IOMMU group {device.function.iommu_group}"
    pod = departed_pod(state, device)
    if pod is not None:
        reads = [state.departed[m.address].read for m in device.group if m.address in state.departed]
        if use.poll < max(reads):
            return Stand(Standing.UNDECIDED, f"{group} is {use.evidence}; pod {pod} has just left")
        return Stand(
            Standing.LEFT_HELD,
            f"{group} is still {use.evidence}: pod {pod} is gone from kubelet's books, its process is not",
        )
    if state.ledger.read > use.since:
        # An old view is no fact: what it lacks may have been given away since.
        given = (
            "was in no pod's hands when kubelet's ledger could last be read"
            if state.ledger.problem is not None
            else "kubelet has given it to no pod"
        )
        return Stand(Standing.FOREIGN, f"{group} is {use.evidence}, and {given}")
    unread = f"; kubelet's ledger cannot be read: {state.ledger.problem}" if state.ledger.problem else ""
    return Stand(Standing.UNDECIDED, f"{group} is {use.evidence}{unread}")
