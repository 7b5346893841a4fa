"""The host: uevents, scans and inspections of functions, polls of IOMMU groups."""

from __future__ import annotations

from dataclasses import dataclass

from gpuactors.core.values.model import GroupUse, PciAddress, PciFunction


@dataclass(frozen=True, slots=True)
class HostChanged:
    """A uevent named this function or this IOMMU group (one of the two is set)."""

    address: PciAddress | None
    iommu_group: int | None
    cause: str
    """Action and subsystem of the uevent: `bind pci`."""


@dataclass(frozen=True, slots=True)
class UeventsOpened:
    """Uevents are received from now on. Earlier changes may have been missed."""


@dataclass(frozen=True, slots=True)
class UeventsLost:
    """Uevents were lost (ENOBUFS); reception continues."""

    reason: str


@dataclass(frozen=True, slots=True)
class UeventsUnavailable:
    """Uevents are unavailable: until they are received only scans find changes."""

    reason: str


@dataclass(frozen=True, slots=True)
class HostScanned:
    """The full scan number `inspection` came back: every selected or given function, companions in their groups
    included."""

    inspection: int
    functions: tuple[PciFunction, ...]


@dataclass(frozen=True, slots=True)
class ScanFailed:
    """The full scan number `inspection` failed; the known facts stay."""

    inspection: int
    reason: str


@dataclass(frozen=True, slots=True)
class FunctionInspected:
    """Inspection number `inspection` of `address` came back: the function itself, if it exists and is selected or
    given, and the other members of its IOMMU group."""

    inspection: int
    address: PciAddress
    functions: tuple[PciFunction, ...]


@dataclass(frozen=True, slots=True)
class InspectionFailed:
    """Inspection number `inspection` of `address` did not come back in time or failed as a whole."""

    inspection: int
    address: PciAddress
    reason: str
    shortage: bool = False
    """The daemon had no descriptors, memory or threads for the inspection: the known facts stay."""


@dataclass(frozen=True, slots=True)
class GroupsObserved:
    """Poll number `poll` came back: the use of every requested group. A group that could not be read at all is not in
    here."""

    poll: int
    uses: tuple[GroupUse, ...]


@dataclass(frozen=True, slots=True)
class SomeGroupsObserved:
    """A `GroupsObserved` of some groups only, without evidence of the others. A kind of its own, as the journal writes
    only the differences from the last event of a kind."""

    poll: int
    uses: tuple[GroupUse, ...]


HostEvent = (
    HostChanged
    | UeventsOpened
    | UeventsLost
    | UeventsUnavailable
    | HostScanned
    | ScanFailed
    | FunctionInspected
    | InspectionFailed
)
UsageEvent = GroupsObserved | SomeGroupsObserved
