"""Values derived from the node's state that every event needs: derived once when their source changes.

An index is carried in the state (`NodeState.index`) with the objects that it was derived from. So a comparison by
identity shows whether it belongs to this state, and a stale one cannot be read: `index_of` brings it up to date, at a
cost of what has changed and not of what exists.

Must not judge: owner and status of a device are decided in `assessment/`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import fields, replace
from itertools import compress
from operator import attrgetter, is_not
from typing import Any, Final, TypeVar

from gpuactors.core.state import NodeState
from gpuactors.core.state.index import NO_INDEX, Index
from gpuactors.core.values.inventory import Device, ids_of, is_selected, may_be_unbinding, named
from gpuactors.core.values.model import (
    DeviceId,
    DeviceList,
    Observed,
    PciAddress,
    PciFunction,
    Pod,
    Resolved,
    ResourceName,
    differences,
    is_pci_address,
)
from gpuactors.core.values.owner import Named, Owner, gpu_uuid, owner_of

_SORTED: Final = ("functions", "names", "devices", "polled")
"""The mappings that are sorted by their keys. A choice among several values must not depend on the order in which they
came, nor on their hashes."""


def index_of(state: NodeState) -> Index:
    """The index of exactly this state."""
    index, ledger = state.index, state.kubelet.ledger
    if (
        index.functions is state.host.functions
        and index.resolved is state.kubelet.resolved
        and index.entries is ledger.entries
        and index.claims is ledger.claims
        and index.reserved is state.claims.reserved
        and index.admin == state.claims.admin
        and index.ended == state.claims.ended
        and index.served == state.published.served.keys()
        and index.leaving == state.host.polls.leaving
        and index.device_lists is state.published.device_lists
        and index.observed is state.host.polls.groups
    ):
        return index
    return _refreshed(index, state)


def indexed(state: NodeState) -> NodeState:
    """`state` with its index, for later readers."""
    index = index_of(state)
    return state if index is state.index else replace(state, index=index)


def check_index(state: NodeState) -> None:
    """Raises AssertionError if the carried index differs from that of a full derivation, or is not sorted: a bug. Tests
    and simulation check this after every step."""
    fresh = index_of(replace(state, index=NO_INDEX))
    differ = [f.name for f in fields(Index) if getattr(state.index, f.name) != getattr(fresh, f.name)]
    assert not differ, f"of the index {', '.join(differ)} is stale"
    unsorted = [name for name in _SORTED if list(m := getattr(state.index, name)) != sorted(m)]
    assert not unsorted, f"of the index {', '.join(unsorted)} is not sorted"


def _refreshed(before: Index, state: NodeState) -> Index:
    index = before if before.functions is state.host.functions else _with_functions(before, state)
    ledger = state.kubelet.ledger
    names = changed_keys(index.resolved, state.kubelet.resolved)
    if index.resolved is not state.kubelet.resolved:
        index = _with_names(index, state, names) if names else replace(index, resolved=state.kubelet.resolved)
    touched = names | changed_keys(index.entries, ledger.entries)
    if (
        touched
        or index.entries is not ledger.entries
        or index.claims is not ledger.claims
        or index.reserved is not state.claims.reserved
        or index.admin != state.claims.admin
        or index.ended != state.claims.ended
    ):
        index = _with_ledger(before, index, state, touched)
    if (
        index.functions is not before.functions
        or names
        or index.served != state.published.served.keys()
        or index.device_lists.keys() != state.published.device_lists.keys()
    ):
        index = _with_devices(before, index, state, names)
    if touched or index.resources is not before.resources:
        index = _with_unresolved(before, index, touched)
    changed = changed_keys(before.devices, index.devices)
    if index.device_lists is not state.published.device_lists:
        index = replace(
            index,
            device_lists=state.published.device_lists,
            listed_aliases=_listed_aliases(index, state.published.device_lists),
        )
    if index.devices is not before.devices or index.leaving != state.host.polls.leaving:
        index = _with_groups(before, index, state.host.polls.leaving, changed)
    if (
        index.devices is not before.devices
        or index.aliases is not before.aliases
        or index.listed_aliases is not before.listed_aliases
    ):
        index = replace(index, by_id=_by_id(before, index, changed))
    if index.observed is not state.host.polls.groups:
        index = _with_uses(index, state.host.polls.groups)
    return index


def _with_functions(index: Index, state: NodeState) -> Index:
    """After inspections that found something else. Values that did not change stay the same objects."""
    functions = state.host.functions
    changed = changed_keys(index.functions, functions)
    names = dict(index.names)
    for address in changed:
        function = functions.get(address)
        if function is not None and is_selected(state.daemon.settings.selectors, function):
            names[address] = named(function)
        else:
            names.pop(address, None)
    names = _sorted(names, index.names)
    same = names == index.names and all(
        ids_of(functions[a]) == ids_of(index.functions[a]) for a in changed & names.keys()
    )
    return replace(
        index,
        functions=functions,
        groups=_groups(index, functions, changed),
        iommufd=any(f.iommufd for f in functions.values()),
        switches=_switches(index, functions, changed),
        names=index.names if names == index.names else names,
        models=index.models if same else _models(names, functions),
        uuids=_uuids(index, functions, changed),
    )


def _groups(
    index: Index, functions: Mapping[PciAddress, PciFunction], changed: Set[PciAddress]
) -> Mapping[int, tuple[PciFunction, ...]]:
    """A changed function is looked up once: at a start all of them have changed, in as many groups."""
    groups = dict(index.groups)
    joined: dict[int, list[PciFunction]] = {}
    for address in changed:
        was, now = index.functions.get(address), functions.get(address)
        if was is not None and was.iommu_group is not None:
            joined.setdefault(was.iommu_group, [])
        if now is not None and now.iommu_group is not None:
            joined.setdefault(now.iommu_group, []).append(now)
    for group, came in joined.items():
        stayed = (f for f in groups.pop(group, ()) if f.address not in changed)
        members = tuple(sorted((*stayed, *came), key=attrgetter("address")))
        if members:
            groups[group] = members
    return groups


def _switches(
    index: Index, functions: Mapping[PciAddress, PciFunction], changed: Set[PciAddress]
) -> frozenset[PciAddress]:
    """The same object unless one of them changed."""
    found = {
        a
        for a in changed
        if (f := functions.get(a)) is not None and f.is_nvswitch and f.driver is not None and not f.vfio_bound
    }
    if found == index.switches & changed:
        return index.switches
    return (index.switches - changed) | found


def _uuids(
    index: Index, functions: Mapping[PciAddress, PciFunction], changed: Set[PciAddress]
) -> Mapping[str, PciAddress]:
    """The same object unless one of them changed."""
    before, now = (
        {f.gpu_uuid: a for a in changed if (f := of.get(a)) is not None and f.gpu_uuid is not None}
        for of in (index.functions, functions)
    )
    if before == now:
        return index.uuids
    return {**{u: a for u, a in index.uuids.items() if a not in changed}, **now}


def _models(
    names: Mapping[PciAddress, ResourceName], functions: Mapping[PciAddress, PciFunction]
) -> dict[ResourceName, frozenset[str]]:
    models: dict[ResourceName, set[str]] = {}
    for address, name in names.items():
        models.setdefault(name, set()).add(ids_of(functions[address]))
    return {name: frozenset(of_name) for name, of_name in models.items()}


def _with_names(index: Index, state: NodeState, names: Set[Named]) -> Index:
    """After reads of the ledger and grants: the devices of these names, or that they mean no device any more."""
    before, now = index.resolved, state.kubelet.resolved
    touched = {m.address for r in (before, now) for n in names if (m := r.get(n)) is not None}
    meant: dict[PciAddress, list[Named]] = {
        a: [n for n in index.resolved_by.get(a, ()) if n not in names] for a in touched
    }
    for name in names & now.keys():
        meant[now[name].address].append(name)
    resolved_by = dict(index.resolved_by)
    for address, known_by in meant.items():
        resolved_by.pop(address, None)
        if known_by:
            resolved_by[address] = tuple(sorted(known_by))
    aliases = {n: a for n, a in index.aliases.items() if n not in names}
    aliases |= {n: now[n].address for n in names & now.keys() if n[1] != DeviceId(now[n].address)}
    inspected_always = (index.inspected_always - touched) | {
        a for a in touched if any(_is_inspected_always(now[n]) for n in resolved_by.get(a, ()))
    }
    unsettled = (index.unsettled - names) | {n for n in names & now.keys() if now[n].ids is None}
    return replace(
        index,
        resolved=now,
        unsettled=unsettled,
        resolved_by=resolved_by,
        aliases=aliases if aliases != index.aliases else index.aliases,
        inspected_always=index.inspected_always
        if inspected_always == index.inspected_always
        else inspected_always,
    )


def _is_inspected_always(meant: Resolved) -> bool:
    return meant.ids is not None or meant.inspection_requested


def _with_devices(before: Index, index: Index, state: NodeState, names: Set[Named]) -> Index:
    """After inspections, reads of the ledger and lists: the devices and resources that follow from all three."""
    resources = {*index.models, *state.published.device_lists}
    if others := state.published.served.keys() - resources:
        resources |= {r for r, _ in state.kubelet.resolved if r in others}
    moved = changed_keys(before.functions, index.functions)
    touched = moved | {
        m.address
        for r in (before.resolved, state.kubelet.resolved)
        for n in names
        if (m := r.get(n)) is not None
    }
    if resources != index.resources:
        touched |= index.resolved_by.keys()
    kept = _kept(index, touched, resources)
    functions = [f for a in moved for i in (before, index) if (f := i.functions.get(a)) is not None]
    touched |= {
        f.address
        for group in {f.iommu_group for f in functions} - {None}
        for f in index.groups.get(group or 0, ())
    }
    changed = {a: _device(index, kept, a) for a in touched}
    changed = {a: device for a, device in changed.items() if device != index.devices.get(a)}
    devices = dict(index.devices)
    for address, device in changed.items():
        if device is not None:
            devices[address] = device
        else:
            devices.pop(address, None)
    return replace(
        index,
        served=frozenset(state.published.served),
        resources=resources if resources != index.resources else index.resources,
        kept=kept if kept != index.kept else index.kept,
        devices=_sorted(devices, index.devices) if changed else index.devices,
    )


def _kept(
    index: Index, touched: Set[PciAddress], resources: Set[ResourceName]
) -> dict[PciAddress, ResourceName]:
    kept = {a: resource for a, resource in index.kept.items() if a not in touched}
    for address in touched:
        function = index.functions.get(address)
        given = {
            name[0]
            for name in index.resolved_by.get(address, ())
            if function is not None
            and name[0] in resources
            and ids_of(function) in (index.resolved[name].ids, "")
        }
        if given and index.names.get(address) not in given:
            kept[address] = min(given)
    return kept


def _device(index: Index, kept: Mapping[PciAddress, ResourceName], address: PciAddress) -> Device | None:
    """The device at an address, if there is one."""
    function, resource = index.functions.get(address), kept.get(address) or index.names.get(address)
    if function is None or resource is None:
        return None
    group = (function,) if function.iommu_group is None else index.groups[function.iommu_group]
    return Device(function, resource, group)


def _with_ledger(before: Index, index: Index, state: NodeState, names: Set[Named]) -> Index:
    """After reads of the ledger and grants that changed the entries of these names, or the claims."""
    resolved, entries, claims = (
        state.kubelet.resolved,
        state.kubelet.ledger.entries,
        state.kubelet.ledger.claims,
    )
    unlisted = {n for n in names if n in resolved and n not in entries}
    return replace(
        index,
        entries=entries,
        claims=claims,
        reserved=state.claims.reserved,
        admin=state.claims.admin,
        ended=state.claims.ended,
        owners=_owners(before, index, state, names),
        given=_given(index, entries, names),
        unlisted=(index.unlisted - names) | unlisted,
    )


def _with_unresolved(before: Index, index: Index, names: Set[Named]) -> Index:
    """After changes of these names' entries and devices, or of the resources."""
    if index.resources is not before.resources:
        names = index.entries.keys()
    unresolved = {
        n
        for n in names
        if n in index.entries
        and n not in index.resolved
        and (n[0] in index.resources or is_pci_address(n[1]) or gpu_uuid(n[1]) is not None)
    }
    return replace(index, unresolved=(index.unresolved - names) | unresolved)


