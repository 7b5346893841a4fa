"""The owner or holder of a device, by kubelet, the kernel and the other members of its group.

A device held by the pod that kubelet gave it to is Healthy, and counted once; one held by any other process is
Unhealthy, and the holder named (docs/architecture.md, "Which devices are Healthy").
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Set

from gpuactors.core.assessment.blockers import is_unbinding
from gpuactors.core.devices.index import index_of
from gpuactors.core.state import NodeState
from gpuactors.core.values.cause import Cause
from gpuactors.core.values.inventory import Device, may_be_unbinding
from gpuactors.core.values.model import DeviceId, Observed, Pod, ResourceName
from gpuactors.core.values.owner import Given, Named
from gpuactors.core.values.status import Ownership


def allocated_ids(
    state: NodeState, resources: Container[ResourceName]
) -> Mapping[ResourceName, Set[DeviceId]]:
    """The IDs of these resources that are allocated to pods, by kubelet's ledger or an answer of ours."""
    found: dict[ResourceName, Set[DeviceId]] = {
        r: ids for r, ids in index_of(state).given.items() if r in resources
    }
    for resource, device_id in state.kubelet.pending_allocations:
        if resource in resources:
            found[resource] = found.get(resource, frozenset()) | {device_id}
    return found


def given(state: NodeState, name: Named) -> Given:
    """The entry of kubelet's ledger with that name; a pending allocation if there is none."""
    return Given(*name, state.kubelet.ledger.entries.get(name))


def ownership_of(state: NodeState, device: Device) -> Ownership:
    """The ownership of `device`."""
    owners = index_of(state).owners
    owner = owners.get(device.function.address)
    if owner is not None:
        return Ownership(owner.cause(device.resource), owner.message(device.resource), owner)
    for member in device.group:
        if (owner := owners.get(member.address)) is not None:
            return Ownership(
                Cause.GROUP_IN_USE,
                f"IOMMU group {device.function.iommu_group} is in use: {member.address} is {owner.message()}",
            )
    return _by_use(state, device)


def observed_use(state: NodeState, device: Device) -> Observed | None:
    """The use of its group, as last polled."""
    group = device.function.iommu_group
    return state.host.polls.groups.get(group) if group is not None else None


def is_offered(state: NodeState, device: Device) -> bool:
    """Whether it is advertised at all: bound to a vfio driver (or not readable now, but bound before), or being unbound
    or unplugged while a process has it open.

    A device that has lost its driver stays in the list until a poll has seen whether it is open, and as long as it is.
    """
    if device.function.vfio_bound or is_unbinding(device.function, observed_use(state, device)):
        return True
    return may_be_unbinding(device.function) and _is_listed(state, device) and not _is_polled(state, device)


def _is_listed(state: NodeState, device: Device) -> bool:
    address = device.function.address
    return any(a.address == address for a in state.published.device_lists.get(device.resource, ()))


def _is_polled(state: NodeState, device: Device) -> bool:
    """The last poll saw its group, and none is under way that may see something else."""
    use = observed_use(state, device)
    return (
        use is not None
        and use.poll >= state.host.polls.done
        and not state.host.polls.is_to_see(device.function.iommu_group)
    )


def orphans_pod(state: NodeState, device: Device) -> Pod | None:
    """The pod that had a device of this group, has left kubelet's ledger, and may still hold it."""
    return next(
        (state.kubelet.orphans[m.address].pod for m in device.group if m.address in state.kubelet.orphans),
        None,
    )


def may_be_a_pods(use: Observed) -> bool:
    """Whether a pod's process may use the group: the holders are not known, or one of them is in a pod."""
    return not use.holders or any(holder.pod_uid is not None for holder in use.holders)


def _by_use(state: NodeState, device: Device) -> Ownership:
    use = observed_use(state, device)
    if use is None or not use.in_use:
        return Ownership(Cause.FREE, "free")
    group = f"IOMMU group {device.function.iommu_group}"
    pod = orphans_pod(state, device)
    if pod is not None:
        reads = [
            state.kubelet.orphans[m.address].read for m in device.group if m.address in state.kubelet.orphans
        ]
        if use.poll < max(reads):
            return Ownership(
                Cause.HOLDER_UNKNOWN, f"{group} is {use.evidence}; pod {pod} has just left kubelet's ledger"
            )
        return Ownership(
            Cause.ORPHANED,
            f"{group} is still {use.evidence}: pod {pod} is gone from kubelet's ledger, its process is not",
        )
    if state.kubelet.ledger.read > use.since:
        # An old view is no fact: a device that it lacks may have been allocated since.
        given = (
            "no pod had it when kubelet's ledger was last readable"
            if state.kubelet.ledger.problem is not None
            else "kubelet has given it to no pod"
        )
        return Ownership(Cause.HELD_BY_OTHER, f"{group} is {use.evidence}, and {given}")
    unread = (
        f"; kubelet's ledger cannot be read: {state.kubelet.ledger.problem}"
        if state.kubelet.ledger.problem
        else ""
    )
    return Ownership(Cause.HOLDER_UNKNOWN, f"{group} is {use.evidence}{unread}")
