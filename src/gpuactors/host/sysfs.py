"""Reads PCI functions from sysfs, and which device nodes exist: the facts that everything else follows from.

Synchronous; `reader.py` runs it. Reads only what never blocks (vendor, device, class, numa_node, resource, links,
listings, existence), and through `nvidia.py` what NVIDIA's driver says of a GPU. Must not read `uevent` or
`driver_override`, which hang on kernel 6.1 while an unbind waits for its holder, and must not open a device node:
opening an IOMMU group makes it busy.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Final, final

from msgspec import Struct
from msgspec.structs import replace

from gpuactors.core.values.model import PciAddress, PciFunction, ResourceName, pci_address
from gpuactors.core.values.selector import Selector, matches
from gpuactors.core.values.text import encodable
from gpuactors.host.faults import GONE, fault, gone, raise_if_short
from gpuactors.host.nvidia import GpuUuids
from gpuactors.host.pci_ids import PciIds
from gpuactors.host.root import CONTAINER_NODE, IOMMU_GROUPS, IOMMUFD_NODE, PCI_DEVICES, HostRoot
from gpuactors.host.root import cdev_node as cdev_node_of
from gpuactors.host.root import group_node as group_node_of
from gpuactors.ports.errors import HostError

VFIO_DRIVERS: Final = frozenset({"vfio-pci", "nvgrace_gpu_vfio_pci"})
"""Drivers known by name; any other is recognised by the directory `vfio-dev/` that the kernel makes."""

_ID = re.compile(rb"0x([0-9a-f]{4})\n?")
_CLASS = re.compile(rb"0x([0-9a-f]{6})\n?")
_VFIO_DEVICE = re.compile(r"vfio[0-9]+")
_PCIE_ROOT = re.compile(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}")
_PCI_IDS_ALONE: Final[Mapping[tuple[str, str], ResourceName]] = {}
_BARS: Final = 6
"""The first lines of `resource` are the BARs: start, end and flags (drivers/pci/pci-sysfs.c, resource_show)."""
_ADDRESSES: Final = 1 << 64
_BAR_TYPE: Final = 0x6
_BAR_64_BIT: Final = 0x4
"""PCI_BASE_ADDRESS_MEM_TYPE_64, of the bits of PCI_BASE_ADDRESS_MEM_TYPE_MASK."""
_NODES: Final = 1 << 31
"""A NUMA node is an int of the kernel's."""
_ATTRIBUTE_BYTES: Final = 4096
"""A sysfs attribute is a page at most."""


class _Identity(Struct, frozen=True):
    """The identity of a function. An empty part could not be read, which `faults` explains."""

    vendor: str
    device: str
    class_code: str
    faults: tuple[str, ...]


