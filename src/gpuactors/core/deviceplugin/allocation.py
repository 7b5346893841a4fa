"""The devices that kubelet should choose for a container.

Must not decide whether a device may be allocated at all: that is the gate in `calls.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from gpuactors.core.deviceplugin.choice import Group, Search, choose
from gpuactors.core.events.deviceplugin import PreferenceRequest
from gpuactors.core.values.inventory import Device
from gpuactors.core.values.model import DeviceId


def prefer(
    request: PreferenceRequest,
    devices: Mapping[DeviceId, Device],
    busy: Collection[DeviceId] = (),
    search: Search | None = None,
    taken: Collection[DeviceId] = (),
) -> tuple[DeviceId, ...]:
    """Return the devices that kubelet should choose, sorted.

    In this order: those that must be included; those neither `busy` nor `taken`; those not `taken`; whole IOMMU groups;
    the fewest NUMA nodes; the fewest PCIe roots; the lowest addresses. Never fails, because an error fails the pod's
    admission: if fewer devices are available than requested, the answer has all of them. The containers of one call
    share one `search`, which bounds their work.
    """
    must = tuple(sorted(set(request.must_include)))
    offered = set(request.available)
    pools = (sorted(offered.difference(*last) | set(must)) for last in ((busy, taken), (taken,), ((),)))
    pool = next((p for p in pools if len(p) >= request.size), sorted(offered | set(must)))
    need = max(0, min(request.size, len(pool)) - len(must))
    if need == 0:
        return must[: max(request.size, 0)]
    chosen = set(must)
    groups = _groups((i for i in pool), devices)
    opened = {g: not chosen.isdisjoint(g.ids) for g in groups}
    halves = [g for g in groups if opened[g]]
    for group in halves:  # a group that must be opened anyway is completed first
        rest = [i for i in group.ids if i not in chosen][: need - (len(chosen) - len(must))]
        chosen.update(rest)
    need = min(request.size, len(pool)) - len(chosen)
    whole = [g for g in groups if not opened[g]]
    anchors = {(g.numa_node, g.pcie_root) for g in halves}
    chosen.update(choose(whole, need, anchors, search or Search()))
    return tuple(sorted(chosen))


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
