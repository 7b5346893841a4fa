"""What follows from the node's state and is needed at every event: derived once when what it follows from changes.

An index is carried in the state (`NodeState.index`) with the very objects that it was derived from. So whether it is of
this state is told by identity, and nobody can read one that is stale: `index_of` brings it up to date, from what has
changed and not from what exists.

Must not judge: whose a device is, and how it is, is decided in `assessment/`.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, TypeVar

from gpuactors.core.assessment.owner import Named, Owner, owners_of
from gpuactors.core.inventory import (
    Device,
    devices_named,
    functions_of,
    groups_of,
    ids_of,
    is_selected,
    may_be_unbinding,
    named,
)
from gpuactors.core.model import (
    ClaimedDevice,
    DeviceId,
    Fact,
    Frame,
    PciAddress,
    PciFunction,
    Pod,
    Resolved,
    ResourceName,
)

if TYPE_CHECKING:
    from gpuactors.core.state import NodeState


@dataclass(frozen=True, slots=True)
class Index:
    """What is derived, and before it what it is derived from."""

    facts: Mapping[PciAddress, Fact]
    resolved: Mapping[Named, Resolved]
    entries: Mapping[Named, Pod]
    claims: Mapping[PciAddress, ClaimedDevice]
    served: frozenset[ResourceName]
    """Without their models."""
    frames: Mapping[ResourceName, Frame]
    leaving: frozenset[PciAddress]
    """As `Polls.leaving`."""

    functions: Mapping[PciAddress, PciFunction]
    """Those that are there, sorted by address."""
    short: Mapping[PciAddress, str]
    """As `Fact.short`, where it is not empty."""
    groups: Mapping[int, tuple[PciFunction, ...]]
    """By the number of their IOMMU group."""
    names: Mapping[PciAddress, ResourceName]
    """The selected functions and the resource that their model's name makes them, sorted by address: of a group's
    members an older plugin's ID stands for the first."""
    models: Mapping[ResourceName, frozenset[str]]
    """What models (`10de:2330`) the selected functions are, by the resource that their name makes them. A device that
    is listed by a former name, as a pod has it, adds nothing to that."""
    resources: Set[ResourceName]
    """Those that are served here: of the selected functions, of the lists, and of what a daemon before this served, as
    long as a pod has something of it by an ID of ours."""
    devices: Mapping[PciAddress, Device]
    """Every device of this node, sorted by address: the selected functions; and whatever is selected or named now, what
    a pod has been given is a device of the resource that it was given as, until the pod ends."""
    by_id: Mapping[ResourceName, Mapping[DeviceId, Device]]
    """The devices of each resource by the IDs that kubelet may use: those that are listed or given away, and the PCI
    address."""
    owners: Mapping[PciAddress, Owner]
    """Every device that kubelet has given to somebody, under whatever ID and API."""
    polled: Mapping[int, tuple[PciAddress, ...]]
    """The groups with a device that is on a vfio driver, or may be leaving one, sorted, and what of them a virtual
    machine can have open: the functions on a vfio driver, and those that are leaving one."""


_NOTHING: Final[Mapping[Any, Any]] = MappingProxyType({})
_NOBODY: Final[frozenset[Any]] = frozenset()

NO_INDEX: Final = Index(
    facts=_NOTHING,
    resolved=_NOTHING,
    entries=_NOTHING,
    claims=_NOTHING,
    served=_NOBODY,
    frames=_NOTHING,
    leaving=_NOBODY,
    functions=_NOTHING,
    short=_NOTHING,
    groups=_NOTHING,
    names=_NOTHING,
    models=_NOTHING,
    resources=_NOBODY,
    devices=_NOTHING,
    by_id=_NOTHING,
    owners=_NOTHING,
    polled=_NOTHING,
)
"""Of a state in which nothing is known."""

_SORTED: Final = ("functions", "names", "devices", "polled")
"""By their keys. Which of several is taken must not hang on the order in which they came, nor on how they hash."""


