"""The values of ResourceSlices: how the devices of this node are offered to the scheduler (`resource.k8s.io/v1`).

`claims/pool.py` decides which devices are offered, and how; `claims/slice_writes.py` what is to be written.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final, Generic, Protocol, TypeAlias, TypeVar

from msgspec import Struct, field

SLICE_ATTRIBUTES_MAX: Final = 32
"""Attributes and capacities of one device (ResourceSliceMaxAttributesAndCapacitiesPerDevice)."""


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
    """A pod or a process has it, and not by a claim of gpuactors."""


class BlockReason(Struct, frozen=True, gc=False):
    """A device must not be given to a claim now."""

    kind: BlockKind
    cause: str
    """One word for programs (`values/cause.py`); the value of the taint."""


class OfferedDevice(Protocol):
    """One device as the node offers it."""

    @property
    def name(self) -> str:
        """A DNS label, unique in the pool. Devices are offered in the order of their names."""
        ...

    @property
    def attributes(self) -> Mapping[str, Attribute]:
        """At most SLICE_ATTRIBUTES_MAX; one that is not known is absent."""
        ...

    @property
    def capacity(self) -> Mapping[str, str]:
        """Quantities, as the server writes them; they count with the attributes."""
        ...

    @property
    def invalid(self) -> str:
        """Why no slice can have it, as a sentence; empty if one can."""
        ...

    @property
    def blocked(self) -> BlockReason | None:
        """Why it must not be given away now."""
        ...

    @property
    def claimed(self) -> bool:
        """A live claim has it: it stays in the slice, whatever else."""
        ...


D_co = TypeVar("D_co", bound=OfferedDevice, covariant=True)


class Offer(Struct, Generic[D_co], frozen=True, gc=False):
    """All that one driver offers on this node."""

    driver: str
    node: str
    devices: tuple[D_co, ...]
    """In any order."""


AnyOffer: TypeAlias = Offer[OfferedDevice]
"""Of any driver."""


# --- as the API server has them ---------------------------------------------------------------------------


class Attribute(Struct, frozen=True, gc=False):
    """The value of a device's attribute. The type is part of it: Python takes True for 1."""

    type: str
    """`string`, `int`, `bool` or `version`."""
    value: str | int | bool


NO_SCHEDULE = "NoSchedule"
"""The only effect of our taints: NoExecute would evict the virtual machine that has the device."""


class Taint(Struct, frozen=True, gc=False, eq=False):
    """A taint of a device."""

    key: str
    value: str = ""
    effect: str = NO_SCHEDULE
    time_added: str | None = None
    """Set by the server where we leave it out, anew at each write; so it is taken over from what is stored, and
    does not count when slices are compared."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Taint) and self._compared() == other._compared()

    def __hash__(self) -> int:
        return hash(self._compared())

    def _compared(self) -> tuple[str, str, str]:
        return self.key, self.value, self.effect


class SliceDevice(Struct, frozen=True, gc=False):
    """A device in a slice."""

    name: str
    attributes: Mapping[str, Attribute]
    taints: tuple[Taint, ...] = ()
    capacity: Mapping[str, str] = field(default_factory=dict)
    """Quantities."""


class SliceSpec(Struct, frozen=True, gc=False):
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


class StoredSlice(Struct, frozen=True, gc=False):
    """A slice as the server stored it."""

    name: str
    uid: str
    version: str
    """Its resourceVersion: compared for equality only."""
    owner: str | None
    """The UID of the Node that is its controller."""
    spec: SliceSpec


class Publication(Struct, frozen=True, gc=False):
    """The publisher's facts and writes of one driver's slices; for the log, `inspect` and `explain`."""

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
    left_out: Mapping[str, str] = field(default_factory=dict)
    """The names of the devices that no slice can have, with the reason."""
    problem: str = ""
    """Why it is not settled, as a sentence; empty if nothing is wrong."""
