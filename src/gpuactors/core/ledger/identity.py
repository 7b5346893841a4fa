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

from gpuactors.core.devices.index import Index
from gpuactors.core.host.inspections import ask_inspections
from gpuactors.core.kinds.presence import GONE, another
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
    function_address,
)
from gpuactors.core.values.owner import Named, gpu_uuid
from gpuactors.core.values.status import Reason


def resolved(before: NodeState, state: NodeState) -> NodeState:
    """`state` with the device of every ID that is named in it, if that can have changed since `before`.

    The result does not depend on the order in which kubelet lists its pods.
    """
    if _names_and_models(before) == _names_and_models(state):
        return state
    named = _named(state)
    unsettled = [name for name, meant in named.kubelet.resolved.items() if meant.ids is None]
    return _with_models(named, unsettled, state.index) if unsettled else named


def _names_and_models(state: NodeState) -> tuple[object, ...]:
    """What IDs are resolved by."""
    kubelet, host = state.kubelet, state.host
    names = (kubelet.resolved, kubelet.ledger.entries, kubelet.pending_allocations)
    return *names, host.seen, host.inspections


def _named(state: NodeState) -> NodeState:
    """`state` with the devices of new names, and without the names that are in no ledger entry or grant any more."""
    index, pending, before = state.index, state.kubelet.pending_allocations, state.kubelet.resolved
    gone = [] if index.unlisted <= pending.keys() else [n for n in index.unlisted if n not in pending]
    unknown = [*index.unresolved, *filterfalse(before.__contains__, pending)]
    if not (gone or unknown):
        return state
    known = dict(before)
    for name in gone:
        del known[name]
    known |= {n: Resolved(DeviceKey(n[1])) for n in unknown if is_key(n[1])}
    known |= {n: Resolved(a) for n in unknown if (a := index.uuids.get(gpu_uuid(n[1]) or "")) is not None}
    if older := sorted(n for n in unknown if n not in known):
        known |= _resolved_older(state, older, known)
    return (
        replace(state, kubelet=replace(state.kubelet, resolved=known))
        if gone or any(n in known for n in unknown)
        else state
    )


