"""The host: uevents, scans and inspections of functions and mediated devices, polls of IOMMU groups."""

from __future__ import annotations

from msgspec import Struct

from gpuactors.core.kinds.sets import KnownSets, SetSource
from gpuactors.core.values.mediated import MediatedDevice
from gpuactors.core.values.model import DeviceKey, GroupUse, InspectedKey, PciAddress, PciFunction


class HostChanged(Struct, frozen=True, gc=False):
    """A uevent named this function, this IOMMU group or this mediated device: one of the three is set."""

    address: PciAddress | None
    iommu_group: int | None
    cause: str
    """The action and subsystem of the uevent: `bind pci`."""
    mediated: DeviceKey | None = None


class UeventsOpened(Struct, frozen=True, gc=False):
    """Uevents are received from now on. Earlier changes were missed."""

    scan_begun: bool = True
    """True if a scan may have begun before, and have missed such a change."""


class UeventsLost(Struct, frozen=True, gc=False):
    """Uevents were lost (ENOBUFS); reception continues."""

    reason: str


class UeventsUnavailable(Struct, frozen=True, gc=False):
    """Uevents are unavailable: until they are received only scans find changes."""

    reason: str
    scan_begun: bool = True
    """The same as `UeventsOpened.scan_begun`."""


class HostScanned(Struct, frozen=True, gc=False):
    """The full scan number `inspection` came back: every selected or given function, companions in their groups
    included."""

    inspection: int
    functions: tuple[PciFunction, ...]
    mediated: tuple[MediatedDevice, ...] = ()
    """All mediated devices; the functions that they are parts of are in `functions`."""


class ScanFailed(Struct, frozen=True, gc=False):
    """The full scan number `inspection` failed; the known facts stay."""

    inspection: int
    reason: str


class FunctionInspected(Struct, frozen=True, gc=False):
    """Inspection number `inspection` of `address` came back: the function itself, if it exists and is selected or
    given, and the other members of its IOMMU group. Or the mediated device of this key, if it exists, and the functions
    that it is a part of."""

    inspection: int
    address: InspectedKey
    functions: tuple[PciFunction, ...]
    mediated: tuple[MediatedDevice, ...] = ()


class FunctionsInspected(Struct, frozen=True, gc=False):
    """Several inspections came back together, in this order: those of a call's devices, for instance."""

    inspected: tuple[FunctionInspected, ...]


class InspectionFailed(Struct, frozen=True, gc=False):
    """Inspection number `inspection` of `address` did not come back in time or failed as a whole."""

    inspection: int
    address: InspectedKey
    reason: str
    shortage: bool = False
    """True if the daemon lacked descriptors, memory or threads for the inspection: the known facts stay."""


class GroupsObserved(Struct, frozen=True, gc=False):
    """Poll number `poll` came back with the use of every requested group, except groups that could not be read at
    all."""

    poll: int
    uses: tuple[GroupUse, ...]


class SomeGroupsObserved(Struct, frozen=True, gc=False):
    """A `GroupsObserved` of some groups only: no evidence about the others. A type of its own, as the journal writes
    only the differences from the last event of a type."""

    poll: int
    uses: tuple[GroupUse, ...]


class SetsObserved(Struct, frozen=True, gc=False):
    """A source of sets of devices was read: it names these, or could not be read, for the reason in the sentence."""

    source: SetSource
    known: KnownSets | str


HostEvent = (
    HostChanged
    | UeventsOpened
    | UeventsLost
    | UeventsUnavailable
    | HostScanned
    | ScanFailed
    | FunctionInspected
    | FunctionsInspected
    | InspectionFailed
    | SetsObserved
)
UsageEvent = GroupsObserved | SomeGroupsObserved