def _given(
    index: Index, entries: Mapping[Named, Pod], names: Set[Named]
) -> Mapping[ResourceName, frozenset[DeviceId]]:
    given = dict(index.given)
    for resource in {name[0] for name in names if (name in entries) != (name in index.entries)}:
        ids = {name[1] for name in names if name[0] == resource}
        now = (given.pop(resource, frozenset()) - ids) | {i for i in ids if (resource, i) in entries}
        if now:
            given[resource] = now
    return given


def _owners(before: Index, index: Index, state: NodeState, names: Set[Named]) -> Mapping[PciAddress, Owner]:
    """The owners, derived again only for the devices of changed entries and claims."""
    claims, entries = state.kubelet.ledger.claims, state.kubelet.ledger.entries
    reserved, admin, ended = state.claims.reserved, state.claims.admin, state.claims.ended
    touched = changed_keys(index.claims, claims) | changed_keys(index.reserved, reserved)
    touched |= {address for _, address in index.admin ^ admin}
    if other := index.ended ^ ended:
        touched |= {address for address, listed in claims.items() if any(c.name in other for c in listed)}
    touched |= {
        m.address
        for r in (before.resolved, state.kubelet.resolved)
        for n in names
        if (m := r.get(n)) is not None
    }
    if not touched:
        return index.owners
    owners = dict(index.owners)
    for address in touched:
        owners.pop(address, None)
        listed = [
            c for c in claims.get(address, ()) if (c.name, address) not in admin and c.name not in ended
        ]
        own = reserved.get(address)
        if own is not None and own.name not in {c.name for c in listed}:
            listed.append(own)
        owner = owner_of(listed, index.resolved_by.get(address, ()), entries)
        if owner is not None:
            owners[address] = owner
    return owners


