"""The remembered signs that PCI functions are dead, and what a reader of sysfs must know of them
(docs/dev/adr/0024-a-dead-gpu-is-known-by-passive-signs.md).

A file of its own: the state, the file of signs, the readers and their requests have it. Must not decide when a function
is dead: that is `core/host/dead_signs.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from msgspec import Struct

from gpuactors.core.values.model import PciAddress, Sign


class DeadSign(Struct, frozen=True, gc=False):
    """The first sign of one function."""

    presence: int
    """The same as `PciFunction.presence`; never 0. With another one it is not this function any more."""
    sign: Sign


DeadSigns = Mapping[PciAddress, DeadSign]
"""The signs by the addresses of the functions, which need not be there."""


class KnownErrors(Struct, frozen=True, gc=False):
    """The errors that are known when a read is requested: a read of `config` would wait for the reset after one."""

    dead: DeadSigns
    of_ports: Mapping[PciAddress, int]
    """The last `PciFunction.port_fatal_errors` of each function that has one."""


NO_ERRORS: Final = KnownErrors({}, {})
