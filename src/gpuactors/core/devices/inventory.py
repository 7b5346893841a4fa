"""From functions to groups and devices: what is there, and which of it is ours.

Plain loops. A part is made anew as a whole when one of its inputs, which are its arguments, is another object; so it
cannot be stale. Which devices there are the kinds say (`kinds/table.py`).

Must not judge: owner and status of a device are decided in `assessment/`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from operator import is_
from typing import Any, Final

from msgspec import Struct, field
from msgspec.structs import replace

from gpuactors.core.kinds import table
from gpuactors.core.kinds.kind import HostFacts
from gpuactors.core.values.group import GroupKey
from gpuactors.core.values.inventory import Device
from gpuactors.core.values.model import (
    DeviceId,
    DeviceKey,
    PciAddress,
    PciFunction,
    Resolved,
    ResourceName,
    device_key,
    function_address,
)
from gpuactors.core.values.owner import Named
from gpuactors.core.values.remade import amended, changed_keys, replaced, same_if_equal
from gpuactors.core.values.selector import Selector

_EMPTY: Final[frozenset[Any]] = frozenset()


class Inventory(Struct, frozen=True, gc=False):
    """The inventory, by the functions and the operator's selectors."""

    functions: Mapping[PciAddress, PciFunction] = field(default_factory=dict)
    """See `Host.functions`."""

    present: Mapping[DeviceKey, Device] = field(default_factory=dict)
    """Every device that is there, sorted by key, chosen by a selector or not, with the resource of its model."""
    groups: Mapping[int, tuple[PciFunction, ...]] = field(default_factory=dict)
    """By the number of their IOMMU group; each sorted by address."""
    group_of: Mapping[DeviceKey, GroupKey] = field(default_factory=dict)
    """The group of each of these devices."""
    switches: frozenset[PciAddress] = _EMPTY
    """The NVSwitches that are on a driver of the host."""
    names: Mapping[DeviceKey, ResourceName] = field(default_factory=dict)
    """The selected devices with the resource of their model's name, sorted by key: an older plugin's ID, which is the
    group's number, means the first of the group's members."""
    models: Mapping[ResourceName, frozenset[str]] = field(default_factory=dict)
    """The models of the selected devices, by the resource of their name. A device that is listed by a former name,
    because a pod has it, does not count."""
    uuids: Mapping[str, DeviceKey] = field(default_factory=dict)
    """The GPUs by the UUID that NVIDIA's driver names them by, where it is known."""

    def group_number(self, device: DeviceKey) -> int | None:
        """The number of a device's IOMMU group; None: it is in none, or not there."""
        group = self.group_of.get(device)
        return group if isinstance(group, int) else None

    def group_numbers(self, devices: Iterable[DeviceKey]) -> frozenset[int]:
        """Those of all of these devices."""
        return frozenset(g for device in devices if isinstance(g := self.group_of.get(device), int))


NOTHING_KNOWN: Final = Inventory()


class Meanings(Struct, frozen=True, gc=False):
    """The devices that the names in kubelet's ledger and our grants mean."""

    resolved: Mapping[Named, Resolved] = field(default_factory=dict)
    """See `Kubelet.resolved`."""

    names: Mapping[DeviceKey, tuple[Named, ...]] = field(default_factory=dict)
    """The names of each device, in order."""
    aliases: Mapping[Named, DeviceKey] = field(default_factory=dict)
    """The names that are no PCI address."""
    inspected_always: frozenset[PciAddress] = _EMPTY
    """The functions of the devices of our resources that are allocated to pods: inspected whatever the selectors
    choose."""
    unsettled: frozenset[Named] = _EMPTY
    """The names whose device has no known model."""


NOTHING_MEANT: Final = Meanings()


