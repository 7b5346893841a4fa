"""The vGPU facts of a virtual function: what NVIDIA's driver says of it (vendor VFIO, vGPU 17 and newer).

A file of its own: the functions of the host, the memory of names and the kind have it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final

from msgspec import Struct

from gpuactors.core.values.selector import full_address

VGPU_TYPES: Final = 1 << 32
"""The numbers of vGPU types are below this: an unsigned int of NVIDIA's driver (NvU32). 0 is none."""


class VendorVgpu(Struct, frozen=True, gc=False):
    """The attributes in the directory `nvidia/` of a virtual function, as an inspection read them."""

    type: int | None
    """The number of the vGPU type that the function has, 0 for none; None if it could not be read. The number means a
    type of one physical card only."""
    creatable: tuple[tuple[int, str], ...] = ()
    """The types that could be set now, by number, each with its name: `(1147, "NVIDIA L40S-1Q")`. Empty once the card
    is full."""
    unlisted: str = ""
    """The part of the list of types that could not be read, as a sentence; empty if all could."""
    driver_bind: int = 0
    """The inode number of the link `driver` of the physical function, which the kernel never reuses (fs/kernfs,
    kernfs_ino): it changes when a driver is bound anew. On Linux 6.18 a link that was made three times had 143015,
    143092 and 143169. 0 if unknown."""
    made_by: str = ""
    """Another program that has set the type for a use of its own, as `MediatedDevice.made_by`."""

    @property
    def is_typed(self) -> bool:
        """True if the function has a vGPU type."""
        return bool(self.type)


class CardTypes(Struct, frozen=True, gc=False):
    """The names of the vGPU types of one physical card, as the lists of its virtual functions have had them since its
    driver was bound."""

    driver_bind: int
    """The same as `VendorVgpu.driver_bind`."""
    names: Mapping[int, tuple[str, ...]]
    """The name of each type, by its number. Several where the present lists of the card contradict each other: the
    number has no name then."""


class OwnVgpuType(Struct, frozen=True, gc=False):
    """The operator's name of a vGPU type: `vgpu_type` of the settings."""

    card: str | None
    """The PCI address of the physical function; None for every card."""
    number: int
    name: str

    def __str__(self) -> str:
        return f"{self.card}/{self.number}={self.name}" if self.card else f"{self.number}={self.name}"


def names_of(
    vgpu: VendorVgpu | None, card: str | None, types: CardTypes | None, own: Iterable[OwnVgpuType]
) -> tuple[str, ...]:
    """Return the name of the function's vGPU type: the operator's, for this card before one for every card, else that
    of the card's lists. Empty if it has no type or no name; several if the lists contradict each other.

    `card` is the function's physical function, and `types` are those of this card. The types of another bind of its
    driver say nothing: the same number may mean another type. Then only the function's own list counts, which was read
    with its type: so it is of a card that is being unplugged while its virtual function is in use.
    """
    if vgpu is None or not vgpu.type:
        return ()
    names = {o.card: o.name for o in own if o.number == vgpu.type and o.card in (None, card)}
    if names:
        return (names.get(card) or names[None],)
    if types is None or types.driver_bind != vgpu.driver_bind:
        return tuple(sorted({name for number, name in vgpu.creatable if number == vgpu.type}))
    return types.names.get(vgpu.type, ())


_OWN: Final = re.compile(
    r"(?:(?P<card>[0-9A-Fa-f:.]+)/)?(?P<number>[0-9]{1,10})=(?P<name>[\x20-\x7e]{1,128})"
)


def parse_own_type(text: str) -> OwnVgpuType:
    """Read `[ADDRESS/]NUMBER=NAME`, the operator's name of a vGPU type. Raises ValueError with a sentence that says how
    to write it."""
    match = _OWN.fullmatch(text.strip())
    card = full_address(match["card"]) if match is not None and match["card"] else None
    if (
        match is None
        or (match["card"] and card is None)
        or not 0 < int(match["number"]) < VGPU_TYPES
        or not (name := match["name"].strip())
    ):
        raise ValueError(
            f"{text!r} is not [ADDRESS/]NUMBER=NAME; write for example 1147=NVIDIA L40S-1Q, or for one card "
            "0000:3b:00.0/1147=NVIDIA L40S-1Q"
        )
    return OwnVgpuType(card, int(match["number"]), name)
