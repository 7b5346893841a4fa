"""The devices offered to claims of GPUs, as the state carries them: data only. `core/gpus/offer.py` makes it.

A file of its own: the state carries this data, and must not import what makes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from msgspec import Struct, field

from gpuactors.core.values.claim import DeviceHealth
from gpuactors.core.values.model import DeviceKey
from gpuactors.core.values.slices import Offer, OfferedDevice


class Offered(Struct, frozen=True, gc=False):
    """The offer. It is state, because two parts of it follow from the offer before."""

    placed: frozenset[DeviceKey] = frozenset()
    """The devices of prepared claims that an inspection has seen since they were bound."""
    devices: Mapping[DeviceKey, OfferedDevice] = field(default_factory=dict)
    """The offered devices, sorted by key. One that is gone while a claim has it stays as it was offered last."""
    offer: Offer | None = None
    """The same devices as an offer; None while DRA is off, or the node has not been read."""
    health: tuple[DeviceHealth, ...] = ()
    """The health of every device that is offered or that a claim has, sorted by name."""


NOTHING_OFFERED: Final = Offered()
