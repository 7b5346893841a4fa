"""Sets of devices that one virtual machine should get together: by the operator, the fabric manager or the kernel.

A partition of an NVLink fabric is all of its GPUs: a GPU reaches another one by NVLink only inside an activated
partition. The memory of an EGM is given away only with all GPUs of its superchip, and NVSwitches go to one virtual
machine. Must not read what another program has written: that is `set_sources.py`. Must not choose: that is
`deviceplugin/allocation.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Final

from msgspec import Struct, field
from msgspec.structs import replace

from gpuactors.core.values.cause import Cause
from gpuactors.core.values.model import DeviceKey, PciAddress
from gpuactors.core.values.quote import quoted_ids
from gpuactors.core.values.slices import OfferedDevice, known_attributes
from gpuactors.core.values.status import Reason

PARTITION_SIZES: Final = (1, 2, 4, 8)
"""The sizes of partitions that a slice has an attribute for, by the names of NVIDIA's DRA driver: `partition2`."""

LISTED_BY: Final = "--partition-command"
"""The place of a partition in a problem: what lists it."""

_NAMED_MAX: Final = 4
"""The maximum number of sets that a refusal names: each has up to 8 addresses."""


class SetSource(StrEnum):
    """Where a set comes from."""

    OPERATOR = "the operator's file"
    FABRIC_MANAGER = "the fabric manager"
    EGM = "EGM"
    SWITCHES = "the NVSwitches"


class DeviceSet(Struct, frozen=True, gc=False):
    """Devices of this node that belong together."""

    devices: tuple[DeviceKey, ...]
    """The keys of its devices, each once, sorted; at least one."""
    source: SetSource
    name: str
    """The name in its source: of a partition its number, in decimal digits; of an EGM the kernel's, `egm4`."""
    is_active: bool = False
    """True if the fabric manager has activated it."""
    node: str = ""
    """The device node of an EGM, by which QEMU gets its memory: `/dev/egm4`; empty if it is not there. Must not be
    opened: the first open clears the memory, which takes long."""

    @property
    def size(self) -> int:
        """The number of its devices."""
        return len(self.devices)

    @property
    def is_partition(self) -> bool:
        """True if a request should get exactly this set; False if it should only get all of it or nothing."""
        return self.source in (SetSource.OPERATOR, SetSource.FABRIC_MANAGER)


class PartitionGpu(Struct, frozen=True, gc=False, rename="camel"):
    """A GPU of a partition, as `fmpm -l` prints it (fmFabricPartitionGpuInfo_t of NVIDIA's nv_fm_types.h)."""

    physical_id: int = 0
    uuid: str | None = ""
    pci_bus_id: str | None = ""


class Partition(Struct, frozen=True, gc=False, rename="camel"):
    """A partition, as `fmpm -l` prints it (fmFabricPartitionInfo_t)."""

    partition_id: int
    is_active: bool = False
    """Printed as 0 or 1."""
    gpu_info: tuple[PartitionGpu, ...] = ()


class KnownSets(Struct, frozen=True, gc=False):
    """The content of one source of sets, or of all."""

    sets: tuple[DeviceSet, ...] = ()
    modules: Mapping[DeviceKey, int] = field(default_factory=dict)
    """The module id of each GPU that has a known one: the number of its place on the board."""
    problems: tuple[str, ...] = ()
    """Why sets were left out, each as a sentence with file, place and remedy."""
    partitions: tuple[Partition, ...] = ()
    """The partitions that the fabric manager lists. Which GPUs they mean depends on what the host says of each."""
    bridges: tuple[PciAddress, ...] = ()
    """The functions on a driver of the host by which its fabric manager reaches NVSwitches that are no PCI functions
    (HGX B200 and B300), sorted."""


class SetsOfSource(Struct, frozen=True, gc=False):
    """The last reads of one source."""

    known: KnownSets | None = None
    """Its content as last read; None if it was never read."""
    unread: str = ""
    """Why it could not be read last, as a sentence; empty if it could be."""


NO_SETS: Final = KnownSets()


def switch_set(switches: Iterable[DeviceKey]) -> tuple[DeviceSet, ...]:
    """Return the NVSwitches of the node as one set. A board whose switches are no PCI functions has none."""
    keys = tuple(sorted(switches))
    return (DeviceSet(keys, SetSource.SWITCHES, "nvswitches"),) if len(keys) > 1 else ()