def index_of(state: NodeState) -> Index:
    """The index of exactly this state."""
    index, ledger = state.index, state.ledger
    if (
        index.facts is state.facts
        and index.resolved is state.resolved
        and index.entries is ledger.entries
        and index.claims is ledger.claims
        and index.served == state.served.keys()
        and index.leaving == state.polls.leaving
        and index.frames is state.frames
    ):
        return index
    return _refreshed(index, state)


def indexed(state: NodeState) -> NodeState:
    """`state` with its index, for all who come later."""
    index = index_of(state)
    return state if index is state.index else replace(state, index=index)


def check_index(state: NodeState) -> None:
    """Raises AssertionError if what is carried is not what would be derived from nothing, or not in the order that it
    has: a bug, which tests and simulation look for after every step."""
    fresh = index_of(replace(state, index=NO_INDEX))
    differ = [f.name for f in fields(Index) if getattr(state.index, f.name) != getattr(fresh, f.name)]
    assert not differ, f"of the index {', '.join(differ)} is stale"
    unsorted = [name for name in _SORTED if list(m := getattr(state.index, name)) != sorted(m)]
    assert not unsorted, f"of the index {', '.join(unsorted)} is not sorted"


def _refreshed(before: Index, state: NodeState) -> Index:
    index = before if before.facts is state.facts else _with_facts(before, state)
    if (
        index.resolved is not state.resolved
        or index.entries is not state.ledger.entries
        or index.claims is not state.ledger.claims
    ):
        owners = _owners(index, state)
        index = replace(index, entries=state.ledger.entries, claims=state.ledger.claims, owners=owners)
    if (
        index.functions is not before.functions
        or index.resolved is not state.resolved
        or index.served != state.served.keys()
        or index.frames.keys() != state.frames.keys()
    ):
        index = _with_devices(index, state)
    if index.frames is not state.frames:
        index = replace(index, frames=state.frames)
    if (
        index.devices is not before.devices
        or index.resolved is not before.resolved
        or not _are_listed_alike(before.frames, index.frames)
    ):
        index = replace(index, by_id=_by_id(index))
    if index.devices is not before.devices or index.leaving != state.polls.leaving:
        index = replace(index, leaving=state.polls.leaving, polled=_polled(index, state.polls.leaving))
    return index


def _with_facts(index: Index, state: NodeState) -> Index:
    """After looks: most of them find what was known, and change nothing but the look's number. What they did not change
    is the very object that it was."""
    short = {a: f.short for a, f in state.facts.items() if f.short}
    index = replace(index, facts=state.facts, short=index.short if short == index.short else short)
    there = {a: f.function for a, f in state.facts.items() if f.function is not None}
    changed = changed_keys(index.functions, there)
    if not changed:
        return index
    functions = functions_of(state.facts)
    names = {a: name for a, name in index.names.items() if a not in changed}
    names |= {
        a: named(f)
        for a in changed
        if (f := functions.get(a)) is not None and is_selected(state.settings.selectors, f)
    }
    names = dict(sorted(names.items()))
    models = _models(names, functions)
    touched = {
        f.iommu_group for a in changed for f in (index.functions.get(a), functions.get(a)) if f is not None
    }
    groups = {g: members for g, members in index.groups.items() if g not in touched}
    groups |= groups_of(f for f in functions.values() if f.iommu_group in touched)
    return replace(
        index,
        functions=functions,
        groups=groups,
        names=names,
        models=models if models != index.models else index.models,
    )


def _models(
    names: Mapping[PciAddress, ResourceName], functions: Mapping[PciAddress, PciFunction]
) -> dict[ResourceName, frozenset[str]]:
    models: dict[ResourceName, set[str]] = {}
    for address, name in names.items():
        models.setdefault(name, set()).add(ids_of(functions[address]))
    return {name: frozenset(of_name) for name, of_name in models.items()}


