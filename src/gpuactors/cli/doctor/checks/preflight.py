"""The host's part in a virtual machine that works with its GPU: the boot framebuffer, interrupt remapping, locked
memory. Must not pass what cannot be seen."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from gpuactors.cli.doctor.facts import Facts, Unknown
from gpuactors.cli.doctor.finding import Check, Finding, Level, failed, passed, warned
from gpuactors.core.values.model import PciAddress
from gpuactors.core.values.quote import first_of, quoted_id
from gpuactors.host.preflight import UNLIMITED, Console, LockedMemory, Preflight

_FREE_IT: Final = (
    "Have the firmware use another display (BMC, integrated graphics), or keep the kernel from it: boot with "
    "initcall_blacklist=sysfb_init (before Linux 5.15 video=efifb:off,vesafb:off). Then restart the node"
)

_MIB: Final = 1 << 20


def check(facts: Facts) -> Iterator[Finding]:
    """Check the host; nothing if it could not be read, which `iommu.py` reports."""
    if facts.preflight is None or isinstance(facts.preflight, Unknown):
        return
    yield from _framebuffer(facts.preflight.console)
    yield from _interrupts(facts.preflight)
    yield from map(_locked_memory, facts.preflight.locked_memory)


def _framebuffer(console: Console) -> Iterator[Finding]:
    """Check for a framebuffer in a GPU's memory: vfio cannot have that part of the BAR, and the guest finds a dead
    GPU."""
    if not console.bars:
        return
    in_words = f" ({', '.join(console.devices)})" if console.devices else ""
    if console.regions is None:
        yield from _hidden(console, in_words)
        return
    kept: list[tuple[PciAddress, str]] = []
    for address, bars in console.bars.items():
        for bar in bars:
            for region in filter(bar.overlaps, console.regions):
                where = f"{quoted_id(region.name)} {region.start:x}-{region.end:x}"
                kept.append((address, f"{where} is in {bar.name} of {address}"))
    if kept:
        addresses = tuple(dict.fromkeys(address for address, _ in kept))
        by_firmware = [address for address in addresses if address in console.boot_vga]
        yield Finding(
            Check.BOOT_FRAMEBUFFER,
            Level.WARN,
            f"the boot framebuffer of the host{in_words} keeps a part of a GPU's memory: "
            f"{'; '.join(first_of([text for _, text in kept]))}"
            + (f"; boot_vga is 1 of {', '.join(by_firmware)}" if by_firmware else "")
            + ". A virtual machine starts, and its GPU does not work",
            f"{_FREE_IT}.",
            devices=addresses,
        )
    elif console.regions and all(console.bars.values()):
        yield passed(Check.BOOT_FRAMEBUFFER, f"the boot framebuffer is in no selected GPU's memory{in_words}")


def _hidden(console: Console, in_words: str) -> Iterator[Finding]:
    """Warn that the framebuffer, whose place is hidden, may be on a selected GPU. No warning if the firmware used
    another function: most servers have one, of their BMC."""
    if not console.devices and not console.boot_vga:
        return
    suspects = tuple(address for address in console.bars if address in console.boot_vga)
    if not suspects and (console.boot_vga or not console.devices):
        return
    place = f"on {', '.join(suspects)} (boot_vga is 1)" if suspects else "on a selected GPU"
    yield Finding(
        Check.BOOT_FRAMEBUFFER,
        Level.WARN,
        f"the boot framebuffer{in_words} may be {place}: not known, as /proc/iomem shows no addresses to this process",
        f"Run `gpuactors doctor --pre` as root on the node (CAP_SYS_ADMIN). {_FREE_IT}, if it says so.",
        devices=suspects,
    )


def _interrupts(host: Preflight) -> Iterator[Finding]:
    if host.interrupts_remapped:
        yield passed(Check.INTERRUPT_REMAPPING, "the IOMMU remaps interrupts (IR- in /proc/interrupts)")
    elif host.interrupts_remapped is False and host.unsafe_interrupts:
        yield warned(
            Check.INTERRUPT_REMAPPING,
            "interrupts are not remapped, and allow_unsafe_interrupts of vfio_iommu_type1 is on: a guest can raise "
            "any interrupt of the host",
            "Switch interrupt remapping (VT-d, AMD-Vi, x2APIC) on in the firmware, remove intremap=off from the "
            "kernel command line, and then allow_unsafe_interrupts.",
        )
    elif host.interrupts_remapped is False:
        yield failed(
            Check.INTERRUPT_REMAPPING,
            "interrupts are not remapped (no IR- in /proc/interrupts): vfio refuses a virtual machine its GPU",
            "Switch interrupt remapping (VT-d, AMD-Vi, x2APIC) on in the firmware, and remove intremap=off from the "
            "kernel command line. Else, where guests are trusted, allow_unsafe_interrupts=1 of vfio_iommu_type1.",
        )


def _locked_memory(limit: LockedMemory) -> Finding:
    """Report the limit. A small one is no fault: KubeVirt raises it for each virtual machine that has a device."""
    if limit.bytes == UNLIMITED:
        return passed(Check.LOCKED_MEMORY, f"containers of {limit.runtime} may lock memory without limit")
    return passed(
        Check.LOCKED_MEMORY,
        f"containers of {limit.runtime} may lock {limit.bytes / _MIB:g} MiB: enough for KubeVirt, which raises it for "
        f"its virtual machines; for others set LimitMEMLOCK=infinity of {limit.runtime}.service",
    )