def _listed_aliases(
    index: Index, device_lists: Mapping[ResourceName, DeviceList]
) -> Mapping[Named, PciAddress]:
    """The aliases, derived again only for changed lists."""
    aliases = dict(index.listed_aliases)
    for resource in index.device_lists.keys() | device_lists.keys():
        for was, now in differences(index.device_lists.get(resource, ()), device_lists.get(resource, ())):
            if was is not None:
                aliases.pop((resource, was.id), None)
            if now is not None and now.is_alias:
                aliases[resource, now.id] = now.address
    return aliases if aliases != index.listed_aliases else index.listed_aliases


def _by_id(
    before: Index, index: Index, changed: Set[PciAddress]
) -> Mapping[ResourceName, Mapping[DeviceId, Device]]:
    """An ID means the device that was allocated by it; if none was, the device that is listed by it."""
    if before.aliases or before.listed_aliases:
        before, changed = NO_INDEX, index.devices.keys()
    by_id = {resource: dict(own) for resource, own in before.by_id.items()}
    for resource in {
        d.resource for a in changed for i in (before, index) if (d := i.devices.get(a)) is not None
    }:
        own = by_id.setdefault(resource, {})
        for address in changed:
            own.pop(DeviceId(address), None)
            if (device := index.devices.get(address)) is not None and device.resource == resource:
                own[DeviceId(address)] = device
    aliases: dict[ResourceName, dict[DeviceId, PciAddress]] = {}
    for (resource, device_id), address in (*index.listed_aliases.items(), *index.aliases.items()):
        aliases.setdefault(resource, {})[device_id] = address
    for resource in aliases.keys() & by_id.keys():
        own = by_id[resource]
        meant = {
            i: own[by_address] for i, a in aliases[resource].items() if (by_address := DeviceId(a)) in own
        }
        by_id[resource] = {**own, **meant}
    return {resource: own for resource, own in by_id.items() if own}


