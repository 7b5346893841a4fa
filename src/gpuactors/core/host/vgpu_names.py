"""The names of vGPU types: which name a number has on a card, remembered once a list of NVIDIA's driver had it.

A virtual function shows the number of its type, and the lists show the names of those types only that could be set now:
of a card that is full they show none. The number means a type of one physical card, as long as its driver stays bound.
So the lists of all virtual functions of a card are merged, by the card and the bind of its driver.

Must not decide what a name means for a device: that is `kinds/vgpu.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gpuactors.core.values.model import Functions, PciAddress, PciFunction
from gpuactors.core.values.vgpu import CardTypes, VendorVgpu


def learned(
    known: Mapping[PciAddress, CardTypes], functions: Functions, changed: Iterable[PciFunction | None]
) -> Mapping[PciAddress, CardTypes]:
    """Return the names after an inspection that has `changed` these of the `functions`; the same object if none
    changed."""
    of_card: dict[PciAddress, list[VendorVgpu]] = {
        function.physical: []
        for function in changed
        if function is not None and function.physical is not None and function.vgpu is not None
    }
    if not of_card:
        return known
    for function in functions.values():
        if function.vgpu is not None and function.physical in of_card:
            of_card[function.physical].append(function.vgpu)
    after = dict(known)
    for card, vgpus in of_card.items():
        if (types := _of_card(known.get(card), vgpus)) is not None:
            after[card] = types
    return known if after == known else dict(sorted(after.items()))


def remembered(
    known: Mapping[PciAddress, CardTypes], before: Mapping[PciAddress, CardTypes]
) -> Mapping[PciAddress, CardTypes]:
    """Return the `known` names with those that an earlier daemon of this boot has kept: they count where the driver has
    not been bound anew since. What this daemon has read itself comes first."""
    after = dict(known)
    for card, types in before.items():
        own = known.get(card)
        if own is None:
            after[card] = types
        elif own.driver_bind == types.driver_bind:
            after[card] = CardTypes(own.driver_bind, {**types.names, **own.names})
    return known if after == known else dict(sorted(after.items()))


def _of_card(known: CardTypes | None, vgpus: Iterable[VendorVgpu]) -> CardTypes | None:
    """Return the names of one card; None if no bind of its driver is known.

    The kernel's inode numbers grow, so the greatest is the newest bind; a function with another one has not been
    inspected since. The present lists come before what is remembered: if they agree on a name, they are newer.
    """
    vgpus = [vgpu for vgpu in vgpus if vgpu.driver_bind]
    if not vgpus:
        return known
    bind = max(vgpu.driver_bind for vgpu in vgpus)
    present: dict[int, set[str]] = {}
    for vgpu in vgpus:
        for number, name in vgpu.creatable if vgpu.driver_bind == bind else ():
            present.setdefault(number, set()).add(name)
    kept = known.names if known is not None and known.driver_bind == bind else {}
    names = {**kept, **{number: tuple(sorted(of_number)) for number, of_number in present.items()}}
    return CardTypes(bind, dict(sorted(names.items())))
