"""Kubelet's counts of each resource, as the daemon knew them: capacity, allocatable, allocated and free."""

from __future__ import annotations

from msgspec import Struct

from gpuactors.core.state import NodeState
from gpuactors.core.values.model import Health, ResourceName


class Counts(Struct, frozen=True):
    """The counts of one resource, as kubelet and the scheduler compute them."""

    capacity: int
    """The number of listed devices."""
    allocatable: int
    """The number of Healthy devices."""
    allocated: int
    """The number of devices that are allocated to pods."""

    @property
    def free(self) -> int:
        """The number of devices that the scheduler takes for free. Negative if a device is counted twice."""
        return self.allocatable - self.allocated

    def __str__(self) -> str:
        return f"capacity {self.capacity}, allocatable {self.allocatable}, allocated {self.allocated}, free {self.free}"


def counts_of(state: NodeState) -> dict[ResourceName, Counts]:
    """Return the counts of every resource that is advertised. Allocated is what pods have by kubelet's ledger, as last
    read, and what was just allocated."""
    counts: dict[ResourceName, Counts] = {}
    for resource, device_list in sorted(state.published.device_lists.items()):
        in_ledger = {device for name, device in state.kubelet.ledger.entries if name == resource}
        pending = sum(
            1
            for name, device in state.kubelet.pending_allocations
            if name == resource and device not in in_ledger
        )
        healthy = sum(1 for a in device_list if a.health is Health.HEALTHY)
        counts[resource] = Counts(len(device_list), healthy, len(in_ledger) + pending)
    return counts
