"""Reads PCI functions from sysfs, and which device nodes exist: the facts that everything else follows from.

Synchronous; `reader.py` runs it. Reads only what never blocks (vendor, device, class, numa_node, resource, links,
listings, existence), through `nvidia.py` what NVIDIA's driver says of a GPU, and through `signs.py` whether it is dead.
Must not read `uevent` or `driver_override`, which hang on kernel 6.1 while an unbind waits for its holder, and must not
open a device node: opening an IOMMU group makes it busy.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Final, final

from msgspec import Struct
from msgspec.structs import replace

from gpuactors.core.values.dead_signs import NO_ERRORS, KnownErrors
from gpuactors.core.values.model import PciAddress, PciFunction, is_pci_address, pci_address
from gpuactors.core.values.selector import Selector, matches
from gpuactors.core.values.text import encodable
from gpuactors.core.values.vgpu import VendorVgpu
from gpuactors.host.best_effort import names_in
from gpuactors.host.faults import GONE, fault, gone, raise_if_short
from gpuactors.host.iommu import IommuGroup, read_group
from gpuactors.host.nvidia import NvidiaGpus
from gpuactors.host.pci_ids import PciIds
from gpuactors.host.root import (
    CDEV_NODES,
    CONTAINER_NODE,
    DRM_NODES,
    IOMMU_GROUPS,
    IOMMUFD_NODE,
    PCI_DEVICES,
    HostRoot,
)
from gpuactors.host.root import cdev_node as cdev_node_of
from gpuactors.host.root import group_node as group_node_of
from gpuactors.host.signs import has_fatal_errors, is_silent, port_fatal_errors, reset_methods
from gpuactors.host.vgpu import read_vgpu
from gpuactors.ports.errors import HostError

VFIO_DRIVERS: Final = frozenset({"vfio-pci", "nvgrace_gpu_vfio_pci"})
"""The vfio drivers known by name; others are recognised by the directory `vfio-dev/` that the kernel makes."""

ONLY_VIRTUAL: Final = "sriov_vf_msix_count"
"""The file that only SR-IOV virtual functions have, from Linux 5.13 on, with CONFIG_PCI_MSI (drivers/pci/iov.c,
sriov_vf_attrs_are_visible). It is there as long as the function is; `physfn` comes after it, and goes before it."""

_ID = re.compile(rb"0x([0-9a-f]{4})\n?")
_CLASS = re.compile(rb"0x([0-9a-f]{6})\n?")
_VFIO_DEVICE = re.compile(r"vfio[0-9]+")
_PCIE_ROOT = re.compile(r"(?:/|\A)(pci[0-9a-f]{4,8}:[0-9a-f]{2})(?:/|\Z)")
_BARS: Final = 6
"""The first lines of `resource` are the BARs: start, end and flags (drivers/pci/pci-sysfs.c, resource_show)."""
_ADDRESSES: Final = 1 << 64
_BAR_TYPE: Final = 0x6
_BAR_64_BIT: Final = 0x4
"""The flags of a 64-bit BAR: PCI_BASE_ADDRESS_MEM_TYPE_64, of the bits of PCI_BASE_ADDRESS_MEM_TYPE_MASK."""
_NODES: Final = 1 << 31
"""A NUMA node is an int of the kernel's."""
_ATTRIBUTE_BYTES: Final = 4096
"""A sysfs attribute is a page at most."""


class _Identity(Struct, frozen=True):
    """The identity of a function. An empty part could not be read."""

    vendor: str
    device: str
    class_code: str


_UNKNOWN: Final = _Identity("", "", "")
_NO_GROUP: Final = IommuGroup()