def without_devices(sets: Sequence[DeviceSet], others: Collection[DeviceKey]) -> tuple[DeviceSet, ...]:
    """Return the sets less the devices that are offered as another resource: kubelet calls once for each resource, so
    that one call never has a set of GPUs and NVSwitches."""
    left = ((found, tuple(key for key in found.devices if key not in others)) for found in sets)
    return tuple(
        found if len(keys) == found.size else replace(found, devices=keys) for found, keys in left if keys
    )


def not_a_set(devices: Collection[DeviceKey], sets: Sequence[DeviceSet]) -> Reason | None:
    """Return why one container or claim must not have these devices together; None if it may.

    Its devices that are in any partition must be exactly one partition, as one virtual machine gets one
    (dra-driver-nvidia-gpu refuses two at Prepare as well). It must have all NVSwitches or none. A device that no set
    names, and an EGM of which it has a part, refuse nothing: the container only gets no device node of that EGM.
    """
    requested = frozenset(devices)
    partitions = [s for s in sets if s.is_partition]
    in_partitions = requested & {key for s in partitions for key in s.devices}
    if in_partitions and not any(in_partitions == set(s.devices) for s in partitions):
        return Reason(
            Cause.NOT_A_SET,
            f"{_listed(sorted(in_partitions))} are not exactly one partition of this node: "
            f"{_remedy(len(in_partitions), partitions)}, or allow it by --sets prefer",
        )
    for switches in (s for s in sets if s.source is SetSource.SWITCHES):
        missing = set(switches.devices) - requested
        if missing and len(missing) < switches.size:
            return Reason(
                Cause.NOT_A_SET,
                f"the NVSwitches {_listed(sorted(missing))} are missing: request all {switches.size} of this node or "
                "none, or allow it by --sets prefer",
            )
    return None


def egm_nodes(devices: Collection[DeviceKey], sets: Iterable[DeviceSet]) -> tuple[str, ...]:
    """Return the node of each EGM of which one container has every GPU, sorted. Another container that has a GPU of it
    must not reach its memory, so a part gets no node (as kubevirt-gpu-device-plugin 1.6, generic_device_plugin.go)."""
    requested = frozenset(devices)
    return tuple(sorted(s.node for s in sets if s.node and requested.issuperset(s.devices)))


def _remedy(size: int, partitions: Sequence[DeviceSet]) -> str:
    """Return what to request instead, as a part of a sentence."""
    right = [s for s in partitions if s.size == size]
    if not right:
        sizes = sorted({s.size for s in partitions})
        return f"it has none of {size}; request {', '.join(map(str, sizes))} GPUs"
    shown = "; ".join(_listed(s.devices) for s in right[:_NAMED_MAX])
    more = f"; and {len(right) - _NAMED_MAX} more" if len(right) > _NAMED_MAX else ""
    return f"request one of its partitions of {size} ({shown}{more}), by matchAttribute partition{size} in a claim"


def _listed(devices: Sequence[DeviceKey]) -> str:
    return ", ".join(quoted_ids(devices))


def with_attributes(offered: OfferedDevice, of_sets: Mapping[str, int | str | None]) -> OfferedDevice:
    """Return the device of a slice with what `set_attributes` knows of it. The same object if that is nothing."""
    if not of_sets:
        return offered
    return replace(offered, attributes={**offered.attributes, **known_attributes(of_sets)})


def set_attributes(
    key: DeviceKey, sets: Sequence[DeviceSet], modules: Mapping[DeviceKey, int]
) -> dict[str, int | str | None]:
    """Return the attributes by which a claim requests a set (`matchAttribute`), without those that are not known: two
    devices have the same `partition2` exactly if they are in the same partition of two.

    A slice has the name `gpuModuleID` from NVIDIA's DRA driver, where 0 is unknown; the EGM's name is ours.
    """
    egms = [s.name for s in sets if s.source is SetSource.EGM and key in s.devices]
    attributes: dict[str, int | str | None] = {"gpuModuleID": modules.get(key) or None}
    attributes |= {f"partition{size}": _partition(key, size, sets) for size in PARTITION_SIZES}
    attributes["egm"] = egms[0] if len(egms) == 1 else None
    return {name: value for name, value in attributes.items() if value is not None}


def _partition(key: DeviceKey, size: int, sets: Sequence[DeviceSet]) -> int | None:
    """Return the number of the device's partition of this size; None if it is in none, or in several.

    Two sources may use one number for different partitions: where the fabric manager has partitions of this size, only
    its own count, as these can be activated.
    """
    of_size = [s for s in sets if s.is_partition and s.size == size]
    of_fabric = [s for s in of_size if s.source is SetSource.FABRIC_MANAGER]
    numbers = {int(s.name) for s in of_fabric or of_size if key in s.devices}
    return numbers.pop() if len(numbers) == 1 else None
