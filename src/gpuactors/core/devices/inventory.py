"""From functions to groups and devices: those that are there, and those that are offered here.

Each part is derived as a whole from its arguments, again when one of them differs; so it cannot be stale. The kinds say
which devices there are (`kinds/table.py`).

Must not judge: owner and status of a device are decided in `assessment/`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from msgspec import Struct
from msgspec.structs import replace

from gpuactors.core.devices.mixed import without_mixed
from gpuactors.core.kinds import table
from gpuactors.core.kinds.kind import HostFacts
from gpuactors.core.values.group import GroupKey
from gpuactors.core.values.inventory import Device
from gpuactors.core.values.mediated import MediatedDevices
from gpuactors.core.values.memo import memoized, memoized_each
from gpuactors.core.values.model import (
    DeviceId,
    DeviceKey,
    Functions,
    PciAddress,
    PciFunction,
    Resolved,
    ResourceName,
    by_group,
    device_key,
    function_address,
)
from gpuactors.core.values.owner import Named
from gpuactors.core.values.selector import Selector
from gpuactors.core.values.vgpu import CardTypes, OwnVgpuType


class Inventory(Struct, frozen=True, gc=False):
    """The groups and devices of the node, by its functions and the operator's selectors."""

    functions: Functions
    """The same as `Host.functions`."""
    present: Mapping[DeviceKey, Device]
    """Every device that is there, sorted by key, chosen by a selector or not, with the resource of its model."""
    parts: Mapping[DeviceKey, tuple[DeviceKey, ...]]
    """The devices in `present` that have this key among their ancestors, sorted; also of a device that is not there."""
    groups: Mapping[int, tuple[PciFunction, ...]]
    """The functions of each IOMMU group, sorted by address."""
    group_of: Mapping[DeviceKey, GroupKey]
    """The group of each device in `present`."""
    switches: frozenset[PciAddress]
    """The NVSwitches that are on a driver of the host."""
    names: Mapping[DeviceKey, ResourceName]
    """The resource of each selected device by its model's name, sorted by key: an older plugin's ID, the number of a
    group, means the first of the group's members."""
    models: Mapping[ResourceName, frozenset[str]]
    """The models of the selected devices, by the resource of their name; not of a device that is listed by a former
    name, as a pod has it."""
    uuids: Mapping[str, DeviceKey]
    """The GPUs by the UUID that NVIDIA's driver gives them, if it is known."""


class Meanings(Struct, frozen=True, gc=False):
    """The devices that the names in kubelet's ledger and in grants mean."""

    names: Mapping[DeviceKey, tuple[Named, ...]]
    """The names of each device, in order."""
    aliases: Mapping[Named, DeviceKey]
    """The device of each name that is no PCI address."""
    inspected_always: frozenset[PciAddress]
    """The functions of the devices that pods have by a resource of gpuactors: inspected whatever the selectors
    choose."""


@memoized
def inventory_of(
    functions: Functions,
    mediated: MediatedDevices,
    selectors: tuple[Selector, ...],
    vgpu_types: Mapping[PciAddress, CardTypes] = MappingProxyType({}),
    own_vgpu_types: tuple[OwnVgpuType, ...] = (),
) -> Inventory:
    """Derive the groups and devices of these functions and mediated devices, which are sorted by key. The names of vGPU
    types are as in `HostFacts`."""
    groups = by_group(functions)
    present, parts = _with_relatives(
        table.devices(HostFacts(functions, groups, selectors, mediated, vgpu_types, own_vgpu_types))
    )
    facts = _facts_of(functions)
    present = without_mixed(present, selectors)
    selected = {key: device for key, device in present.items() if device.is_selected}
    models: dict[ResourceName, set[str]] = {}
    for device in selected.values():
        if device.unnamed:
            continue
        models.setdefault(device.resource, set()).add(device.model)
    return Inventory(
        functions=functions,
        present=present,
        parts=parts,
        groups=groups,
        group_of={key: key if device.group is None else device.group for key, device in present.items()},
        switches=facts.switches,
        names={key: device.resource for key, device in selected.items()},
        models={name: frozenset(models[name]) for name in sorted(models)},
        uuids=facts.uuids,
    )


class _Facts(Struct, frozen=True, gc=False):
    """The facts of single functions, in one pass: a node may have thousands of functions."""

    switches: frozenset[PciAddress]
    uuids: Mapping[str, DeviceKey]
    """As in `Inventory`."""


def _facts_of(functions: Functions) -> _Facts:
    switches, uuids = set[PciAddress](), dict[str, DeviceKey]()
    for address, function in functions.items():
        if function.driver is not None and not function.vfio_bound and function.is_nvswitch:
            switches.add(address)
        if function.gpu_uuid is not None:
            uuids[function.gpu_uuid] = device_key(address)
    return _Facts(frozenset(switches), uuids)


_Relatives = tuple[Device, tuple[DeviceKey, ...], tuple[DeviceKey, ...]]
"""A device as its kind returns it, its ancestors and its parts."""


