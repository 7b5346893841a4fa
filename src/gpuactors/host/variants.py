"""Reads which selected functions the kernel has a variant of vfio-pci for, such as `nvgrace_gpu_vfio_pci`.

Synchronous. Reads `modalias` alone, which never blocks. Must not load a module.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Final

from msgspec import Struct

from gpuactors.core.values.model import PciAddress
from gpuactors.host import modules
from gpuactors.host.best_effort import text_of
from gpuactors.host.root import PCI_DEVICES, HostRoot

_MODALIAS_BYTES: Final = 256

EGM_MODULE: Final = "nvgrace_egm"
"""The module that makes EGMs, in NVIDIA's newer kernels; in older ones the variant driver itself does."""


class Variant(Struct, frozen=True):
    """The variant driver of one function."""

    address: PciAddress
    driver: str
    """The name of its module, by the kernel's modules.alias."""
    is_loaded: bool


def read(root: HostRoot, functions: Iterable[PciAddress]) -> tuple[Variant, ...]:
    """Return the variant of each function that has one; none where the kernel's modules are not to be seen, as in a
    pod. Raises `HostShortError`."""
    found = []
    for address in functions:
        modalias = text_of(root.real(f"{PCI_DEVICES}/{address}/modalias"), _MODALIAS_BYTES).strip()
        driver = modules.vfio_driver(root, modalias)
        if driver != modules.DEFAULT:
            found.append(Variant(address, driver, modules.loaded(root, driver) is not None))
    return tuple(found)


def lacks_egm_module(root: HostRoot) -> bool:
    """Return whether the kernel has the module of EGM, and it is not loaded; False where that is not known. Raises
    `HostShortError`."""
    return bool(modules.is_installed(root, EGM_MODULE)) and not os.path.isdir(
        root.real(f"/sys/module/{EGM_MODULE}")
    )
