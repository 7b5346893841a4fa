"""Reads sets of devices: from the operator's file, from what the fabric manager's tool prints, from EGM's lists.

The content is decoded, and untrusted. A set that cannot be read, or whose devices contradict each other, is left out
and named with its place and the remedy; every other set stands. Must not touch bytes or files.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

from msgspec import Struct, ValidationError, convert

from gpuactors.core.kinds.sets import (
    LISTED_BY,
    DeviceSet,
    KnownSets,
    Partition,
    PartitionGpu,
    SetsOfSource,
    SetSource,
)
from gpuactors.core.values.memo import memoized
from gpuactors.core.values.model import DeviceKey, PciAddress, PciFunction, device_key, pci_address
from gpuactors.core.values.quote import quoted, quoted_id
from gpuactors.core.values.selector import full_address

SETS_MAX: Final = 256
"""The maximum number of sets of one source. A board of eight GPUs has 15; the search for a set takes a step for each
pair of them."""

SET_DEVICES_MAX: Final = 64
"""The maximum number of devices in one set: four times those of the largest board, of 16 GPUs."""

MODULE_ID_MAX: Final = 255
"""The largest module id: the number of a GPU's place on its board, from 1."""


class SetsRead(Struct, frozen=True, gc=False):
    """The sets of one source, and what is wrong in it."""

    sets: tuple[DeviceSet, ...] = ()
    problems: tuple[str, ...] = ()
    """Why sets were left out, each as a sentence with file, place and remedy."""


class GpuIdentity(Struct, frozen=True, gc=False):
    """The names of one GPU by which the list of the fabric manager may mean it."""

    key: DeviceKey
    uuid: str = ""
    """The UUID that NVIDIA's driver gives or gave it; empty if unknown."""
    module_id: int = 0
    """The number of its place on the board; 0 if unknown."""


@memoized
def known_sets(
    sources: Mapping[SetSource, SetsOfSource], functions: Mapping[PciAddress, PciFunction]
) -> KnownSets:
    """Return what all sources together say of the GPUs among these functions."""
    read = [source.known for _, source in sorted(sources.items()) if source.known is not None]
    modules = {key: number for known in read for key, number in known.modules.items()}
    sets = [found for known in read for found in known.sets]
    problems = [problem for known in read for problem in known.problems]
    if listed := [partition for known in read for partition in known.partitions]:
        gpus = identities(functions.values(), modules)
        fabric = fabric_sets(LISTED_BY, listed, gpus)
        sets += fabric.sets
        problems += fabric.problems
    bridges = tuple(bridge for known in read for bridge in known.bridges)
    return KnownSets(tuple(sets), modules, tuple(problems), bridges=bridges)


# --- the operator's file ----------------------------------------------------------------------------------


def operator_sets(file: str, content: object) -> SetsRead:
    """Return the operator's sets: `content` maps each size to the sets of that size, each a list of PCI addresses.

    The name of a set is its place among those of its size, from 1, whether the others can be read or not.
    """
    if not isinstance(content, Mapping):
        return SetsRead(problems=(f"{file}: it is no mapping; write for each size a list of sets",))
    sets: list[DeviceSet] = []
    problems: list[str] = []
    for size, entries in content.items():
        place = f"{file}, sets of {quoted_id(str(size))}"
        if _number(size, SET_DEVICES_MAX) is None:
            problems.append(f"{place}: the size is no number from 1 to {SET_DEVICES_MAX}; correct it")
        elif not isinstance(entries, list | tuple):
            problems.append(f"{place}: it is no list; write a list of sets, each a list of PCI addresses")
        else:
            for number, entry in enumerate(entries[: SETS_MAX + 1], start=1):
                if len(sets) + len(problems) >= SETS_MAX:
                    problems.append(f"{place}: the file has more than {SETS_MAX} sets; the rest is not read")
                    return SetsRead(tuple(sets), tuple(problems))
                keys, problem = _addresses(entry)
                if not problem and len(keys) != int(size):
                    problem = f"it has {len(keys)} addresses; move it to its size, or complete it"
                if problem:
                    problems.append(f"{place}, number {number}: {problem}")
                else:
                    sets.append(DeviceSet(keys, SetSource.OPERATOR, str(number)))
    return SetsRead(tuple(sets), tuple(problems))


