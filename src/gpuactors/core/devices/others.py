"""The GPUs that claims of other programs have: those of another DRA driver, and those of our driver's name that are no
claims here.

Kubelet's list names such a device as its driver does, which says nothing of where it is. The device nodes that its CDI
file gives the container do. A claim's file counts without kubelet's list as well: it is there from the prepare to the
unprepare, and its driver may still bind the GPU to another driver. Where nothing says which GPU a name means, each that
it may mean has this `Doubt`: unknown is not free.

Must not judge what an owner means for a device: that is decided in `assessment/`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final

from msgspec import Struct, field

from gpuactors.core.devices.inventory import Inventory
from gpuactors.core.values.cdi import NO_SPECS, CdiSpec, CdiSpecs, is_metadata
from gpuactors.core.values.model import ClaimedDevice, PciAddress, PciFunction, Pod
from gpuactors.core.values.owner import Allocation, Named, OwnClaims, Owner, is_mig_device, owner_of
from gpuactors.core.values.quote import first_of, quoted_id, quoted_name
from gpuactors.core.values.remade import same_if_equal

NVIDIAS_DRIVER: Final = "gpu.nvidia.com"
_NVIDIA: Final = "10de"
_MANAGEMENT: Final = "management.nvidia.com/"
"""Devices that give a container all GPUs to watch over (NVIDIA's container toolkit), and none to use."""
_OF_DOMAINS: Final = r"(?:channel|daemon)-[0-9]+"
"""The devices of compute domains, which are no GPUs. A daemon gets the nodes of all of them, for management."""
_GROUP_NODE: Final = r"/dev/vfio/([0-9]+)"
_NVIDIAS_NODE: Final = r"/dev/nvidia[0-9]+"


class Doubt(Struct, frozen=True, gc=False):
    """An owner of one of several GPUs."""

    owner: Allocation
    among: frozenset[PciAddress]


class Others(Struct, frozen=True, gc=False):
    """What follows from these of the claims of other programs."""

    known: Inventory | None = None
    claims: frozenset[ClaimedDevice] = frozenset()
    """As `Ledger.unplaced`."""
    specs: CdiSpecs = NO_SPECS
    own: OwnClaims = OwnClaims()

    has: Mapping[PciAddress, tuple[Allocation, ...]] = field(default_factory=dict)
    """The GPUs that they have."""
    doubts: tuple[Doubt, ...] = ()


NO_OTHERS: Final = Others()


def others(
    before: Others, known: Inventory, claims: frozenset[ClaimedDevice], specs: CdiSpecs, own: OwnClaims
) -> Others:
    """`claims`: the devices that kubelet lists by names that are no PCI addresses."""
    if before.known is known and before.claims is claims and before.specs is specs and before.own is own:
        return before
    has: dict[PciAddress, list[Allocation]] = {}
    doubts: list[Doubt] = [
        Doubt(_allocation(claimed, _TAKEN_OVER), _all_of(known, claimed.driver)) for claimed in own.unplaced
    ]
    by_id = {device: spec for spec in specs.specs for device in spec.devices}
    listed = set[str]()
    for claimed in sorted(claims, key=lambda c: (c.driver, c.claim, c.device, str(c.pod))):
        listed.update(claimed.cdi_ids)
        if not (own.knows(claimed) or re.fullmatch(_OF_DOMAINS, claimed.device)):
            _place(known, claimed, by_id, specs, own.driver, has, doubts)
    for spec in specs.specs:
        if spec.nodes and spec.claim and spec.claim not in own.uids and listed.isdisjoint(spec.devices):
            claimed = ClaimedDevice(spec.driver, "", spec.path, "", None, spec.claim)
            _place_nodes(known, claimed, spec.nodes, has, doubts, is_certain=True)
    return Others(
        known,
        claims,
        specs,
        own,
        same_if_equal(before.has, {address: tuple(dict.fromkeys(of)) for address, of in has.items()}),
        same_if_equal(before.doubts, tuple(doubts)),
    )


_TAKEN_OVER: Final = "NVIDIA's driver has prepared it, and nothing says which GPU that is"


def _place(
    known: Inventory,
    claimed: ClaimedDevice,
    by_id: Mapping[str, CdiSpec],
    specs: CdiSpecs,
    own_driver: str,
    has: dict[PciAddress, list[Allocation]],
    doubts: list[Doubt],
) -> None:
    """Adds the GPUs of a device that kubelet lists to `has`, or a doubt to `doubts`; nothing if it is no GPU."""
    ids = [i for i in claimed.cdi_ids if not (is_metadata(i) or i.startswith(_MANAGEMENT))]
    found = [by_id[i] for i in ids if i in by_id]
    nodes = dict.fromkeys(node for spec in found for node in spec.nodes)
    if nodes:
        # Of a file of several devices that is no claim's it is not known here which of them has which node.
        is_certain = all(spec.claim or len(spec.devices) == 1 for spec in found)
        _place_nodes(known, claimed, nodes, has, doubts, is_certain=is_certain)
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
    doubts.append(Doubt(_allocation(claimed, why), _all_of(known, claimed.driver)))


def _place_nodes(
    known: Inventory,
    claimed: ClaimedDevice,
    nodes: Iterable[str],
    has: dict[PciAddress, list[Allocation]],
    doubts: list[Doubt],
    *,
    is_certain: bool,
) -> None:
    among = set[PciAddress]()
    for node in nodes:
        gpus = _of_node(known, node)
        if not gpus and re.fullmatch(_NVIDIAS_NODE, node):
            # It is one of those of which the driver does not say the number.
            unnumbered = frozenset(f.address for f in _on_nvidia(known) if not f.host_nodes)
            why = f"it has {node}, and NVIDIA's driver does not say which GPU that is"
            if unnumbered:
                doubts.append(Doubt(_allocation(claimed, why), unnumbered))
        among |= gpus
    if is_certain or len(among) == 1:
        for address in among:
            has.setdefault(address, []).append(_allocation(claimed))
    elif among:
        why = f"{', '.join(first_of(claimed.cdi_ids))} is one of several devices of its CDI file"
        doubts.append(Doubt(_allocation(claimed, why), frozenset(among)))


def _of_node(known: Inventory, node: str) -> set[PciAddress]:
    """The GPUs that a container with this node has: whoever has an IOMMU group has all of its functions."""
    if (match := re.fullmatch(_GROUP_NODE, node)) is not None:
        return {f.address for f in known.groups.get(int(match[1]), ()) if f.address in known.names}
    return {a for a, f in known.functions.items() if node in f.host_nodes or node in f.nodes}


def _allocation(claimed: ClaimedDevice, doubt: str = "") -> Allocation:
    return Allocation(None, claimed.claim, claimed, doubt)


def _all_of(known: Inventory, driver: str) -> frozenset[PciAddress]:
    """Every GPU that a driver may have given away: one of NVIDIA's gives away NVIDIA's."""
    is_nvidias = driver.endswith(".nvidia.com")
    return frozenset(a for a in known.names if not is_nvidias or known.functions[a].vendor in (_NVIDIA, ""))


def _on_nvidia(known: Inventory) -> list[PciFunction]:
    return [f for a in known.names if (f := known.functions[a]).driver == "nvidia"]


def of_ids(known: Inventory, vague: Iterable[Named], entries: Mapping[Named, Pod]) -> list[Doubt]:
    """The doubts by IDs of NVIDIA's device plugin in kubelet's ledger that do not say of which GPU they are.

    That of a MIG device may be of each GPU that is divided, or, where that is not known, that may be. A UUID that no
    GPU is known to have may be of each of which NVIDIA's driver does not say it.
    """
    on_driver = _on_nvidia(known)
    divided = [f for f in on_driver if f.has_parts]
    undetermined = [f for f in on_driver if f.has_parts is None]
    with_parts = frozenset(f.address for f in divided or undetermined or on_driver)
    nameless = frozenset(f.address for f in on_driver if f.gpu_uuid is None)
    return [
        Doubt(Allocation(*name, entries[name], _MIG), with_parts)
        if is_mig_device(name[1])
        else Doubt(Allocation(*name, entries[name], _NAMELESS), nameless)
        for name in sorted(vague)
    ]


_MIG: Final = "the ID of a MIG device does not say of which GPU it is a part"
_NAMELESS: Final = "NVIDIA's driver does not say the UUID of this GPU"


def doubted(
    before: Mapping[PciAddress, Owner], doubts: Iterable[Doubt], owners: Mapping[PciAddress, Owner]
) -> Mapping[PciAddress, Owner]:
    """The GPUs without an owner that one of these may have."""
    found: dict[PciAddress, list[Allocation]] = {}
    for doubt in doubts:
        for address in doubt.among - owners.keys():
            found.setdefault(address, []).append(doubt.owner)
    return same_if_equal(before, {address: owner_of(of) for address, of in sorted(found.items())})
