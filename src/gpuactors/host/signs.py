"""Reads the passive signs that a PCI function is dead, and the ways in which the kernel can reset it
(docs/dev/adr/0024-a-dead-gpu-is-known-by-passive-signs.md).

Must not wake a function or its bridge, and must not read where it would wait for a reset: a read of `config` resumes a
suspended bridge and a function in D3cold (drivers/pci/pci.c, pci_config_pm_runtime_get), and waits while the kernel
resets the function (drivers/pci/access.c, pci_wait_cfg). The other files here are of the kernel's memory only.

A read that fails is no sign, and no fault: a GPU is usable without these files.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

CONFIG_BYTES: Final = 16
"""The part of the configuration space that is read: ids, command, status, class, header type. The ids of an SR-IOV
virtual function read all ones in any case; command and status never do."""

_POWERED: Final = frozenset({b"D0", b"D3hot"})
"""The power states in which a read of `config` reaches the function and wakes nothing. `unknown` is that of a function
which no driver has enabled yet."""

_ALL_ONES: Final = b"\xff" * CONFIG_BYTES
"""The result of a read where no function answers (include/linux/pci.h, PCI_ERROR_RESPONSE)."""

_FATAL: Final = re.compile(rb"^TOTAL_ERR_FATAL ([0-9]+)$", re.MULTILINE)

PORT_TOTAL: Final = "../aer_rootport_total_err_fatal"
"""The count of a root port; nothing has it where the port directly above is one of a switch."""

_METHOD: Final = re.compile(r"[a-z0-9_]{1,32}")
_METHODS_MAX: Final = 8
"""The kernel has eight at most: PCI_NUM_RESET_METHODS, include/linux/pci.h."""

Read = Callable[[str, int], bytes]
"""Reads at most so many bytes of an attribute, by its name below the function's directory. Raises `OSError`, or
`HostError` for want of descriptors."""

_ATTRIBUTE_BYTES: Final = 4096


def is_silent(read: Read, *, vfio_bound: bool) -> bool:
    """Return whether the function does not answer: its configuration space reads all ones although it is powered.

    False as well where that is not read: in another power state, below a suspended bridge or physical function, and
    while a vfio driver's function is enabled. A virtual machine has that one open, and the kernel resets it then.
    """
    try:
        if not _can_be_read(read, vfio_bound=vfio_bound) or read("config", CONFIG_BYTES) != _ALL_ONES:
            return False
        return _can_be_read(read, vfio_bound=vfio_bound)  # else it was suspended or opened meanwhile
    except (OSError, ValueError):
        return False


def _can_be_read(read: Read, *, vfio_bound: bool) -> bool:
    """Return whether a read of `config` wakes nothing and waits for no reset. Raises `OSError` and `ValueError` if that
    cannot be known."""
    if read("power_state", _ATTRIBUTE_BYTES).strip() not in _POWERED:
        return False
    if any(_is_suspended(read, above) for above in ("../power_state", "physfn/power_state")):
        return False
    return not vfio_bound or int(read("enable", _ATTRIBUTE_BYTES)) == 0


def _is_suspended(read: Read, above: str) -> bool:
    """Return whether the bridge or physical function is not in D0. A host bridge has no power state, and only a virtual
    function has a physical one."""
    try:
        return read(above, _ATTRIBUTE_BYTES).strip() != b"D0"
    except FileNotFoundError:
        return False


def has_fatal_errors(read: Read) -> bool:
    """Return whether the kernel has counted a fatal PCIe error of the function since it was enumerated
    (drivers/pci/pcie/aer.c, pci_dev_aer_stats_incr). Only the total counts each: the status register of a fatal error
    is not read. Kernels before Linux 6.16 do not count an error without a status at all: see `port_fatal_errors`."""
    try:
        total = _FATAL.search(read("aer_dev_fatal", _ATTRIBUTE_BYTES))
    except OSError:
        return False
    return total is not None and int(total[1]) > 0


def port_fatal_errors(read: Read) -> int | None:
    """Return how many fatal PCIe errors the root port directly above has received (drivers/pci/pcie/aer.c,
    pci_rootport_aer_stats_incr), before the kernel begins to recover from one; None if that is unknown."""
    try:
        return int(read(PORT_TOTAL, _ATTRIBUTE_BYTES))
    except (OSError, ValueError):
        return None


def reset_methods(read: Read, has: Callable[[str], bool]) -> tuple[str, ...] | None:
    """Return the methods by which the kernel can reset the function alone, in the order in which it tries them; empty
    if there is none, None if they are unknown. `has` returns whether the function has an attribute.

    A function has both `reset` and `reset_method` if it has a method (drivers/pci/pci.c, reset_method_show); before
    Linux 5.15 only the first.
    """
    try:
        names = read("reset_method", _ATTRIBUTE_BYTES).decode(errors="replace").split()
    except FileNotFoundError:
        return None if has("reset") else ()
    except OSError:
        return None
    return tuple([name for name in names if _METHOD.fullmatch(name)][:_METHODS_MAX])