def module_ids(file: str, content: object) -> tuple[Mapping[DeviceKey, int], tuple[str, ...]]:
    """Return the module id of each GPU as the operator has written them, `content` by PCI address, and the problems.

    NVIDIA's driver tells the id only while it drives the GPU, so it is noted before the GPU is bound to vfio. An id of
    two GPUs is of neither; 0 is unknown.
    """
    if not isinstance(content, Mapping):
        return {}, (f"{file}: the module ids are no mapping; write PCI address: number for each GPU",)
    found: dict[DeviceKey, int] = {}
    problems: list[str] = []
    for address, value in content.items():
        (keys, problem), number = _addresses([address]), _number(value, MODULE_ID_MAX)
        if not problem and value != 0 and number is None:
            problem = f"{quoted_id(str(value))} is no number from 1 to {MODULE_ID_MAX}; correct it"
        if problem:
            problems.append(f"{file}, module id of {quoted_id(str(address))}: {problem}")
        elif number is not None:
            found[keys[0]] = number
    for number, count in sorted(Counter(found.values()).items()):
        if count > 1:
            problems.append(f"{file}: {count} GPUs have the module id {number}; correct all but one")
            found = {key: other for key, other in found.items() if other != number}
    return found, tuple(problems)


def _number(value: object, most: int) -> int | None:
    """Return a number from 1 to `most`, or its decimal digits, as the key of a JSON object is text; else None."""
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= len(str(most)):
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most else None


def _addresses(entry: object) -> tuple[tuple[DeviceKey, ...], str]:
    """Return the devices of a list of PCI addresses, sorted; or why it is none, as a sentence with the remedy."""
    if not isinstance(entry, list | tuple) or not 0 < len(entry) <= SET_DEVICES_MAX:
        return (), f"it is no list of 1 to {SET_DEVICES_MAX} PCI addresses; correct it"
    keys: set[DeviceKey] = set()
    for text in entry:
        address = full_address(text) if isinstance(text, str) else None
        if address is None:
            # YAML 1.1 reads 0000:01:00.0 as a number of base 60.
            remedy = "" if isinstance(text, str) else ", in quotation marks"
            return (), f"{quoted_id(str(text))} is no PCI address; write it as 0000:3b:00.0{remedy}"
        if address in keys:
            return (), f"{address} is named twice; remove one"
        keys.add(device_key(pci_address(address)))
    return tuple(sorted(keys)), ""


# --- the fabric manager -----------------------------------------------------------------------------------


def identities(functions: Iterable[PciFunction], modules: Mapping[DeviceKey, int]) -> tuple[GpuIdentity, ...]:
    """Return what is known of each whole function of the host, NVSwitches excepted."""
    whole = [f for f in functions if not f.is_virtual and not f.is_nvswitch]
    return tuple(
        GpuIdentity(key, function.gpu_uuid or "", modules.get(key, 0))
        for function, key in ((f, device_key(f.address)) for f in whole)
    )


def partitions(file: str, content: object) -> tuple[tuple[Partition, ...], tuple[str, ...]]:
    """Return the partitions of the list that the fabric manager's tool prints, and the problems."""
    entries = content.get("partitionInfo") if isinstance(content, Mapping) else content
    if not isinstance(entries, list | tuple):
        return (), (f"{file}: it has no list partitionInfo; have the command print what fmpm -l prints",)
    problems: list[str] = []
    listed: list[Partition] = []
    for index, entry in enumerate(entries[:SETS_MAX]):
        try:
            listed.append(convert(entry, Partition, strict=False))
        except ValidationError as error:
            number = entry.get("partitionId", "?") if isinstance(entry, Mapping) else "?"
            place = f"{file}, partitionInfo[{index}] (partition {quoted_id(str(number))})"
            problems.append(f"{place}: {quoted(str(error))}; the partition is not used")
    if len(entries) > SETS_MAX:
        problems.append(f"{file}: it has more than {SETS_MAX} partitions; the rest is not read")
    return tuple(listed), tuple(problems)


