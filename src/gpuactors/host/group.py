"""A GPU and its companions, as an act must know them: who is on which driver, in which IOMMU group, with which nodes.

Synchronous. Like `sysfs.py` it reads only what never blocks: while an unbind waits for its holder, reading `uevent`,
`driver_override` or `sriov_numvfs` waits as well (they take the device's lock), links and listings do not.
"""

from __future__ import annotations

import os
import re
from typing import Final, final

from msgspec import Struct

from gpuactors.core.values.claim import BoundFunction
from gpuactors.core.values.model import PciAddress, is_bridge, is_pci_address
from gpuactors.core.values.text import encodable
from gpuactors.host.best_effort import names_in, text_of
from gpuactors.host.faults import GONE, raise_if_short
from gpuactors.host.iommu import read_group
from gpuactors.host.procfs import NodeId, node_id
from gpuactors.host.root import (
    DEV,
    IOMMUFD_NODE,
    NVIDIA_GPUS,
    PCI_DEVICES,
    HostRoot,
    cdev_node,
    group_node,
)
from gpuactors.host.sysfs import ONLY_VIRTUAL, VFIO_DRIVERS, has_virtual_functions, presence_of

_CDEV: Final = re.compile(r"vfio[0-9]+")
_DEPTH: Final = 4
"""The depth of a function's devices below its directory: `sound/card1/pcmC1D3p/dev`, `i2c-3/i2c-dev/i2c-3/dev`."""
_NUMBER: Final = re.compile(r"([0-9]{1,4}):([0-9]{1,7})")
"""A device number: 12 bits and 20 (include/linux/kdev_t.h)."""
_MINOR: Final = re.compile(r"^Device Minor:\s*([0-9]{1,7})\s*$", re.MULTILINE)
_NVIDIA_MAJOR: Final = 195
_NODE_DIRECTORIES: Final = {"drm": "dri", "sound": "snd"}
"""The directories below /dev by the directory of the subsystem: their nodes have the names of sysfs."""


class GroupFunction(Struct, frozen=True):
    """One function of an IOMMU group."""

    bound: BoundFunction
    vendor: str
    """The vendor id, four hex digits; empty if it cannot be read."""
    class_code: str
    """The class code, six hex digits; empty if it cannot be read."""
    has_virtual_functions: bool
    physical: PciAddress | None
    """See `PciFunction.physical`."""
    unlinked: bool
    """See `PciFunction.unlinked`."""
    modalias: str
    """The modalias, `pci:v…`; empty if it cannot be read."""
    interrupts: int = 0
    """The number of MSI or MSI-X vectors that its driver has (`msi_irqs/`). NVIDIA's driver has them while it has
    started the device, and none before its first user or after its last one (kernel-open/nvidia/nv.c, nv_start_device
    and nv_shutdown_adapter, as of 595.45). With NVreg_EnableMSI=0 it never has any, with NVreg_GpuInitOnProbe=1
    always."""

    @property
    def is_virtual(self) -> bool:
        """See `PciFunction.is_virtual`."""
        return self.physical is not None or self.unlinked

    @property
    def address(self) -> PciAddress:
        return self.bound.address

    @property
    def driver(self) -> str | None:
        return self.bound.driver

    @property
    def vfio_bound(self) -> bool:
        return self.bound.vfio


class Group(Struct, frozen=True):
    """An IOMMU group."""

    iommu_group: int
    functions: tuple[GroupFunction, ...]
    """The PCI functions in the group, sorted by address, bridges included."""
    has_node: bool
    """True if `/dev/vfio/<number>` exists."""
    other_members: tuple[tuple[str, str], ...] = ()
    """See `PciFunction.other_members`."""
    direct_region: str = ""
    """See `PciFunction.direct_region`."""


