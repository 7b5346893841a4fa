"""The host's facts that decide whether a virtual machine works with its GPU, apart from driver and IOMMU group: the
framebuffer of the firmware's console, interrupt remapping, the locked memory of containers.

For `gpuactors doctor`. Synchronous, and read once; it may block. What is not there, or hidden from this process, is not
known: None. Must not judge.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from msgspec import Struct

from gpuactors.core.values.model import PciAddress, is_pci_address
from gpuactors.host.best_effort import names_in, text_of
from gpuactors.host.root import (
    INTERRUPTS,
    MEMORY_MAP,
    PCI_DEVICES,
    PLATFORM_DEVICES,
    PLATFORM_DRIVERS,
    PROC,
    HostRoot,
    module_parameter,
)

_MAP_MAX_BYTES: Final = 4 << 20
_BARS: Final = 6
"""The first lines of `resource`; the expansion ROM and windows follow."""

_REGION: Final = re.compile(r"\s*([0-9a-f]{1,16})-([0-9a-f]{1,16}) : (.{1,128})")
_FRAMEBUFFER: Final = re.compile(
    r"(?:(?:simple|efi|vesa|of)-framebuffer|simpledrm|efidrm|vesadrm|ofdrm)\.[0-9]+"
)
"""The platform devices that the kernel makes of the firmware's framebuffer (drivers/firmware/sysfb.c)."""
_DRIVERS: Final = ("-framebuffer", "drm")
"""The ends of the names of their drivers."""
_OF_CONSOLE: Final = frozenset(
    ("BOOTFB", "efifb", "vesafb", "simplefb", "simpledrm", "efidrm", "vesadrm", "ofdrm", "offb")
)
"""The names in /proc/iomem of the console's framebuffer, and of its drivers."""

_REMAPPED: Final = re.compile(r"\bIR-(?:IO-APIC|PCI-MSI)")
_OF_X86: Final = re.compile(r"\b(?:IO-APIC|PCI-MSI)")
"""The interrupt chips of x86 in /proc/interrupts, with remapping and without (arch/x86/kernel/apic)."""

_RUNTIMES: Final = ("containerd", "crio", "dockerd")
_LOCKED: Final = re.compile(r"^Max locked memory\s+(\S+)\s+(\S+)", re.MULTILINE)
UNLIMITED: Final = -1


class Region(Struct, frozen=True):
    """Physical addresses, both ends included."""

    name: str
    start: int
    end: int

    def overlaps(self, other: Region) -> bool:
        """Return whether an address is in both."""
        return self.start <= other.end and other.start <= self.end


class Console(Struct, frozen=True):
    """The framebuffer that the firmware has left to the kernel."""

    devices: tuple[str, ...]
    """The platform devices that it is: `simple-framebuffer.0`; none where the kernel has none."""
    regions: tuple[Region, ...] | None
    """Its physical addresses; None where they are hidden: only root with CAP_SYS_ADMIN sees them."""
    boot_vga: frozenset[PciAddress]
    """The functions that the firmware used for it, according to the kernel."""
    bars: Mapping[PciAddress, tuple[Region, ...]]
    """The BARs of each requested function; empty where they cannot be read."""


class LockedMemory(Struct, frozen=True):
    """The limit that containers inherit from the container runtime."""

    runtime: str
    bytes: int
    """The limit in bytes, or UNLIMITED."""


class Preflight(Struct, frozen=True):
    """The facts for `gpuactors doctor`."""

    console: Console
    interrupts_remapped: bool | None
    """True if interrupts are remapped; None on other machines than x86, or where it cannot be seen."""
    unsafe_interrupts: bool | None
    """The parameter `allow_unsafe_interrupts` of vfio_iommu_type1; None while that is not loaded."""
    locked_memory: tuple[LockedMemory, ...]
    """The limit of each container runtime that is seen to run."""


def read(root: HostRoot, functions: Iterable[PciAddress]) -> Preflight:
    """Read the host below `root`. Raises `HostShortError`."""
    interrupts = _text(root, INTERRUPTS, _MAP_MAX_BYTES)
    remapped = bool(_REMAPPED.search(interrupts)) if _OF_X86.search(interrupts) else None
    unsafe = _text(root, module_parameter("vfio_iommu_type1", "allow_unsafe_interrupts"), 16).strip()
    return Preflight(
        console=Console(
            devices=_framebuffers(root),
            regions=_regions(_text(root, MEMORY_MAP, _MAP_MAX_BYTES)),
            boot_vga=frozenset(
                PciAddress(name)
                for name in _names(root, PCI_DEVICES)
                if is_pci_address(name) and _text(root, f"{PCI_DEVICES}/{name}/boot_vga", 8).strip() == "1"
            ),
            bars={address: _bars(root, address) for address in functions},
        ),
        interrupts_remapped=remapped,
        unsafe_interrupts=unsafe == "Y" if unsafe else None,
        locked_memory=tuple(_locked_memory(root)),
    )


def _framebuffers(root: HostRoot) -> tuple[str, ...]:
    names = {*_names(root, PLATFORM_DEVICES)}
    for driver in _names(root, PLATFORM_DRIVERS):
        if driver.endswith(_DRIVERS):
            names.update(_names(root, f"{PLATFORM_DRIVERS}/{driver}"))
    return tuple(sorted(filter(_FRAMEBUFFER.fullmatch, names)))


def _regions(text: str) -> tuple[Region, ...] | None:
    """Return the framebuffer's regions; None where all addresses are zero."""
    regions = [
        Region(match[3].strip(), int(match[1], 16), int(match[2], 16))
        for line in text.splitlines()
        if (match := _REGION.fullmatch(line)) is not None
    ]
    if not any(region.end for region in regions):
        return None
    return tuple(region for region in regions if region.name in _OF_CONSOLE)


def _bars(root: HostRoot, address: PciAddress) -> tuple[Region, ...]:
    bars: list[Region] = []
    for number, line in enumerate(
        _text(root, f"{PCI_DEVICES}/{address}/resource", 4096).splitlines()[:_BARS]
    ):
        words = line.split()
        try:
            start, end = int(words[0], 16), int(words[1], 16)
        except (ValueError, IndexError):
            continue
        if end > start > 0:
            bars.append(Region(f"BAR {number}", start, end))
    return tuple(bars)


def _locked_memory(root: HostRoot) -> Iterator[LockedMemory]:
    reported: set[str] = set()
    for pid in filter(str.isdigit, _names(root, PROC)):
        runtime = _text(root, f"{PROC}/{pid}/comm", 64).strip()
        if runtime not in _RUNTIMES or runtime in reported:
            continue
        if (match := _LOCKED.search(_text(root, f"{PROC}/{pid}/limits", 4096))) is not None:
            reported.add(runtime)
            hard = match[2]
            yield LockedMemory(runtime, int(hard) if hard.isdecimal() and len(hard) < 20 else UNLIMITED)


def _names(root: HostRoot, directory: str) -> list[str]:
    return sorted(names_in(root.real(directory)))


def _text(root: HostRoot, path: str, bytes_max: int) -> str:
    return text_of(root.real(path), bytes_max)
