"""Reads what NVIDIA's driver says of a virtual function that can be a vGPU: its type, and the types that its card could
still make (vendor VFIO: the directory `nvidia/` of the function, vGPU 17 and newer).

A read of these files enters NVIDIA's driver and may block, so it runs where the inspection of the function runs. Must
not read `gpu_instance_id`, `placement_id` or `vgpu_params`, and must not write anything: gpuactors makes no vGPU.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Final

from gpuactors.core.values.vgpu import VGPU_TYPES, VendorVgpu
from gpuactors.host.faults import GONE, raise_if_short

TYPE: Final = "nvidia/current_vgpu_type"
CREATABLE: Final = "nvidia/creatable_vgpu_types"
"""The two attributes, below the directory of the function."""

_NUMBER: Final = re.compile(rb"[0-9]{1,10}")

_NUMBER_FIRST: Final = re.compile(r"([0-9]{1,10})\s*:\s*(\S.*)")
"""A line of the driver of vGPU 17 to 19: `1147  : NVIDIA L40S-1Q`, under the header `ID    : vGPU Name`."""
_NUMBER_LAST: Final = re.compile(r"(\S.*?)\s+([0-9]{1,10})")
"""A line as NVIDIA's documentation shows it: `NVIDIA A40-2Q 558`."""
_HEADER: Final = re.compile(r"(?i)\W*ID\s*:?\s*vGPU\b.*|vGPU\b.*\bID\W*")
_NAME: Final = re.compile(r"[\x20-\x7e]{1,128}")

_PAGE_BYTES: Final = 4095
"""An attribute of sysfs ends here at the latest (fs/sysfs/file.c, sysfs_emit): the last line of a longer list is
cut."""


def read_vgpu(
    path: str, content: Callable[[str], bytes], at_fault: Callable[[str, str], None]
) -> VendorVgpu | None:
    """Return the vGPU facts of the function whose directory is `path`; None if its driver has none.

    `content` reads an attribute by its name below the directory, and raises `OSError`, or `HostError` for want of
    descriptors. `at_fault` is told which file has which problem; the type is None then.
    """
    bind = _driver_bind(path)
    try:
        text = content(TYPE)
    except OSError as error:
        if error.errno in GONE and not os.path.isdir(f"{path}/nvidia"):
            return None
        at_fault(f"{path}/{TYPE}", f"cannot be read ({error.strerror})")
        return VendorVgpu(None, driver_bind=bind)
    number = _number(text.strip())
    if number is None:
        read = text[:32].decode("latin-1")
        at_fault(f"{path}/{TYPE}", f"reads {read!r} instead of the number of a vGPU type")
    try:
        creatable, unlisted = _types(content(CREATABLE), f"{path}/{CREATABLE}")
    except OSError as error:
        creatable, unlisted = (), f"{path}/{CREATABLE} cannot be read ({error.strerror})"
    if _driver_bind(path) != bind:  # the list may be of either bind
        return VendorVgpu(number, unlisted=unlisted)
    return VendorVgpu(number, creatable, unlisted, bind)


def _number(text: bytes) -> int | None:
    if not _NUMBER.fullmatch(text) or (number := int(text)) >= VGPU_TYPES:
        return None
    return number


def _types(content: bytes, path: str) -> tuple[tuple[tuple[int, str], ...], str]:
    """Return the types of such a list, sorted, and what of it makes no sense, as a sentence.

    A number that the list gives two names has none.
    """
    lines = content.decode("latin-1").splitlines()
    if len(content) >= _PAGE_BYTES and not content.endswith(b"\n"):
        del lines[-1:]
    names: dict[int, set[str]] = {}
    unlisted = ""
    for line in filter(None, map(str.strip, lines)):
        if (listed := _type(line)) is not None:
            names.setdefault(listed[0], set()).add(listed[1])
        elif not _HEADER.fullmatch(line):
            unlisted = unlisted or f"{path} has the line {line[:64]!r}, which is no vGPU type"
    if twice := sorted(number for number, of_number in names.items() if len(of_number) > 1):
        unlisted = unlisted or f"{path} has several names for the vGPU type {twice[0]}"
    return tuple(sorted((n, min(of_n)) for n, of_n in names.items() if len(of_n) == 1)), unlisted


def _type(line: str) -> tuple[int, str] | None:
    """Return the number and the name of a line of either form; None if it has neither."""
    if (match := _NUMBER_FIRST.fullmatch(line)) is not None:
        number, name = match[1], match[2]
    elif (match := _NUMBER_LAST.fullmatch(line)) is not None:
        name, number = match[1], match[2]
    else:
        return None
    return (int(number), name) if 0 < int(number) < VGPU_TYPES and _NAME.fullmatch(name) else None


def _driver_bind(path: str) -> int:
    """Return the value of `VendorVgpu.driver_bind`. Raises `HostError` for want of memory."""
    link = f"{path}/physfn/driver"
    try:
        return os.lstat(link).st_ino
    except OSError as error:
        raise_if_short(error, link)
        return 0
