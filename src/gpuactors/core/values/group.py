"""The inputs of an IOMMU group's assessment: one value per group, which is all that `assessment/assess.py` knows."""

from __future__ import annotations

from msgspec import Struct

from gpuactors.core.values.inventory import Device
from gpuactors.core.values.model import DeviceKey, Health, Observed, Pod
from gpuactors.core.values.owner import Owner

GroupKey = int | DeviceKey
"""An IOMMU group by its number; a device that is in none is a group of its own, by its key."""

Owned = tuple[tuple[DeviceKey, Owner], ...]
"""The devices of a group that have an owner, sorted by key."""


Short = tuple[tuple[DeviceKey, str], ...]
"""The devices of a group that cannot be inspected now because of a shortage of this process, and why; sorted by
key."""


class UnownedUse(Struct, frozen=True, gc=False):
    """The other inputs for a group that is in use by somebody to whom kubelet has not given it."""

    left: Pod | None
    """The pod that had a function of it and has left kubelet's ledger; it may still hold it."""
    is_settled: bool
    """The one observation that shows whose use it is has been made: if a pod has left, a poll since then; else a read
    of kubelet's ledger since the use began."""
    problem: str | None
    """Why kubelet's ledger cannot be read, as a sentence."""
    listed: tuple[tuple[DeviceKey, Health], ...]
    """The last advertised health of its devices, where it is not settled."""


class GroupInputs(Struct, frozen=True, gc=False):
    """All that the assessment of a group's devices follows from."""

    group: GroupKey
    devices: tuple[Device, ...] = ()
    """Sorted by key; each has all functions of the group."""
    owners: Owned = ()
    use: Observed | None = None
    """As last polled."""
    unowned: UnownedUse | None = None
    """None unless the group is in use. Its assessment goes without where kubelet has given a function to somebody."""
    short: Short = ()
