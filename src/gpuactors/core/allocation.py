"""What a container gets, and which devices kubelet had better choose.

Must not decide whether a device may be had at all: that is the gate in `calls.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Final

from gpuactors.core.effects import Grant
from gpuactors.core.events import PreferenceRequest
from gpuactors.core.inventory import Device
from gpuactors.core.model import DeviceId, ResourceName
from gpuactors.core.naming import env_name

SUBSETS_MAX: Final = 1000
"""Sets of NUMA nodes or PCIe roots that are tried before the search settles for the fullest ones; a node with ten
roots has 1,023 sets of them."""


def grant(resource: ResourceName, devices: Sequence[Device]) -> Grant:
    """What a container with these devices gets.

    The variable holds exactly one PCI address per requested unit, sorted: KubeVirt gives the next one to each
    `gpus[]` entry, and its order is the guest's slot order. Nodes are those that exist: the container and the group
    node (legacy), the cdevs of all vfio functions in the group and /dev/iommu (iommufd). A missing one would fail the
    container's creation (kubevirt #18895).
    """
    addresses = sorted(d.function.address for d in devices)
    nodes = {n for d in devices for member in d.group if member.vfio_bound for n in member.nodes}
    return Grant(
        envs=((env_name(resource), ",".join(addresses)),),
        nodes=tuple(sorted(nodes, key=_node_order)),
    )


def _node_order(path: str) -> tuple[int, int, str]:
    """Container, groups, cdevs, iommufd; within each by number, as a reader would list them."""
    number = int("".join(c for c in path if c.isdigit()) or 0)
    if path == "/dev/vfio/vfio":
        return (0, 0, path)
    if path.startswith("/dev/vfio/devices/"):
        return (2, number, path)
    return (3, 0, path) if path == "/dev/iommu" else (1, number, path)


# --- preferred allocation ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Group:
    """The available devices of one IOMMU group: best given away together."""

    ids: tuple[DeviceId, ...]
    numa_node: int
    pcie_root: str

    @property
    def key(self) -> tuple[int, str, tuple[DeviceId, ...]]:
        return (self.numa_node, self.pcie_root, self.ids)


def prefer(
    request: PreferenceRequest, devices: Mapping[DeviceId, Device], busy: Collection[DeviceId] = ()
) -> tuple[DeviceId, ...]:
    """The devices that kubelet had better choose, sorted.

    In this order: what must be included; what is not `busy`; whole IOMMU groups; the fewest NUMA nodes; the fewest
    PCIe roots; the lowest addresses. Never fails, because an error fails the pod's admission: with fewer devices than
    asked for, all of them are answered.
    """
    must = tuple(sorted(set(request.must_include)))
    free = (set(request.available) - set(busy)) | set(must)
    pool = sorted(free if len(free) >= request.size else set(request.available) | set(must))
    need = max(0, min(request.size, len(pool)) - len(must))
    if need == 0:
        return must[: max(request.size, 0)]
    chosen = set(must)
    groups = _groups((i for i in pool), devices)
    halves = [g for g in groups if chosen.intersection(g.ids)]
    for group in halves:  # a group that must be opened anyway is completed first
        rest = [i for i in group.ids if i not in chosen][: need - (len(chosen) - len(must))]
        chosen.update(rest)
    need = min(request.size, len(pool)) - len(chosen)
    whole = [g for g in groups if g not in halves]
    anchors = {(g.numa_node, g.pcie_root) for g in halves}
    chosen.update(_choose(whole, need, anchors))
    return tuple(sorted(chosen))


def _groups(ids: Iterable[DeviceId], devices: Mapping[DeviceId, Device]) -> list[_Group]:
    """The available devices by group; a device that is unknown or in no group stands for itself."""
    members: dict[tuple[int, str], list[DeviceId]] = {}
    for device_id in ids:
        device = devices.get(device_id)
        group = device.function.iommu_group if device is not None else None
        members.setdefault((-1, device_id) if group is None else (group, ""), []).append(device_id)
    return sorted((_group(tuple(sorted(m)), devices) for m in members.values()), key=lambda g: g.key)


def _group(ids: tuple[DeviceId, ...], devices: Mapping[DeviceId, Device]) -> _Group:
    first = devices.get(ids[0])
    numa = first.function.numa_node if first is not None else None
    root = first.function.pcie_root if first is not None else None
    # kubelet uses a device without topology last, so do we: it counts as one more NUMA node, after all others
    return _Group(ids, numa if numa is not None else 1 << 16, root or "")


def _choose(groups: list[_Group], need: int, anchors: set[tuple[int, str]]) -> list[DeviceId]:
    """`need` devices out of `groups`, staying with the NUMA nodes and roots in `anchors` where possible."""
    if need <= 0:
        return []
    by_numa = _narrow(
        groups, need, lambda g: str(g.numa_node).zfill(6), {str(n).zfill(6) for n, _ in anchors}
    )
    by_root = _narrow(by_numa, need, lambda g: g.pcie_root, {r for _, r in anchors})
    exact = _exact(by_root, need)
    if exact is not None:
        return [i for g in exact for i in g.ids]
    return _greedy(by_root, need)


def _narrow(
    groups: list[_Group], need: int, place: Callable[[_Group], str], anchors: set[str]
) -> list[_Group]:
    """The groups of the fewest places (NUMA nodes or roots) that hold `need` devices, in whole groups if any set of
    places does; places in `anchors` cost nothing."""
    whole_possible = _exact(groups, need) is not None
    places = sorted({place(g) for g in groups} - anchors)
    tried = 0
    for size in range(len(places) + 1):
        for extra in combinations(places, size):
            tried += 1
            if tried > SUBSETS_MAX:
                return groups
            inside = [g for g in groups if place(g) in anchors or place(g) in extra]
            enough = sum(len(g.ids) for g in inside) >= need
            if enough and (not whole_possible or _exact(inside, need) is not None):
                return inside
    return groups


def _exact(groups: list[_Group], need: int) -> list[_Group] | None:
    """Whole groups with `need` devices together, the earliest ones that do; None if no choice of groups does."""
    sums: list[set[int]] = [
        {0}
    ]  # what the groups from each one to the last can add up to, the last one's first
    for group in reversed(groups):
        sums.append(sums[-1] | {s + len(group.ids) for s in sums[-1] if s + len(group.ids) <= need})
    sums.reverse()
    if need not in sums[0]:
        return None
    taken: list[_Group] = []
    for index, group in enumerate(groups):
        if need >= len(group.ids) and need - len(group.ids) in sums[index + 1]:
            taken.append(group)
            need -= len(group.ids)
        if need == 0:
            break
    return taken


def _greedy(groups: list[_Group], need: int) -> list[DeviceId]:
    """As many whole groups as fit, the last one broken: the smallest that is large enough."""
    taken: list[DeviceId] = []
    left = sorted(groups, key=lambda g: (-len(g.ids), g.key))
    while need > 0 and left:
        fitting = next((g for g in left if len(g.ids) <= need), None)
        group = fitting or min(left, key=lambda g: (len(g.ids), g.key))
        left.remove(group)
        taken.extend(group.ids[:need])
        need -= min(len(group.ids), need)
    return taken