def _with_relatives(
    present: Mapping[DeviceKey, Device],
) -> tuple[Mapping[DeviceKey, Device], Mapping[DeviceKey, tuple[DeviceKey, ...]]]:
    """Return the devices with their ancestors and parts, and `Inventory.parts`."""
    ancestors: dict[DeviceKey, tuple[DeviceKey, ...]] = {}
    parts: dict[DeviceKey, list[DeviceKey]] = {}
    for key, device in present.items():
        if device.parent is None:
            continue
        ancestors[key] = _ancestors(device, present)
        for ancestor in ancestors[key]:
            parts.setdefault(ancestor, []).append(key)
    if not ancestors:
        return present, {}
    parts_of = {key: tuple(of_device) for key, of_device in parts.items()}
    related = {key: present[key] for key in present if key in ancestors or key in parts_of}
    inputs = {key: (device, ancestors.get(key, ()), parts_of.get(key, ())) for key, device in related.items()}
    return {**present, **_related(inputs)}, parts_of


def _ancestors(device: Device, present: Mapping[DeviceKey, Device]) -> tuple[DeviceKey, ...]:
    ancestors: list[DeviceKey] = []
    parent = device.parent
    while parent is not None and parent not in (device.key, *ancestors):
        ancestors.append(parent)
        above = present.get(parent)
        parent = None if above is None else above.parent
    return tuple(ancestors)


@memoized_each
def _related(inputs: _Relatives) -> Device:
    device, ancestors, parts = inputs
    return replace(device, ancestors=ancestors, parts=parts)


@memoized
def meanings_of(resolved: Mapping[Named, Resolved]) -> Meanings:
    """Derive the meanings of the names in kubelet's ledger and in grants."""
    names: dict[DeviceKey, list[Named]] = {}
    for name in sorted(resolved):
        names.setdefault(resolved[name].key, []).append(name)
    return Meanings(
        names={address: tuple(of_device) for address, of_device in names.items()},
        aliases={
            n: resolved_as.key for n, resolved_as in resolved.items() if n[1] != DeviceId(resolved_as.key)
        },
        inspected_always=frozenset(
            [
                function_address(resolved_as.key)
                for resolved_as in resolved.values()
                if resolved_as.ids is not None or resolved_as.inspection_requested
            ]
        ),
    )


def may_be_of(device: Device, model: str | None) -> bool:
    """Return whether it may be the device of this model that was allocated. One whose ids cannot be read may. A
    mediated device whose type the kernel has not linked yet may not: it was made anew, and perhaps with another type.
    """
    return device.model == model or (device.model == "" and bool(device.fault or device.unnamed))


@memoized
def devices(
    inventory: Inventory,
    meanings: Meanings,
    resolved: Mapping[Named, Resolved],
    resources: frozenset[ResourceName],
) -> Mapping[DeviceKey, Device]:
    """Return the devices of this node, sorted by key: the selected ones, and the allocated ones of `resources`, those
    served here. Until its pod ends, an allocated device belongs to the resource that it was allocated as, whatever is
    selected or named now."""
    of_node = {key: inventory.present[key] for key in inventory.names}
    renamed = {m.key for n, m in resolved.items() if inventory.names.get(m.key) != n[0]}
    for key in renamed & inventory.present.keys():
        device = inventory.present[key]
        allocated_as = {
            name[0]
            for name in meanings.names[key]
            if name[0] in resources and may_be_of(device, resolved[name].ids)
        }
        if allocated_as and inventory.names.get(key) not in allocated_as:
            of_node[key] = replace(device, resource=min(allocated_as))
    return of_node if of_node.keys() == inventory.names.keys() else dict(sorted(of_node.items()))


@memoized
def devices_by_group(
    devices: Mapping[DeviceKey, Device], group_of: Mapping[DeviceKey, GroupKey]
) -> Mapping[GroupKey, tuple[Device, ...]]:
    """Derive `Index.devices_by_group`."""
    members: dict[GroupKey, list[Device]] = {}
    for key, device in devices.items():
        members.setdefault(group_of[key], []).append(device)
    return {group: tuple(of_group) for group, of_group in members.items()}


@memoized
def polled(
    groups: Mapping[int, tuple[PciFunction, ...]],
    devices: Mapping[DeviceKey, Device],
    leaving: frozenset[PciAddress],
) -> Mapping[int, tuple[PciAddress, ...]]:
    """Derive `Index.polled`."""
    polled_groups = {
        d.group for d in devices.values() if d.group is not None and (d.has_backing or d.may_be_unbinding)
    }
    open_functions = {
        g: tuple([f.address for f in groups.get(g, ()) if f.vfio_bound or f.address in leaving])
        for g in sorted(polled_groups)
    }
    return {
        group: functions for group, functions in open_functions.items() if functions or group not in groups
    }


@memoized
def by_id(
    devices: Mapping[DeviceKey, Device],
    aliases: Mapping[Named, DeviceKey],
    listed_aliases: Mapping[Named, DeviceKey],
) -> Mapping[ResourceName, Mapping[DeviceId, Device]]:
    """Derive `Index.by_id`. An ID means the device that was allocated by it; if none was, the device that is listed by
    it."""
    by_resource: dict[ResourceName, dict[DeviceId, Device]] = {}
    for address, device in devices.items():
        by_resource.setdefault(device.resource, {})[DeviceId(address)] = device
    aliased: list[tuple[ResourceName, DeviceId, Device]] = []
    for (resource, device_id), address in (*listed_aliases.items(), *aliases.items()):
        if (listed := by_resource.get(resource, {}).get(DeviceId(address))) is not None:
            aliased.append((resource, device_id, listed))
    for resource, device_id, listed in aliased:
        by_resource[resource][device_id] = listed
    return by_resource
