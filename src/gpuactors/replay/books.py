"""Kubelet's counts of each resource, as the daemon knew them: capacity, allocatable, allocated and free."""

from __future__ import annotations

from dataclasses import dataclass

from gpuactors.core.model import Health, ResourceName
from gpuactors.core.state import NodeState


@dataclass(frozen=True, slots=True)
class Books:
    """One resource, as kubelet computes it."""

    capacity: int
    """All devices listed."""
    allocatable: int
    """The Healthy ones."""
    allocated: int
    """Allocated to pods: by kubelet's ledger as last read, or just allocated."""

    @property
    def free(self) -> int:
        """The scheduler's free count."""
        return self.allocatable - self.allocated

    def __str__(self) -> str:
        return f"capacity {self.capacity}, allocatable {self.allocatable}, allocated {self.allocated}, free {self.free}"


def books_of(state: NodeState) -> dict[ResourceName, Books]:
    """The counts of every resource that is advertised."""
    books: dict[ResourceName, Books] = {}
    for resource, device_list in sorted(state.device_lists.items()):
        listed = {device for of, device in state.ledger.entries if of == resource}
        granted = sum(
            1 for of, device in state.pending_allocations if of == resource and device not in listed
        )
        healthy = sum(1 for a in device_list if a.health is Health.HEALTHY)
        books[resource] = Books(len(device_list), healthy, len(listed) + granted)
    return books
