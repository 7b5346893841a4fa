"""The devices that kubelet should choose for a container.

Must not decide whether a device may be allocated at all: that is the gate in `calls.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from gpuactors.core.deviceplugin.choice import Group, Search, choose
from gpuactors.core.deviceplugin.set_choice import Ids, choose_set, whole_sets
from gpuactors.core.events.deviceplugin import PreferenceRequest
from gpuactors.core.kinds.sets import DeviceSet
from gpuactors.core.values.inventory import Device
from gpuactors.core.values.model import DeviceId, DeviceKey


def prefer(
    request: PreferenceRequest,
    devices: Mapping[DeviceId, Device],
    busy: Collection[DeviceId] = (),
    search: Search | None = None,
    taken: Collection[DeviceId] = (),
    sets: Sequence[DeviceSet] = (),
    sets_required: bool = False,
) -> tuple[DeviceId, ...]:
    """Return the devices that kubelet should choose, sorted.

    In this order: those that must be included; those neither `busy` nor `taken`; those not `taken`; a partition of
    exactly this size (`set_choice.py`); all or none of the NVSwitches and of the GPUs of an EGM; whole IOMMU groups;
    the fewest NUMA nodes; the fewest PCIe roots; the lowest addresses. With `sets_required` a partition comes before
    all but those that must be included, as Allocate refuses what is none, and waits for one that is busy. Never fails,
    because an error fails the pod's admission: if fewer devices are available than requested, the answer has all of
    them. The containers of one call share one `search`, which bounds their work.
    """
    must = tuple(sorted(set(request.must_include)))
    offered = set(request.available)
    pools = [sorted(offered.difference(*last) | set(must)) for last in ((busy, taken), (taken,), ((),))]
    pools = [pool for pool in pools if len(pool) >= request.size] or pools[-1:]
    size = min(request.size, len(pools[0]))
    if size <= len(must):
        return must[: max(request.size, 0)]
    search = search or Search()
    for pool in pools if sets_required else pools[:1]:
        if sets and (whole := _whole_set(request.size, pool, must, devices, sets, search)) is not None:
            return tuple(sorted(whole))
    groups = _groups(pools[0], devices)
    units = _joined(groups, devices, [s for s in sets if not s.is_partition])
    chosen = set(must)
    for some in (groups, units):
        _complete(chosen, some, size)
    untouched = [unit for unit in units if chosen.isdisjoint(unit.ids)]
    anchors = {(g.numa_node, g.pcie_root) for g in units if not chosen.isdisjoint(g.ids)}
    chosen.update(choose(untouched, size - len(chosen), anchors, search))
    return tuple(sorted(chosen))


def _whole_set(
    size: int,
    pool: Sequence[DeviceId],
    must: Sequence[DeviceId],
    devices: Mapping[DeviceId, Device],
    sets: Sequence[DeviceSet],
    search: Search,
) -> Ids | None:
    """Return the best partition of this size among the devices of the pool; None if there is none."""
    # an older daemon's ID and the address may both be of one device: the one that must be included is it
    ids = {devices[i].key: i for i in (*reversed(pool), *must) if i in devices}
    return choose_set(whole_sets(sets, ids), size, must, _groups(pool, devices), search)


def _complete(chosen: set[DeviceId], groups: Iterable[Group], size: int) -> None:
    """Add to `chosen`, up to this size, the rest of each group that it must open anyway."""
    for group in groups:
        if not chosen.isdisjoint(group.ids):
            chosen.update([i for i in group.ids if i not in chosen][: size - len(chosen)])


def _joined(
    groups: Sequence[Group], devices: Mapping[DeviceId, Device], sets: Iterable[DeviceSet]
) -> list[Group]:
    """Return the groups, those that devices of one set are in as one, sorted by key. The devices of a group stay side
    by side, so that at most one group is split where a part must be chosen."""
    joined = [[group] for group in groups]
    for found in sets:
        keys = frozenset[DeviceKey](found.devices)
        parts = [p for p in joined if any(i in devices and devices[i].key in keys for g in p for i in g.ids)]
        if len(parts) > 1:
            joined = [p for p in joined if p not in parts]
            joined.append(sorted((g for part in parts for g in part), key=lambda g: g.key))
    units = (Group(tuple(i for g in p for i in g.ids), p[0].numa_node, p[0].pcie_root) for p in joined)
    return sorted(units, key=lambda g: g.key)


def _groups(ids: Iterable[DeviceId], devices: Mapping[DeviceId, Device]) -> list[Group]:
    """Return the available devices by group. A device that is unknown or in no group is a group of its own."""
    members: dict[tuple[int, str], list[DeviceId]] = {}
    for device_id in ids:
        device = devices.get(device_id)
        group = device.group if device is not None else None
        members.setdefault((-1, device_id) if group is None else (group, ""), []).append(device_id)
    return sorted((_group(tuple(sorted(m)), devices) for m in members.values()), key=lambda g: g.key)


def _group(ids: tuple[DeviceId, ...], devices: Mapping[DeviceId, Device]) -> Group:
    first = devices.get(ids[0])
    numa = first.numa_node if first is not None else None
    root = first.pcie_root if first is not None else None
    # kubelet uses a device without topology last, so do we: it counts as one more NUMA node, after all others
    return Group(ids, numa if numa is not None else 1 << 16, root or "")
