"""What is derived of the node's state for every event: the inventory, and who has each device.

An index is carried in the state (`NodeState.index`) with the objects that it was derived from. So a comparison by
identity shows whether it belongs to this state, and a stale one cannot be read: `index_of` brings it up to date. Each
part is made by a function of `inventory.py` or `holdings.py`, of which the arguments are all that it follows from.

Must not judge: owner and status of a device are decided in `assessment/`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Final

from gpuactors.core.devices.holdings import holdings, unresolved
from gpuactors.core.devices.inventory import by_id, devices, inventory, meanings, polled
from gpuactors.core.state import NodeState, Published
from gpuactors.core.state.index import NO_INDEX, Devices, Holdings, Index, Inventory, Meanings
from gpuactors.core.values.model import DeviceId, DeviceList, PciAddress, ResourceName
from gpuactors.core.values.remade import remade, same_if_equal

_SORTED: Final = ("functions", "names", "devices", "polled")
"""The mappings that are sorted by their keys. A choice among several values must not depend on the order in which they
came, nor on their hashes."""


def index_of(state: NodeState) -> Index:
    """The index of exactly this state."""
    index, held, ledger = state.index, state.index.held, state.kubelet.ledger
    if (
        index.known.functions is state.host.functions
        and index.meant.resolved is state.kubelet.resolved
        and held.entries is ledger.entries
        and held.claims is ledger.claims
        and held.reserved is state.claims.reserved
        and held.admin == state.claims.admin
        and held.ended == state.claims.ended
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
    differ = [
        f.name
        for carried, now in zip(_parts(state.index), _parts(fresh), strict=True)
        for f in fields(carried)
        if (value := getattr(now, f.name)) != getattr(carried, f.name) and not is_dataclass(value)
    ]
    assert not differ, f"of the index {', '.join(differ)} is stale"
    unsorted = [name for name in _SORTED if list(m := getattr(state.index, name)) != sorted(m)]
    assert not unsorted, f"of the index {', '.join(unsorted)} is not sorted"


def _parts(index: Index) -> tuple[Inventory | Meanings | Devices | Holdings | Index, ...]:
    return index.known, index.meant, index.of, index.held, index


def _refreshed(before: Index, state: NodeState) -> Index:
    host, ledger, published, claims = state.host, state.kubelet.ledger, state.published, state.claims
    known = inventory(before.known, host.functions, state.daemon.settings.selectors)
    meant = meanings(before.meant, state.kubelet.resolved)
    resources = _resources(before.of.resources, known, meant, published)
    of = devices(before.of, known, meant, resources)
    held = holdings(
        before.held, meant.names, ledger.entries, ledger.claims, claims.reserved, claims.admin, claims.ended
    )
    lists, leaving, observed = published.device_lists, host.polls.leaving, host.polls.groups
    aliases_of, listed_aliases = before.aliases_of, before.listed_aliases
    if before.device_lists is not lists:
        aliases_of = remade(aliases_of, before.device_lists, lists, _aliases)
        listed_aliases = {(r, i): a for r, aliases in aliases_of.items() for i, a in aliases.items()}
        listed_aliases = same_if_equal(before.listed_aliases, listed_aliases)
    same_devices = before.of.devices is of.devices
    return Index(
        known=known,
        meant=meant,
        of=of,
        held=held,
        served=frozenset(published.served),
        device_lists=lists,
        leaving=leaving,
        observed=observed,
        aliases_of=aliases_of,
        listed_aliases=listed_aliases,
        unresolved=before.unresolved
        if before.held is held and before.of.resources is resources
        else unresolved(held.may_mean, resources),
        by_id=before.by_id
        if same_devices and before.aliases is meant.aliases and before.listed_aliases is listed_aliases
        else by_id(of.devices, meant.aliases, listed_aliases),
        polled=before.polled
        if same_devices and before.leaving == leaving
        else polled(before.polled, known.groups, of.devices, leaving),
        in_use=before.in_use
        if before.observed is observed
        else frozenset([group for group, use in observed.items() if use.in_use]),
    )


def _resources(
    before: frozenset[ResourceName], known: Inventory, meant: Meanings, published: Published
) -> frozenset[ResourceName]:
    """As `Devices.resources`."""
    resources = {*known.models, *published.device_lists}
    if others := published.served.keys() - resources:
        resources |= {resource for resource, _ in meant.resolved if resource in others}
    return same_if_equal(before, frozenset(resources))


def _aliases(_: ResourceName, device_list: DeviceList) -> Mapping[DeviceId, PciAddress]:
    return {a.id: a.address for a in device_list if a.id != DeviceId(a.address)}
