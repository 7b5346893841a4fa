"""The inputs of an IOMMU group's assessment: one value per group, the only argument of `assessment/assess.py`."""

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


class RelativeOwner(Struct, frozen=True, gc=False):
    """The owner of a relative of a device: of its parent, or of a part of it."""

    device: DeviceKey
    relative: DeviceKey
    is_part: bool
    """True if the relative is a part of the device."""
    owner: Owner


class UnownedUse(Struct, frozen=True, gc=False):
    """The further inputs for a group that is in use and that kubelet has given to no pod."""

    departed: Pod | None
    """The pod that had a function of it and has left kubelet's ledger; it may still hold it."""
    is_settled: bool
    """True if the observation that shows whose use it is has been made: a poll since a pod left the ledger; without
    such a pod, a read of the ledger since the use began."""
    problem: str | None
    """Why kubelet's ledger cannot be read, as a sentence."""
    listed: tuple[tuple[DeviceKey, Health], ...]
    """The last advertised health of its devices; empty if it is settled."""


class GroupInputs(Struct, frozen=True, gc=False):
    """The inputs of the assessment of a group's devices."""

    group: GroupKey
    devices: tuple[Device, ...] = ()
    """The devices, sorted by key; each has all functions of the group."""
    owners: Owned = ()
    use: Observed | None = None
    """The use as last polled; None if it was not polled."""
    unowned: UnownedUse | None = None
    """The further inputs if it is in use; None if it is not, or kubelet has given a device of it to a pod or claim."""
    short: Short = ()
    relatives: tuple[RelativeOwner, ...] = ()
    """The owners of the devices' relatives, sorted by relative."""
