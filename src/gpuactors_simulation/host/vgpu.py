"""The files of a vGPU by NVIDIA's vendor VFIO: `nvidia/` below a virtual function on the driver `nvidia`.

Played from NVIDIA's vGPU user guide and from reports (kubevirt PR #16890, kubevirt-gpu-device-plugin PR #192), as the
driver is not free. Only makes files; `tree.py` says when.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from fractions import Fraction
from pathlib import Path
from typing import Final

from msgspec import Struct

from gpuactors_simulation.host.vfio import clear, write

VGPU_HEADER: Final = "ID    : vGPU Name\n"
"""All that `creatable_vgpu_types` has once a card is full."""

_WITHOUT_VGPU: Final = ("gpu_instance_id", "placement_id")
"""They answer ENXIO without a vGPU: sockets here, which open(2) refuses so."""


class VgpuType(Struct, frozen=True):
    """A type of vGPU of one card."""

    number: int
    """Unique within one card only: `1147`."""
    name: str
    """`NVIDIA L40S-1Q`"""
    instances: int
    """How many of it the card has room for."""


def creatable(types: Iterable[VgpuType], numbers: Iterable[int]) -> tuple[VgpuType, ...]:
    """Return the types that the card still has room for beside those with these `numbers`; 0 is none."""
    by_number = {t.number: t for t in types}
    free = 1 - sum((Fraction(1, by_number[number].instances) for number in numbers if number), Fraction())
    return tuple([t for t in by_number.values() if Fraction(1, t.instances) <= free])


def listed(types: Iterable[VgpuType], *, names_first: bool) -> str:
    """Return `creatable_vgpu_types`: by default as drivers print it (reports), else as NVIDIA's user guide does. On a
    full card only the header is left."""
    if names_first:
        return "".join(f"{t.name} {t.number}\n" for t in types)
    return VGPU_HEADER + "".join(f"{t.number:<6}: {t.name}\n" for t in types)


def make_attributes(function: Path) -> None:
    """Make them for a virtual function without a type, in its directory."""
    directory = function / "nvidia"
    directory.mkdir()
    for name in ("current_vgpu_type", "creatable_vgpu_types", "vgpu_params"):
        write(str(directory / name), "")
    show_type(function, 0)


def show_type(function: Path, number: int) -> None:
    """The function has the type of this number now."""
    directory = function / "nvidia"
    current = directory / "current_vgpu_type"
    write(f"{current}.new", f"{number}\n")
    os.replace(f"{current}.new", current)
    for name in _WITHOUT_VGPU:
        clear(directory / name)
        if number:
            write(str(directory / name), "0\n")
        else:
            os.mknod(directory / name, stat.S_IFSOCK | 0o600)
