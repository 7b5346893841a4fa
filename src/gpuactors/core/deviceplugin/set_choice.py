"""The choice of a set for a container: a partition of exactly the requested size that breaks up least.

Two sets are compared in this order: the IOMMU groups that they split, as the rest of a split group is lost for every
other pod; the whole sets that they break up; whether the fabric manager has activated it; the NUMA nodes and PCIe roots
that they span; the lowest addresses. A set is whole while all its devices are available, and is broken up by a choice
that has some of them, but not all. Must not know kubelet's requests: that is `allocation.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from gpuactors.core.deviceplugin.choice import Group, Search
from gpuactors.core.kinds.sets import DeviceSet
from gpuactors.core.values.model import DeviceId, DeviceKey

Ids = frozenset[DeviceId]
"""Devices that are allocated together."""


def whole_sets(sets: Sequence[DeviceSet], ids: Mapping[DeviceKey, DeviceId]) -> dict[Ids, DeviceSet]:
    """Return the sets whose devices are all in `ids`, by their ids. Of sets with the same devices return one: a
    partition before any other, an active one before the others."""
    whole: dict[Ids, DeviceSet] = {}
    for found in sorted(sets, key=lambda s: (s.is_partition, s.is_active)):
        if all(key in ids for key in found.devices):
            whole[frozenset(ids[key] for key in found.devices)] = found
    return whole


def choose_set(
    whole: Mapping[Ids, DeviceSet],
    size: int,
    must: Collection[DeviceId],
    groups: Sequence[Group],
    search: Search,
) -> Ids | None:
    """Return the best partition of this size with all of `must`; None if there is none. Where the search has no steps
    left, take the best so far: an active one first, then the lowest addresses."""
    fitting = [
        ids
        for ids, found in whole.items()
        if found.is_partition and len(ids) == size and ids.issuperset(must)
    ]
    fitting.sort(key=lambda ids: (not whole[ids].is_active, sorted(ids)))
    best: tuple[tuple[int, ...], Ids] | None = None
    for ids in fitting:
        if best is not None and not search.has(len(whole) + len(groups)):
            break
        cost = _cost(ids, whole, groups)
        if best is None or cost < best[0]:
            best = cost, ids
    return best[1] if best is not None else None


def _cost(ids: Ids, whole: Mapping[Ids, DeviceSet], groups: Sequence[Group]) -> tuple[int, ...]:
    """Return what a choice of these devices costs: of two choices, the lower is better."""
    touched = [group for group in groups if not ids.isdisjoint(group.ids)]
    return (
        sum(not ids.issuperset(group.ids) for group in touched),
        sum(not (ids.isdisjoint(other) or ids.issuperset(other)) for other in whole),
        int(not whole[ids].is_active),
        len({group.numa_node for group in touched}),
        len({group.pcie_root for group in touched}),
    )
