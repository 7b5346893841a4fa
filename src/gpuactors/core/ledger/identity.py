"""The ID of a device in kubelet's ledger, and the device of an ID.

Kubelet's ledger is by ID string. Ours is the PCI address. NVIDIA's plugin up to 1.4 and KubeVirt's built-in one use the
IOMMU group number: a device that the ledger lists by such an ID keeps it until its pod ends, so that an older plugin
can be replaced on a busy node. An ID of NVIDIA's plugin for containers has the UUID of a GPU: another API allocates the
GPU that way, under a resource of another plugin.

An ID is an opaque string: every client, and every other plugin, may send any. It is compared, never computed with
(`²`.isdigit() is true, and int() refuses it). Its device is resolved once, when kubelet's ledger or our answer to
Allocate first names the ID, and kept as long as the ID is named: `51` continues to mean the GPU that was allocated by
it when that GPU comes back in another group.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import filterfalse

from msgspec.structs import replace

from gpuactors.core.assessment.blockers import is_unbinding, unbinding
from gpuactors.core.devices.index import Index
from gpuactors.core.devices.inventory import may_be_of
from gpuactors.core.host.inspections import ask_inspections
from gpuactors.core.host.usage import use_of
from gpuactors.core.kinds.presence import another, gone
from gpuactors.core.kinds.table import is_key, kind_of
from gpuactors.core.state import NodeState
from gpuactors.core.values.cause import Cause
from gpuactors.core.values.inventory import Device
from gpuactors.core.values.model import (
    DeviceId,
    DeviceKey,
    Inspections,
    Resolved,
    ResourceName,
)
from gpuactors.core.values.owner import Named, gpu_uuid
from gpuactors.core.values.status import Reason


def resolved(before: NodeState, state: NodeState) -> NodeState:
    """Return `state` with the device of every ID that is named in it, if that can have changed since `before`.

    The result does not depend on the order in which kubelet lists its pods.
    """
    if _names_and_models(before) == _names_and_models(state):
        return state
    named = _named(state)
    unsettled = [name for name, target in named.kubelet.resolved.items() if target.ids is None]
    return _with_models(named, unsettled, state.index) if unsettled else named


def with_ancestors(before: NodeState, state: NodeState) -> NodeState:
    """Return `state` with the ancestors of every device that has an owner and is not there (`Kubelet.ancestors`), as
    they were known in `before`, the state before this step."""
    known, present = state.kubelet.ancestors, state.index.present
    if not known and before.index.present is present:
        return state
    was, ancestors = before.index.present, dict[DeviceKey, tuple[DeviceKey, ...]]()
    for key in state.index.owners.keys() - present.keys():
        above = was[key].ancestors if key in was else known.get(key, ())
        if above:
            ancestors[key] = above
    if ancestors == known:
        return state
    return replace(state, kubelet=replace(state.kubelet, ancestors=dict(sorted(ancestors.items()))))


def _names_and_models(state: NodeState) -> tuple[object, ...]:
    """Return everything that IDs are resolved by."""
    kubelet, host = state.kubelet, state.host
    names = (kubelet.resolved, kubelet.ledger.entries, kubelet.pending_allocations)
    return *names, host.seen, host.inspections


def _named(state: NodeState) -> NodeState:
    """Add the devices of new names; remove the names that no ledger entry or grant has any more."""
    index, pending, before = state.index, state.kubelet.pending_allocations, state.kubelet.resolved
    stale = [] if index.unlisted <= pending.keys() else [n for n in index.unlisted if n not in pending]
    unknown = [*index.unresolved, *filterfalse(before.__contains__, pending)]
    corrected = _corrected(index, before)
    if not (stale or unknown or corrected):
        return state
    targets = {**before, **corrected}
    for name in stale:
        del targets[name]
    targets |= {n: Resolved(DeviceKey(n[1])) for n in unknown if is_key(n[1])}
    targets |= {n: Resolved(a) for n in unknown if (a := index.uuids.get(gpu_uuid(n[1]) or "")) is not None}
    if older := sorted(n for n in unknown if n not in targets):
        targets |= _resolved_older(state, older, targets)
    return (
        replace(state, kubelet=replace(state.kubelet, resolved=targets))
        if stale or corrected or any(n in targets for n in unknown)
        else state
    )


def _resolved_older(
    state: NodeState, names: Iterable[Named], targets: Mapping[Named, Resolved]
) -> dict[Named, Resolved]:
    """Resolve those of `names` that are listed, or that are the group number of a device that gpuactors lists. None of
    them is a PCI address.

    NVIDIA's plugin lists a group of several GPUs once: the number means one of them that no other ID means.
    """
    listed = {
        (resource, a.id): a.key
        for resource, device_list in state.published.device_lists.items()
        for a in device_list
        if is_key(a.key)
    }
    members: dict[tuple[ResourceName, str], list[DeviceKey]] = {}
    index = state.index
    for device, selected in index.names.items():
        group = (selected, str(index.group_number(device)))
        members.setdefault(group, []).append(device)
    taken = {(resource, target.key) for (resource, _), target in targets.items()}
    older: dict[Named, Resolved] = {}
    for name in names:
        resource, device_id = name
        if name in listed:
            older[name] = Resolved(listed[name])
        elif group_members := members.get((resource, device_id)):
            free = [a for a in group_members if (resource, a) not in taken]
            key = (free or group_members)[0]
            older[name] = Resolved(key, others=tuple(a for a in group_members if a != key))
    return older


def _corrected(index: Index, targets: Mapping[Named, Resolved]) -> dict[Named, Resolved]:
    """Return the names that mean another device of the group than was thought, as that one is gone and another is
    there. A device that came into the group later is not meant."""
    mistaken = [n for n, key in index.aliases.items() if targets[n].others and key not in index.present]
    taken = {(resource, target.key) for (resource, _), target in targets.items()} if mistaken else set()
    corrected: dict[Named, Resolved] = {}
    for name in mistaken:
        others = targets[name].others
        free = (key for key in others if key in index.present and (name[0], key) not in taken)
        if (key := next(free, None)) is not None:
            corrected[name] = Resolved(key, others=tuple(a for a in others if a != key))
    return corrected


def _with_models(state: NodeState, unsettled: Iterable[Named], index: Index) -> NodeState:
    """Record the model of each allocated device of gpuactors' resources, as first seen since it was allocated. Request
    an inspection of a device that no selector chooses: no scan has it. `unsettled` are the names whose device's model
    is not known yet; `index` has the functions of `state`."""
    host, seen, wanted = state.host, dict[Named, Resolved](), list[DeviceKey]()
    # Of a name that is resolved, the same as whether its resource is in `Index.resources`.
    own_resources = {*index.models, *state.published.device_lists, *state.published.served}
    resolved = state.kubelet.resolved
    for name in sorted(n for n in unsettled if n[0] in own_resources):
        target = resolved[name]
        device = index.present.get(target.key)
        if device is not None:
            seen[name] = replace(target, ids=_allocated_model(state, index.models, name[0], device) or None)
        elif host.scanned and not target.inspection_requested:
            seen[name] = replace(target, inspection_requested=True)
            wanted.append(target.key)
        elif host.scanned and not _is_awaited(host.inspections, target.key):
            # A failed inspection does not show that no function is there.
            seen[name] = replace(target, ids="")
    if not seen:
        return state
    return replace(
        state,
        kubelet=replace(state.kubelet, resolved={**state.kubelet.resolved, **seen}),
        host=replace(
            state.host,
            inspections=ask_inspections(state.host.inspections, sorted({*wanted})),
        ),
    )


def _is_awaited(inspections: Inspections, device: DeviceKey) -> bool:
    """Return whether an inspection of the device is outstanding, or will be repeated."""
    return device in {*inspections.functions, *inspections.retries}


def _allocated_model(
    state: NodeState,
    models: Mapping[ResourceName, frozenset[str]],
    resource: ResourceName,
    device: Device,
) -> str:
    """Return the model that was allocated as `resource`, where `device` is the first of its key that this daemon sees;
    empty if its ids cannot be read.

    A device with another name now is the same device if its model ever had this name (pci.ids was renewed). Otherwise
    another model has replaced it while no daemon ran.
    """
    ids = device.model
    named_models = state.published.served.get(resource, frozenset()) | models.get(resource, frozenset())
    if not ids or not named_models or ids in named_models:
        return ids
    return min(named_models)  # any of them, as each differs from the model that is there now


def awaits_inspection(state: NodeState) -> bool:
    """Return whether an inspection of an allocated device is outstanding: whether the device is there is not known
    yet."""
    outstanding = state.host.inspections.functions
    return any(
        m.inspection_requested and m.ids is None and m.key in outstanding
        for m in state.kubelet.resolved.values()
    )


def alias_ids(state: NodeState) -> Mapping[DeviceKey, DeviceId]:
    """Return the devices that are listed by another ID than their PCI address, with that ID. Kubelet has allocated them
    only by that ID, or the present list has only that ID and must not change during a call."""
    index, ids = state.index, dict[DeviceKey, DeviceId]()
    if not (index.aliases or index.listed_aliases):
        return ids
    held = {*state.calls.no_removal_until, *(call.resource for call in state.calls.waiting.values())}
    listed: dict[Named, list[DeviceId]] = {}
    for resource in held & state.published.device_lists.keys():
        for entry in state.published.device_lists[resource]:
            listed.setdefault((resource, DeviceId(entry.key)), []).append(entry.id)
    for address in {*index.aliases.values(), *index.listed_aliases.values()}:
        if (device := index.devices.get(address)) is None:
            continue
        by_address = DeviceId(address)
        named = [name[1] for name in index.resolved_by.get(address, ()) if name[0] == device.resource]
        kubelet_ids = named or listed.get((device.resource, by_address), [])
        if kubelet_ids and by_address not in kubelet_ids:
            ids[address] = min(kubelet_ids)
    return ids


def address_of(state: NodeState, resource: ResourceName, device: DeviceId) -> DeviceKey | None:
    """Return the device of an ID: the one that was allocated by it, the one at that PCI address, or the one listed by
    it."""
    if (target := state.kubelet.resolved.get((resource, device))) is not None:
        return target.key
    if is_key(device):
        return DeviceKey(device)
    return next((a.key for a in state.published.device_lists.get(resource, ()) if a.id == device), None)


def not_listed(state: NodeState, resource: ResourceName, key: DeviceKey) -> Reason:
    """Return why a device, if it is there, does not belong to a resource."""
    device = state.index.present.get(key)
    if device is None:
        return gone(key)
    if device.unnamed:
        return kind_of(device).not_backed(device)
    if is_unbinding(device, use_of(state, device)):
        return unbinding(device)
    if device.has_backing and device.resource == resource:
        return Reason(Cause.NOT_SELECTED, "no selector matches it any more (--select)")
    if device.has_backing and not device.model:
        return Reason(Cause.UNREADABLE, device.fault or "its type is not known yet")
    if device.has_backing and device.model not in state.published.served.get(resource, ()):
        return another(device.model)
    return kind_of(device).not_backed(device)


def lost(state: NodeState, resource: ResourceName, target: Resolved | None) -> Reason | None:
    """Return why a pod can no longer use the device that was allocated to it by an ID: the device is gone, unbound, or
    another model; None if it can. `target` is the device of the ID.

    A device whose vendor and device ids could never be read is not lost: its model was known when it was allocated. Nor
    is one of the same model that has another name, as pci.ids was renewed. Nor is one that has not been inspected yet:
    no selector matches it, so that no scan has it.
    """
    if target is None:
        return Reason(Cause.UNKNOWN_ID, f"no device of {resource} on this node is known by this ID")
    device = state.index.present.get(target.key)
    if device is None and target.ids is None:
        return None
    is_here = device is not None and (device.resource == resource or may_be_of(device, target.ids))
    if device is not None and device.has_backing and is_here:
        return None
    return not_listed(state, resource, target.key)
