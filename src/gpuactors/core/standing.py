"""Where a device stands between kubelet, the kernel and the other members of its group: whose is it?

This is the heart of the program (architecture, "The books"). Held by the pod that kubelet gave it to is Healthy and
counted once; held by a stranger is Unhealthy and named.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from gpuactors.core.identity import address_of
from gpuactors.core.inventory import Device
from gpuactors.core.model import DeviceId, NodeState, Observed, PciAddress, Pod, ResourceName


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


@dataclass(frozen=True, slots=True)
class Owner:
    """To whom kubelet has given a device."""

    resource: ResourceName | None
    """The resource it was given as; None for a DRA claim."""
    claimed: bool
    said: str
    """`allocated to pod default/vm-1`"""


def owners(state: NodeState) -> dict[PciAddress, Owner]:
    """Every device that kubelet has given to somebody, under whatever ID and API."""
    found: dict[PciAddress, Owner] = {}
    for address, claim in state.ledger.claims.items():
        found[address] = Owner(None, True, f"in use by the claim {claim.claim} of pod {claim.pod}")
    for (resource, device), said in given_away(state).items():
        given = address_of(state, resource, device)
        if given is not None:
            found[given] = Owner(resource, False, said)
    return found


def given_away(state: NodeState) -> dict[tuple[ResourceName, DeviceId], str]:
    """Every device that kubelet has given to a pod as a device plugin's, and the words for it."""
    just = dict.fromkeys(state.granted, "just handed out")
    return just | {given: f"allocated to pod {pod}" for given, pod in state.ledger.entries.items()}


def stand_of(state: NodeState, device: Device, owned: Mapping[PciAddress, Owner]) -> Stand:
    """Whose `device` is."""
    stand = _stand_of(state, device, owned)
    return replace(stand, unbinding=True) if is_unbinding(state, device) else stand


def _stand_of(state: NodeState, device: Device, owned: Mapping[PciAddress, Owner]) -> Stand:
    owner = owned.get(device.function.address)
    if owner is not None and not owner.claimed and owner.resource in (None, device.resource):
        return Stand(Standing.ALLOCATED, owner.said)
    if owner is not None:
        return Stand(Standing.CLAIMED, owner.said + (f" as {owner.resource}" if owner.resource else ""))
    for member in device.group:
        if (mate := owned.get(member.address)) is not None:
            return Stand(
                Standing.GROUP_IN_USE,
                f"IOMMU group {device.function.iommu_group} is in use: {member.address} is {mate.said}",
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
    return may_be_unbinding(device) and _is_listed(state, device) and not _is_polled(state, device)


def may_be_unbinding(device: Device) -> bool:
    """It has no driver, and its group's node is still there: it may be open, which only a poll can tell.

    The driver's link goes first in an unbind or unplug; then the kernel waits until nobody has the function open, and
    the node goes when the last function of the group has been let go (drivers/base/dd.c, __device_release_driver;
    drivers/vfio/vfio_main.c, vfio_unregister_group_dev).
    """
    return device.function.driver is None and device.function.has_node


def is_unbinding(state: NodeState, device: Device) -> bool:
    """Its driver has been told to let it go and waits for whoever has it open, as the last poll saw.

    The node counts as well as `enable`, to which any process may have written where there was never a driver.
    """
    use = observed_use(state, device)
    return may_be_unbinding(device) and use is not None and device.function.address in use.open


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
        return Stand(Standing.FOREIGN, f"{group} is {use.evidence}, and kubelet has given it to no pod")
    unread = f"; kubelet's ledger cannot be read: {state.ledger.problem}" if state.ledger.problem else ""
    return Stand(Standing.UNDECIDED, f"{group} is {use.evidence}{unread}")
