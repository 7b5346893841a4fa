"""A node's PCI devices as a real directory tree, shaped and changed like the kernel's.

A tree below a root holds what the daemon reads: `sys/` with sysfs' symbolic links and `dev/` with the device nodes
(plain files: nodes need root, and nothing here may be opened anyway). Every operation changes the tree in the kernel's
order and returns the uevents in the kernel's order (drivers/base/core.c, drivers/vfio/{group,vfio_main}.c; measured
in a virtual machine). Tenants (`tenants.py`) open and close groups, which sends no uevent, as in the kernel.
Must not decide anything about devices: it plays the kernel, not the daemon.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import Final, final

from msgspec import Struct
from msgspec.structs import replace

from gpuactors_simulation.host.tenants import Tenants
from gpuactors_simulation.host.uevents import Uevent

__all__ = ["VFIO_DRIVERS", "VGPU_HEADER", "HostTree", "PciSpec", "Uevent"]

VFIO_DRIVERS: Final = frozenset({"vfio-pci", "nvgrace_gpu_vfio_pci"})
"""Drivers that make a vfio device of what is bound to them."""

DRIVER_MANAGED_DMA: Final = VFIO_DRIVERS | {"pci-stub", "pcieport"}
"""Drivers beside which user space may have an IOMMU group: `driver_managed_dma` of struct pci_driver."""

_BLOCKED: Final = ("uevent", "driver_override")
"""Attributes that take the device's lock when they are read, on kernel 6.1; nothing else reads them here, so they are
only there when that lock is held."""

_MODES: Final = {"vfio/vfio": 0o666, "iommu": 0o660}
"""Of the nodes below /dev: as drivers/vfio/container.c and drivers/iommu/iommufd/main.c have them; others have that of
devtmpfs, 0600."""

VGPU_HEADER: Final = "ID    : vGPU Name\n"
"""All that `creatable_vgpu_types` has once a card is full."""

_GROUP_MAJOR: Final = 243
_CDEV_MAJOR: Final = 511


class PciSpec(Struct, frozen=True):
    """A PCI function to plug in."""

    address: str
    """`0000:23:00.0`"""
    vendor: str
    """Four hex digits, lower case: `10de`."""
    device: str
    class_code: str
    """Six hex digits: `030200`."""
    group: int | None
    """IOMMU group; None on a host without an IOMMU."""
    numa_node: int = -1
    pcie_root: str = "pci0000:20"
    driver: str | None = None
    """The driver that knows its id and takes it at once when it is plugged in."""
    bridges: tuple[str, ...] = ()
    """Addresses of the bridges between the root and the function, outermost first."""
    total_vfs: int = 0
    """How many virtual functions it can have; 0 of a function without SR-IOV."""


@dataclass(slots=True)
class _Plugged:
    """A function that is in the tree, and what the kernel keeps about it."""

    spec: PciSpec
    driver: str | None = None
    vfio: int | None = None
    """N of `vfio-dev/vfioN`."""
    waiting: Iterator[Uevent] | None = None
    """The rest of an unbind or unplug that waits for the holder of the device."""
    virtual: tuple[str, ...] = ()
    """The addresses of its virtual functions."""

    @property
    def devpath(self) -> str:
        return "/".join(("/devices", self.spec.pcie_root, *self.spec.bridges, self.spec.address))


@final
class HostTree:
    """Makes a node's tree below `root` and changes it. Not for use from several threads at once.

    `cdev` is a kernel with CONFIG_IOMMUFD and CONFIG_VFIO_DEVICE_CDEV: `/dev/iommu` and `/dev/vfio/devices/vfioN`
    exist. Without it the directory `vfio-dev/vfioN` exists in sysfs all the same, as on Debian's kernels.

    Each operation comes twice: `bind()` does it all and returns the uevents; `bind_steps()` yields each uevent with the
    tree as it is at that moment, so that a test can read it half way or stop there.

    While a tenant has a device open, its unbind or unplug stops half way, where the kernel's writer sleeps
    (vfio_unregister_group_dev): the driver's link is gone, the group's node stays. Kernel 6.12 has sent `remove`
    vfio-dev by then, and that directory is gone. With `waits_silently` it is kernel 6.1: no uevent was sent, the
    directory is there, and readers of `uevent` or `driver_override` sleep as well. The rest happens when the tenant
    closes the device, in `close_group` or `kill`, which return its uevents.
    """

    def __init__(
        self,
        root: Path,
        *,
        cdev: bool = False,
        waits_silently: bool = False,
        tenants: Tenants | None = None,
        make_node: Callable[[str], None] | None = None,
    ) -> None:
        """`tenants` are other processes than those that are made here. `make_node` makes the device node at a real
        path; by default it is a plain file."""
        self.root = root
        self.cdev = cdev
        self.waits_silently = waits_silently
        self._make_node_at = make_node or _plain_file
        self._functions: dict[str, _Plugged] = {}
        self._members: dict[int, set[str]] = {}
        self._vfio_numbers: set[int] = set()
        self._seqnum = 1000
        self._tenants = Tenants(root) if tenants is None else tenants
        self._probed: list[str] = []
        for directory in (
            "sys/bus/pci/devices",
            "sys/bus/pci/drivers",
            "sys/kernel/iommu_groups",
            "sys/devices/virtual/vfio",
            "sys/class/vfio",
            "sys/class/vfio-dev",
            "dev/vfio",
        ):
            (root / directory).mkdir(parents=True, exist_ok=True)
        self.make_node("vfio/vfio")
        if cdev:
            (root / "dev/vfio/devices").mkdir(exist_ok=True)
            self.make_node("iommu")

    # --- what is there --------------------------------------------------------------------------------------

    @property
    def functions(self) -> Mapping[str, PciSpec]:
        """All plugged functions by address."""
        return MappingProxyType({address: plugged.spec for address, plugged in self._functions.items()})

    def driver_of(self, address: str) -> str | None:
        """Return the driver that the function is bound to. Raises `KeyError` for an address that is not plugged."""
        return self._functions[address].driver

    def group_members(self, group: int) -> frozenset[str]:
        """Return the functions in an IOMMU group."""
        return frozenset(self._members.get(group, ()))

    def free_group(self) -> int:
        """Return the number of the next IOMMU group: the lowest that is free (drivers/iommu/iommu.c, ida_alloc)."""
        return next(number for number in count() if number not in self._members)

    def vfio_number(self, address: str) -> int | None:
        """N of the function's `vfio-dev/vfioN`."""
        return self._functions[address].vfio

    def device_dir(self, address: str) -> Path:
        """Return the function's real directory below `sys/devices`."""
        return self.root / f"sys{self._functions[address].devpath}"

    def is_viable(self, group: int, beside: Collection[str] = ()) -> bool:
        """The kernel gives the group to user space: no member of it is on a driver that does DMA
        (drivers/iommu/iommu.c, iommu_group_claim_dma_owner), and firmware reserves no memory one to one. The functions
        `beside` are left out."""
        members = self._members.get(group, set()).difference(beside)
        drivers = {self._functions[address].driver for address in members} - {None}
        directory = self.root / f"sys/kernel/iommu_groups/{group}"
        others = [
            m for m in directory.glob("devices/*") if not _is_pci(m.name) and (m / "driver").is_symlink()
        ]
        regions = directory / "reserved_regions"
        is_reserved = regions.is_file() and any(
            line.endswith(" direct") for line in regions.read_text().splitlines()
        )
        return drivers <= DRIVER_MANAGED_DMA and not others and not is_reserved

    def holder_of(self, group: int) -> int | None:
        """Return the PID of the tenant that has a group open."""
        return self._tenants.holder_of(group)

    def is_waiting(self, address: str) -> bool:
        """An unbind or unplug of the function waits for its holder. Raises `KeyError` if it is not plugged."""
        return self._functions[address].waiting is not None

    @property
    def probed(self) -> tuple[str, ...]:
        """The host's paths of all nodes that were opened by `open_node`, in order."""
        return tuple(self._probed)

    # --- what can happen ------------------------------------------------------------------------------------

    def plug(self, spec: PciSpec) -> tuple[Uevent, ...]:
        """Make a function appear. Raises `ValueError` if its address is taken."""
        return tuple(self.plug_steps(spec))

    def unplug(self, address: str) -> tuple[Uevent, ...]:
        """Make a function disappear (hot unplug or sysfs `remove`). Raises `ValueError` if it is not there."""
        return tuple(self.unplug_steps(address))

    def bind(self, address: str, driver: str) -> tuple[Uevent, ...]:
        """Bind a function to a driver. Raises `ValueError` if it is not there or is bound (EBUSY)."""
        return tuple(self.bind_steps(address, driver))

    def unbind(self, address: str) -> tuple[Uevent, ...]:
        """A function is unbound from its driver. Raises `ValueError` if it is not there or not bound (ENODEV)."""
        return tuple(self.unbind_steps(address))

    def plug_steps(self, spec: PciSpec) -> Iterator[Uevent]:
        """`plug`, uevent by uevent."""
        if spec.address in self._functions:
            raise ValueError(f"{spec.address} is plugged in already")
        plugged = _Plugged(spec)
        self._functions[spec.address] = plugged
        self._make_function(plugged)
        if spec.group is not None:
            self._join_group(plugged, spec.group)
        yield self._pci_uevent("add", plugged)
        if spec.driver is not None:
            yield from self._bind(plugged, spec.driver)

    def unplug_steps(self, address: str) -> Iterator[Uevent]:
        """`unplug`, uevent by uevent. The directory goes with the last one, when the reader may already have it."""
        plugged = self._find(address)
        self._refuse_if_waiting(plugged)
        if plugged.driver is not None:
            yield from self._unbind(plugged, self._remove(plugged))
        else:
            yield from self._remove(plugged)

    def virtualize(self, address: str, count: int, driver: str | None = None) -> tuple[Uevent, ...]:
        """A function gets so many virtual functions, 0: it loses them (`sriov_numvfs`). `driver` takes them at once."""
        return tuple(self.virtualize_steps(address, count, driver))

    def virtualize_steps(self, address: str, count: int, driver: str | None = None) -> Iterator[Uevent]:
        """`virtualize`, uevent by uevent: drivers/pci/iov.c, sriov_enable and sriov_disable. A virtual function is
        added before the links say that it is one; when they go no uevent names the physical function. Each is in an
        IOMMU group of its own. Raises `ValueError` for more than it can have, or if it has some."""
        plugged = self._find(address)
        if count > plugged.spec.total_vfs:
            raise ValueError(f"{address} can have {plugged.spec.total_vfs} virtual functions")
        if count and plugged.virtual:
            raise ValueError(f"{address} has {len(plugged.virtual)} virtual functions; write 0 first")
        if count:
            yield from self._virtualize(plugged, count, driver)
        for number, virtual in enumerate(plugged.virtual if not count else ()):
            plugged.virtual = plugged.virtual[1:]
            self.remove_attribute(address, f"virtfn{number}")
            self.remove_attribute(virtual, "physfn")
            yield from self.unplug_steps(virtual)
        self.set_attribute(address, "sriov_numvfs", f"{count}\n".encode())

    def _virtualize(self, plugged: _Plugged, count: int, driver: str | None) -> Iterator[Uevent]:
        physical, spec = plugged.spec.address, plugged.spec
        head, _, tail = physical.rpartition(":")
        slot, _, function = tail.partition(".")
        first = int(slot, 16) * 8 + int(function) + 4
        for number in range(count):
            virtual = f"{head}:{(first + number) // 8:02x}.{(first + number) % 8}"
            group = None if spec.group is None else max(self._members, default=0) + 1
            of_virtual = replace(spec, address=virtual, group=group, driver=None, total_vfs=0)
            yield from self.plug_steps(of_virtual)
            os.symlink(f"../{virtual}", self.device_dir(physical) / f"virtfn{number}")
            os.symlink(f"../{physical}", self.device_dir(virtual) / "physfn")
            plugged.virtual = (*plugged.virtual, virtual)
            yield self._pci_uevent("change", self._functions[virtual])
            if driver is not None:
                yield from self.bind_steps(virtual, driver)
        yield self._pci_uevent("change", plugged)

    def register_vgpu(self, address: str, creatable: str = VGPU_HEADER) -> tuple[Uevent, ...]:
        """NVIDIA's driver, which has the virtual function, registers it with vfio and makes its directory `nvidia/`,
        without a vGPU. Raises `ValueError` if it is on no driver, or in no group."""
        plugged = self._find(address)
        if plugged.driver is None or plugged.spec.group is None or plugged.vfio is not None:
            raise ValueError(f"{address} is on no driver that could make a vGPU of it")
        uevents = tuple(self._make_vfio(plugged, plugged.spec.group))
        self.set_vgpu(address, 0, creatable)
        return uevents

    def set_vgpu(self, address: str, number: int, creatable: str = VGPU_HEADER) -> None:
        """A virtual function gets a vGPU type, 0: it loses it. There is no uevent. `creatable`: the list of the types
        that can be set now; by default that of a card that is full."""
        (self.device_dir(address) / "nvidia").mkdir(exist_ok=True)
        self.set_attribute(address, "nvidia/current_vgpu_type", f"{number}\n".encode())
        self.set_attribute(address, "nvidia/creatable_vgpu_types", creatable.encode())

    def virtual_functions(self, address: str) -> tuple[str, ...]:
        """Return the addresses of a function's virtual functions."""
        return self._functions[address].virtual

    def bind_steps(self, address: str, driver: str) -> Iterator[Uevent]:
        """`bind`, uevent by uevent."""
        plugged = self._find(address)
        self._refuse_if_waiting(plugged)
        if plugged.driver is not None:
            raise ValueError(f"{address} is bound to {plugged.driver} already; unbind it first")
        yield from self._bind(plugged, driver)

    def unbind_steps(self, address: str) -> Iterator[Uevent]:
        """`unbind`, uevent by uevent. Stopped before the end, it is an unbind that waits for its holder."""
        plugged = self._find(address)
        self._refuse_if_waiting(plugged)
        if plugged.driver is None:
            raise ValueError(f"{address} is bound to no driver")
        yield from self._unbind(plugged, iter(()))

    # --- tenants --------------------------------------------------------------------------------------------

    def open_group(
        self,
        group: int,
        pid: int,
        command: str = "qemu-system-x86",
        pod_uid: str | None = None,
        *,
        device: bool = True,
    ) -> None:
        """A process opens a group and, with `device`, every function in it. It is started if it is not there.

        Raises `OSError` as open(2) would: ENOENT without a node, EBUSY if a process has the group open (this one
        included). With `device` also EPERM, as VFIO_GROUP_SET_CONTAINER says while the group is not viable.
        """
        self._check_open(f"/dev/vfio/{group}", group)
        if device and not self.is_viable(group):
            raise OSError(errno.EPERM, os.strerror(errno.EPERM), f"/dev/vfio/{group}")
        if pid not in self._tenants:
            self._tenants.start(pid, command, pod_uid)
        self._tenants.open_group(pid, group)
        if device:
            for address in sorted(self._members.get(group, ())):
                if self._functions[address].vfio is not None:
                    self.open_device(address, pid)

    def open_device(self, address: str, pid: int) -> None:
        """A process that has the function's group open gets its device: the function wakes up and is enabled.

        Raises `ValueError` if the group is not open, the device is open already, or the function is bound to no vfio
        driver.
        """
        plugged = self._find(address)
        group = plugged.spec.group
        if plugged.vfio is None or group is None or self.holder_of(group) != pid:
            raise ValueError(
                f"process {pid} cannot open {address}: it does not hold its group, or it is not on vfio"
            )
        if self._tenants.opener_of(address) is not None:
            raise ValueError(f"process {pid} has {address} open already")
        self._tenants.open_device(pid, address)
        self._set_status(plugged, "active")
        self._count(plugged, +1)

    def close_group(self, group: int, pid: int) -> tuple[Uevent, ...]:
        """A process closes a group and its devices, and lives on. There is no uevent, unless an unbind waited.

        Raises `ValueError` if it does not hold the group.
        """
        if self.holder_of(group) != pid:
            raise ValueError(f"process {pid} does not hold group {group}")
        return tuple(self._close_group(group, pid))

    def kill(self, pid: int) -> tuple[Uevent, ...]:
        """End a process and close all that it holds, as `close_group`. Raises `ValueError` if there is none."""
        uevents = [u for group in self._tenants.groups_of(pid) for u in self._close_group(group, pid)]
        self._tenants.kill(pid)
        return tuple(uevents)

    def wake(self) -> tuple[Uevent, ...]:
        """Continue what waited for a holder that has closed the group meanwhile. For tenants that are processes of
        their own."""
        uevents: list[Uevent] = []
        for plugged in list(self._functions.values()):
            if plugged.waiting is not None and not self._is_open(plugged):
                remaining_uevents, plugged.waiting = plugged.waiting, None
                uevents.extend(remaining_uevents)
        return tuple(uevents)

    def is_open(self, address: str) -> bool:
        """A tenant has the function's device open. Raises `KeyError` if it is not plugged."""
        return self._is_open(self._functions[address])

    def open_file(self, path: str, pid: int, command: str, pod_uid: str | None = None) -> None:
        """A process opens a node of a host driver (its path on the host). It is started if it is not there."""
        if pid not in self._tenants:
            self._tenants.start(pid, command, pod_uid)
        self._tenants.open_file(pid, f"{self.root}{path}")

    def close_file(self, path: str, pid: int) -> None:
        """Let a process close the file and live on."""
        self._tenants.close_file(pid, f"{self.root}{path}")

    def open_node(self, path: str) -> None:
        """A probe opens a group's node (its real path) and closes it. Raises `OSError`: ENOENT, EBUSY."""
        node = "/" + str(Path(path).relative_to(self.root))
        self._probed.append(node)
        self._check_open(node, int(Path(path).name))

    def _check_open(self, node: str, group: int) -> None:
        if not (self.root / node.removeprefix("/")).exists():
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), node)
        if self.holder_of(group) is not None:
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), node)

    def _close_group(self, group: int, pid: int) -> Iterator[Uevent]:
        members = [self._functions[address] for address in sorted(self._members.get(group, ()))]
        for plugged in members:
            if self._tenants.opener_of(plugged.spec.address) == pid:
                self._close_device(plugged, pid)
        self._tenants.close_group(pid, group)
        for plugged in members:
            if plugged.waiting is not None:
                remaining_uevents, plugged.waiting = plugged.waiting, None
                yield from remaining_uevents

    def _close_device(self, plugged: _Plugged, pid: int) -> None:
        self._tenants.close_device(pid, plugged.spec.address)
        self._count(plugged, -1)
        self._set_status(plugged, "suspended")

    def _set_status(self, plugged: _Plugged, status: str) -> None:
        with suppress(OSError):  # a fault was put there, or the function is hollow
            _replace(f"{self.root}/sys{plugged.devpath}/power/runtime_status", f"{status}\n")

    def _count(self, plugged: _Plugged, change: int) -> None:
        """Change `enable`, which is a count: an operator may have written to it."""
        path = f"{self.root}/sys{plugged.devpath}/enable"
        with suppress(OSError, ValueError):  # a fault was put there
            _replace(path, f"{int(Path(path).read_bytes()) + change}\n")

    def switch(self, address: str, *, on: bool) -> None:
        """1 or 0 is written to `enable`, which counts up or down. There is no uevent.

        Raises `ValueError` if the function has a driver (EBUSY), or was not switched on before (EIO):
        drivers/pci/pci-sysfs.c, enable_store.
        """
        plugged = self._find(address)
        if plugged.driver is not None or plugged.waiting is not None:
            raise ValueError(f"{address} has a driver; only the driver may switch it")
        if not on and self.enabled(address) <= 0:
            raise ValueError(f"{address} is not switched on")
        self._count(plugged, +1 if on else -1)

    def enabled(self, address: str) -> int:
        """`enable` of a function; 0 if it cannot be read."""
        try:
            return int((self.device_dir(address) / "enable").read_bytes())
        except (OSError, ValueError):
            return 0

    # --- faults ---------------------------------------------------------------------------------------------

    def set_attribute(self, address: str, name: str, content: bytes) -> None:
        """An attribute reads as `content`, sense or nonsense."""
        path = self.device_dir(address) / name
        self._clear(path)
        path.write_bytes(content)

    def make_unreadable(self, address: str, name: str) -> None:
        """Reading the attribute fails, for root as well: it is a directory now (EISDIR)."""
        path = self.device_dir(address) / name
        self._clear(path)
        path.mkdir()

    def make_hang(self, address: str, name: str) -> None:
        """Reading the attribute hangs until `end_hang`: it is a FIFO without a writer."""
        path = self.device_dir(address) / name
        self._clear(path)
        os.mkfifo(path)

    def end_hang(self, address: str, name: str, content: bytes) -> None:
        """Readers that hang in the attribute get an end of file, later readers get `content`."""
        path = self.device_dir(address) / name
        # Opened for both ends it does not block, and readers that hang in open() go on.
        descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        path.unlink()
        path.write_bytes(content)
        os.close(descriptor)

    def remove_attribute(self, address: str, name: str) -> None:
        """Remove an attribute or link."""
        self._clear(self.device_dir(address) / name)

    def hollow(self, address: str) -> None:
        """The function vanishes half way: listed on the bus, but its directory is gone. `unplug` finishes it."""
        shutil.rmtree(self.device_dir(address))

    def remove_node(self, node: str) -> None:
        """A device node (path of the host, `/dev/vfio/51`) is not there."""
        (self.root / node.removeprefix("/")).unlink()

    def restore_node(self, node: str) -> None:
        """Put a removed device node back."""
        self.make_node(node.removeprefix("/dev/"))

    # --- IOMMU groups -----------------------------------------------------------------------------------------

    def join_group(self, group: int, name: str, driver: str | None) -> None:
        """A platform device is a member of the group, bound to `driver` or to none."""
        device = self.root / "sys/devices/platform" / name
        device.mkdir(parents=True, exist_ok=True)
        (device / "driver").unlink(missing_ok=True)
        if driver is not None:
            (device / "driver").symlink_to(f"../../../bus/platform/drivers/{driver}")
        link = self.root / f"sys/kernel/iommu_groups/{group}/devices/{name}"
        if not link.is_symlink():
            link.symlink_to(f"../../../../devices/platform/{name}")

    def leave_group(self, group: int, name: str) -> None:
        """Take a platform device out of the group."""
        (self.root / f"sys/kernel/iommu_groups/{group}/devices/{name}").unlink(missing_ok=True)

    def reserve(self, group: int, regions: str) -> None:
        """The group's reserved regions read as `regions` (drivers/iommu/iommu.c, iommu_group_show_resv_regions)."""
        (self.root / f"sys/kernel/iommu_groups/{group}/reserved_regions").write_text(regions)

    # --- functions ------------------------------------------------------------------------------------------

    def _find(self, address: str) -> _Plugged:
        if address not in self._functions:
            raise ValueError(f"{address} is not plugged in")
        return self._functions[address]

    def _refuse_if_waiting(self, plugged: _Plugged) -> None:
        """The kernel would let the caller sleep on the device's lock as well."""
        if plugged.waiting is not None:
            raise ValueError(
                f"{plugged.spec.address} is being unbound and waits for its holder; close its group first"
            )

    def _make_function(self, plugged: _Plugged) -> None:
        spec = plugged.spec
        directory = f"{self.root}/sys{plugged.devpath}"
        up = "../" * (2 + len(spec.bridges) + 1)
        os.makedirs(f"{directory}/power")
        for name, content in (
            ("vendor", f"0x{spec.vendor}\n"),
            ("device", f"0x{spec.device}\n"),
            ("class", f"0x{spec.class_code}\n"),
            ("numa_node", f"{spec.numa_node}\n"),
            ("enable", "0\n"),
            ("power/runtime_status", "active\n"),
        ):
            _write(f"{directory}/{name}", content)
        if spec.total_vfs:
            _write(f"{directory}/sriov_totalvfs", f"{spec.total_vfs}\n")
            _write(f"{directory}/sriov_numvfs", "0\n")
        os.symlink(f"{up}bus/pci", f"{directory}/subsystem")
        os.symlink(f"../../..{plugged.devpath}", f"{self.root}/sys/bus/pci/devices/{spec.address}")

    def _join_group(self, plugged: _Plugged, group: int) -> None:
        address = plugged.spec.address
        self._members.setdefault(group, set()).add(address)
        devices = f"{self.root}/sys/kernel/iommu_groups/{group}/devices"
        os.makedirs(devices, exist_ok=True)
        up = "../" * (2 + len(plugged.spec.bridges) + 1)
        os.symlink(f"{up}kernel/iommu_groups/{group}", f"{self.root}/sys{plugged.devpath}/iommu_group")
        os.symlink(f"../../../..{plugged.devpath}", f"{devices}/{address}")

    def _leave_group(self, plugged: _Plugged, group: int) -> None:
        address = plugged.spec.address
        (self.root / f"sys{plugged.devpath}/iommu_group").unlink(missing_ok=True)
        directory = self.root / f"sys/kernel/iommu_groups/{group}"
        (directory / "devices" / address).unlink(missing_ok=True)
        self._members[group].discard(address)
        if not self._members[group]:
            del self._members[group]
            shutil.rmtree(directory)

    # --- drivers --------------------------------------------------------------------------------------------

    def _bind(self, plugged: _Plugged, driver: str) -> Iterator[Uevent]:
        """Link, then probe, then the uevent: drivers/base/dd.c, really_probe."""
        plugged.driver = driver
        drivers = f"{self.root}/sys/bus/pci/drivers/{driver}"
        os.makedirs(drivers, exist_ok=True)
        up = "../" * (2 + len(plugged.spec.bridges) + 1)
        os.symlink(f"../../../..{plugged.devpath}", f"{drivers}/{plugged.spec.address}")
        os.symlink(f"{up}bus/pci/drivers/{driver}", f"{self.root}/sys{plugged.devpath}/driver")
        if driver in VFIO_DRIVERS and plugged.spec.group is not None:
            yield from self._make_vfio(plugged, plugged.spec.group)
        yield self._pci_uevent("bind", plugged)

    def _unbind(self, plugged: _Plugged, uevents_after: Iterator[Uevent]) -> Iterator[Uevent]:
        """The links go at once, then the driver's own things, then the uevent: dd.c, __device_release_driver.

        `uevents_after` follow the unbind; while a process has the device open, they wait with the rest for its end.
        """
        driver, plugged.driver = plugged.driver, None
        (self.root / f"sys{plugged.devpath}/driver").unlink(missing_ok=True)
        (self.root / f"sys/bus/pci/drivers/{driver}/{plugged.spec.address}").unlink(missing_ok=True)
        shutil.rmtree(self.root / f"sys{plugged.devpath}/nvidia", ignore_errors=True)
        remaining_uevents = self._finish_unbind(plugged, plugged.vfio, uevents_after)
        if self.waits_silently and plugged.vfio is not None and self._is_open(plugged):
            plugged.waiting = self._wake(plugged, plugged.vfio, remaining_uevents)
            for name in _BLOCKED:
                self.make_hang(plugged.spec.address, name)
            return
        if plugged.vfio is not None:
            yield from self._drop_vfio_device(plugged, plugged.vfio)
        if self._is_open(plugged):
            plugged.waiting = remaining_uevents
        else:
            yield from remaining_uevents

    def has_user(self, group: int) -> bool:
        """A process has a device of the group open: the group is user space's as a whole."""
        return any(self._is_open(self._functions[address]) for address in self._members.get(group, ()))

    def _is_open(self, plugged: _Plugged) -> bool:
        return self._tenants.opener_of(plugged.spec.address) is not None

    def _wake(self, plugged: _Plugged, number: int, remaining_uevents: Iterator[Uevent]) -> Iterator[Uevent]:
        """Continue after an unbind that has waited silently."""
        for name in _BLOCKED:
            self.remove_attribute(plugged.spec.address, name)
        yield from self._drop_vfio_device(plugged, number)
        yield from remaining_uevents

    def _finish_unbind(
        self, plugged: _Plugged, number: int | None, uevents_after: Iterator[Uevent]
    ) -> Iterator[Uevent]:
        if number is not None and plugged.spec.group is not None:
            self._vfio_numbers.discard(number)
            # vfio_pci_core_unregister_device forbids runtime power management, which resumes the function.
            self._set_status(plugged, "active")
            yield from self._drop_group(plugged.spec.group)
        yield self._pci_uevent("unbind", plugged)
        yield from uevents_after

    def _remove(self, plugged: _Plugged) -> Iterator[Uevent]:
        """The function itself goes: drivers/pci/remove.c, pci_destroy_dev."""
        os.unlink(self.root / "sys/bus/pci/devices" / plugged.spec.address)
        if plugged.spec.group is not None:
            self._leave_group(plugged, plugged.spec.group)
        del self._functions[plugged.spec.address]
        shutil.rmtree(self.root / f"sys{plugged.devpath}", ignore_errors=True)
        yield self._pci_uevent("remove", plugged)

    def _make_vfio(self, plugged: _Plugged, group: int) -> Iterator[Uevent]:
        number = next(n for n in range(len(self._vfio_numbers) + 1) if n not in self._vfio_numbers)
        first_of_group = self._vfio_bound_members(group) == 0
        plugged.vfio = number
        self._vfio_numbers.add(number)
        # Before there is a node to open: vfio_pci_core_register_device, drivers/vfio/pci/vfio_pci_core.c.
        self._set_status(plugged, "suspended")
        if first_of_group:
            directory = f"{self.root}/sys/devices/virtual/vfio/{group}"
            os.makedirs(directory)
            _write(f"{directory}/dev", f"{_GROUP_MAJOR}:{group}\n")
            os.symlink(f"../../devices/virtual/vfio/{group}", f"{self.root}/sys/class/vfio/{group}")
            self.make_node(f"vfio/{group}")
            yield self._group_uevent("add", group)
        directory = f"{self.root}/sys{plugged.devpath}/vfio-dev/vfio{number}"
        os.makedirs(directory)
        os.symlink(
            f"../..{plugged.devpath}/vfio-dev/vfio{number}", f"{self.root}/sys/class/vfio-dev/vfio{number}"
        )
        if self.cdev:
            _write(f"{directory}/dev", f"{_CDEV_MAJOR}:{number}\n")
            self.make_node(f"vfio/devices/vfio{number}")
        yield self._vfio_dev_uevent("add", plugged, number)

    def _drop_vfio_device(self, plugged: _Plugged, number: int) -> Iterator[Uevent]:
        (self.root / f"dev/vfio/devices/vfio{number}").unlink(missing_ok=True)
        (self.root / f"sys/class/vfio-dev/vfio{number}").unlink(missing_ok=True)
        # The kernel removes `vfio-dev/` as well: it is a glue directory (drivers/base/core.c, cleanup_glue_dir).
        shutil.rmtree(self.root / f"sys{plugged.devpath}/vfio-dev", ignore_errors=True)
        plugged.vfio = None
        yield self._vfio_dev_uevent("remove", plugged, number)

    def _drop_group(self, group: int) -> Iterator[Uevent]:
        """The group's node goes with the last function, even if a process has only the node open (seen on 6.1): only an
        open device delays an unbind."""
        if self._vfio_bound_members(group) != 0:
            return
        self._tenants.node_removed(group)
        (self.root / f"dev/vfio/{group}").unlink(missing_ok=True)
        (self.root / f"sys/class/vfio/{group}").unlink(missing_ok=True)
        shutil.rmtree(self.root / f"sys/devices/virtual/vfio/{group}", ignore_errors=True)
        yield self._group_uevent("remove", group)

    def _vfio_bound_members(self, group: int) -> int:
        """Those that are on vfio, or leave it and wait for their holder."""
        members = [self._functions[address] for address in self._members.get(group, ())]
        return sum(plugged.vfio is not None or plugged.waiting is not None for plugged in members)

    # --- uevents --------------------------------------------------------------------------------------------

    def _uevent(self, action: str, devpath: str, subsystem: str, *properties: tuple[str, str]) -> Uevent:
        self._seqnum += 1
        return Uevent(action, devpath, subsystem, (*properties, ("SEQNUM", str(self._seqnum))))

    def _pci_uevent(self, action: str, plugged: _Plugged) -> Uevent:
        """drivers/pci/pci-driver.c, pci_uevent; DRIVER comes from the driver core and is there only while bound."""
        spec = plugged.spec
        vendor, device, code = spec.vendor.upper(), spec.device.upper(), spec.class_code.upper()
        modalias = (
            f"pci:v0000{vendor}d0000{device}sv0000{vendor}sd0000{device}bc{code[:2]}sc{code[2:4]}i{code[4:]}"
        )
        driver = (("DRIVER", plugged.driver),) if plugged.driver is not None else ()
        return self._uevent(
            action,
            plugged.devpath,
            "pci",
            *driver,
            ("PCI_CLASS", f"{int(code, 16):04X}"),
            ("PCI_ID", f"{vendor}:{device}"),
            ("PCI_SUBSYS_ID", f"{vendor}:{device}"),
            ("PCI_SLOT_NAME", spec.address),
            ("MODALIAS", modalias),
        )

    def _group_uevent(self, action: str, group: int) -> Uevent:
        return self._uevent(
            action,
            f"/devices/virtual/vfio/{group}",
            "vfio",
            ("MAJOR", str(_GROUP_MAJOR)),
            ("MINOR", str(group)),
            ("DEVNAME", f"vfio/{group}"),
        )

    def _vfio_dev_uevent(self, action: str, plugged: _Plugged, number: int) -> Uevent:
        node = (
            (
                ("MAJOR", str(_CDEV_MAJOR)),
                ("MINOR", str(number)),
                ("DEVNAME", f"vfio/devices/vfio{number}"),
            )
            if self.cdev
            else ()
        )
        return self._uevent(action, f"{plugged.devpath}/vfio-dev/vfio{number}", "vfio-dev", *node)

    # --- files ----------------------------------------------------------------------------------------------

    def make_node(self, name: str) -> None:
        """The node of a device appears below `/dev`."""
        path = f"{self.root}/dev/{name}"
        self._make_node_at(path)
        os.chmod(path, _MODES.get(name, 0o600))

    def _clear(self, path: Path) -> None:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _is_pci(name: str) -> bool:
    return name.count(":") == 2 and "." in name


def _plain_file(path: str) -> None:
    _write(path, "")


def _write(path: str, content: str) -> None:
    # Not pathlib: a tree of 4,096 functions is made of some 50,000 files and links.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        os.write(descriptor, content.encode())
    finally:
        os.close(descriptor)


def _replace(path: str, content: str) -> None:
    """Change a file while others read it: they find the old content or the new one. Raises `OSError`."""
    if not os.path.isfile(path):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
    _write(f"{path}.new", content)
    os.replace(f"{path}.new", path)