@final
class SysfsReader:
    """Reads the selected functions, those that share an IOMMU group with them, and the physical function of each SR-IOV
    virtual function among these. Keeps nothing between calls but the last reader of other selectors."""

    def __init__(
        self,
        root: HostRoot,
        selectors: tuple[Selector, ...],
        names: PciIds,
        of: SysfsReader | None = None,
        errors: KnownErrors = NO_ERRORS,
    ) -> None:
        """`of`: another reader of the same host, whose readers of files this one uses."""
        self._bus = root.real(PCI_DEVICES)
        self._groups = root.real(IOMMU_GROUPS)
        self._root = root
        self._selectors = selectors
        self._choosing = tuple(s for s in selectors if not s.exclude and not s.names_only and s.mdev is None)
        self._excluding = tuple(s for s in selectors if s.exclude and s.mdev is None)
        self._vendors = frozenset(s.vendor for s in self._choosing)
        """The vendors of the functions that may be selected; None among them stands for any."""
        self._names = names
        self._nvidia: NvidiaGpus = of._nvidia if of is not None else NvidiaGpus(root)
        self._errors = errors
        self._other = self
        """The reader that `choosing` returned last: all scans and inspections after a reload ask for the same one."""

    def choosing(
        self, selectors: tuple[Selector, ...] | None, errors: KnownErrors = NO_ERRORS
    ) -> SysfsReader:
        """Return a reader of what these selectors choose, None: the same, that does not read the configuration space of
        a function after one of these errors, or a new one."""
        wanted = (self._selectors if selectors is None else selectors), errors
        if wanted == (self._selectors, self._errors):
            return self
        if wanted != (self._other._selectors, self._other._errors):
            self._other = SysfsReader(self._root, wanted[0], self._names, self, errors)
        return self._other

    def scan(
        self,
        allocated: Collection[PciAddress] = (),
        *,
        unanswered: Collection[str] = (),
        reads: Callable[[str], None] = lambda name: None,
    ) -> tuple[PciFunction, ...]:
        """Return every function that is selected or `allocated`, the other members of their IOMMU groups, and the
        physical functions of all these, sorted by address. Reads the vendor of each function on the bus, but the rest
        only of the selected ones: a host has thousands of functions and a few GPUs. Raises `HostError` if the bus
        cannot be listed.

        `unanswered`: functions of which only links are read, as reads of their attributes hang; they are at fault.
        `reads` is called with the name of each function before its attributes are read, and may raise.
        """
        look = self.look()
        functions: dict[PciAddress, PciFunction] = {}
        companions: set[PciAddress] = set()
        for name in self._list_bus():
            if name in unanswered:
                if name in allocated or self._chosen(name, _UNKNOWN):
                    functions[pci_address(name)] = self._unanswered(name)
                continue
            reads(name)
            vendor = None
            if name not in allocated and None not in self._vendors:
                vendor = self._vendor(name)
                if vendor is not None and vendor not in self._vendors:
                    continue
            function, _ = self._function(look, name, vendor, unless_chosen=name in allocated)
            function, members = (None, ()) if function is None else self._with_group(look, function)
            if function is not None:
                functions[function.address] = function
                companions.update(members)
        for silent in (companions - functions.keys()) & frozenset(unanswered):
            functions[silent] = self._unanswered(silent)
        self._add_companions(look, functions, sorted(companions), reads)
        for silent in (_physical_of(functions) - functions.keys()) & frozenset(unanswered):
            functions[silent] = self._unanswered(silent)
        self._add_physical(look, functions, reads)
        return tuple(functions[address] for address in sorted(functions))

    def look(self) -> Look:
        """Begin inspections that share what they read."""
        return Look(self._root)

    def inspect(
        self, address: PciAddress, allocated: Collection[PciAddress] = (), look: Look | None = None
    ) -> tuple[PciFunction, ...]:
        """Return the function, its IOMMU group and their physical functions, sorted by address, if any of the group is
        selected or `allocated`; the function alone if only a virtual function of its own is; nothing if it does not
        exist. Raises `HostError` if there is no PCI bus to read.
        """
        look = look or self.look()
        function, chosen = self._function(look, address)
        function, members = (None, ()) if function is None else self._with_group(look, function)
        if function is None:
            self._check_bus()
            return ()
        group = {address: function}
        if self._add_companions(look, group, members) or chosen or not group.keys().isdisjoint(allocated):
            self._add_physical(look, group)
            return tuple(group[member] for member in sorted(group))
        return (function,) if self._has_chosen_virtual_function(look, function, allocated) else ()

    def function(self, look: Look, address: PciAddress) -> PciFunction | None:
        """Return one function, chosen or not; None if it does not exist. Raises `HostError` for a shortage."""
        return self._function(look, address)[0]

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
        """Raise `HostError` if the bus is unreadable, which says nothing about the function."""
        if not os.path.isdir(self._bus):
            self._list_bus()

    def _vendor(self, name: str) -> str | None:
        """Return its vendor, the one read for most functions of a large host; None if it cannot be read or makes no
        sense."""
        try:
            match = _ID.fullmatch(read_attribute(f"{self._bus}/{name}/vendor"))
        except OSError:
            return None
        return None if match is None else match[1].decode()

    def _chosen(self, address: str, identity: _Identity) -> bool:
        """Return whether a selector matches it, or might if the unreadable parts were known."""
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
            for selector in self._choosing
        ) and not any(
            matches(
                selector,
                vendor=identity.vendor,
                device=identity.device,
                class_code=identity.class_code,
                address=address,
            )
            for selector in self._excluding
        )

    def _add_companions(
        self,
        look: Look,
        functions: dict[PciAddress, PciFunction],
        members: Iterable[PciAddress],
        reads: Callable[[str], None] = lambda name: None,
    ) -> bool:
        """Add the members that are missing; return whether one of them is chosen."""
        any_chosen = False
        for member in members:
            if member in functions:
                continue
            reads(member)
            function, chosen = self._function(look, member)
            if function is not None:
                functions[member] = function
                any_chosen = any_chosen or chosen
        return any_chosen

    def _add_physical(
        self,
        look: Look,
        functions: dict[PciAddress, PciFunction],
        reads: Callable[[str], None] = lambda name: None,
    ) -> None:
        """Add the physical functions that are missing, each read once in a look."""
        for address in sorted(_physical_of(functions) - functions.keys()):
            if address not in look.physical:
                reads(address)
                function, _ = self._function(look, address)
                look.physical[address] = None if function is None else self._with_group(look, function)[0]
            if (physical := look.physical[address]) is not None:
                functions[address] = physical

    def _has_chosen_virtual_function(
        self, look: Look, function: PciFunction, allocated: Collection[PciAddress]
    ) -> bool:
        """Return whether a scan would add the function, as a virtual function of its own is selected or `allocated`."""
        if not function.has_virtual_functions:
            return False
        directory = Directory(function.address, f"{self._bus}/{function.address}")
        for link in names_in(directory.path):
            name = directory.link(link) if link.startswith("virtfn") else None
            if name is not None and (name in allocated or self._function(look, name, unless_chosen=False)[1]):
                return True
        return False

    def _with_group(
        self, look: Look, function: PciFunction
    ) -> tuple[PciFunction | None, Sequence[PciAddress]]:
        """Return the function and the addresses in its IOMMU group.

        At fault if the group cannot be listed, as the other functions that a tenant would get are not known then; None
        if the function is gone, and its group with it.
        """
        if function.iommu_group is None:
            return function, ()
        try:
            group = look.group(function.iommu_group)
        except OSError as error:
            if gone(f"{self._bus}/{function.address}"):
                return None, ()
            path = error.filename or f"{self._groups}/{function.iommu_group}/devices"
            unread = fault(function.address, path, f"cannot be listed ({error.strerror})")
            return replace(function, fault=function.fault or unread), ()
        return function, group.functions

    # --- one function ---------------------------------------------------------------------------------------

    def _function(
        self,
        look: Look,
        name: str,
        vendor: str | None = None,
        *,
        unless_chosen: bool = True,
        again: bool = True,
    ) -> tuple[PciFunction | None, bool]:
        """Everything about one function, and whether it is chosen; None if it vanished meanwhile, or `name` is no
        function's. One that is not chosen is read no further than that, and is None, without `unless_chosen`.

        `vendor`: its vendor, if that was read just before.
        """
        if (address := _address(name)) is None:
            return None, False
        path = f"{self._bus}/{name}"
        try:
            descriptor = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise_if_short(error, path)
            if gone(path):
                return None, False
            unread = fault(name, path, f"cannot be opened ({error.strerror})")
            return replace(self._unanswered(name), fault=unread), self._chosen(name, _UNKNOWN)
        try:
            directory = Directory(name, path, descriptor)
            identity = directory.identity(vendor)
            chosen = self._chosen(name, identity)
            if not (chosen or unless_chosen):
                return None, False
            function = self._read(look, address, directory, identity, chosen=chosen)
            opened = _number_of(descriptor)
        finally:
            os.close(descriptor)
        if again and function is not None and opened and function.presence not in (0, opened):
            # It was unplugged and plugged in meanwhile: the files of the directory that is gone are as if never there.
            return self._function(look, name, unless_chosen=unless_chosen, again=False)
        return function, chosen

    def _read(
        self, look: Look, address: PciAddress, directory: Directory, identity: _Identity, *, chosen: bool
    ) -> PciFunction | None:
        driver = directory.link("driver")
        group = directory.group()
        cdevs = self._cdevs(look, directory, driver) if driver is not None else None
        vfio_bound = driver in VFIO_DRIVERS or cdevs is not None
        if vfio_bound:
            nodes = self._nodes(look, directory, group, cdevs or ())
        else:
            nodes = self._node_left_by_driver(group) if driver is None else ()
        numa_node = directory.numa_node()
        root = pcie_root_of(directory.path)
        physical = directory.link("physfn")
        unlinked = physical is None and directory.has(ONLY_VIRTUAL)
        has_virtual_functions = directory.has_virtual_functions()
        memory_bytes = directory.memory_bytes()
        iommu_group = self._group(look, group)
        vgpu = directory.vgpu() if physical is not None and driver not in (None, *VFIO_DRIVERS) else None
        fatal_errors = has_fatal_errors(directory.content)
        errors_of_port = port_fatal_errors(directory.content)
        # A read of `config` waits while the kernel resets its link after a fatal error: seconds, or a minute.
        is_known_dead = fatal_errors or self._is_known_dead(address, directory.path, errors_of_port)
        is_function_silent = not is_known_dead and is_silent(directory.content, vfio_bound=vfio_bound)
        methods = reset_methods(directory.content, directory.has) if vfio_bound else None
        # Last, so that a function that vanished while it was read is not taken for one without a driver.
        if (presence := presence_of(directory.path)) is None:
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
            # Only of the selected ones: reading a vendor's names for the first time takes as long as ten inspections.
            model=(self._names.lookup(identity.vendor, identity.device) or "") if chosen else None,
            fault=directory.faults[0] if directory.faults else None,
            without_iommu=vfio_bound and group is not None and self._is_without_iommu(group),
            iommufd=look.node(IOMMUFD_NODE) is True,
            physical=_address(physical) if physical is not None else None,
            has_virtual_functions=has_virtual_functions,
            gpu_uuid=self._nvidia.uuid(address, driver),
            host_nodes=self._host_nodes(address, directory, driver) if not vfio_bound else (),
            has_parts=self._nvidia.has_parts(address, driver),
            memory_bytes=memory_bytes,
            presence=presence,
            other_members=iommu_group.other_members,
            direct_region=iommu_group.direct_region,
            vgpu=vgpu,
            unlinked=unlinked,
            is_silent=is_function_silent,
            has_fatal_errors=fatal_errors,
            reset_methods=methods,
            port_fatal_errors=errors_of_port,
        )

    def _is_known_dead(self, address: PciAddress, path: str, errors_of_port: int | None) -> bool:
        """Return whether the function is dead by the errors that are known, or the port above has counted one since."""
        last, dead = self._errors.of_ports.get(address), self._errors.dead.get(address)
        if last is not None and errors_of_port is not None and errors_of_port > last:
            return True
        return dead is not None and dead.presence == presence_of(path)

    def _host_nodes(self, address: PciAddress, directory: Directory, driver: str | None) -> tuple[str, ...]:
        """Return the value of `PciFunction.host_nodes`."""
        if driver is None:
            return ()
        node = self._nvidia.node(address, driver)
        drm = (f"{DRM_NODES}/{name}" for name in directory.drm())
        return (*([node] if node is not None else []), *drm)

    def _group(self, look: Look, group: int | None) -> IommuGroup:
        """Read what its group has beside its functions. One that cannot be read is a fault of `_with_group`."""
        try:
            return _NO_GROUP if group is None else look.group(group)
        except OSError:
            return _NO_GROUP

    def _unanswered(self, name: str) -> PciFunction:
        """Return a function whose attributes are not read, as that hangs: links and listings do not."""
        directory = Directory(name, f"{self._bus}/{name}")
        driver = directory.link("driver")
        physical = directory.link("physfn")
        return PciFunction(
            address=pci_address(name),
            vendor="",
            device="",
            class_code="",
            driver=driver,
            vfio_bound=driver in VFIO_DRIVERS or vfio_devices(f"{directory.path}/vfio-dev") is not None,
            iommu_group=directory.group(),
            numa_node=None,
            pcie_root=None,
            nodes=(),
            model=None,
            fault=fault(name, directory.path, "does not answer: a read of its attributes hangs"),
            physical=_address(physical) if physical is not None else None,
            has_virtual_functions=directory.has_virtual_functions(),
            presence=presence_of(directory.path) or 0,
            unlinked=physical is None and directory.has(ONLY_VIRTUAL),
        )

    def _is_without_iommu(self, group: int) -> bool:
        """Return whether vfio itself made the group for a function without an IOMMU (drivers/vfio/group.c,
        vfio_noiommu_group_alloc); only such a group, and those of a few platforms, have a name."""
        try:
            return read_attribute(f"{self._groups}/{group}/name").strip() == b"vfio-noiommu"
        except OSError:
            return False

    def _cdevs(self, look: Look, directory: Directory, driver: str) -> tuple[str, ...] | None:
        """Return the names of its vfio devices, which matter where there are nodes of them; None if it is no vfio
        device."""
        if driver in VFIO_DRIVERS and look.node(CDEV_NODES) is False:
            return ()
        return vfio_devices(f"{directory.path}/vfio-dev")

    def _nodes(
        self, look: Look, directory: Directory, group: int | None, cdevs: tuple[str, ...]
    ) -> tuple[str, ...]:
        """Return the nodes that exist, as the host's own paths: a missing one in kubelet's answer fails the
        container."""
        own = [] if group is None else [group_node_of(group)]
        own += map(cdev_node_of, cdevs)
        candidates = [(CONTAINER_NODE, look.node(CONTAINER_NODE))]
        candidates += [(node, _exists(self._root.real(node))) for node in own]
        candidates.append((IOMMUFD_NODE, look.node(IOMMUFD_NODE)))
        return directory.existing(self._root, candidates)

    def _node_left_by_driver(self, group: int | None) -> tuple[str, ...]:
        """Return the group's node, if it is there for a function without a driver: its unbind may wait for its holder,
        which may be older than this daemon."""
        node = group_node_of(group) if group is not None else None
        return (node,) if node is not None and _exists(self._root.real(node)) is True else ()