def fabric_sets(file: str, listed: Iterable[Partition], gpus: Sequence[GpuIdentity]) -> SetsRead:
    """Return the partitions of the fabric manager as sets of the GPUs of this node.

    A GPU is found by its UUID, else by its PCI address; only where the list has neither (H100 and newer) is the
    physical id the module id. On an A100 the physical ids are 9 to 16, and are no module ids.
    """
    problems: list[str] = []
    found: list[tuple[Partition, tuple[DeviceKey, ...]]] = []
    for partition in listed:
        try:
            found.append((partition, _gpus_of(partition, gpus)))
        except _UnknownGpuError as error:
            place = f"{file}, partition {partition.partition_id}"
            problems.append(f"{place}: {quoted(str(error))}; the partition is not used")
    refused = _contradictions(found)
    problems += [
        f"{file}, partition {number}: {why}; it is not used" for number, why in sorted(refused.items())
    ]
    sets = [
        DeviceSet(
            tuple(sorted(keys)), SetSource.FABRIC_MANAGER, str(partition.partition_id), partition.is_active
        )
        for partition, keys in found
        if partition.partition_id not in refused
    ]
    return SetsRead(tuple(sets), tuple(problems))


class _UnknownGpuError(Exception):
    """A GPU of a partition is none of this node, or of it is said what cannot be; the text says which and the
    remedy."""


def _gpus_of(partition: Partition, gpus: Sequence[GpuIdentity]) -> tuple[DeviceKey, ...]:
    """Return the GPUs of a partition, in its order. Raises `_UnknownGpuError`."""
    if partition.partition_id < 0 or not 0 < len(partition.gpu_info) <= SET_DEVICES_MAX:
        raise _UnknownGpuError(
            f"it has no number, or not 1 to {SET_DEVICES_MAX} GPUs; see the log of the fabric manager"
        )
    keys = [_gpu_of(info, gpus) for info in partition.gpu_info]
    for key, count in Counter(keys).items():
        if count > 1:
            raise _UnknownGpuError(
                f"{count} of its GPUs are {key}; correct the module ids, or report the list"
            )
    return tuple(keys)


def _gpu_of(info: PartitionGpu, gpus: Sequence[GpuIdentity]) -> DeviceKey:
    """Return the GPU of this node that is meant. Raises `_UnknownGpuError`."""
    uuid, bus_id = (info.uuid or "").strip(), (info.pci_bus_id or "").strip()
    address = full_address(bus_id)
    if bus_id and address is None:
        raise _UnknownGpuError(f"pciBusId {quoted_id(bus_id)} is no PCI address; report it to NVIDIA")
    if address == _NO_ADDRESS:
        address = None
    by_uuid = [gpu.key for gpu in gpus if uuid and gpu.uuid.lower() == uuid.lower()]
    if by_uuid:
        if len(by_uuid) > 1 or address not in (None, by_uuid[0]):
            raise _UnknownGpuError(
                f"UUID {quoted_id(uuid)} is that of {' and '.join(by_uuid)} here, and pciBusId is "
                f"{address or 'empty'} in the list; restart the fabric manager, which has an old list, and then "
                "gpuactors"
            )
        return by_uuid[0]
    if address is not None:
        return _at_address(uuid, address, gpus)
    if uuid:
        raise _UnknownGpuError(
            f"UUID {quoted_id(uuid)} is of no GPU whose UUID is known here; write the set into the operator's file"
        )
    by_module = [gpu.key for gpu in gpus if gpu.module_id and gpu.module_id == info.physical_id]
    if len(by_module) != 1:
        raise _UnknownGpuError(
            f"physicalId {info.physical_id} comes without UUID and PCI address, and is the module id of "
            f"{' and '.join(by_module) or 'no GPU here'}; write the module ids into the operator's file"
        )
    return by_module[0]