@final
class SysfsReader:
    """Reads the selected functions, and those that share an IOMMU group with them. Keeps nothing between calls."""

    def __init__(
        self,
        root: HostRoot,
        selectors: tuple[Selector, ...],
        names: PciIds,
        own_names: Mapping[tuple[str, str], ResourceName] = _PCI_IDS_ALONE,
    ) -> None:
        self._bus = root.real(PCI_DEVICES)
        self._groups = root.real(IOMMU_GROUPS)
        self._root = root
        self._selectors = selectors
        self._names = names
        self._own_names = own_names
        self._uuids = GpuUuids(root)

    def scan(
        self,
        given: Collection[PciAddress] = (),
        *,
        unanswered: Collection[str] = (),
        reads: Callable[[str], None] = lambda name: None,
    ) -> tuple[PciFunction, ...]:
        """Every function that is selected or `given`, and the other members of their IOMMU groups, sorted by address.
        Reads the identity of each function on the bus, but the rest only of the selected ones: a host has thousands of
        functions and a few GPUs. Raises `HostError` if the bus cannot be listed.

        `unanswered`: functions of which only links are read, as reads of their attributes hang; they are at fault.
        `reads` is called with the name of each function before its attributes are read, and may raise.
        """
        found: dict[PciAddress, PciFunction] = {}
        companions: set[PciAddress] = set()
        for name in self._list_bus():
            if name in unanswered:
                if name in given or self._chosen(name, _Identity("", "", "", ())):
                    found[pci_address(name)] = self._unanswered(name)
                continue
            reads(name)
            identity = self._identity(name) if name in given or self._candidate(name) else None
            if identity is None or not (name in given or self._chosen(name, identity)):
                continue
            function = self._function(name, identity)
            function, members = (None, ()) if function is None else self._with_group(function)
            if function is not None:
                found[function.address] = function
                companions.update(members)
        for silent in (companions - found.keys()) & frozenset(unanswered):
            found[silent] = self._unanswered(silent)
        self._add_companions(found, companions, reads)
        return tuple(found[address] for address in sorted(found))

    def inspect(self, address: PciAddress, given: Collection[PciAddress] = ()) -> tuple[PciFunction, ...]:
        """The function and its IOMMU group, sorted by address, if any of them is selected or `given`; nothing if it
        does not exist. Raises `HostError` if there is no PCI bus to read.
        """
        identity = self._identity(address)
        function = None if identity is None else self._function(address, identity)
        function, members = (None, ()) if function is None else self._with_group(function)
        if function is None:
            self._check_bus()
            return ()
        found = {address: function}
        self._add_companions(found, members)
        if not any(f.address in given or self._chosen(f.address, _identity_of(f)) for f in found.values()):
            return ()
        return tuple(found[member] for member in sorted(found))

    # --- which functions ------------------------------------------------------------------------------------

    def _list_bus(self) -> list[str]:
        try:
            return _listing(self._bus)
        except OSError as error:
            raise HostError(
                f"the PCI bus cannot be listed at {self._bus} ({error.strerror}): the host's /sys must be readable "
                "there; check --host-root and, in a pod, the mount of the host's /sys"
            ) from error

    def _check_bus(self) -> None:
        """An unreadable bus is not a bus without this function. Raises `HostError`."""
        if not os.path.isdir(self._bus):
            self._list_bus()

    def _candidate(self, name: str) -> bool:
        """Whether it may be selected, by its vendor only: one read for most functions of a large host."""
        try:
            match = _ID.fullmatch(_read(f"{self._bus}/{name}/vendor"))
        except OSError:
            return True
        if match is None:
            return True
        vendor = match[1].decode()
        return any(s.vendor in (None, vendor) for s in self._selectors if not s.exclude)

    def _chosen(self, address: str, identity: _Identity) -> bool:
        """Whether a selector matches it, or might if the unreadable parts were known."""
        # An unreadable part counts as a match: the core knows what the function was before, and ignores it if it never
        # knew it. For the same reason a function is excluded only by parts that could be read.
        return any(
            matches(
                selector,
                vendor=identity.vendor or selector.vendor or "",
                device=identity.device or selector.device or "",
                class_code=identity.class_code or selector.class_prefix or "",
                address=address,
            )
            for selector in self._selectors
            if not selector.exclude
        ) and not any(
            matches(
                selector,
                vendor=identity.vendor,
                device=identity.device,
                class_code=identity.class_code,
                address=address,
            )
            for selector in self._selectors
            if selector.exclude
        )

    def _add_companions(
        self,
        found: dict[PciAddress, PciFunction],
        members: Iterable[PciAddress],
        reads: Callable[[str], None] = lambda name: None,
    ) -> None:
        for member in members:
            if member in found:
                continue
            reads(member)
            identity = self._identity(member)
            function = None if identity is None else self._function(member, identity)
            if function is not None:
                found[member] = function

    def _with_group(self, function: PciFunction) -> tuple[PciFunction | None, tuple[PciAddress, ...]]:
        """The function and the addresses in its IOMMU group.

        At fault if the group cannot be listed, as the other functions that a tenant would get are not known then; None
        if the function is gone, and its group with it.
        """
        if function.iommu_group is None:
            return function, ()
        path = f"{self._groups}/{function.iommu_group}/devices"
        try:
            names = _listing(path)
        except OSError as error:
            if gone(f"{self._bus}/{function.address}"):
                return None, ()
            unlisted = fault(function.address, path, f"cannot be listed ({error.strerror})")
            return replace(function, fault=function.fault or unlisted), ()
        return function, tuple(address for name in names if (address := _address(name)) is not None)

    # --- one function ---------------------------------------------------------------------------------------

    def _identity(self, name: str) -> _Identity | None:
        """The function's identity, as far as it can be read; None if `name` is no function's."""
        if _address(name) is None:
            return None
        directory = f"{self._bus}/{name}"
        faults: list[str] = []
        vendor = _attribute(name, f"{directory}/vendor", _ID, "a PCI vendor id such as 0x10de", faults)
        device = _attribute(name, f"{directory}/device", _ID, "a PCI device id such as 0x2330", faults)
        class_code = _attribute(name, f"{directory}/class", _CLASS, "a class code such as 0x030200", faults)
        return _Identity(vendor, device, class_code, tuple(faults))

    def _function(self, name: str, identity: _Identity) -> PciFunction | None:
        """Everything about one function; None if it vanished meanwhile."""
        address = pci_address(name)
        directory = f"{self._bus}/{name}"
        faults = list(identity.faults)
        driver = _link_name(name, f"{directory}/driver", faults)
        group = self._iommu_group(name, f"{directory}/iommu_group", faults)
        cdevs = _vfio_devices(f"{directory}/vfio-dev")
        vfio_bound = driver is not None and (driver in VFIO_DRIVERS or cdevs is not None)
        if vfio_bound:
            nodes = self._nodes(name, group, cdevs or (), faults)
        else:
            nodes = self._left(group) if driver is None else ()
        numa_node = _numa_node(f"{directory}/numa_node")
        root = _pcie_root(directory)
        physical = _link_name(name, f"{directory}/physfn", faults)
        # Last, so that a function that vanished while it was read is not taken for one without a driver.
        if (presence := presence_of(directory)) is None:
            return None
        return PciFunction(
            address=address,
            vendor=identity.vendor,
            device=identity.device,
            class_code=identity.class_code,
            driver=driver,
            vfio_bound=vfio_bound,
            iommu_group=group,
            numa_node=numa_node,
            pcie_root=root,
            nodes=nodes,
            # Only of the selected ones: reading a vendor's names for the first time takes as long as a hundred
            # inspections.
            model=self._names.lookup(identity.vendor, identity.device)
            if self._chosen(name, identity)
            else None,
            fault=faults[0] if faults else None,
            without_iommu=vfio_bound and group is not None and self._is_without_iommu(group),
            iommufd=os.path.exists(self._root.real(IOMMUFD_NODE)),
            own_name=self._own_names.get((identity.vendor, identity.device)),
            physical=_address(physical) if physical is not None else None,
            # Numbered from 0. Not by `sriov_numvfs`, whose reader waits for an unbind of the function.
            has_virtual_functions=_link_name(name, f"{directory}/virtfn0", faults) is not None,
            gpu_uuid=self._uuids.of(address, driver),
            memory_bytes=_memory_bytes(f"{directory}/resource"),
            presence=presence,
        )

    def _unanswered(self, name: str) -> PciFunction:
        """A function whose attributes are not read, as that hangs: links and listings do not."""
        directory = f"{self._bus}/{name}"
        driver = _link_name(name, f"{directory}/driver", [])
        return PciFunction(
            address=pci_address(name),
            vendor="",
            device="",
            class_code="",
            driver=driver,
            vfio_bound=driver in VFIO_DRIVERS,
            iommu_group=self._iommu_group(name, f"{directory}/iommu_group", []),
            numa_node=None,
            pcie_root=None,
            nodes=(),
            model=None,
            fault=fault(name, directory, "does not answer: a read of its attributes hangs"),
            presence=presence_of(directory) or 0,
        )

    def _iommu_group(self, name: str, path: str, faults: list[str]) -> int | None:
        group = _link_name(name, path, faults)
        if group is None:
            return None
        if not (group.isascii() and group.isdigit()):
            faults.append(
                fault(name, path, f"points at {group!r}, which is not the number of an IOMMU group")
            )
            return None
        return int(group)

    def _is_without_iommu(self, group: int) -> bool:
        """The group was made by vfio itself for a function without an IOMMU (drivers/vfio/group.c,
        vfio_noiommu_group_alloc); only such a group, and those of a few platforms, have a name."""
        try:
            return _read(f"{self._groups}/{group}/name").strip() == b"vfio-noiommu"
        except OSError:
            return False

    def _nodes(
        self, name: str, group: int | None, cdevs: tuple[str, ...], faults: list[str]
    ) -> tuple[str, ...]:
        """The nodes that exist, as the host's own paths: a missing one in kubelet's answer fails the container."""
        wanted = (
            CONTAINER_NODE,
            *(() if group is None else (group_node_of(group),)),
            *(cdev_node_of(cdev) for cdev in cdevs),
            IOMMUFD_NODE,
        )
        return tuple(node for node in wanted if self._exists(name, node, faults))

    def _left(self, group: int | None) -> tuple[str, ...]:
        """The group's node, if it is there for a function without a driver: its unbind may wait for its holder, which
        may be older than this daemon."""
        node = group_node_of(group) if group is not None else None
        return (node,) if node is not None and os.path.exists(self._root.real(node)) else ()

    def _exists(self, name: str, node: str, faults: list[str]) -> bool:
        path = self._root.real(node)
        try:
            os.stat(path)
        except OSError as error:
            raise_if_short(error, path)
            if error.errno not in GONE:
                faults.append(fault(name, path, f"cannot be accessed ({error.strerror})"))
            return False
        return True


