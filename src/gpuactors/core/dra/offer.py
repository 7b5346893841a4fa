"""The devices that the node offers to claims, and why one must not be given away now.

A GPU on its host's driver is offered: a claim binds it, and its companions, to vfio. One that a pod has by the device
plugin, or a process holds, is not to be given away, nor is one that no virtual machine could open. Derived when
something of a device changes, and carried in the state with what it is derived from (as an index is, `index.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from gpuactors.core.assessment.assess import Assessment
from gpuactors.core.assessment.assessments import assessments_of
from gpuactors.core.assessment.blockers import without_group
from gpuactors.core.assessment.cause import Cause
from gpuactors.core.assessment.status import Blocker
from gpuactors.core.dra.claim import DeviceHealth, DraHealth
from gpuactors.core.dra.exclusion import of_the_hosts_fabric
from gpuactors.core.dra.offered import OfferedGpu, device_name
from gpuactors.core.dra.slices import Blocked, BlockKind, Offer
from gpuactors.core.index import changed_keys, index_of
from gpuactors.core.inventory import Device
from gpuactors.core.model import ClaimedDevice, PciAddress, ResourceName

if TYPE_CHECKING:
    from gpuactors.core.state import NodeState


@dataclass(frozen=True, slots=True)
class Offered:
    """What is offered, preceded by the values that it is derived from."""

    devices: Mapping[PciAddress, Device] = field(default_factory=dict)
    assessments: Mapping[PciAddress, Assessment] = field(default_factory=dict)
    names: Mapping[PciAddress, ResourceName] = field(default_factory=dict)
    reserved: Mapping[PciAddress, ClaimedDevice] = field(default_factory=dict)
    switches: frozenset[PciAddress] = frozenset()

    offer: Offer[OfferedGpu] | None = None
    """None while DRA is off, or the node has not been read."""
    health: tuple[DeviceHealth, ...] = ()
    """Of every device that is offered or that a claim has, sorted by address."""


NOTHING_OFFERED: Final = Offered()

_HELD: Final = frozenset(
    {
        Cause.ALLOCATED,
        Cause.JUST_ALLOCATED,
        Cause.CLAIMED_ELSEWHERE,
        Cause.GROUP_IN_USE,
        Cause.ORPHANED,
        Cause.HELD_BY_OTHER,
        Cause.HOLDER_UNKNOWN,
    }
)
"""A pod, a claim or a process has it."""

_GONE: Final = Blocked(BlockKind.UNHEALTHY, str(Cause.GONE))

_BOUND_BY_CLAIMS: Final = frozenset({Cause.NOT_BOUND, Cause.GROUP_NOT_VIABLE})
"""What a claim mends itself: it binds the device and its companions to vfio."""


def offered(state: NodeState) -> NodeState:
    """`state` with what it offers, for the snapshot."""
    settings = state.claims.settings
    if (
        settings is None
        or not state.claims.loaded
        or not state.host.scanned
        or not state.kubelet.ledger.tried
    ):
        return state
    carried, index, assessments = state.offered, index_of(state), assessments_of(state).of
    reserved = state.claims.reserved
    if (
        carried.devices is index.devices
        and carried.assessments is assessments
        and carried.names is index.names
        and carried.reserved is reserved
        and carried.switches is index.switches
        and carried.offer is not None
    ):
        return state
    touched = changed_keys(carried.devices, index.devices) | changed_keys(carried.assessments, assessments)
    touched |= changed_keys(carried.names, index.names) | changed_keys(carried.reserved, reserved)
    if carried.switches != index.switches:
        touched |= index.devices.keys()
    known = {d.address: d for d in carried.offer.devices} if carried.offer is not None else {}
    health = {h.device: h for h in carried.health}
    for address in touched:
        was = known.pop(address, None)
        health.pop(device_name(address), None)
        if address in index.names and address in index.devices:
            known[address] = _offered(state, index.devices[address], assessments[address])
        elif address in reserved and was is not None:
            # A pool never has less than what is held: it stays until its claim ends.
            known[address] = replace(was, claimed=True, blocked=_GONE)
        if address in known or address in reserved:
            of_device = _health(state, settings.pool, address)
            health[of_device.device] = of_device
    offer = Offer(settings.driver, settings.pool, tuple(known[a] for a in sorted(known)))
    if carried.offer is not None and offer == carried.offer:
        offer = carried.offer
    after = Offered(
        index.devices,
        assessments,
        index.names,
        reserved,
        index.switches,
        offer,
        tuple(health[n] for n in sorted(health)),
    )
    return replace(state, offered=after)


def _offered(state: NodeState, device: Device, assessment: Assessment) -> OfferedGpu:
    function, claimed = device.function, device.function.address in state.claims.reserved
    return OfferedGpu(
        address=function.address,
        vendor=function.vendor,
        device=function.device,
        model=function.model,
        numa_node=function.numa_node,
        pcie_root=function.pcie_root,
        iommu_group=function.iommu_group,
        iommufd=function.iommufd,
        is_nvswitch=function.is_nvswitch,
        blocked=None if claimed else _blocked(state, device, assessment),
        claimed=claimed,
    )


def _blocked(state: NodeState, device: Device, assessment: Assessment) -> Blocked | None:
    if assessment.ownership.cause in _HELD:
        return Blocked(BlockKind.HELD, str(assessment.ownership.cause))
    fault = _fault(state, device, assessment)
    return Blocked(BlockKind.UNHEALTHY, str(fault.cause)) if fault is not None else None


def _fault(state: NodeState, device: Device, assessment: Assessment) -> Blocker | None:
    """Why no claim could use it, whoever has it now; None if one could."""
    blocker = without_group(device.function) or assessment.blocker
    if blocker is not None and blocker.cause not in _BOUND_BY_CLAIMS:
        return blocker
    fabric = of_the_hosts_fabric(state, device.function)
    return Blocker(fabric.cause, fabric.message) if fabric is not None else None


def _health(state: NodeState, pool: str, address: PciAddress) -> DeviceHealth:
    """The health that kubelet shows in the status of the pod that has the device. That somebody has it is no fault."""
    name, index = device_name(address), index_of(state)
    if address not in index.functions:
        return DeviceHealth(pool, name, DraHealth.UNHEALTHY, "the PCI function is gone from this node")
    device, assessment = index.devices.get(address), assessments_of(state).of.get(address)
    fault = _fault(state, device, assessment) if device is not None and assessment is not None else None
    if fault is not None:
        return DeviceHealth(pool, name, DraHealth.UNHEALTHY, fault.message)
    return DeviceHealth(pool, name, DraHealth.HEALTHY, "")