@final
class Look:
    """The shared reads of one scan, or of inspections one after the other. Each is read at its first use."""

    def __init__(self, root: HostRoot) -> None:
        self._root = root
        self._nodes: dict[str, bool | str] = {}
        self._groups: dict[int, IommuGroup] = {}
        self.physical: dict[PciAddress, PciFunction | None] = {}
        """The physical functions that were read because of a virtual one; None if there is none at the address."""

    def node(self, node: str) -> bool | str:
        """Return whether that path of the host's /dev exists, as `_exists`."""
        if node not in self._nodes:
            self._nodes[node] = _exists(self._root.real(node))
        return self._nodes[node]

    def group(self, number: int) -> IommuGroup:
        """Return an IOMMU group. Raises `OSError`; `HostError` for want of descriptors."""
        if (group := self._groups.get(number)) is None:
            group = self._groups[number] = read_group(self._root, number)
        return group


@final
class Directory:
    """The directory of one function, in which its files are found from `descriptor`, where there is one: the path to it
    has ten parts. Collects the function's faults."""

    def __init__(self, name: str, path: str, descriptor: int | None = None) -> None:
        self.name = name
        self.path = path
        self._descriptor = descriptor
        self.faults: list[str] = []

    def at_fault(self, path: str, problem: str) -> None:
        self.faults.append(fault(self.name, path, problem))

    def identity(self, vendor: str | None) -> _Identity:
        """Return the function's identity, as far as it can be read; `vendor` if that was read already."""
        return _Identity(
            vendor or self._attribute("vendor", _ID, "a PCI vendor id such as 0x10de"),
            self._attribute("device", _ID, "a PCI device id such as 0x2330"),
            self._attribute("class", _CLASS, "a class code such as 0x030200"),
        )

    def _attribute(self, attribute: str, form: re.Pattern[bytes], expected: str) -> str:
        """Return the hex digits of an attribute; empty, with a fault, if it cannot be read or makes no sense."""
        try:
            content = self.content(attribute)
        except OSError as error:
            self.at_fault(f"{self.path}/{attribute}", f"cannot be read ({error.strerror})")
            return ""
        match = form.fullmatch(content)
        if match is None:
            read = content[:32].decode("latin-1")
            self.at_fault(f"{self.path}/{attribute}", f"reads {read!r} instead of {expected}")
            return ""
        return match[1].decode()

    def link(self, link: str) -> str | None:
        """Return the last component of a link's target (which need not exist any more); None if there is no link.

        A driver's name may be any bytes, UTF-8 or not.
        """
        try:
            if self._descriptor is None:
                target = os.readlink(f"{self.path}/{link}")
            else:
                target = os.readlink(link, dir_fd=self._descriptor)
        except OSError as error:
            if error.errno not in GONE:
                raise_if_short(error, f"{self.path}/{link}")
                self.at_fault(f"{self.path}/{link}", f"cannot be read as a link ({error.strerror})")
            return None
        return encodable(target.rpartition("/")[2])

    def has(self, attribute: str) -> bool:
        """Return whether the function has the attribute. Raises `HostError` for want of memory."""
        try:
            if self._descriptor is None:
                os.stat(f"{self.path}/{attribute}")
            else:
                os.stat(attribute, dir_fd=self._descriptor)
        except OSError as error:
            raise_if_short(error, f"{self.path}/{attribute}")
            return False
        return True

    def has_virtual_functions(self) -> bool:
        """Return whether the function has active virtual functions."""
        return has_virtual_functions(self.path)

    def existing(self, root: HostRoot, candidates: Iterable[tuple[str, bool | str]]) -> tuple[str, ...]:
        """Return those of the nodes that exist. Each comes with `Look.node` or `_exists`; one of which that cannot be
        known is a fault."""
        nodes = []
        for node, is_there in candidates:
            if is_there is True:
                nodes.append(node)
            elif is_there is not False:
                self.at_fault(root.real(node), f"cannot be accessed ({is_there})")
        return tuple(nodes)

    def drm(self) -> list[str]:
        """Return the names of its DRM devices that a container may get: `card1`, `renderD128`."""
        return sorted(n for n in names_in(f"{self.path}/drm") if n.startswith(("card", "renderD")))

    def group(self) -> int | None:
        """Return the number of its IOMMU group."""
        group = self.link("iommu_group")
        if group is None:
            return None
        if not (group.isascii() and group.isdigit()):
            path = f"{self.path}/iommu_group"
            self.at_fault(path, f"points at {group!r}, which is not the number of an IOMMU group")
            return None
        return int(group)

    def numa_node(self) -> int | None:
        """Return the NUMA node; None for -1 (no topology), and for anything unreadable: a GPU is usable without it."""
        try:
            return numa_node_of(self.content("numa_node"))
        except OSError:
            return None

    def memory_bytes(self) -> int:
        """Compute `PciFunction.memory_bytes`, which is the `addressableMemory` of NVIDIA's DRA driver: the sum
        of the BARs of 64 bits, rounded up to a power of two (go-nvlib, nvpci, GetTotalAddressableMemory). 0 if it
        cannot be read."""
        total = 0
        try:
            for line in self.content("resource").splitlines()[:_BARS]:
                start, end, flags = (int(number, 16) for number in line.split())
                if flags & _BAR_TYPE == _BAR_64_BIT and 0 <= start < end < _ADDRESSES:
                    total += end - start + 1
        except (OSError, ValueError):
            return 0
        return 1 << (total - 1).bit_length() if total else 0

    def vgpu(self) -> VendorVgpu | None:
        """Return what NVIDIA's driver says of its vGPU; None if no such driver has it."""
        return read_vgpu(self.path, self.content, self.at_fault)

    def content(self, attribute: str, bytes_max: int = _ATTRIBUTE_BYTES) -> bytes:
        """Read an attribute of the function, as `read_attribute`, or the beginning of it."""
        try:
            descriptor = os.open(attribute, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._descriptor)
        except OSError as error:
            raise_if_short(error, f"{self.path}/{attribute}")
            raise
        try:
            return os.read(descriptor, bytes_max)
        finally:
            os.close(descriptor)


