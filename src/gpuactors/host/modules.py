"""The kernel's modules: which are there, and which is the vfio driver of a function (`vfio_pci:` in modules.alias).

A variant driver names the devices that it is for (`alias vfio_pci:v000010DEd00002342sv*sd*bc*sc*i*
nvgrace_gpu_vfio_pci`), vfio-pci names all of them. The entry with the fewest wildcards is meant (scripts/mod/
file2alias.c, do_pci_entry; libvirt and NVIDIA's driver choose so as well). Must not load a module.
"""

from __future__ import annotations

import os
import re
from typing import Final

from gpuactors.host.faults import raise_if_short
from gpuactors.host.root import MODULES, OS_RELEASE, PCI_DRIVERS, HostRoot

MODULES_ALIAS_MAX_BYTES: Final = 32 * 1024 * 1024
"""The kernel's modules.alias, modules.dep or modules.builtin: 1 to 2 MB on distributions' kernels."""

DEFAULT: Final = "vfio-pci"

_ALIAS: Final = b"\nalias vfio_pci:"
_FIELDS: Final = re.compile(
    r"v([0-9A-F]{8}|\*)d([0-9A-F]{8}|\*)sv([0-9A-F]{8}|\*)sd([0-9A-F]{8}|\*)"
    r"bc([0-9A-F]{2}|\*)sc([0-9A-F]{2}|\*)i([0-9A-F]{2}|\*)"
)
"""The fields of an alias, as written by file2alias.c and pci_uevent: vendor, device, their subsystem's, class,
subclass, interface."""


def vfio_driver(root: HostRoot, modalias: str) -> str:
    """Return the name of the module or driver for a function of this modalias (`pci:v…`). `vfio-pci` where no alias
    matches, the modalias is not known (empty), or there is no modules.alias."""
    return best(_content(root, "modules.alias"), modalias)


def best(aliases: bytes, modalias: str) -> str:
    """Do as `vfio_driver`, with the content of modules.alias."""
    closest, fewest = DEFAULT, 8
    match = _FIELDS.fullmatch(modalias.removeprefix("pci:"))
    if match is None:
        return DEFAULT
    wanted = match.groups()
    # Twenty of 26,000 lines: a regular expression for all of them takes 8 ms, which each prepare would wait for.
    for part in (b"\n" + aliases).split(_ALIAS)[1:]:
        pattern, _, module = part.partition(b"\n")[0].rstrip().partition(b" ")
        fields = _FIELDS.fullmatch(pattern.decode("latin-1"))
        if fields is None or not module:
            continue
        wildcards = fields.groups().count("*")
        if wildcards < fewest and all(f in ("*", w) for f, w in zip(fields.groups(), wanted, strict=True)):
            closest, fewest = module.decode("latin-1"), wildcards
    return DEFAULT if closest == "vfio_pci" else closest


def loaded(root: HostRoot, driver: str) -> str | None:
    """Return the name of the driver on the PCI bus for a module's or driver's name; None if it is not loaded. A
    module's name has `_` where its driver's may have `-`."""
    for name in (driver, driver.replace("-", "_"), driver.replace("_", "-")):
        if "/" not in name and name.strip(".") and os.path.isdir(root.real(f"{PCI_DRIVERS}/{name}")):
            return name
    return None


def is_installed(root: HostRoot, module: str) -> bool | None:
    """Return whether the running kernel has the module, as a file or built in; None where its modules are not to be
    seen, as in a pod."""
    lists = [_content(root, name) for name in ("modules.dep", "modules.builtin")]
    if not any(lists):
        return None
    file = re.compile(
        rb"(?:^|/)" + re.escape(module).encode().replace(b"_", b"[-_]") + rb"\.ko[.a-z0-9]*(?::|$)", re.M
    )
    return any(file.search(listed) for listed in lists)


def _content(root: HostRoot, name: str) -> bytes:
    """Read a file of the running kernel's modules; empty if it cannot be read."""
    release = os.uname().release
    try:
        with open(root.real(OS_RELEASE), encoding="ascii", errors="replace") as file:
            release = file.read(256).strip() or release
        if "/" in release or "\0" in release or release in (".", ".."):
            return b""
        with open(root.real(f"{MODULES}/{release}/{name}"), "rb") as module_list:
            return module_list.read(MODULES_ALIAS_MAX_BYTES)
    except OSError as error:
        raise_if_short(error, root.real(MODULES))
        return b""
