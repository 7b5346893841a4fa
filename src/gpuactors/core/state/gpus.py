"""The state of the claims of GPUs: the claims, and what only claims of GPUs need.

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
"""An operator's list without an address."""


class GpuSettings(Struct, frozen=True, gc=False):
    """The settings and the facts of this boot that only claims of GPUs need."""

    operator: OperatorsList = NOBODY
    hints: tuple[KernelId, ...] = ()
    """The ids that the kernel command line gives to vfio-pci."""
    nvswitch_allowed: bool = False
    """True if a GPU may be taken from its host's driver although the host runs NVSwitches."""


class Fitness(Struct, frozen=True, gc=False):
    """Whether a claim could bind a device that is on its host's driver."""

    due_at: float = 0.0
    """When the device is checked next; past while the check is outstanding."""
    bind_blocker: Reason | None = None
    """Why no claim could bind it, by the last check or an act of a claim; None if one could, or that is not known."""


class Returned(Struct, frozen=True, gc=False):
    """A device that an act has returned to its original driver: it was last seen on vfio, where it can be allocated."""

    claim: ClaimName
    since: int
    """The last number issued then: only later inspections are used."""


class OfClaim(Struct, frozen=True, gc=False):
    """The consequences of one claim for others. `strangers.own_claims` follows from these values alone."""

    name: ClaimName
    owns: bool = False
    """True if it has its devices, or is to give them back."""
    has_ended: bool = False
    """True if it was unprepared."""
    is_over: bool = False
    """True if nothing of it is left."""
    reserved: tuple[tuple[DeviceKey, ClaimedDevice], ...] = ()
    """The devices that it has for itself."""
    unplaced: tuple[str, ...] = ()
    """The same as `ClaimRecord.unplaced`."""
    admin: tuple[AdminAccess, ...] = ()
    nodes: frozenset[int | str] = frozenset()
    """The IOMMU groups and cdevs that its files name, may name, or are to name."""


class OfClaims(Struct, frozen=True, gc=False):
    """The consequences of the claims for others: derived for changed claims only, as a node may have a thousand."""

    by_claim: Mapping[ClaimUid, OfClaim] = field(default_factory=dict)
    """The consequences of each claim."""
    named: Mapping[int | str, int] = field(default_factory=dict)
    """The number of claims whose files name each node (`OfClaim.nodes`)."""


class Gpus(Struct, frozen=True, gc=False):
    """The claims of GPUs on this node. The numbers of checks and of owed returns come from the claims' counter."""

    settings: GpuSettings = GpuSettings()
    claims: Claims = NO_CLAIMS
    original_drivers: OriginalDrivers = field(default_factory=dict)
    """The drivers that the functions were found on, from `prebound.noted`."""
    acted: frozenset[PciAddress] = frozenset()
    """The functions whose present driver gpuactors may have bound (`gpus/returns.py`)."""
    settled: Mapping[PciAddress, int] = field(default_factory=dict)
    """The functions that an act has brought to a driver, with the last number issued then: only later inspections show
    where they are."""
    left_out: frozenset[PciAddress] = frozenset()
    """The devices of claims of the checkpoint that no scan has had, until they have been looked for."""
    owed: Mapping[DeviceKey, OwedReturn] = field(default_factory=dict)
    """The returns that are owed, by the device's address."""
    fitness: Mapping[DeviceKey, Fitness] = field(default_factory=dict)
    """Whether a claim could bind each device that is on its host's driver, or that a claim has."""
    fitness_check: FitnessCheck | None = None
    """The outstanding check; None without one."""
    check_at: float = math.inf
    """When the next check is due, the earliest of `fitness`; infinite while one is outstanding. Each step reads it."""
    of_claims: OfClaims = OfClaims()
    """The consequences of `claims` for others, derived from them."""
    reserved: Mapping[DeviceKey, ClaimedDevice] = field(default_factory=dict)
    """The devices that claims have for themselves, and those in `returned`; each with its claim."""
    returned: Mapping[DeviceKey, Returned] = field(default_factory=dict)
    """The devices that claims gave back, until an inspection has seen them on their driver."""
    admin: frozenset[AdminAccess] = frozenset()
    """The claims with admin access to a device: kubelet lists them like its owner."""
    own: OwnClaims = OwnClaims()
    """The claims of GPUs that are known here: no other claim on the node is taken for one of them."""
    ended: frozenset[tuple[str, str]] = frozenset()
    """The names (`ClaimedDevice.name`) of unprepared claims: kubelet lists them until it gets the answer."""


NO_GPUS: Final = Gpus()
"""The state of a node without claims of GPUs."""
