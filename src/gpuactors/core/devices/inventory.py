"""From functions to groups and devices: what is there, and which of it is ours.

Plain loops. A part is made anew as a whole when one of its inputs, which are its arguments, differs; so it cannot be
stale. Which devices there are the kinds say (`kinds/table.py`).

Must not judge: owner and status of a device are decided in `assessment/`.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct
from msgspec.structs import replace

from gpuactors.core.kinds import table
from gpuactors.core.kinds.kind import HostFacts
from gpuactors.core.values.group import GroupKey
from gpuactors.core.values.inventory import Device
from gpuactors.core.values.memo import memoized
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


class Inventory(Struct, frozen=True, gc=False):
    """The inventory, by the functions and the operator's selectors."""

    functions: Functions
    """See `Host.functions`."""
    present: Mapping[DeviceKey, Device]
    """Every device that is there, sorted by key, chosen by a selector or not, with the resource of its model."""
    groups: Mapping[int, tuple[PciFunction, ...]]
    """By the number of their IOMMU group; each sorted by address."""
    group_of: Mapping[DeviceKey, GroupKey]
    """The group of each of these devices."""
    switches: frozenset[PciAddress]
    """The NVSwitches that are on a driver of the host."""
    names: Mapping[DeviceKey, ResourceName]
    """The selected devices with the resource of their model's name, sorted by key: an older plugin's ID, which is the
    group's number, means the first of the group's members."""
    models: Mapping[ResourceName, frozenset[str]]
    """The models of the selected devices, by the resource of their name. A device that is listed by a former name,
    because a pod has it, does not count."""
    uuids: Mapping[str, DeviceKey]
    """The GPUs by the UUID that NVIDIA's driver names them by, where it is known."""


class Meanings(Struct, frozen=True, gc=False):
    """The devices that the names in kubelet's ledger and our grants mean."""

    names: Mapping[DeviceKey, tuple[Named, ...]]
    """The names of each device, in order."""
    aliases: Mapping[Named, DeviceKey]
    """The names that are no PCI address."""
    inspected_always: frozenset[PciAddress]
    """The functions of the devices of our resources that are allocated to pods: inspected whatever the selectors
    choose."""


@memoized
def inventory(functions: Functions, selectors: tuple[Selector, ...]) -> Inventory:
    """The groups and devices of these functions, which are sorted by address."""
    groups = by_group(functions)
    present = table.devices(HostFacts(functions, groups, selectors))
    selected = {key: device for key, device in present.items() if device.is_selected}
    models: dict[ResourceName, set[str]] = {}
    for device in selected.values():
        models.setdefault(device.resource, set()).add(device.model)
    return Inventory(
        functions=functions,
        present=present,
        groups=groups,
        group_of={key: key if device.group is None else device.group for key, device in present.items()},
        switches=frozenset(
            [a for a, f in functions.items() if f.driver is not None and not f.vfio_bound and f.is_nvswitch]
        ),
        names={key: device.resource for key, device in selected.items()},
        models={name: frozenset(models[name]) for name in sorted(models)},
        uuids={f.gpu_uuid: device_key(a) for a, f in functions.items() if f.gpu_uuid is not None},
    )


@memoized
def meanings(resolved: Mapping[Named, Resolved]) -> Meanings:
    """The devices that the names in kubelet's ledger and our grants mean."""
    names: dict[DeviceKey, list[Named]] = {}
    for name in sorted(resolved):
        names.setdefault(resolved[name].key, []).append(name)
    return Meanings(
        names={address: tuple(of_device) for address, of_device in names.items()},
        aliases={n: meant.key for n, meant in resolved.items() if n[1] != DeviceId(meant.key)},
        inspected_always=frozenset(
            [
                function_address(m.key)
                for m in resolved.values()
                if m.ids is not None or m.inspection_requested
            ]
        ),
    )


@memoized
def devices(
    known: Inventory, meant: Meanings, resolved: Mapping[Named, Resolved], resources: frozenset[ResourceName]
) -> Mapping[DeviceKey, Device]:
    """Every device of this node, sorted by key: the selected ones, and the allocated ones of `resources`, which are
    those served here. Whatever is selected or named now, an allocated device belongs to the resource that it was
    allocated as, until the pod ends."""
    found = {key: known.present[key] for key in known.names}
    others = {m.key for n, m in resolved.items() if known.names.get(m.key) != n[0]}
    for key in others & known.present.keys():
        device = known.present[key]
        given = {
            name[0]
            for name in meant.names[key]
            if name[0] in resources and device.model in (resolved[name].ids, "")
        }
        if given and known.names.get(key) not in given:
            found[key] = replace(device, resource=min(given))
    return found if found.keys() == known.names.keys() else dict(sorted(found.items()))


@memoized
def polled(
    groups: Mapping[int, tuple[PciFunction, ...]],
    of: Mapping[DeviceKey, Device],
    leaving: frozenset[PciAddress],
) -> Mapping[int, tuple[PciAddress, ...]]:
    """Derive `Index.polled`."""
    wanted = {d.group for d in of.values() if d.group is not None and (d.has_backing or d.may_be_unbinding)}
    found = {
        g: tuple([f.address for f in groups.get(g, ()) if f.vfio_bound or f.address in leaving])
        for g in sorted(wanted)
    }
    return {group: functions for group, functions in found.items() if functions or group not in groups}


@memoized
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