_NO_ADDRESS: Final = "0000:00:00.0"
"""The address of a GPU that the fabric manager does not know the address of: it prints `00000000:00:00.0`."""


def _at_address(uuid: str, address: str, gpus: Sequence[GpuIdentity]) -> DeviceKey:
    """Return the GPU at an address; its UUID, if both are known, must not be another one."""
    for gpu in gpus:
        if gpu.key == address:
            if uuid and gpu.uuid:
                raise _UnknownGpuError(
                    f"the GPU at {address} has UUID {quoted_id(gpu.uuid)} here, and {quoted_id(uuid)} in the list; "
                    "restart the fabric manager, which has an old list, and then gpuactors"
                )
            return gpu.key
    # Functions that no selector chooses are not read, so one that is not chosen looks like one that is not there.
    raise _UnknownGpuError(
        f"the GPU at {address} is not selected, or is not on this node; have a selector choose it and none exclude "
        "it, or restart the fabric manager if the GPU is gone"
    )


def _contradictions(found: Sequence[tuple[Partition, tuple[DeviceKey, ...]]]) -> dict[int, str]:
    """Return why partitions contradict each other, by their numbers: one number is listed twice, or a physical id is
    one GPU here and another one there. Physical id 0 is none."""
    pairs = {
        (info.physical_id, key)
        for partition, keys in found
        for info, key in zip(partition.gpu_info, keys, strict=True)
        if info.physical_id
    }
    of_ids, of_keys = Counter(number for number, _ in pairs), Counter(key for _, key in pairs)
    wrong = sorted((number, key) for number, key in pairs if of_ids[number] > 1 or of_keys[key] > 1)
    listed = Counter(partition.partition_id for partition, _ in found)
    refused: dict[int, str] = {}
    for partition, keys in found:
        pair = next((pair for pair in wrong if pair[1] in keys), None)
        if listed[partition.partition_id] > 1:
            refused[partition.partition_id] = "it is listed more than once; restart the fabric manager"
        elif pair is not None:
            others = ", ".join(f"{number} is {key}" for number, key in wrong)
            refused[partition.partition_id] = (
                f"its physical ids contradict those of other partitions ({quoted(others)}); "
                "correct the module ids in the operator's file, or restart the fabric manager"
            )
    return refused


# --- EGM ---------------------------------------------------------------------------------------------------


def egm_sets(lists: Mapping[str, Sequence[str]], nodes: Collection[str] = ()) -> SetsRead:
    """Return the GPUs of each EGM, from the addresses in `/sys/class/egm/<name>`. An EGM without a GPU yet is no set,
    and a GPU of two EGMs is a contradiction. `nodes`: the EGMs whose device node exists."""
    found: dict[str, tuple[DeviceKey, ...]] = {}
    problems: list[str] = []
    for name, addresses in sorted(lists.items()):
        if addresses:
            keys, problem = _addresses(tuple(addresses))
            if problem:
                problems.append(
                    f"/sys/class/egm/{quoted_id(name)}, list of GPUs: {problem} (the kernel's list)"
                )
            else:
                found[name] = keys
    counts = Counter(key for keys in found.values() for key in keys)
    for key in sorted(key for key, count in counts.items() if count > 1):
        names = [name for name, keys in found.items() if key in keys]
        problems.append(
            f"/sys/class/egm: {key} is in the lists of {' and '.join(map(quoted_id, names))}; none of them is used, "
            "as only one can be right: report it to the vendor of the kernel"
        )
    return SetsRead(
        tuple(
            DeviceSet(keys, SetSource.EGM, name, node=f"/dev/{name}" if name in nodes else "")
            for name, keys in found.items()
            if all(counts[key] == 1 for key in keys)
        ),
        tuple(problems),
    )
