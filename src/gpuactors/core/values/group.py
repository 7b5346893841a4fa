"""The inputs of an IOMMU group's assessment: one value per group, which is all that `assessment/assess.py` knows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gpuactors.core.values.inventory import Device
from gpuactors.core.values.model import Health, Observed, PciAddress, Pod
from gpuactors.core.values.owner import Allocation, Owner

GroupKey = int | PciAddress
"""An IOMMU group by its number; a function that is in none is a group of its own, by its address."""

Owned = tuple[tuple[PciAddress, Owner], ...]
"""The functions of a group that have an owner, sorted by address."""


@dataclass(frozen=True, slots=True)
class Holding:
    """The owner of a function of a group, and so of the group: it opens once."""

    function: PciAddress
    owner: Owner


def other_holding(
    owned: Owned, address: PciAddress, is_own: Callable[[PciAddress, Allocation], bool] = lambda *_: False
) -> Holding | None:
    """The owner of the group of the function at `address`, apart from the asking one: an owner of that function first,
    then of the others. `is_own`: whether an entry, of a function, is of whoever asks."""
    for function, owner in sorted(owned, key=lambda pair: pair[0] != address):
        if others := tuple(e for e in owner.entries if not is_own(function, e)):
            return Holding(function, owner if len(others) == len(owner.entries) else Owner(others))
    return None


Short = tuple[tuple[PciAddress, str], ...]
"""The devices of a group that cannot be inspected now because of a shortage of this process, and why; sorted by
address."""


@dataclass(frozen=True, slots=True)
class UnownedUse:
    """The other inputs for a group that is in use, and of which kubelet has given no function to anybody."""

    left: Pod | None
    """The pod that had a function of it and has left kubelet's ledger; it may still hold it."""
    is_settled: bool
    """The one observation that shows whose use it is has been made: if a pod has left, a poll since then; else a read
    of kubelet's ledger since the use began."""
    problem: str | None
    """Why kubelet's ledger cannot be read, as a sentence."""
    listed: tuple[tuple[PciAddress, Health], ...]
    """The last advertised health of its devices, where it is not settled."""


@dataclass(frozen=True, slots=True)
class GroupInputs:
    """All that the assessment of a group's devices follows from."""

    devices: tuple[Device, ...]
    """Sorted by address; each has all functions of the group."""
    owners: Owned = ()
    use: Observed | None = None
    """As last polled."""
    unowned: UnownedUse | None = None
    """None unless the group is in use and nobody's by kubelet's word."""
    short: Short = ()