def _resolved_older(
    state: NodeState, names: Iterable[Named], known: Mapping[Named, Resolved]
) -> dict[Named, Resolved]:
    """Of `names`, which are no PCI addresses, those that are listed, or the group's number of one of our devices.

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
    taken = {(resource, meant.key) for (resource, _), meant in known.items()}
    found: dict[Named, Resolved] = {}
    for name in names:
        resource, device_id = name
        if name in listed:
            found[name] = Resolved(listed[name])
        elif group_members := members.get((resource, device_id)):
            free = [a for a in group_members if (resource, a) not in taken]
            found[name] = Resolved((free or group_members)[0])
    return found


def _with_models(state: NodeState, unsettled: Iterable[Named], index: Index) -> NodeState:
    """`state` with the model of each of our allocated devices, as first seen since it was allocated. A device that no
    selector chooses is in no scan: an inspection of it is requested. `unsettled` are the names whose device's model is
    not known yet; `index` has the functions of `state`."""
    host, seen, wanted = state.host, dict[Named, Resolved](), list[DeviceKey]()
    # Of a name that is resolved, the same as whether its resource is in `Index.resources`.
    ours = {*index.models, *state.published.device_lists, *state.published.served}
    resolved = state.kubelet.resolved
    for name in sorted(n for n in unsettled if n[0] in ours):
        meant = resolved[name]
        device = index.present.get(meant.key)
        if device is not None:
            seen[name] = replace(meant, ids=_allocated_model(state, index.models, name[0], device) or None)
        elif host.scanned and not meant.inspection_requested:
            seen[name] = replace(meant, inspection_requested=True)
            wanted.append(meant.key)
        elif host.scanned and not _is_awaited(host.inspections, meant.key):
            # A failed inspection does not show that no function is there.
            seen[name] = replace(meant, ids="")
    if not seen:
        return state
    return replace(
        state,
        kubelet=replace(state.kubelet, resolved={**state.kubelet.resolved, **seen}),
        host=replace(
            state.host,
            inspections=ask_inspections(state.host.inspections, map(function_address, sorted({*wanted}))),
        ),
    )


def _is_awaited(inspections: Inspections, device: DeviceKey) -> bool:
    """Its function is being inspected, or will be again."""
    return function_address(device) in {*inspections.functions, *inspections.retries}


def _allocated_model(
    state: NodeState,
    models: Mapping[ResourceName, frozenset[str]],
    resource: ResourceName,
    device: Device,
) -> str:
    """The model that was allocated as `resource`, where `device` is the first of its key that this daemon sees; empty
    if its ids cannot be read.

    A device with another name now is the same device if its model ever had this name (pci.ids was renewed). Otherwise
    another model has replaced it while no daemon ran.
    """
    ids = device.model
    known = state.published.served.get(resource, frozenset()) | models.get(resource, frozenset())
    if not ids or not known or ids in known:
        return ids
    return min(known)  # any of them, as each differs from the model that is there now


def awaits_inspection(state: NodeState) -> bool:
    """Whether the inspection of an allocated device is outstanding, so that it is not known yet whether the device is
    there."""
    outstanding = state.host.inspections.functions
    return any(
        m.inspection_requested and m.ids is None and function_address(m.key) in outstanding
        for m in state.kubelet.resolved.values()
    )


def alias_ids(state: NodeState) -> Mapping[DeviceKey, DeviceId]:
    """The devices that are listed by another ID than their PCI address, with that ID: kubelet has allocated them only
    by that ID, or has only that ID in the present list, which must not change during a call."""
    index, ids = state.index, dict[DeviceKey, DeviceId]()
    if not (index.aliases or index.listed_aliases):
        return ids
    held = [r for r in state.published.device_lists if _is_held(state, r)]
    listed: dict[Named, list[DeviceId]] = {}
    for resource, entry in ((r, a) for r in held for a in state.published.device_lists[r]):
        listed.setdefault((resource, DeviceId(entry.key)), []).append(entry.id)
    for address in {*index.aliases.values(), *index.listed_aliases.values()}:
        if (device := index.devices.get(address)) is None:
            continue
        by_address = DeviceId(address)
        named = [name[1] for name in index.resolved_by.get(address, ()) if name[0] == device.resource]
        known = named or listed.get((device.resource, by_address), [])
        if known and by_address not in known:
            ids[address] = min(known)
    return ids


def _is_held(state: NodeState, resource: ResourceName) -> bool:
    return resource in state.calls.no_removal_until or any(
        c.resource == resource for c in state.calls.waiting.values()
    )


def address_of(state: NodeState, resource: ResourceName, device: DeviceId) -> DeviceKey | None:
    """The device of an ID: the one that was allocated by it, the one at that PCI address, or the one listed by it."""
    if (meant := state.kubelet.resolved.get((resource, device))) is not None:
        return meant.key
    if is_key(device):
        return DeviceKey(device)
    return next((a.key for a in state.published.device_lists.get(resource, ()) if a.id == device), None)


def not_listed(state: NodeState, resource: ResourceName, key: DeviceKey) -> Reason:
    """Why a device, if it is there, is none of a resource."""
    device = state.index.present.get(key)
    if device is None:
        return GONE
    if device.has_backing and device.resource == resource:
        return Reason(Cause.NOT_SELECTED, "no selector matches it any more (--select)")
    if device.has_backing and device.model not in state.published.served.get(resource, ()):
        return another(device.model)
    return kind_of(device).not_backed(device)


def lost(state: NodeState, resource: ResourceName, meant: Resolved | None) -> Reason | None:
    """Why a pod can no longer use the device that was allocated to it by an ID: the device is gone, unbound, or another
    model; None if it can. `meant` is the device of the ID.

    A device whose vendor and device ids could never be read is not lost: its model was known when it was allocated. Nor
    is one of the same model that has another name, as pci.ids was renewed, nor one that has not been inspected yet: no
    selector matches it, so that it is in no scan.
    """
    if meant is None:
        return Reason(Cause.UNKNOWN_ID, f"no device of {resource} on this node is known by this ID")
    device = state.index.present.get(meant.key)
    if device is None and meant.ids is None:
        return None
    if (
        device is not None
        and device.has_backing
        and (device.model in ("", meant.ids) or device.resource == resource)
    ):
        return None
    return not_listed(state, resource, meant.key)
