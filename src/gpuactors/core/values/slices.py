"""The values of ResourceSlices: how the devices of this node are offered to the scheduler (`resource.k8s.io/v1`).

`claims/pool.py` decides which devices are offered, and how; `claims/slice_writes.py` decides the writes.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final

from msgspec import Struct, field

SLICE_STRING_MAX_BYTES: Final = 64
"""The maximum size of a string attribute of a device (DeviceAttributeMaxValueLength)."""

STANDARD: Final = "resource.kubernetes.io/"
"""The prefix of the attributes that Kubernetes defines (k8s.io/dynamic-resource-allocation/deviceattribute)."""

PCIE_ROOT: Final = f"{STANDARD}pcieRoot"
NUMA_NODE: Final = f"{STANDARD}numaNode"

SLICE_ATTRIBUTES_MAX: Final = 32
"""The maximum number of attributes and capacities of one device (ResourceSliceMaxAttributesAndCapacitiesPerDevice)."""


class ServerKeeps(StrEnum):
    """Whether the API server stores the fields of a feature gate: the taints of devices (DRADeviceTaints), or counters
    (DRAPartitionableDevices). It drops them silently if the gate is off, as both are in 1.34 and 1.35 by default, so a
    dry run determines it."""

    UNKNOWN = "unknown"
    YES = "yes"
    NO = "no"


class BlockKind(StrEnum):
    """Why a device must not be given to a claim, as the last part of its taint's key."""

    UNHEALTHY = "unhealthy"
    """No virtual machine could open it."""
    HELD = "held"
    """A pod has it without a claim of gpuactors, or a process has it."""


class BlockReason(Struct, frozen=True, gc=False):
    """Why a device must not be given to a claim now."""

    kind: BlockKind
    cause: str
    """One word for programs (`values/cause.py`); the value of the taint."""


class OfferedDevice(Struct, frozen=True, gc=False):
    """One device as the node offers it to claims."""

    name: str
    """The name: a DNS label, unique in the pool. Devices are offered in the order of their names."""
    attributes: Mapping[str, Attribute]
    """The known attributes, at most SLICE_ATTRIBUTES_MAX with the capacities. Scalars only: lists need a gate."""
    capacity: Mapping[str, str] = field(default_factory=dict)
    """The quantities, as the server writes them."""
    invalid: str = ""
    """Why no slice can have it, as a sentence; empty if one can."""
    blocked: BlockReason | None = None
    """Why it must not be allocated now; None if it may be."""
    claimed: bool = False
    """True if a live claim has it: it stays in the slice in any case."""
    counter_set: str = ""
    """The counter set of its card, by which the scheduler gives away the card or parts of it; empty without parts."""
    is_whole: bool = False
    """True if it takes all of that set; a part takes one slot."""


class Offer(Struct, frozen=True, gc=False):
    """The devices that one driver offers on this node."""

    driver: str
    node: str
    devices: tuple[OfferedDevice, ...]
    """The devices, in any order."""


# --- as the API server has them ---------------------------------------------------------------------------


class Attribute(Struct, frozen=True, gc=False):
    """The value of a device's attribute. The type is part of it: Python takes True for 1."""

    type: str
    """`string`, `int`, `bool` or `version`."""
    value: str | int | bool


def quantity(size_bytes: int) -> str:
    """Write bytes as Kubernetes does: `128Gi` (k8s.io/apimachinery, resource.Quantity of BinarySI)."""
    for suffix in ("", "Ki", "Mi", "Gi", "Ti", "Pi"):
        if size_bytes % 1024 or not size_bytes:
            return f"{size_bytes}{suffix}"
        size_bytes //= 1024
    return f"{size_bytes}Ei"


def attribute(value: str | int | bool) -> Attribute:
    """Return `value` with its type; a string is cut to SLICE_STRING_MAX_BYTES."""
    match value:
        case bool():
            return Attribute("bool", value)
        case int():
            return Attribute("int", value)
        case str():
            # The server counts bytes; a character that would be cut in two is left out.
            short = value.encode()[:SLICE_STRING_MAX_BYTES].decode(errors="ignore")
            return Attribute("string", short)


class CounterSet(Struct, frozen=True, gc=False):
    """A named set of counters: what a pool has of it, or what a device consumes (KEP-4815)."""

    name: str
    counters: Mapping[str, str]
    """The quantity of each counter, as the server writes it."""


def known_attributes(values: Mapping[str, str | int | bool | None]) -> dict[str, Attribute]:
    """Return these values with their types, without those that are None: they are not known."""
    return {name: attribute(value) for name, value in values.items() if value is not None}


NO_SCHEDULE = "NoSchedule"
"""The only effect of gpuactors' taints: NoExecute would evict the virtual machine that has the device."""


class Taint(Struct, frozen=True, gc=False, eq=False):
    """A taint of a device."""

    key: str
    value: str = ""
    effect: str = NO_SCHEDULE
    time_added: str | None = None
    """When the taint was added. The server sets it again at each write that lacks it, so it is copied from the stored
    slice and ignored in comparisons."""

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
    """The same as `OfferedDevice.capacity`."""
    consumes: tuple[CounterSet, ...] = ()
    """The counters of the pool's sets that it consumes while it is allocated."""


class SliceSpec(Struct, frozen=True, gc=False):
    """The content of a slice."""

    driver: str
    node: str
    pool: str
    generation: int
    slice_count: int
    devices: tuple[SliceDevice, ...]
    """The devices in the order of preference: the scheduler takes the first that fits."""
    foreign: tuple[str, ...] = ()
    """The paths of a stored slice that gpuactors never writes (`devices[0].allowMultipleAllocations`)."""
    counter_sets: tuple[CounterSet, ...] = ()
    """The pool's counter sets: a slice has these or devices."""


class StoredSlice(Struct, frozen=True, gc=False):
    """A slice as the server stored it."""

    name: str
    uid: str
    version: str
    """The slice's resourceVersion: compared for equality only."""
    owner: str | None
    """The UID of the Node that is its controller; None without one."""
    spec: SliceSpec


class Publication(Struct, frozen=True, gc=False):
    """The publisher's report about one driver's slices, for the log, `inspect` and `explain`."""

    driver: str
    keeps_taints: ServerKeeps
    settled: bool
    """True if the server has what is offered."""
    generation: int
    slices: int
    tainted: tuple[str, ...] = ()
    """The names of the devices that are offered with a taint."""
    withdrawn: tuple[str, ...] = ()
    """The names of the devices that are left out as the server keeps no taints."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Why no slice can have a device, by its name."""
    problem: str = ""
    """Why it is not settled, as a sentence; empty if nothing is wrong."""
    keeps_counters: ServerKeeps = ServerKeeps.UNKNOWN
