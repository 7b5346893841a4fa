"""Whether a GPU is pre-bound: it is on a vfio driver that no claim of gpuactors has bound it to, so it stays there.

gpuactors keeps a binding that it did not make: a GPU that a boot script, an administrator or another program has bound
is pre-bound, also when a claim has had it before. Decided per PCI address: of four identical GPUs two may be pre-bound,
so ids cannot decide. If a GPU is wrongly pre-bound, its host's driver does not get it back; if it is wrongly not, it is
taken from its users (NVIDIA issues 1089, 1090, 1099). So in doubt a GPU is pre-bound.

The kernel command line (`vfio-pci.ids=`) is only mentioned in the sentence of a GPU that was found on vfio: without it
such a GPU is pre-bound as well (bound by a boot script, or the checkpoint is lost).
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

# --- the original drivers ---------------------------------------------------------------------------------------------


def noted(
    drivers: OriginalDrivers,
    functions: Iterable[PciFunction],
    acted: Collection[PciAddress] = (),
) -> OriginalDrivers:
    """Record the drivers on which an inspection saw `functions`. Returns the same object if nothing changes. The
    drivers of `acted` addresses, which gpuactors may have bound, do not change.

    A driver that another program has bound replaces the recorded one. A function without a driver is between two
    drivers, so the recorded one stays.
    """
    changed: dict[PciAddress, OriginalDriver] = {}
    for function in functions:
        address = function.address
        seen = found_on(function)
        earlier = drivers.get(address)
        by_others = address not in acted and seen.driver is not None
        if earlier is None or is_another(earlier, function) or (by_others and seen != earlier):
            changed[address] = seen
        elif (not earlier.presence and seen.presence) or (not earlier.ids and seen.ids):
            # An older daemon has not recorded them.
            changed[address] = replace(earlier, presence=seen.presence, ids=earlier.ids or seen.ids)
    return {**drivers, **changed} if changed else drivers


def found_on(function: PciFunction) -> OriginalDriver:
    """Return the driver on which an inspection saw the function."""
    return OriginalDriver(
        function.address, function.driver, function.vfio_bound, function.presence, ids=ids_of(function)
    )


def is_another(earlier: OriginalDriver | BoundFunction, now: PciFunction) -> bool:
    """Return whether the function was unplugged since, and one was plugged in at its address. False if unknown."""
    return bool(earlier.presence and now.presence) and earlier.presence != now.presence


# --- the decision -----------------------------------------------------------------------------------------------------


class Rule(StrEnum):
    """The rule that decided whether a function is pre-bound."""

    OPERATOR = "operator"
    """`--prebound` names the address, or is `all`."""
    ORIGINAL_DRIVER = "first-driver"
    """The driver of the function before any act of gpuactors decided."""
    UNKNOWN = "unknown"
    """Its original driver is unknown, so it stays where it is."""


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
    original: OriginalDriver | None,
    *,
    operator: OperatorsList,
    hints: Iterable[KernelId] = (),
    function: PciFunction | None = None,
) -> PreBound:
    """Decide whether the function is pre-bound. `hints` are the ids of the kernel command line, which are compared with
    those of `function`."""
    if address in operator:
        named = "all" if operator.everything else address
        return PreBound(True, Rule.OPERATOR, f"--prebound {named} says so")
    if original is None:
        return PreBound(True, Rule.UNKNOWN, "its original driver is unknown, so it stays on its present one")
    if original.vfio:
        hint = next((h for h in hints if function is not None and h.matches(function)), None)
        named = f"; the kernel command line names {hint} as well" if hint is not None else ""
        return PreBound(
            True,
            Rule.ORIGINAL_DRIVER,
            f"it was found on {quoted_id(original.driver or '')}, and no claim of gpuactors had put it there{named}",
        )
    place = f"on {quoted_id(original.driver)}" if original.driver is not None else "without a driver"
    return PreBound(False, Rule.ORIGINAL_DRIVER, f"it was found {place}")


# --- the kernel command line ------------------------------------------------------------------------------------------

_ANY: Final = 0xFFFF_FFFF
"""PCI_ANY_ID."""

_PARAMETERS: Final = ("vfio_pci.ids",)
"""The kernel's parameters, also written with `-` for `_` (kernel/params.c, parameq)."""

_WORD: Final = re.compile(r'(?:[^\s"]|"[^"]*"?)+')
"""A word of the command line; blanks within quotes belong to it (lib/cmdline.c, next_arg)."""

_FIELD: Final = re.compile(r"(?:0x)?[0-9a-f]{1,8}", re.IGNORECASE)


class KernelId(Struct, frozen=True, gc=False):
    """One id of `vfio-pci.ids=`: `vendor:device[:subvendor[:subdevice[:class[:mask]]]]`, hexadecimal
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
        """Return whether vendor, device and class match; the subsystem is unknown here, and this is only a hint. False
        if the function's ids could not be read."""
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
    """Return every id that the kernel command line gives to vfio-pci, in order. An entry that the kernel would refuse
    is left out, as are the words after `--`, which are for init."""
    return tuple(
        kernel_id
        for value in _values(command_line)
        for entry in value.split(",")
        if (kernel_id := _kernel_id(entry))
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