class Devices(Struct, frozen=True, gc=False):
    """The devices of this node."""

    inventory: Inventory = NOTHING_KNOWN
    meanings: Meanings = NOTHING_MEANT
    resources: frozenset[ResourceName] = _EMPTY
    """The resources that are served here: of the selected functions, of the lists, and those that an earlier daemon
    served, as long as a pod has a device of them by one of our IDs."""

    kept: Mapping[DeviceKey, ResourceName] = field(default_factory=dict)
    """The devices that belong to another resource than that of their name, or have no name, because a pod has them."""
    devices: Mapping[DeviceKey, Device] = field(default_factory=dict)
    """Every device of this node, sorted by address: the selected functions, and the allocated ones. Whatever is
    selected or named now, an allocated device belongs to the resource that it was allocated as, until the pod ends."""
    unbinding: frozenset[DeviceKey] = _EMPTY
    """The devices that may be being unbound."""


NO_DEVICES: Final = Devices()


def inventory(
    before: Inventory, functions: Mapping[PciAddress, PciFunction], selectors: tuple[Selector, ...]
) -> Inventory:
    """The groups and devices of these functions, which are sorted by address. `before` is of the same selectors."""
    if before.functions is functions:
        return before
    groups = _groups(functions, before.groups)
    present = table.devices(HostFacts(functions, groups, selectors, before.present))
    names = {key: device.resource for key, device in present.items() if device.is_selected}
    models: dict[ResourceName, set[str]] = {}
    for key, resource in names.items():
        models.setdefault(resource, set()).add(present[key].model)
    switches = frozenset(
        [a for a, f in functions.items() if f.driver is not None and not f.vfio_bound and f.is_nvswitch]
    )
    group_of = {key: key if device.group is None else device.group for key, device in present.items()}
    uuids = {f.gpu_uuid: device_key(a) for a, f in functions.items() if f.gpu_uuid is not None}
    return Inventory(
        functions=functions,
        present=present,
        groups=groups,
        group_of=same_if_equal(before.group_of, group_of),
        switches=same_if_equal(before.switches, switches),
        names=same_if_equal(before.names, names),
        models={name: frozenset(models[name]) for name in sorted(models)},
        uuids=same_if_equal(before.uuids, uuids),
    )


def _groups(
    functions: Mapping[PciAddress, PciFunction], before: Mapping[int, tuple[PciFunction, ...]]
) -> Mapping[int, tuple[PciFunction, ...]]:
    found: dict[int, list[PciFunction]] = {}
    for function in functions.values():
        if function.iommu_group is not None:
            found.setdefault(function.iommu_group, []).append(function)
    return {group: same_if_equal(before.get(group), tuple(members)) for group, members in found.items()}


def meanings(before: Meanings, resolved: Mapping[Named, Resolved]) -> Meanings:
    """The devices that the names in kubelet's ledger and our grants mean."""
    if before.resolved is resolved:
        return before
    other = changed_keys(before.resolved, resolved)
    named: dict[DeviceKey, set[Named]] = {}
    for name in other:
        for meant in (before.resolved.get(name), resolved.get(name)):
            if meant is not None and meant.address not in named:
                named[meant.address] = {*before.names.get(meant.address, ())} - other
    for name in other & resolved.keys():
        named[resolved[name].address].add(name)
    names = {address: tuple(sorted(of_it)) or None for address, of_it in named.items()}
    aliases = {n: _alias(n, resolved[n]) if n in resolved else None for n in other}
    always = [
        function_address(key)
        for key, of_it in named.items()
        if any(map(_is_inspected_always, map(resolved.__getitem__, of_it)))
    ]
    unsettled = [n for n in other if n in resolved and resolved[n].ids is None]
    return Meanings(
        resolved=resolved,
        names=amended(before.names, names),
        aliases=amended(before.aliases, aliases),
        inspected_always=replaced(before.inspected_always, [*map(function_address, named)], always),
        unsettled=replaced(before.unsettled, other, unsettled),
    )


def _alias(name: Named, meant: Resolved) -> DeviceKey | None:
    return meant.address if name[1] != DeviceId(meant.address) else None


