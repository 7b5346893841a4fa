"""The memory of signs that a function is dead: which function has one now, and what the next daemon is to know
(docs/dev/adr/0024-a-dead-gpu-is-known-by-passive-signs.md).

A sign lasts until the kernel enumerates the function again, which gives it another presence: that alone sets up a
function that has lost its state. Two signs are no lasting facts of the kernel's: a function that was silent may answer
again, and the count of the port above says nothing without an earlier one. So the signs are remembered by address and
presence, whether the function is there or not, and a file has them for the next daemon of this boot.

Must not decide what a sign means for a device: that is `kinds/dead.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from gpuactors.core.values.dead_signs import DeadSign, DeadSigns, KnownErrors
from gpuactors.core.values.memo import memoized
from gpuactors.core.values.model import Functions, PciAddress, PciFunction, Sign


def with_sign(function: PciFunction, last: PciFunction | None, signs: DeadSigns) -> PciFunction:
    """Return an inspected function with the sign that it is dead: the remembered one, or one that it shows now.

    `last`: what the inspection before it has found. A count of the port that cannot be read just now is the last one.
    """
    before = last.port_fatal_errors if last is not None and _is_same(function, last.presence) else None
    known = signs.get(function.address)
    if known is not None and _is_same(function, known.presence):
        sign: Sign | None = known.sign
    else:
        sign = _shown(function, before)
    of_port = before if function.port_fatal_errors is None else function.port_fatal_errors
    if (sign, of_port) == (function.sign, function.port_fatal_errors):
        return function
    return replace(function, sign=sign, port_fatal_errors=of_port)


def _shown(function: PciFunction, before: int | None) -> Sign | None:
    """Return the sign that an inspection shows; `before`: the count of the port at the one before it."""
    if function.is_silent:
        return Sign.SILENT
    if function.has_fatal_errors:
        return Sign.FATAL
    now = function.port_fatal_errors
    return Sign.PORT if before is not None and now is not None and now > before else None


def with_function(signs: DeadSigns, function: PciFunction) -> DeadSigns:
    """Return the remembered signs after an inspection has found this function, with the sign that it has; the same
    object if none changed."""
    known = signs.get(function.address)
    if function.presence == 0:
        return signs
    if function.sign is not None:
        found = DeadSign(function.presence, function.sign)
        return signs if known == found else {**signs, function.address: found}
    if known is None:
        return signs
    return {address: sign for address, sign in signs.items() if address != function.address}


def remembered(signs: DeadSigns, before: DeadSigns, functions: Functions) -> DeadSigns:
    """Return the signs with those that an earlier daemon of this boot has kept: they count where the kernel has not
    enumerated the function again since. What this daemon has seen itself comes first."""
    kept = {
        address: sign
        for address, sign in before.items()
        if (function := functions.get(address)) is None or function.presence in (0, sign.presence)
    }
    return signs if kept.keys() <= signs.keys() else {**kept, **signs}


def signed(functions: Functions, signs: DeadSigns) -> tuple[PciFunction, ...]:
    """Return those of the functions that get a sign by the memory, with it."""
    known = ((functions.get(address), sign) for address, sign in signs.items())
    return tuple(
        replace(function, sign=sign.sign)
        for function, sign in known
        if function is not None and function.sign is None and _is_same(function, sign.presence)
    )


def known_errors(functions: Functions, signs: DeadSigns) -> KnownErrors:
    """Return what the next read must know."""
    return KnownErrors(signs, _of_ports(functions))


@memoized
def _of_ports(functions: Functions) -> Mapping[PciAddress, int]:
    counts = ((address, function.port_fatal_errors) for address, function in functions.items())
    return {address: count for address, count in counts if count is not None}


def _is_same(function: PciFunction, presence: int) -> bool:
    """Return whether it is the function of this presence, which may be unknown."""
    return function.presence == presence != 0