def presence_of(directory: str) -> int | None:
    """The number of a function's directory in sysfs, as `PciFunction.presence`; None if it is gone. Raises `HostError`
    for want of descriptors."""
    try:
        return os.stat(directory).st_ino
    except OSError as error:
        raise_if_short(error, directory)
        return None if error.errno in GONE else 0


# --- reading ----------------------------------------------------------------------------------------------------


def _attribute(name: str, path: str, form: re.Pattern[bytes], expected: str, faults: list[str]) -> str:
    """The hex digits of an attribute; empty, with a fault, if it cannot be read or makes no sense."""
    try:
        content = _read(path)
    except OSError as error:
        faults.append(fault(name, path, f"cannot be read ({error.strerror})"))
        return ""
    match = form.fullmatch(content)
    if match is None:
        faults.append(fault(name, path, f"reads {content[:32].decode('latin-1')!r} instead of {expected}"))
        return ""
    return match[1].decode()


def _read(path: str) -> bytes:
    """Raises `OSError`; `HostError` for want of descriptors."""
    # Three system calls: no buffering, no encoding, no fstat. A scan of a large host does this 12,000 times.
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise_if_short(error, path)
        raise
    try:
        return os.read(descriptor, _ATTRIBUTE_BYTES)
    finally:
        os.close(descriptor)