@final
class GroupReader:
    """Reads groups below a host's root. Keeps nothing between calls."""

    def __init__(self, root: HostRoot) -> None:
        self._root = root

    def read(self, device: PciAddress) -> Group | None:
        """Return the group of a function; None if it is not there or has none. Raises `OSError`, `HostError`."""
        number = _link_name(f"{self._directory(device)}/iommu_group")
        if number is None or not (number.isascii() and number.isdigit()):
            return None
        try:
            group = read_group(self._root, int(number))
        except OSError as error:
            if error.errno in GONE:
                return None
            raise
        functions = tuple([self._function(member, int(number)) for member in group.functions])
        has_node = os.path.exists(self._root.real(group_node(int(number))))
        return Group(int(number), functions, has_node, group.other_members, group.direct_region)

    def _directory(self, address: PciAddress) -> str:
        return self._root.real(f"{PCI_DEVICES}/{address}")

    def _function(self, address: PciAddress, group: int) -> GroupFunction:
        directory = self._directory(address)
        driver = _link_name(f"{directory}/driver")
        cdevs = sorted(filter(_CDEV.fullmatch, names_in(f"{directory}/vfio-dev")))
        vfio = driver is not None and (driver in VFIO_DRIVERS or bool(cdevs))
        usable = bool(cdevs) and all(
            os.path.exists(self._root.real(node)) for node in (cdev_node(cdevs[0]), IOMMUFD_NODE)
        )
        physical = _link_name(f"{directory}/physfn")
        return GroupFunction(
            BoundFunction(
                address,
                driver,
                group,
                cdevs[0] if usable else None,
                vfio=vfio,
                presence=presence_of(directory) or 0,
            ),
            vendor=_text(f"{directory}/vendor").removeprefix("0x"),
            class_code=_text(f"{directory}/class").removeprefix("0x"),
            has_virtual_functions=has_virtual_functions(directory),
            physical=PciAddress(physical) if physical is not None and is_pci_address(physical) else None,
            unlinked=physical is None and os.path.exists(f"{directory}/{ONLY_VIRTUAL}"),
            modalias=self._modalias(directory),
            interrupts=len(names_in(f"{directory}/msi_irqs")),
        )

    def _modalias(self, directory: str) -> str:
        if text := _text(f"{directory}/modalias"):
            return text
        names = ("vendor", "device", "subsystem_vendor", "subsystem_device", "class")
        ids = [_text(f"{directory}/{name}").removeprefix("0x").upper() for name in names]
        if not (ids[0] and ids[1] and len(ids[4]) == 6):
            return ""
        vendor, device, subvendor, subdevice = (f"{i:0>8}" for i in ids[:4])
        code = ids[4]
        return f"pci:v{vendor}d{device}sv{subvendor}sd{subdevice}bc{code[:2]}sc{code[2:4]}i{code[4:]}"

    # --- the nodes by which a process uses it -------------------------------------------------------------------------

    def nodes(self, group: Group) -> dict[NodeId, PciAddress]:
        """Return every character device by which a process can have a function of the group open, whatever the driver:
        those that sysfs shows below the function (vfio, DRM, sound, I²C, USB), NVIDIA's own, and the group's. Devices
        are identified by number, because a container has nodes of its own. Raises `HostError` for a shortage."""
        by_node: dict[NodeId, PciAddress] = {}
        for function in group.functions:
            if is_bridge(function.class_code):  # below a bridge are other functions
                continue
            address = function.address
            names = [group_node(group.iommu_group)]
            names += [
                cdev_node(n) for n in names_in(f"{self._directory(address)}/vfio-dev") if _CDEV.fullmatch(n)
            ]
            for number, name in _devices(self._directory(address)):
                by_node[-1, number] = address
                names.append(name)
            minor = _MINOR.search(_text(self._root.real(f"{NVIDIA_GPUS}/{address}/information")))
            if minor is not None:
                by_node[-1, os.makedev(_NVIDIA_MAJOR, int(minor[1]))] = address
                names.append(f"{DEV}/nvidia{minor[1]}")
            for name in names:
                if name and (node := node_id(self._root.real(name))) is not None:
                    by_node.setdefault(node, address)
        return by_node


def _devices(directory: str) -> list[tuple[int, str]]:
    """Return the device number and the node of each device below a function; the node is empty where sysfs does not
    give its path."""
    devices: list[tuple[int, str]] = []
    for path, directories, files in os.walk(directory):
        depth = path.count("/") - directory.count("/")
        if depth >= _DEPTH:
            directories.clear()
        if depth and "dev" in files and (number := _NUMBER.fullmatch(_text(f"{path}/dev"))):
            devices.append((os.makedev(int(number[1]), int(number[2])), _node_name(path, directory)))
    return devices


def _node_name(path: str, directory: str) -> str:
    parts = path.removeprefix(directory).strip("/").split("/")
    below = _NODE_DIRECTORIES.get(parts[0])
    return f"{DEV}/{below}/{parts[-1]}" if below is not None else ""


def _text(path: str) -> str:
    """Read an attribute; empty if it cannot be read."""
    return text_of(path, 4096).strip()


def _link_name(path: str) -> str | None:
    try:
        return encodable(os.path.basename(os.readlink(path)))
    except OSError as error:
        raise_if_short(error, path)
        if error.errno in GONE:
            return None
        raise