def _number_of(descriptor: int) -> int:
    """Return the number of an open directory, as `presence_of`; 0 if it is unknown."""
    try:
        return os.fstat(descriptor).st_ino
    except OSError:
        return 0


def has_virtual_functions(directory: str) -> bool:
    """Return whether the function with this directory has active virtual functions. Not by `sriov_numvfs`, whose reader
    waits for an unbind of it. `virtfn0` goes first, also where the removal waits for a process that has a later one
    open (drivers/pci/iov.c, sriov_del_vfs). The link to one that was removed by hand stays for good
    (pci_iov_remove_virtfn): it leads nowhere."""
    if os.path.exists(f"{directory}/virtfn0"):
        return True
    return os.path.exists(f"{directory}/sriov_totalvfs") and any(
        name.startswith("virtfn") and os.path.exists(f"{directory}/{name}") for name in names_in(directory)
    )


def presence_of(directory: str) -> int | None:
    """Return the number of a function's directory in sysfs, as `PciFunction.presence`; None if it is gone. Raises
    `HostError` for want of descriptors."""
    try:
        return os.stat(directory).st_ino
    except OSError as error:
        raise_if_short(error, directory)
        return None if error.errno in GONE else 0


# --- reading ----------------------------------------------------------------------------------------------------


def read_attribute(path: str) -> bytes:
    """Read an attribute. Raises `OSError`; `HostError` for want of descriptors."""
    # Three system calls: no buffering, no encoding, no fstat. A scan of a large host does this 12,000 times, and a poll
    # twice per function.
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
    """Return the names in it. Raises `OSError`; `HostError` for want of descriptors."""
    try:
        return os.listdir(directory)
    except OSError as error:
        raise_if_short(error, directory)
        raise