def _with_devices(index: Index, state: NodeState) -> Index:
    """After looks, reads of the ledger and lists: what they come to together."""
    of_pods = {r for r, _ in state.resolved if r in state.served}
    resources = {*index.names.values(), *state.frames, *of_pods}
    given: dict[PciAddress, set[ResourceName]] = {}
    for (resource, _), meant in state.resolved.items():
        function = index.functions.get(meant.address)
        if function is not None and resource in resources and ids_of(function) in (meant.ids, ""):
            given.setdefault(meant.address, set()).add(resource)
    names = index.names
    kept = {a: min(r) for a, r in given.items() if names.get(a) not in r}
    devices = devices_named({**names, **kept}, index.functions, index.groups, index.devices)
    same = devices.keys() == index.devices.keys() and all(d is index.devices[a] for a, d in devices.items())
    return replace(
        index,
        resolved=state.resolved,
        served=frozenset(state.served),
        frames=state.frames,
        resources=resources if resources != index.resources else index.resources,
        devices=index.devices if same else devices,
    )


def _owners(index: Index, state: NodeState) -> Mapping[PciAddress, Owner]:
    """As they were, but for the devices of those entries that are not what they were."""
    names = changed_keys(index.resolved, state.resolved) | changed_keys(index.entries, state.ledger.entries)
    touched = changed_keys(index.claims, state.ledger.claims)
    touched |= {
        m.address for r in (index.resolved, state.resolved) for n in names if (m := r.get(n)) is not None
    }
    if not touched:
        return index.owners
    owners = {a: owner for a, owner in index.owners.items() if a not in touched}
    return owners | owners_of(touched, state.ledger.claims, state.resolved, state.ledger.entries)


def _listed_otherwise(frame: Frame) -> dict[DeviceId, PciAddress]:
    """What is listed by another ID than its PCI address."""
    return {a.id: a.address for a in frame if a.id != DeviceId(a.address)}


def _are_listed_alike(before: Mapping[ResourceName, Frame], now: Mapping[ResourceName, Frame]) -> bool:
    """By the same IDs, as far as these are no PCI addresses, whatever is said of them."""
    return all(
        (was := before.get(r, ())) is (frame := now.get(r, ()))
        or _listed_otherwise(was) == _listed_otherwise(frame)
        for r in before.keys() | now.keys()
    )


def _by_id(index: Index) -> Mapping[ResourceName, Mapping[DeviceId, Device]]:
    """An ID means what it was given for; only if it was not, what is listed by it."""
    devices: dict[ResourceName, dict[DeviceId, Device]] = {}
    for address, device in index.devices.items():
        devices.setdefault(device.resource, {})[DeviceId(address)] = device
    ids = {r: _listed_otherwise(index.frames.get(r, ())) for r in devices}
    for (resource, device_id), meant in index.resolved.items():
        if resource in ids:
            ids[resource][device_id] = meant.address
    return {
        r: own | {i: own[by_address] for i, a in ids[r].items() if (by_address := DeviceId(a)) in own}
        for r, own in devices.items()
    }


def _polled(index: Index, leaving: frozenset[PciAddress]) -> Mapping[int, tuple[PciAddress, ...]]:
    wanted = {
        d.function.iommu_group
        for d in index.devices.values()
        if d.function.vfio_bound or may_be_unbinding(d.function)
    }
    groups = {
        group: tuple(f.address for f in index.groups[group] if f.vfio_bound or f.address in leaving)
        for group in sorted(g for g in wanted if g is not None)
    }
    polled = {group: functions for group, functions in groups.items() if functions}
    return index.polled if polled == index.polled else polled


Key = TypeVar("Key")


def changed_keys(before: Mapping[Key, Any], now: Mapping[Key, Any]) -> set[Key]:
    """The keys whose values are not what they were."""
    if before is now:
        return set()
    found = {key for key, value in now.items() if (old := before.get(key)) is not value and old != value}
    return found | (before.keys() - now.keys())
