"""The GPUs that claims of other programs have: those of another DRA driver, and those of our driver's name that are no
claims here.

Kubelet's list names such a device as its driver does, which says nothing of where it is. The device nodes that its CDI
file gives the container do. A claim's file counts without kubelet's list as well: it is there from the prepare to the
unprepare, and its driver may still bind the GPU to another driver. Where nothing says which GPU a name means, each that
it may mean is withheld: unknown is not free.

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
"""Devices that give a container all GPUs to watch over (NVIDIA's container toolkit), and none to use."""
_OF_DOMAINS: Final = r"(?:channel|daemon)-[0-9]+"
"""The devices of compute domains, which are no GPUs. A daemon gets the nodes of all of them, for management."""
_GROUP_NODE: Final = r"/dev/vfio/([0-9]+)"
_NVIDIAS_NODE: Final = r"/dev/nvidia[0-9]+"


class Placement(Struct, frozen=True, gc=False):
    """The GPUs that an owner has: each of them, or, where there is a doubt (`Allocation.doubt`), one of them."""

    owner: Allocation
    among: frozenset[DeviceKey]


class Others(Struct, frozen=True, gc=False):
    """What the claims of other programs have."""

    has: Mapping[DeviceKey, tuple[Allocation, ...]]
    """The GPUs that they have."""
    doubts: tuple[Placement, ...]
    """The GPUs of which they have one."""


@memoized
def others(known: Inventory, claims: frozenset[ClaimedDevice], specs: CdiSpecs, own: OwnClaims) -> Others:
    """`claims`: the devices that kubelet lists by names that are no PCI addresses."""
    gpus = _Gpus(known)
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
    has: dict[DeviceKey, dict[Allocation, None]] = {}
    for one in placed:
        for address in one.among if not one.owner.doubt else ():
            has.setdefault(address, {})[one.owner] = None
    return Others(
        {address: tuple(owners) for address, owners in has.items()},
        tuple(one for one in placed if one.owner.doubt),
    )


_TAKEN_OVER: Final = "NVIDIA's driver has prepared it, and nothing says which GPU that is"


@final
class _Gpus:
    """The GPUs of the node by what a file or a driver says of one."""

    def __init__(self, known: Inventory) -> None:
        self._known = known
        self._by_node: dict[str, set[DeviceKey]] = {}
        for address, function in known.functions.items():
            for node in (*function.host_nodes, *function.nodes):
                self._by_node.setdefault(node, set()).add(device_key(address))

    def of_node(self, node: str) -> set[DeviceKey]:
        """Those that a container with this node has: whoever has an IOMMU group has all of its functions."""
        if (match := re.fullmatch(_GROUP_NODE, node)) is not None:
            members = self._known.groups.get(int(match[1]), ())
            return {key for f in members if (key := device_key(f.address)) in self._known.names}
        return self._by_node.get(node, set())

    def of_driver(self, driver: str) -> frozenset[DeviceKey]:
        """Every one that a driver may have given away: one of NVIDIA's gives away NVIDIA's."""
        is_nvidias = driver.endswith(".nvidia.com")
        return frozenset(k for k, f in _selected(self._known) if not is_nvidias or f.vendor in (_NVIDIA, ""))

    @cached_property
    def unnumbered(self) -> frozenset[DeviceKey]:
        """Those of which NVIDIA's driver does not say the number of the node."""
        return frozenset(key for key, f in _on_nvidia(self._known) if not f.host_nodes)


def _placed(
    gpus: _Gpus, claimed: ClaimedDevice, by_id: Mapping[str, CdiSpec], specs: CdiSpecs, own_driver: str
) -> Iterator[Placement]:
    """Where a device is that kubelet lists; nothing if it is no GPU."""
    ids = [i for i in claimed.cdi_ids if not (is_metadata(i) or i.startswith(_MANAGEMENT))]
    found = [by_id[i] for i in ids if i in by_id]
    nodes = dict.fromkeys(node for spec in found for node in spec.nodes)
    if nodes:
        # Of a file of several devices that is no claim's it is not known here which of them has which node.
        is_certain = all(spec.claim or len(spec.devices) == 1 for spec in found)
        yield from _by_nodes(gpus, claimed, nodes, is_certain=is_certain)
        return
    missing = [i for i in ids if i not in by_id]
    if not missing and (ids or claimed.driver not in (NVIDIAS_DRIVER, own_driver)):
        return  # it has no GPU's node, and so no GPU
    said = f"kubelet lists {quoted_id(claimed.device)} of {quoted_name(claimed.driver)} for it"
    unread = f": {specs.problem}" if specs.problem else ""
    file = (
        f"no file in the CDI directory defines {quoted_name(missing[0])}{unread}"
        if missing
        else "no CDI device"
    )
    why = f"{said}, {file}, and nothing says which GPU that is"
    yield Placement(_allocation(claimed, why), gpus.of_driver(claimed.driver))


def _by_nodes(
    gpus: _Gpus, claimed: ClaimedDevice, nodes: Iterable[str], *, is_certain: bool
) -> Iterator[Placement]:
    among = set[DeviceKey]()
    for node in nodes:
        of_node = gpus.of_node(node)
        if not of_node and re.fullmatch(_NVIDIAS_NODE, node) and gpus.unnumbered:
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


def _selected(known: Inventory) -> list[tuple[DeviceKey, PciFunction]]:
    return [(key, known.functions[function_address(key)]) for key in known.names]


def _on_nvidia(known: Inventory) -> list[tuple[DeviceKey, PciFunction]]:
    return [(key, f) for key, f in _selected(known) if f.driver == "nvidia"]


def of_ids(known: Inventory, vague: Iterable[Named], entries: Mapping[Named, Pod]) -> list[Placement]:
    """The doubts by IDs of NVIDIA's device plugin in kubelet's ledger that do not say of which GPU they are.

    That of a MIG device may be of each GPU that is divided, or, where that is not known, that may be. A UUID that no
    GPU is known to have may be of each of which NVIDIA's driver does not say it.
    """
    on_driver = _on_nvidia(known)
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
    """The GPUs without an owner that one of these may have, sorted by key."""
    found: dict[DeviceKey, list[Allocation]] = {}
    for doubt in doubts:
        for address in doubt.among - owners.keys():
            found.setdefault(address, []).append(doubt.owner)
    return {address: owner_of(of) for address, of in sorted(found.items())}