def _exists(path: str) -> bool | str:
    """Return whether there is such a node; if that cannot be known, why. Raises `HostError` for want of memory."""
    try:
        os.stat(path)
    except OSError as error:
        raise_if_short(error, path)
        return error.errno not in GONE and (error.strerror or str(error))
    return True


def vfio_devices(path: str) -> tuple[str, ...] | None:
    """Return the names of the vfio devices of a function (`vfio0`), of which there is one; None if it is no vfio
    device.

    The kernel makes no other names than such (drivers/vfio/vfio_main.c, vfio_init_device): any other is no node's.
    Their directory is there on kernels without cdev support as well, which have no node of that name.
    """
    try:
        return tuple(sorted(name for name in _listing(path) if _VFIO_DEVICE.fullmatch(name)))
    except OSError:
        return None


def numa_node_of(content: bytes) -> int | None:
    """Return the NUMA node of the attribute `numa_node`; None for -1 (no topology), and for anything without sense."""
    try:
        node = int(content)
    except ValueError:
        return None
    return node if 0 <= node < _NODES else None


def pcie_root_of(directory: str) -> str | None:
    """Return the host bridge in the path that a bus's entry links to; None if there is none."""
    try:
        root = _PCIE_ROOT.search(os.readlink(directory))
    except OSError:
        return None
    return None if root is None else root[1]


def _physical_of(functions: Mapping[PciAddress, PciFunction]) -> set[PciAddress]:
    """Return the physical functions of the virtual ones among these."""
    return {f.physical for f in functions.values() if f.physical is not None}


def _address(name: str) -> PciAddress | None:
    """Return `name` as an address; None if it is none."""
    return PciAddress(name) if is_pci_address(name) else None