def _listing(directory: str) -> list[str]:
    """The names in it. Raises `OSError`; `HostError` for want of descriptors."""
    try:
        return os.listdir(directory)
    except OSError as error:
        raise_if_short(error, directory)
        raise


def _link_name(name: str, path: str, faults: list[str]) -> str | None:
    """The last component of a link's target (which need not exist any more); None if there is no link.

    A driver's name may be any bytes, UTF-8 or not.
    """
    try:
        return encodable(os.path.basename(os.readlink(path)))
    except OSError as error:
        raise_if_short(error, path)
        if error.errno not in GONE:
            faults.append(fault(name, path, f"cannot be read as a link ({error.strerror})"))
        return None


def _vfio_devices(path: str) -> tuple[str, ...] | None:
    """Names of the vfio devices of a function (`vfio0`), of which there is one; None if it is no vfio device.

    The kernel makes no other names than such (drivers/vfio/vfio_main.c, vfio_init_device): any other is no node's.
    Their directory is there on kernels without cdev support as well, which have no node of that name.
    """
    try:
        return tuple(sorted(name for name in _listing(path) if _VFIO_DEVICE.fullmatch(name)))
    except OSError:
        return None


def _numa_node(path: str) -> int | None:
    """None for -1 (no topology), and for anything unreadable: a GPU is usable without it."""
    try:
        node = int(_read(path))
    except (OSError, ValueError):
        return None
    return node if 0 <= node < _NODES else None


def _memory_bytes(path: str) -> int:
    """Compute `PciFunction.memory_bytes`, which is the `addressableMemory` of NVIDIA's DRA driver: the sum
    of the BARs of 64 bits, rounded up to a power of two (go-nvlib, nvpci, GetTotalAddressableMemory). 0 if it cannot be
    read."""
    total = 0
    try:
        for line in _read(path).splitlines()[:_BARS]:
            start, end, flags = (int(number, 16) for number in line.split())
            if flags & _BAR_TYPE == _BAR_64_BIT and 0 <= start < end < _ADDRESSES:
                total += end - start + 1
    except (OSError, ValueError):
        return 0
    return 1 << (total - 1).bit_length() if total else 0


def _pcie_root(directory: str) -> str | None:
    try:
        parts = os.readlink(directory).split("/")
    except OSError:
        return None
    return next((part for part in parts if _PCIE_ROOT.fullmatch(part)), None)


def _address(name: str) -> PciAddress | None:
    """`name` as an address; None for other entries of a directory (platform devices in an IOMMU group)."""
    try:
        return pci_address(name)
    except ValueError:
        return None


def _identity_of(function: PciFunction) -> _Identity:
    return _Identity(function.vendor, function.device, function.class_code, ())
