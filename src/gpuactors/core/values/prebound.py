"""Whether a GPU is pre-bound: is on a vfio driver, and no claim of gpuactors has put it there, so that it stays on it.

A binding that gpuactors did not make is somebody's decision: a GPU that a boot script, an administrator or another
program has bound is pre-bound, also when a claim has had it before. Decided per PCI address: of four identical GPUs two
may be pre-bound, so ids cannot decide. A mistake in one direction costs a GPU that the host's driver does not get back;
in the other one it pulls a GPU to the host's driver under its users (NVIDIA issues 1089, 1090, 1099). So in doubt a GPU
is pre-bound.

The kernel command line (`vfio-pci.ids=`) only adds its word to the sentence of a GPU that was found on vfio: without it
such a GPU is pre-bound as well (bound by a boot script, or our checkpoint is lost).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from enum import StrEnum
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from gpuactors.core.values.claim import BoundFunction, OriginalDriver, OriginalDrivers
from gpuactors.core.values.inventory import ids_of
from gpuactors.core.values.model import PciAddress, PciFunction
from gpuactors.core.values.quote import quoted_id

# --- the drivers that functions are found on --------------------------------------------------------------------------


def noted(
    known: OriginalDrivers,
    functions: Iterable[PciFunction],
    acted: Collection[PciAddress] = (),
) -> OriginalDrivers:
    """`known` with the drivers that an inspection of `functions` adds; the same object if it adds none. `acted` are the
    addresses that gpuactors may have bound to their present driver: theirs do not change.

    A driver that somebody else has bound replaces the known one. A function without a driver is between two drivers, so
    the known one stays.
    """
    found: dict[PciAddress, OriginalDriver] = {}
    for function in functions:
        address = function.address
        seen = found_on(function)
        before = known.get(address)
        by_others = address not in acted and seen.driver is not None
        if before is None or is_another(before, function) or (by_others and seen != before):
            found[address] = seen
        elif (not before.presence and seen.presence) or (not before.ids and seen.ids):
            # An older daemon has not noted them.
            found[address] = replace(before, presence=seen.presence, ids=before.ids or seen.ids)
    return {**known, **found} if found else known


def found_on(function: PciFunction) -> OriginalDriver:
    """What an inspection found the function on."""
    return OriginalDriver(
        function.address, function.driver, function.vfio_bound, function.presence, ids=ids_of(function)
    )


def is_another(noted: OriginalDriver | BoundFunction, now: PciFunction) -> bool:
    """The function was unplugged since, and one was plugged in at its address. False where that is not known."""
    return bool(noted.presence and now.presence) and noted.presence != now.presence


# --- the decision -----------------------------------------------------------------------------------------------------


class Rule(StrEnum):
    """The rule that decided."""

    OPERATOR = "operator"
    """`--prebound` names the address, or says `all`."""
    ORIGINAL_DRIVER = "first-driver"
    """The driver found on it before any act of gpuactors."""
    UNKNOWN = "unknown"
    """Its original driver is not known, so nothing is done to it."""


class PreBound(Struct, frozen=True, gc=False):
    """Whether a function is pre-bound, and why."""

    is_prebound: bool
    rule: Rule
    sentence: str


class OperatorsList(Struct, frozen=True, gc=False):
    """The setting `prebound`: addresses, or all of them."""

    addresses: frozenset[PciAddress] = frozenset()
    everything: bool = False

    def __contains__(self, address: PciAddress) -> bool:
        return self.everything or address in self.addresses


def decide(
    address: PciAddress,
    first: OriginalDriver | None,
    *,
    operator: OperatorsList,
    hints: Iterable[KernelId] = (),
    function: PciFunction | None = None,
) -> PreBound:
    """Whether the function is pre-bound. `hints` are those of the kernel command line; `function` is what is known of
    it now, for its ids."""
    if address in operator:
        named = "all" if operator.everything else address
        return PreBound(True, Rule.OPERATOR, f"--prebound {named} says so")
    if first is None:
        return PreBound(True, Rule.UNKNOWN, "its original driver is unknown, so it stays on its present one")
    if first.vfio:
        hint = next((h for h in hints if function is not None and h.matches(function)), None)
        named = f"; the kernel command line names {hint} as well" if hint is not None else ""
        return PreBound(
            True,
            Rule.ORIGINAL_DRIVER,
            f"it was found on {quoted_id(first.driver or '')}, and no claim of gpuactors had put it there{named}",
        )
    had = f"on {quoted_id(first.driver)}" if first.driver is not None else "without a driver"
    return PreBound(False, Rule.ORIGINAL_DRIVER, f"it was found {had}")


# --- the kernel command line ------------------------------------------------------------------------------------------

_ANY: Final = 0xFFFF_FFFF
"""PCI_ANY_ID."""

_PARAMETERS: Final = ("vfio_pci.ids",)
"""With `-` for `_` as well, which the kernel does not distinguish (kernel/params.c, parameq)."""

_WORD: Final = re.compile(r'(?:[^\s"]|"[^"]*"?)+')
"""Blanks within quotes belong to the word (lib/cmdline.c, next_arg)."""

_FIELD: Final = re.compile(r"(?:0x)?[0-9a-f]{1,8}", re.IGNORECASE)


class KernelId(Struct, frozen=True, gc=False):
    """One of `vfio-pci.ids=`: `vendor:device[:subvendor[:subdevice[:class[:mask]]]]`, hexadecimal
    (drivers/vfio/pci/vfio_pci.c, vfio_pci_fill_ids)."""

    vendor: int
    device: int
    subvendor: int = _ANY
    subdevice: int = _ANY
    device_class: int = 0
    mask: int = 0

    def __str__(self) -> str:
        return f"{self.vendor:04x}:{self.device:04x}"

    def matches(self, function: PciFunction) -> bool:
        """Vendor, device and class match; the subsystem is not known here, and this is a hint only. False if the
        function's ids could not be read."""
        try:
            vendor, device = int(function.vendor, 16), int(function.device, 16)
            code = int(function.class_code, 16) if self.mask else 0
        except ValueError:
            return False
        return (
            self.vendor in (_ANY, vendor)
            and self.device in (_ANY, device)
            and (code ^ self.device_class) & self.mask == 0
        )


def kernel_ids(command_line: str) -> tuple[KernelId, ...]:
    """Every id that the kernel command line gives to vfio-pci, in order. An entry that the kernel would not take is
    left out, as are the words after `--`, which are init's."""
    return tuple(
        found for value in _values(command_line) for entry in value.split(",") if (found := _kernel_id(entry))
    )


def _values(command_line: str) -> Iterator[str]:
    for word in _WORD.findall(command_line):
        if word == "--":
            return
        plain = word.replace('"', "")
        name, equals, value = plain.partition("=")
        if equals and name.replace("-", "_") in _PARAMETERS:
            yield value


def _kernel_id(entry: str) -> KernelId | None:
    fields = entry.strip().split(":")
    if not 2 <= len(fields) <= 6 or not all(_FIELD.fullmatch(field) for field in fields):
        return None
    return KernelId(*(int(field, 16) for field in fields))
