"""The values of ResourceSlices: how the devices of this node are offered to the scheduler (`resource.k8s.io/v1`).

`pool.py` decides which devices are offered, and how; `slice_writes.py` what is to be written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from gpuactors.core.model import PciAddress


class ServerKeepsTaints(StrEnum):
    """Whether the API server stores the taints of a device. It drops them without a word where its gate
    DRADeviceTaints is off (1.34 and 1.35 by default), so it is asked by a dry run."""

    UNKNOWN = "unknown"
    YES = "yes"
    NO = "no"


class BlockKind(StrEnum):
    """Why a device must not be given to a claim, as the last part of its taint's key."""

    UNHEALTHY = "unhealthy"
    """No virtual machine could open it."""
    HELD = "held"
    """A pod or a process has it, and not by a claim of ours."""


@dataclass(frozen=True, slots=True)
class Blocked:
    """A device must not be given to a claim now."""

    kind: BlockKind
    cause: str
    """One word for programs (`assessment/cause.py`); the value of the taint."""


@dataclass(frozen=True, slots=True)
class OfferedDevice:
    """One device as the node offers it."""

    address: PciAddress
    vendor: str
    """Four hex digits, as in `PciFunction`; so is `device`."""
    device: str
    model: str | None
    numa_node: int | None
    pcie_root: str | None
    iommu_group: int | None
    iommufd: bool
    """The node has iommufd, so that a virtual machine may open it by its cdev once it is on vfio."""
    uuid: str | None = None
    is_nvswitch: bool = False
    blocked: Blocked | None = None
    claimed: bool = False
    """A live claim has it: it stays in the slice, whatever else."""


@dataclass(frozen=True, slots=True)
class Offer:
    """All that one driver offers on this node."""

    driver: str
    node: str
    devices: tuple[OfferedDevice, ...]
    """In any order."""


# --- as the API server has them ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Attribute:
    """The value of a device's attribute. The type is part of it: Python takes True for 1."""

    type: str
    """`string`, `int`, `bool` or `version`."""
    value: str | int | bool


NO_SCHEDULE = "NoSchedule"
"""The only effect of our taints: NoExecute would evict the virtual machine that has the device."""


@dataclass(frozen=True, slots=True)
class Taint:
    """A taint of a device."""

    key: str
    value: str = ""
    effect: str = NO_SCHEDULE
    time_added: str | None = field(default=None, compare=False)
    """Set by the server where we leave it out, anew at each write; so it is taken over from what is stored, and
    does not count when slices are compared."""


@dataclass(frozen=True, slots=True)
class SliceDevice:
    """A device in a slice."""

    name: str
    attributes: Mapping[str, Attribute]
    taints: tuple[Taint, ...] = ()


@dataclass(frozen=True, slots=True)
class SliceSpec:
    """The content of a slice."""

    driver: str
    node: str
    pool: str
    generation: int
    slice_count: int
    devices: tuple[SliceDevice, ...]
    """In the order of the scheduler's preference: it takes the first that fits."""
    foreign: tuple[str, ...] = ()
    """Of a stored one: what it has that we never write, by its path (`devices[0].allowMultipleAllocations`)."""


@dataclass(frozen=True, slots=True)
class StoredSlice:
    """A slice as the server stored it."""

    name: str
    uid: str
    version: str
    """Its resourceVersion: compared for equality only."""
    owner: str | None
    """The UID of the Node that is its controller."""
    spec: SliceSpec


@dataclass(frozen=True, slots=True)
class Publication:
    """What the publisher of one driver's slices knows and has done; for the log, `inspect` and `explain`."""

    driver: str
    keeps_taints: ServerKeepsTaints
    settled: bool
    """The server has what is offered."""
    generation: int
    slices: int
    tainted: tuple[str, ...] = ()
    """Names of the devices that are offered with a taint."""
    withdrawn: tuple[str, ...] = ()
    """Names of the devices that are left out as the server keeps no taints."""
    left_out: Mapping[PciAddress, str] = field(default_factory=dict)
    """The devices that no slice can have, with the reason."""
    problem: str = ""
    """Why it is not settled, as a sentence; empty if nothing is wrong."""
