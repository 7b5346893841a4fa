"""The grant of a container, and the devices that kubelet should choose.

Must not decide whether a device may be allocated at all: that is the gate in `calls.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache

from gpuactors import limits
from gpuactors.core.deviceplugin.choice import Group, Search, choose
from gpuactors.core.events.deviceplugin import PreferenceRequest
from gpuactors.core.values.effects import Grant
from gpuactors.core.values.inventory import Device
from gpuactors.core.values.model import DeviceId, ResourceName
from gpuactors.core.values.naming import env_name


def grant(resource: ResourceName, devices: Sequence[Device]) -> Grant:
    """The grant of a container with these devices.

    The variable holds exactly one PCI address per requested unit, sorted: KubeVirt gives the next one to each
    `gpus[]` entry, and its order is the guest's slot order. Nodes are those that exist: the container and the group
    node (legacy), the cdevs of all vfio functions in the group and /dev/iommu (iommufd). A missing one would fail the
    container's creation (kubevirt #18895).
    """
    keys = sorted(d.key for d in devices)
    nodes = {n for d in devices for n in d.nodes}
    return Grant(
        envs=((env_name(resource), ",".join(keys)),),
        nodes=tuple(sorted(nodes, key=_node_order)),
    )


# A host has a few paths for each device, and they come back with each call.
@lru_cache(maxsize=limits.CALL_DEVICES_MAX)
def _node_order(path: str) -> tuple[int, int, str]:
    """The key of a node's place: container, groups, cdevs, iommufd; within each by number."""
    number = int("".join(c for c in path if c.isdigit()) or 0)
    if path == "/dev/vfio/vfio":
        return (0, 0, path)
    if path.startswith("/dev/vfio/devices/"):
        return (2, number, path)
    return (3, 0, path) if path == "/dev/iommu" else (1, number, path)


# --- preferred allocation ---------------------------------------------------------------------------------


def prefer(
    request: PreferenceRequest,
    devices: Mapping[DeviceId, Device],
    busy: Collection[DeviceId] = (),
    search: Search | None = None,
    taken: Collection[DeviceId] = (),
) -> tuple[DeviceId, ...]:
    """The devices that kubelet should choose, sorted.

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
    """The available devices by group; a device that is unknown or in no group is a group of its own."""
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
