"""What is derived of the node's functions, devices and owners, from the parts of the state that it follows from.

Each part is made by a function of `inventory.py` or `holdings.py`, of which the arguments are all that it follows from,
and stays the same object as long as these do. `NodeState.index` is that of its state.

Must not judge: owner and status of a device are decided in `assessment/`.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Final

from msgspec import Struct, field

from gpuactors.core.devices.holdings import NO_HOLDINGS, Holdings, holdings, owned, unresolved
from gpuactors.core.devices.inventory import (
    NO_DEVICES,
    NOTHING_KNOWN,
    NOTHING_MEANT,
    Devices,
    Inventory,
    Meanings,
    by_id,
    devices,
    inventory,
    meanings,
    polled,
)
from gpuactors.core.devices.others import NO_OTHERS, Others, doubted, of_ids, others
from gpuactors.core.values.group import GroupKey, Owned
from gpuactors.core.values.inventory import Device
from gpuactors.core.values.model import (
    AdminAccess,
    ClaimedDevice,
    DeviceId,
    DeviceKey,
    DeviceList,
    Ledger,
    Observed,
    PciAddress,
    PciFunction,
    Polls,
    Resolved,
    ResourceName,
    differences,
)
from gpuactors.core.values.owner import Named, OwnClaims, Owner
from gpuactors.core.values.remade import amended, same_if_equal
from gpuactors.core.values.selector import Selector


class Index(Struct, frozen=True, gc=False):
    """The four parts, and what follows from several."""

    known: Inventory = NOTHING_KNOWN
    meant: Meanings = NOTHING_MEANT
    of: Devices = NO_DEVICES
    others: Others = NO_OTHERS
    held: Holdings = NO_HOLDINGS
    served: frozenset[ResourceName] = frozenset()
    """Without their models."""
    device_lists: Mapping[ResourceName, DeviceList] = field(default_factory=dict)
    leaving: frozenset[PciAddress] = frozenset()
    """As `Polls.leaving`."""
    observed: Mapping[int, Observed] = field(default_factory=dict)
    """As `Polls.groups`."""

    listed_aliases: Mapping[Named, DeviceKey] = field(default_factory=dict)
    """The devices that are listed by another ID than their PCI address."""
    unresolved: frozenset[Named] = frozenset()
    """The names in kubelet's ledger that mean no known device, and may come to mean one: a PCI address, an ID of a
    resource that is served here, or one of NVIDIA's device plugin for containers. Of all others, which may be
    thousands, no device is ever looked for."""
    by_id: Mapping[ResourceName, Mapping[DeviceId, Device]] = field(default_factory=dict)
    """The devices of each resource by the IDs that kubelet may use: the listed and allocated IDs, and the PCI
    address."""
    polled: Mapping[int, tuple[PciAddress, ...]] = field(default_factory=dict)
    """The groups with a device that is on a vfio driver, or may be leaving one, sorted, with the functions that a
    virtual machine can have open: those on a vfio driver, and those that are leaving one."""
    doubted: Mapping[DeviceKey, Owner] = field(default_factory=dict)
    """The devices without an owner that somebody may have who has one of several, sorted by address."""
    having: Mapping[DeviceKey, Owner] = field(default_factory=dict)
    """The owners, and those who may be one."""
    owned: Mapping[GroupKey, Owned] = field(default_factory=dict)
    """Who has each group, or may have it, by the word of kubelet, and by ours."""
    in_use: frozenset[int] = frozenset()
    """The groups that were in use when they were last polled."""

    @property
    def functions(self) -> Mapping[PciAddress, PciFunction]:
        return self.known.functions

    @property
    def groups(self) -> Mapping[int, tuple[PciFunction, ...]]:
        return self.known.groups

    @property
    def switches(self) -> frozenset[PciAddress]:
        return self.known.switches

    @property
    def names(self) -> Mapping[DeviceKey, ResourceName]:
        return self.known.names

    @property
    def models(self) -> Mapping[ResourceName, frozenset[str]]:
        return self.known.models

    @property
    def uuids(self) -> Mapping[str, DeviceKey]:
        return self.known.uuids

    @property
    def resolved(self) -> Mapping[Named, Resolved]:
        return self.meant.resolved

    @property
    def resolved_by(self) -> Mapping[DeviceKey, tuple[Named, ...]]:
        return self.meant.names

    @property
    def aliases(self) -> Mapping[Named, DeviceKey]:
        return self.meant.aliases

    @property
    def inspected_always(self) -> frozenset[PciAddress]:
        return self.meant.inspected_always

    @property
    def unsettled(self) -> frozenset[Named]:
        return self.meant.unsettled

    @property
    def resources(self) -> frozenset[ResourceName]:
        return self.of.resources

    @property
    def devices(self) -> Mapping[DeviceKey, Device]:
        return self.of.devices

    @property
    def unbinding(self) -> frozenset[DeviceKey]:
        return self.of.unbinding

    @property
    def owners(self) -> Mapping[DeviceKey, Owner]:
        return self.held.owners

    @property
    def given(self) -> Mapping[ResourceName, frozenset[DeviceId]]:
        return self.held.given

    @property
    def unlisted(self) -> frozenset[Named]:
        return self.held.unlisted


NO_INDEX: Final = Index()
"""Of a state in which nothing is known."""


def index(
    before: Index,
    functions: Mapping[PciAddress, PciFunction],
    selectors: tuple[Selector, ...],
    polls: Polls,
    resolved: Mapping[Named, Resolved],
    ledger: Ledger,
    reserved: Mapping[DeviceKey, ClaimedDevice],
    admin: frozenset[AdminAccess],
    ended: frozenset[tuple[str, str]],
    own: OwnClaims,
    served: Mapping[ResourceName, frozenset[str]],
    device_lists: Mapping[ResourceName, DeviceList],
) -> Index:
    """The index of these; `before`: the one that was made last, of the same selectors."""
    held = before.held
    if (
        before.known.functions is functions
        and before.meant.resolved is resolved
        and held.entries is ledger.entries
        and held.claims is ledger.claims
        and held.reserved is reserved
        and held.admin == admin
        and held.ended == ended
        and before.others.own is own
        and before.others.claims is ledger.unplaced
        and before.others.specs is ledger.cdi
        and before.served == served.keys()
        and before.leaving == polls.leaving
        and before.device_lists is device_lists
        and before.observed is polls.groups
    ):
        return before
    known = inventory(before.known, functions, selectors)
    meant = meanings(before.meant, resolved)
    resources = _resources(before.of.resources, known, meant, served.keys(), device_lists.keys())
    of = devices(before.of, known, meant, resources)
    of_others = others(before.others, known, ledger.unplaced, ledger.cdi, own)
    held = holdings(held, meant, ledger.entries, ledger.claims, reserved, admin, ended, of_others.has)
    doubts = (*of_others.doubts, *(of_ids(known, held.vague, held.entries) if held.vague else ()))
    in_doubt = doubted(before.doubted, doubts, held.owners)
    having = held.owners if not in_doubt else same_if_equal(before.having, {**held.owners, **in_doubt})
    leaving, observed = polls.leaving, polls.groups
    listed_aliases = before.listed_aliases
    if before.device_lists is not device_lists:
        listed_aliases = amended(listed_aliases, _aliases(before.device_lists, device_lists))
    same_devices = before.of.devices is of.devices
    return Index(
        known=known,
        meant=meant,
        of=of,
        others=of_others,
        held=held,
        doubted=in_doubt,
        having=having,
        served=frozenset(served),
        device_lists=device_lists,
        leaving=leaving,
        observed=observed,
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
        owned=before.owned
        if before.having is having and before.known.group_of is known.group_of
        else owned(before.owned, (before.having, before.known), having, known),
        in_use=before.in_use
        if before.observed is observed
        else frozenset([group for group, use in observed.items() if use.in_use]),
    )


def _resources(
    before: frozenset[ResourceName],
    known: Inventory,
    meant: Meanings,
    served: Set[ResourceName],
    device_lists: Set[ResourceName],
) -> frozenset[ResourceName]:
    """As `Devices.resources`."""
    resources = {*known.models, *device_lists}
    if others := served - resources:
        resources |= {resource for resource, _ in meant.resolved if resource in others}
    return same_if_equal(before, frozenset(resources))


def _aliases(
    before: Mapping[ResourceName, DeviceList], now: Mapping[ResourceName, DeviceList]
) -> dict[Named, DeviceKey | None]:
    """The changes of `Index.listed_aliases` with these lists; None: one that is none any more."""
    return {
        (resource, entry.id): entry.address if entry is listed and entry.is_alias else None
        for resource in before.keys() | now.keys()
        for was, listed in differences(before.get(resource, ()), now.get(resource, ()))
        for entry in (was, listed)
        if entry is not None
    }
