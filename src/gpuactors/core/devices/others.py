"""The GPUs that claims of other programs have: claims of another DRA driver, and claims of this driver's name that are
unknown here.

Kubelet's list has the name that the driver gave to such a device, which does not show where it is. The device nodes in
its CDI file do. A claim's file is used without kubelet's list as well: it is there from the prepare to the unprepare,
and its driver may still bind the GPU to another driver. If it is unknown which GPU a name means, every GPU that it may
mean is withheld: unknown is not free.

Must not judge what an owner means for a device: that is decided in `assessment/`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import Final, final

from msgspec import Struct

from gpuactors.core.devices.inventory import Inventory
from gpuactors.core.values.cdi import CdiSpec, CdiSpecs, is_metadata
from gpuactors.core.values.memo import memoized
from gpuactors.core.values.model import (
    ClaimedDevice,
    DeviceKey,
    PciFunction,
    Pod,
    device_key,
    function_address,
)
from gpuactors.core.values.owner import Allocation, Named, OwnClaims, Owner, is_mig_device, owner_of
from gpuactors.core.values.quote import first_of, quoted_id, quoted_name

NVIDIAS_DRIVER: Final = "gpu.nvidia.com"
_NVIDIA: Final = "10de"
_MANAGEMENT: Final = "management.nvidia.com/"
"""The CDI kind of devices that give a container all GPUs to monitor and none to use (NVIDIA's container toolkit)."""
_OF_DOMAINS: Final = r"(?:channel|daemon)-[0-9]+"
"""The names of compute domains' devices, which are no GPUs. A domain's daemon gets the nodes of all GPUs, to manage
them."""
_GROUP_NODE: Final = r"/dev/vfio/([0-9]+)"
_NVIDIAS_NODE: Final = r"/dev/nvidia[0-9]+"


class Placement(Struct, frozen=True, gc=False):
    """The GPUs that an owner has: all of them, or one of them if `Allocation.doubt` is not empty."""

    owner: Allocation
    among: frozenset[DeviceKey]


class Others(Struct, frozen=True, gc=False):
    """The GPUs that claims of other programs have."""

    allocations: Mapping[DeviceKey, tuple[Allocation, ...]]
    """The certain allocations of each GPU."""
    doubts: tuple[Placement, ...]
    """The placements of which it is unknown which GPU the claim has."""


@memoized
def others(
    inventory: Inventory,
    claims: frozenset[ClaimedDevice],
    specs: CdiSpecs,
    own: OwnClaims,
    reserved: Mapping[DeviceKey, object],
) -> Others:
    """Derive the GPUs that claims of other programs have. `claims` are the devices that kubelet lists by names that are
    no PCI addresses, `reserved` those that claims here have for themselves."""
    gpus = _Gpus(inventory, reserved)
    placed = [
        Placement(_allocation(claimed, _TAKEN_OVER), gpus.of_driver(claimed.driver))
        for claimed in own.unplaced
    ]
    by_id = {device: spec for spec in specs.specs for device in spec.devices}
    listed = set[str]()
    for claimed in sorted(claims, key=lambda c: (c.driver, c.claim, c.device, str(c.pod))):
        listed.update(claimed.cdi_ids)
        if not (own.knows(claimed) or re.fullmatch(_OF_DOMAINS, claimed.device)):
            placed += _placed(gpus, claimed, by_id, specs, own.driver)
    for spec in specs.specs:
        if spec.nodes and spec.claim and spec.claim not in own.uids and listed.isdisjoint(spec.devices):
            claimed = ClaimedDevice(spec.driver, "", spec.path, "", None, spec.claim)
            placed += _by_nodes(gpus, claimed, spec.nodes, is_certain=True)
    allocations: dict[DeviceKey, dict[Allocation, None]] = {}
    for placement in placed:
        for address in placement.among if not placement.owner.doubt else ():
            allocations.setdefault(address, {})[placement.owner] = None
    return Others(
        {address: tuple(owners) for address, owners in allocations.items()},
        tuple(placement for placement in placed if placement.owner.doubt),
    )


_TAKEN_OVER: Final = "NVIDIA's driver has prepared it, and nothing says which GPU that is"


@final
class _Gpus:
    """The GPUs of the node, by a device node or by a driver."""

    def __init__(self, inventory: Inventory, reserved: Mapping[DeviceKey, object]) -> None:
        self._inventory = inventory
        self._by_node: dict[str, set[DeviceKey]] = {}
        self._by_former_node: dict[str, set[DeviceKey]] = {}
        for address, function in inventory.functions.items():
            for node in (*function.host_nodes, *function.nodes):
                self._by_node.setdefault(node, set()).add(device_key(address))
            # A claim here binds no GPU that another one has: who has the old node now was given it afterwards.
            for node in function.former_nodes if device_key(address) not in reserved else ():
                self._by_former_node.setdefault(node, set()).add(device_key(address))

    def of_node(self, node: str) -> set[DeviceKey]:
        """Return the GPUs that a container with this device node has: all of an IOMMU group, and the GPU that was bound
        to vfio under the container unless another one has the node now."""
        if (match := re.fullmatch(_GROUP_NODE, node)) is not None:
            members = self._inventory.groups.get(int(match[1]), ())
            return {key for f in members if (key := device_key(f.address)) in self._inventory.names}
        return self._by_node.get(node) or self._by_former_node.get(node, set())

    def may_be_unnumbered(self, node: str) -> bool:
        """Return whether a GPU whose number is unknown may have this node now: no other one is known to."""
        return bool(re.fullmatch(_NVIDIAS_NODE, node) and not self._by_node.get(node) and self.unnumbered)

    def of_driver(self, driver: str) -> frozenset[DeviceKey]:
        """Return every GPU that a driver may have allocated: one of NVIDIA's drivers allocates NVIDIA's GPUs."""
        is_nvidias = driver.endswith(".nvidia.com")
        return frozenset(
            k for k, f in _selected(self._inventory) if not is_nvidias or f.vendor in (_NVIDIA, "")
        )

    @cached_property
    def unnumbered(self) -> frozenset[DeviceKey]:
        """The GPUs on NVIDIA's driver whose node number is unknown."""
        return frozenset(key for key, f in _on_nvidia(self._inventory) if not f.host_nodes)


def _placed(
    gpus: _Gpus, claimed: ClaimedDevice, by_id: Mapping[str, CdiSpec], specs: CdiSpecs, own_driver: str
) -> Iterator[Placement]:
    """Yield the placements of a device that kubelet lists; none if it is no GPU."""
    ids = [i for i in claimed.cdi_ids if not (is_metadata(i) or i.startswith(_MANAGEMENT))]
    specs_of_ids = [by_id[i] for i in ids if i in by_id]
    nodes = dict.fromkeys(node for spec in specs_of_ids for node in spec.nodes)
    if nodes:
        # It is unknown here which node belongs to which device of a file of several devices, unless a claim has it.
        is_certain = all(spec.claim or len(spec.devices) == 1 for spec in specs_of_ids)
        yield from _by_nodes(gpus, claimed, nodes, is_certain=is_certain)
        return
    missing = [i for i in ids if i not in by_id]
    if not missing and (ids or claimed.driver not in (NVIDIAS_DRIVER, own_driver)):
        return  # without the node of a GPU it has no GPU
    listed = f"kubelet lists {quoted_id(claimed.device)} of {quoted_name(claimed.driver)} for it"
    unread = f": {specs.problem}" if specs.problem else ""
    file = (
        f"no file in the CDI directory defines {quoted_name(missing[0])}{unread}"
        if missing
        else "no CDI device"
    )
    why = f"{listed}, {file}, and nothing says which GPU that is"
    yield Placement(_allocation(claimed, why), gpus.of_driver(claimed.driver))


def _by_nodes(
    gpus: _Gpus, claimed: ClaimedDevice, nodes: Iterable[str], *, is_certain: bool
) -> Iterator[Placement]:
    among = set[DeviceKey]()
    for node in nodes:
        of_node = gpus.of_node(node)
        if gpus.may_be_unnumbered(node):
            why = f"it has {node}, and NVIDIA's driver does not say which GPU that is"
            yield Placement(_allocation(claimed, why), gpus.unnumbered)
        among |= of_node
    if is_certain or len(among) == 1:
        yield Placement(_allocation(claimed), frozenset(among))
    elif among:
        why = f"{', '.join(first_of(claimed.cdi_ids))} is one of several devices of its CDI file"
        yield Placement(_allocation(claimed, why), frozenset(among))


def _allocation(claimed: ClaimedDevice, doubt: str = "") -> Allocation:
    return Allocation(None, claimed.claim, claimed, doubt)


def _selected(inventory: Inventory) -> list[tuple[DeviceKey, PciFunction]]:
    """Return the selected devices that are PCI functions: no container has a mediated device."""
    functions = ((key, inventory.functions.get(function_address(key))) for key in inventory.names)
    return [(key, function) for key, function in functions if function is not None]


def _on_nvidia(inventory: Inventory) -> list[tuple[DeviceKey, PciFunction]]:
    """Return the GPUs that containers may have by NVIDIA's driver: a virtual function on it is a vGPU."""
    return [(key, f) for key, f in _selected(inventory) if f.driver == "nvidia" and not f.is_virtual]


def of_ids(inventory: Inventory, vague: Iterable[Named], entries: Mapping[Named, Pod]) -> list[Placement]:
    """Return the placements of IDs of NVIDIA's device plugin that do not show which GPU they belong to.

    The ID of a MIG device may belong to each divided GPU; if none is known to be divided, to each that may be. An
    unknown UUID may belong to each GPU whose UUID is unknown.
    """
    on_driver = _on_nvidia(inventory)
    divided = [key for key, f in on_driver if f.has_parts]
    undetermined = [key for key, f in on_driver if f.has_parts is None]
    with_parts = frozenset(divided or undetermined or [key for key, _ in on_driver])
    nameless = frozenset(key for key, f in on_driver if f.gpu_uuid is None)
    return [
        Placement(Allocation(*name, entries[name], _MIG), with_parts)
        if is_mig_device(name[1])
        else Placement(Allocation(*name, entries[name], _NAMELESS), nameless)
        for name in sorted(vague)
    ]


_MIG: Final = "the ID of a MIG device does not say of which GPU it is a part"
_NAMELESS: Final = "NVIDIA's driver does not say the UUID of this GPU"


def doubted(doubts: Iterable[Placement], owners: Mapping[DeviceKey, Owner]) -> Mapping[DeviceKey, Owner]:
    """Return the possible owners of the GPUs without an owner, sorted by key."""
    doubts_of: dict[DeviceKey, list[Allocation]] = {}
    for doubt in doubts:
        for address in doubt.among - owners.keys():
            doubts_of.setdefault(address, []).append(doubt.owner)
    return {address: owner_of(allocations) for address, allocations in sorted(doubts_of.items())}