def _is_inspected_always(meant: Resolved) -> bool:
    return meant.ids is not None or meant.inspection_requested


def devices(
    before: Devices, known: Inventory, meant: Meanings, resources: frozenset[ResourceName]
) -> Devices:
    """The selected functions, and the allocated ones of `resources`, which are those served here."""
    if before.inventory is known and before.meanings is meant and before.resources is resources:
        return before
    if before.inventory is known and before.resources is resources:
        both = before.meanings.resolved, meant.resolved
        renamed = changed_keys(*both)
        addresses = {of[name].address for name in renamed for of in both if name in of}
        kept = amended(before.kept, {a: _kept_as(known, meant, resources, a) for a in addresses})
    else:
        kept = _kept(known, meant, resources)
    if before.inventory is known and before.kept == kept:
        return replace(before, meanings=meant, resources=resources)
    belongs = {**known.names, **kept}
    if kept.keys() - known.names.keys():
        belongs = dict(sorted(belongs.items()))
    found = {key: known.present[key] for key in belongs}
    for key, resource in kept.items():
        found[key] = same_if_equal(before.devices.get(key), replace(found[key], resource=resource))
    if found.keys() == before.devices.keys() and all(map(is_, found.values(), before.devices.values())):
        return replace(before, inventory=known, meanings=meant, resources=resources, kept=kept)
    unbinding = frozenset([key for key, device in found.items() if device.may_be_unbinding])
    return Devices(known, meant, resources, kept, found, unbinding)


def _kept(known: Inventory, meant: Meanings, resources: Set[ResourceName]) -> dict[DeviceKey, ResourceName]:
    """Derive `Devices.kept`."""
    names = known.names
    others = {m.address for n, m in meant.resolved.items() if names.get(m.address) != n[0]}
    kept = {address: _kept_as(known, meant, resources, address) for address in others}
    return {address: resource for address, resource in kept.items() if resource is not None}


def _kept_as(
    known: Inventory, meant: Meanings, resources: Set[ResourceName], address: DeviceKey
) -> ResourceName | None:
    if (device := known.present.get(address)) is None:
        return None
    given = {
        name[0]
        for name in meant.names.get(address, ())
        if name[0] in resources and device.model in (meant.resolved[name].ids, "")
    }
    return min(given) if given and known.names.get(address) not in given else None


def polled(
    before: Mapping[int, tuple[PciAddress, ...]],
    groups: Mapping[int, tuple[PciFunction, ...]],
    of: Mapping[DeviceKey, Device],
    leaving: Set[PciAddress],
) -> Mapping[int, tuple[PciAddress, ...]]:
    """Derive `Index.polled`."""
    wanted = {d.group for d in of.values() if d.group is not None and (d.has_backing or d.may_be_unbinding)}
    found = {
        g: tuple([f.address for f in groups[g] if f.vfio_bound or f.address in leaving])
        for g in sorted(wanted)
    }
    return same_if_equal(before, {g: functions for g, functions in found.items() if functions})


def by_id(
    of: Mapping[DeviceKey, Device],
    aliases: Mapping[Named, DeviceKey],
    listed_aliases: Mapping[Named, DeviceKey],
) -> Mapping[ResourceName, Mapping[DeviceId, Device]]:
    """An ID means the device that was allocated by it; if none was, the device that is listed by it."""
    found: dict[ResourceName, dict[DeviceId, Device]] = {}
    for address, device in of.items():
        found.setdefault(device.resource, {})[DeviceId(address)] = device
    also: list[tuple[ResourceName, DeviceId, Device]] = []
    for (resource, device_id), address in (*listed_aliases.items(), *aliases.items()):
        if (known := found.get(resource, {}).get(DeviceId(address))) is not None:
            also.append((resource, device_id, known))
    for resource, device_id, known in also:
        found[resource][device_id] = known
    return found
