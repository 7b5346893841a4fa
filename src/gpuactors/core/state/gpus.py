"""The part of the node's state that is about claims of GPUs: the claims, and what only claims of GPUs need.

Frozen values. Changed by `gpus/`, and the claims by `claims/machine.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from msgspec import Struct, field

from gpuactors.core.state.claims import NO_CLAIMS, Claims, OwedReturn
from gpuactors.core.values.claim import ClaimName, ClaimUid, FitnessCheck, OriginalDrivers
from gpuactors.core.values.model import AdminAccess, ClaimedDevice, DeviceKey, PciAddress
from gpuactors.core.values.owner import OwnClaims
from gpuactors.core.values.prebound import KernelId, OperatorsList
from gpuactors.core.values.status import Reason

NOBODY: Final = OperatorsList()
"""The operator names no address."""


class GpuSettings(Struct, frozen=True, gc=False):
    """The settings and the facts of this boot that only claims of GPUs need."""

    operator: OperatorsList = NOBODY
    hints: tuple[KernelId, ...] = ()
    """The ids that the kernel command line gives to vfio-pci."""
    nvswitch_allowed: bool = False
    """A GPU may be taken from its host's driver although the host runs NVSwitches."""


class Fitness(Struct, frozen=True, gc=False):
    """Whether a claim could bind a device that is on its host's driver."""

    due_at: float = 0.0
    """When it is checked next. Past while the check is outstanding."""
    found: Reason | None = None
    """Why none could, by the last check or by an act of a claim; None if one could, or it is not known."""


class Returned(Struct, frozen=True, gc=False):
    """A device that an act has returned to its original driver. It was last seen on vfio, as a device that can be
    allocated."""

    claim: ClaimName
    since: int
    """The last number that had been issued then: only later inspections are used."""


class OfClaim(Struct, frozen=True, gc=False):
    """What one claim means for others. `strangers.own_claims` is derived anew when any of these changes, so what that
    reads of an entry is here as well."""

    name: ClaimName
    owns: bool = False
    """It has its devices, or is to give them back."""
    has_ended: bool = False
    """It was unprepared."""
    is_over: bool = False
    """Nothing of it is left."""
    reserved: tuple[tuple[DeviceKey, ClaimedDevice], ...] = ()
    """The devices that it has for itself."""
    unplaced: tuple[str, ...] = ()
    """See `ClaimRecord.unplaced`."""
    admin: tuple[AdminAccess, ...] = ()
    nodes: frozenset[int | str] = frozenset()
    """The IOMMU groups and cdevs that its files name, or may name, or are to name."""


class OfClaims(Struct, frozen=True, gc=False):
    """What the claims mean for others: derived for an entry that changed only, as a node may have a thousand."""

    of: Mapping[ClaimUid, OfClaim] = field(default_factory=dict)
    """What each claim means."""
    named: Mapping[int | str, int] = field(default_factory=dict)
    """Of how many claims the files name each node (`OfClaim.nodes`)."""


class Gpus(Struct, frozen=True, gc=False):
    """Claims of GPUs on this node. The numbers of checks and of owed returns are from the counter of the claims."""

    settings: GpuSettings = GpuSettings()
    claims: Claims = NO_CLAIMS
    original_drivers: OriginalDrivers = field(default_factory=dict)
    """The drivers that the functions were found on, from `prebound.noted`."""
    acted: frozenset[PciAddress] = frozenset()
    """The functions whose present driver may be of our making (`gpus/returns.py`)."""
    settled: Mapping[PciAddress, int] = field(default_factory=dict)
    """Functions that an act has brought to a driver, with the last number that had been issued then: only later
    inspections say where they are."""
    owed: Mapping[DeviceKey, OwedReturn] = field(default_factory=dict)
    """The returns that are owed, by the device's address."""
    fitness: Mapping[DeviceKey, Fitness] = field(default_factory=dict)
    """Whether a claim could bind them: of the devices on their host's drivers, and those that claims have."""
    fitness_check: FitnessCheck | None = None
    """The check that is outstanding."""
    check_at: float = math.inf
    """When the next one is due; infinite while one is outstanding. The earliest of `fitness`; each step asks."""
    of_claims: OfClaims = OfClaims()
    """Derived of `claims`."""
    reserved: Mapping[DeviceKey, ClaimedDevice] = field(default_factory=dict)
    """The devices that claims have for themselves, with those, and the ones in `returned`."""
    returned: Mapping[DeviceKey, Returned] = field(default_factory=dict)
    """Devices that claims gave back, until an inspection has seen them on their driver."""
    admin: frozenset[AdminAccess] = frozenset()
    """Claims with admin access to a device: kubelet lists them like its owner."""
    own: OwnClaims = OwnClaims()
    """The claims here, as whose no other claim on the node counts."""
    ended: frozenset[tuple[str, str]] = frozenset()
    """The names (`ClaimedDevice.name`) of the claims that were unprepared: kubelet lists them until it gets the
    answer."""


NO_GPUS: Final = Gpus()
"""Of a node without claims of GPUs."""