def _with_groups(
    before: Index, index: Index, leaving: frozenset[PciAddress], changed: Set[PciAddress]
) -> Index:
    """After devices came, went or changed, or began to leave: the groups to poll."""
    touched = {
        d.function.iommu_group
        for a in changed
        for i in (before, index)
        if (d := i.devices.get(a)) is not None
    }
    touched |= {f.iommu_group for a in leaving ^ index.leaving if (f := index.functions.get(a)) is not None}
    touched.discard(None)
    polled = {g: functions for g, functions in index.polled.items() if g not in touched}
    for group in touched & index.groups.keys():
        members = index.groups[group or 0]
        wanted = any(f.address in index.devices and (f.vfio_bound or may_be_unbinding(f)) for f in members)
        functions = tuple(f.address for f in members if f.vfio_bound or f.address in leaving)
        if wanted and functions and group is not None:
            polled[group] = functions
    unbinding = (index.unbinding - changed) | {
        a for a in changed & index.devices.keys() if may_be_unbinding(index.devices[a].function)
    }
    return replace(
        index,
        leaving=leaving,
        polled=index.polled if polled == index.polled else dict(sorted(polled.items())),
        unbinding=unbinding,
    )


def _with_uses(index: Index, observed: Mapping[int, Observed]) -> Index:
    """After polls: the groups that are in use."""
    polled = changed_keys(index.observed, observed)
    in_use = {g for g in polled & observed.keys() if observed[g].in_use}
    return replace(index, observed=observed, in_use=(index.in_use - polled) | in_use)


Key = TypeVar("Key")
Value = TypeVar("Value")


def _sorted(now: Mapping[PciAddress, Value], before: Mapping[PciAddress, Any]) -> dict[PciAddress, Value]:
    """`now` in the order of the addresses. `before` is in this order, and so is `now` if it has no other keys."""
    return dict(now) if now.keys() <= before.keys() else dict(sorted(now.items()))


def changed_keys(before: Mapping[Key, Any], now: Mapping[Key, Any]) -> set[Key]:
    """The keys whose values changed."""
    found = {key for key in other_keys(before, now) if key not in before or before[key] != now[key]}
    return found if now.keys() >= before.keys() else found | (before.keys() - now.keys())


def other_keys(before: Mapping[Key, Any], now: Mapping[Key, Any]) -> Iterable[Key]:
    """The keys of `now` whose values are other objects than before: without a step of the interpreter for each of the
    others, as nearly all are the same."""
    return () if before is now else compress(now, map(is_not, now.values(), map(before.get, now)))
