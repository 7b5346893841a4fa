"""The values of ResourceSlices: how the devices of this node are offered to the scheduler (`resource.k8s.io/v1`).

`claims/pool.py` decides which devices are offered, and how; `claims/slice_writes.py` what is to be written.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final

from msgspec import Struct, field

SLICE_STRING_MAX_BYTES: Final = 64
"""A string attribute of a device (DeviceAttributeMaxValueLength)."""

STANDARD: Final = "resource.kubernetes.io/"
"""The prefix of the attributes that Kubernetes defines (k8s.io/dynamic-resource-allocation/deviceattribute)."""

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


class OfferedDevice(Struct, frozen=True, gc=False):
    """One device as the node offers it."""

    name: str
    """A DNS label, unique in the pool. Devices are offered in the order of their names."""
    attributes: Mapping[str, Attribute]
    """At most SLICE_ATTRIBUTES_MAX, scalars only: lists need a gate. One that is not known is absent."""
    capacity: Mapping[str, str] = field(default_factory=dict)
    """Quantities, as the server writes them; they count with the attributes."""
    invalid: str = ""
    """Why no slice can have it, as a sentence; empty if one can."""
    blocked: BlockReason | None = None
    """Why it must not be given away now."""
    claimed: bool = False
    """A live claim has it: it stays in the slice, whatever else."""


class Offer(Struct, frozen=True, gc=False):
    """All that one driver offers on this node."""

    driver: str
    node: str
    devices: tuple[OfferedDevice, ...]
    """In any order."""


# --- as the API server has them ---------------------------------------------------------------------------


class Attribute(Struct, frozen=True, gc=False):
    """The value of a device's attribute. The type is part of it: Python takes True for 1."""

    type: str
    """`string`, `int`, `bool` or `version`."""
    value: str | int | bool


def quantity(size_bytes: int) -> str:
    """Bytes as Kubernetes writes them: `128Gi` (k8s.io/apimachinery, resource.Quantity of BinarySI)."""
    for suffix in ("", "Ki", "Mi", "Gi", "Ti", "Pi"):
        if size_bytes % 1024 or not size_bytes:
            return f"{size_bytes}{suffix}"
        size_bytes //= 1024
    return f"{size_bytes}Ei"


def attribute(value: str | int | bool) -> Attribute:
    """`value` with its type; a string as far as the server takes it."""
    match value:
        case bool():
            return Attribute("bool", value)
        case int():
            return Attribute("int", value)
        case str():
            # The server counts bytes; a character that would be cut in half is left out.
            short = value.encode()[:SLICE_STRING_MAX_BYTES].decode(errors="ignore")
            return Attribute("string", short)


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
