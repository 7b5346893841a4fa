"""Reads mediated devices from sysfs, and which device nodes exist for them.

Synchronous; `reader.py` runs it. Reads only what never blocks: links, listings, `numa_node` of the parent, the `name`
of the type, existence. Must not read `available_instances` or files below `nvidia/`, whose reads wait for the vendor's
driver, must not open a device node, and must not make, remove or change a device.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from typing import Final, final

from msgspec.structs import replace

from gpuactors.core.values.dead_signs import NO_ERRORS, KnownErrors
from gpuactors.core.values.mediated import HostPart, MediatedDevice, is_mediated_key
from gpuactors.core.values.model import DeviceKey, PciAddress, PciFunction, is_pci_address
from gpuactors.core.values.selector import Selector
from gpuactors.core.values.text import encodable
from gpuactors.host.faults import GONE, fault, raise_if_short
from gpuactors.host.root import CONTAINER_NODE, MDEV_DEVICES, HostRoot, group_node
from gpuactors.host.sysfs import (
    Directory,
    Look,
    SysfsReader,
    numa_node_of,
    pcie_root_of,
    presence_of,
    read_attribute,
    vfio_devices,
)
from gpuactors.ports.errors import HostError

NVIDIAS_MARKERS: Final = "plugins/gpu.nvidia.com/vgpu-concrete"
"""The directory, below kubelet's, in which NVIDIA's DRA driver (planned for 0.6) has a file for each vGPU that it has
made for a claim: by the UUID of a mediated device, or the address of a virtual function."""
_NVIDIAS: Final = "NVIDIA's DRA driver"


@final
class PartsReader:
    """Reads the functions as `SysfsReader`, and every mediated device with the functions that it is a part of. Keeps
    nothing between calls.

    All mediated devices are read, chosen by a selector or not: one keeps its parent from virtual machines.
    """

    def __init__(self, root: HostRoot, functions: SysfsReader, nvidias_markers: str = "") -> None:
        """`nvidias_markers`: the directory in which NVIDIA's DRA driver has a file for each device that it has made;
        empty if there is none to read."""
        self._nvidias_markers = nvidias_markers
        self._root = root
        self._functions = functions
        self._bus = root.real(MDEV_DEVICES)

    def choosing(
        self, selectors: tuple[Selector, ...] | None, errors: KnownErrors = NO_ERRORS
    ) -> PartsReader:
        """Return a reader as `SysfsReader.choosing`."""
        functions = self._functions.choosing(selectors, errors)
        return (
            self
            if functions is self._functions
            else PartsReader(self._root, functions, self._nvidias_markers)
        )

    def look(self) -> Look:
        """Begin inspections that share what they read."""
        return self._functions.look()

    def scan(
        self,
        allocated: Collection[PciAddress | DeviceKey] = (),
        *,
        unanswered: Collection[str] = (),
        reads: Callable[[str], None] = lambda name: None,
    ) -> tuple[HostPart, ...]:
        """Return the functions as `SysfsReader.scan`, the mediated devices, and the functions that these are parts of;
        functions first, each sorted. Raises `HostError` if a bus cannot be listed.

        `unanswered` and `reads` as for `SysfsReader.scan`, of mediated devices as well.
        """
        scanned = self._marked(
            self._functions.scan(frozenset(map(PciAddress, allocated)), unanswered=unanswered, reads=reads)
        )
        keys = self._list()
        if not keys:
            return scanned
        functions = {function.address: function for function in scanned}
        look, devices = self.look(), list[MediatedDevice]()
        for key in keys:
            if key not in unanswered:
                reads(key)
            device = self._device(look, key, is_answering=key not in unanswered)
            if device is not None:
                devices.append(device)
        for parent in sorted({d.parent for d in devices if d.parent is not None} - functions.keys()):
            reads(parent)
            for function in self._marked(self._lineage(look, parent)):
                functions.setdefault(function.address, function)
        return (*[functions[address] for address in sorted(functions)], *devices)

    def inspect(
        self,
        key: PciAddress | DeviceKey,
        allocated: Collection[PciAddress | DeviceKey] = (),
        look: Look | None = None,
    ) -> tuple[HostPart, ...]:
        """Return the function and its group as `SysfsReader.inspect`; of a UUID, the functions that the mediated device
        is a part of, and the device. Nothing if it does not exist. Raises `HostError` as these."""
        if not is_mediated_key(key):
            given = frozenset(map(PciAddress, allocated))
            return self._marked(self._functions.inspect(PciAddress(key), given, look))
        look = look or self.look()
        device = self._device(look, DeviceKey(key))
        if device is None:
            return ()
        lineage = self._lineage(look, device.parent) if device.parent is not None else ()
        return (*self._marked(lineage), device)

    def _lineage(self, look: Look, parent: PciAddress) -> tuple[PciFunction, ...]:
        """Return the parent, and its physical function if it is a virtual one, as far as they are there."""
        function = self._functions.function(look, parent)
        if function is None:
            return ()
        if function.physical is None:
            return (function,)
        physical = self._functions.function(look, function.physical)
        return (function,) if physical is None else (function, physical)

    def _list(self) -> list[DeviceKey]:
        """Return the keys of all mediated devices, sorted; none without the module mdev."""
        try:
            return sorted(DeviceKey(name) for name in os.listdir(self._bus) if is_mediated_key(name))
        except OSError as error:
            if error.errno in GONE:
                return []
            raise_if_short(error, self._bus)
            raise HostError(
                f"the mediated devices cannot be listed at {self._bus} ({error.strerror})"
            ) from error

    def _device(self, look: Look, key: DeviceKey, *, is_answering: bool = True) -> MediatedDevice | None:
        """Return the facts of one device; None if it is gone, or vanished meanwhile. Its attributes are read only if
        reads of them do not hang."""
        directory = Directory(key, f"{self._bus}/{key}")
        if presence_of(directory.path) is None:
            return None
        parent = _parent(directory)
        type_id = directory.link("mdev_type")
        type_name = _type_name(directory, type_id) if is_answering and type_id is not None else ""
        if not is_answering:
            directory.faults.append(
                fault(key, directory.path, "does not answer: a read of its attributes hangs")
            )
        driver, group = directory.link("driver"), directory.group()
        cdevs = vfio_devices(f"{directory.path}/vfio-dev") or ()
        nodes = self._nodes(look, directory, group) if driver is not None else ()
        numa_node = _numa_node(directory) if is_answering else None
        root = pcie_root_of(directory.path)
        # Last, so that a device that vanished while it was read is not taken for one without a driver.
        if (presence := presence_of(directory.path)) is None:
            return None
        return MediatedDevice(
            key=key,
            parent=PciAddress(parent) if is_pci_address(parent) else None,
            parent_name=parent,
            type_id=type_id,
            type_name=type_name,
            driver=driver,
            iommu_group=group,
            cdevs=cdevs,
            nodes=nodes,
            numa_node=numa_node,
            pcie_root=root,
            fault=directory.faults[0] if directory.faults else None,
            presence=presence,
            made_by=_NVIDIAS if self._is_nvidias(key) else "",
        )

    def _marked(self, functions: tuple[PciFunction, ...]) -> tuple[PciFunction, ...]:
        """Return the functions; those that NVIDIA's driver has made vGPUs for a claim are its."""
        return tuple(
            [
                replace(f, vgpu=replace(f.vgpu, made_by=_NVIDIAS))
                if f.vgpu is not None and self._is_nvidias(f.address)
                else f
                for f in functions
            ]
        )

    def _is_nvidias(self, key: PciAddress | DeviceKey) -> bool:
        """Return whether NVIDIA's driver has made the device for a claim."""
        return bool(self._nvidias_markers) and os.path.lexists(f"{self._nvidias_markers}/{key}")

    def _nodes(self, look: Look, directory: Directory, group: int | None) -> tuple[str, ...]:
        """Return the nodes that exist, as the host's own paths."""
        own = (CONTAINER_NODE, *([] if group is None else [group_node(group)]))
        return directory.existing(self._root, ((node, look.node(node)) for node in own))


def _parent(directory: Directory) -> str:
    """Return the name of its parent: the last element but one of the path that the bus links to."""
    try:
        parts = os.readlink(directory.path).rstrip("/").split("/")
    except OSError as error:
        raise_if_short(error, directory.path)
        if error.errno not in GONE:
            directory.at_fault(directory.path, f"cannot be read as a link ({error.strerror})")
        return ""
    return encodable(parts[-2]) if len(parts) > 1 else ""


def _type_name(directory: Directory, type_id: str) -> str:
    """Return the type's name; its id if it has none (the attribute is optional)."""
    path = f"{directory.path}/mdev_type/name"
    try:
        name = read_attribute(path).decode("utf-8", errors="replace").strip()
    except OSError as error:
        if error.errno not in GONE:
            directory.at_fault(path, f"cannot be read ({error.strerror})")
            return ""
        return type_id
    return name or type_id


def _numa_node(directory: Directory) -> int | None:
    """Return the NUMA node of the parent; None for -1 (no topology), and for anything unreadable."""
    try:
        # The entry on the bus is a link, so `..` is the parent's directory.
        return numa_node_of(read_attribute(f"{directory.path}/../numa_node"))
    except OSError:
        return None
