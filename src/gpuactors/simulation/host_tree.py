"""A node's PCI devices as a real directory tree, shaped and changed like the kernel's.

A tree below a root holds what the daemon reads: `sys/` with sysfs' symbolic links and `dev/` with the device nodes
(plain files: nodes need root, and nothing here may be opened anyway). Every operation changes the tree in the kernel's
order and returns the uevents in the kernel's order (drivers/base/core.c, drivers/vfio/{group,vfio_main}.c; measured
in a virtual machine). Must not decide anything about devices: it plays the kernel, not the daemon.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final, final

from gpuactors.simulation.uevent_sender import Uevent

__all__ = ["VFIO_DRIVERS", "HostTree", "PciSpec", "Uevent"]

VFIO_DRIVERS: Final = frozenset({"vfio-pci", "nvgrace_gpu_vfio_pci"})
"""Drivers that make a vfio device of what is bound to them."""

_GROUP_MAJOR: Final = 243
_CDEV_MAJOR: Final = 511


@dataclass(frozen=True, slots=True)
class PciSpec:
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


@dataclass(slots=True)
class _Plugged:
    """A function that is in the tree, and what the kernel keeps about it."""

    spec: PciSpec
    driver: str | None = None
    vfio: int | None = None
    """N of `vfio-dev/vfioN`."""

    @property
    def devpath(self) -> str:
        return "/".join(("/devices", self.spec.pcie_root, *self.spec.bridges, self.spec.address))


@final
class HostTree:
    """Makes a node's tree below `root` and changes it. Not for use from several threads at once.

    `cdev` is a kernel with CONFIG_IOMMUFD and CONFIG_VFIO_DEVICE_CDEV: `/dev/iommu` and `/dev/vfio/devices/vfioN`
    exist. Without it the directory `vfio-dev/vfioN` exists in sysfs all the same, as on Debian's kernels.

    Each operation comes twice: `bind()` does it all and returns the uevents; `bind_steps()` yields each uevent with the
    tree as it is at that moment, so that a test can look half way or stop there.
    """

    def __init__(self, root: Path, *, cdev: bool = False) -> None:
        self.root = root
        self.cdev = cdev
        self._functions: dict[str, _Plugged] = {}
        self._members: dict[int, set[str]] = {}
        self._vfio_numbers: set[int] = set()
        self._seqnum = 1000
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
        self._node("vfio/vfio")
        if cdev:
            (root / "dev/vfio/devices").mkdir(exist_ok=True)
            self._node("iommu")

    # --- what is there --------------------------------------------------------------------------------------

    @property
    def functions(self) -> Mapping[str, PciSpec]:
        """All plugged functions by address."""
        return MappingProxyType({address: plugged.spec for address, plugged in self._functions.items()})

    def driver_of(self, address: str) -> str | None:
        """The driver that the function is bound to. Raises `KeyError` for an address that is not plugged."""
        return self._functions[address].driver

    def group_members(self, group: int) -> frozenset[str]:
        """The functions in an IOMMU group."""
        return frozenset(self._members.get(group, ()))

    def vfio_number(self, address: str) -> int | None:
        """N of the function's `vfio-dev/vfioN`."""
        return self._functions[address].vfio

    def device_dir(self, address: str) -> Path:
        """The function's real directory below `sys/devices`."""
        return self.root / f"sys{self._functions[address].devpath}"

    # --- what can happen ------------------------------------------------------------------------------------

    def plug(self, spec: PciSpec) -> tuple[Uevent, ...]:
        """A function appears. Raises `ValueError` if its address is taken."""
        return tuple(self.plug_steps(spec))

    def unplug(self, address: str) -> tuple[Uevent, ...]:
        """A function disappears (hot unplug or sysfs `remove`). Raises `ValueError` if it is not there."""
        return tuple(self.unplug_steps(address))

    def bind(self, address: str, driver: str) -> tuple[Uevent, ...]:
        """A driver takes a function. Raises `ValueError` if it is not there or is bound (EBUSY)."""
        return tuple(self.bind_steps(address, driver))

    def unbind(self, address: str) -> tuple[Uevent, ...]:
        """A function's driver lets it go. Raises `ValueError` if it is not there or not bound (ENODEV)."""
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
        if plugged.driver is not None:
            yield from self._unbind(plugged)
        os.unlink(self.root / "sys/bus/pci/devices" / address)
        if plugged.spec.group is not None:
            self._leave_group(plugged, plugged.spec.group)
        del self._functions[address]
        shutil.rmtree(self.root / f"sys{plugged.devpath}", ignore_errors=True)
        yield self._pci_uevent("remove", plugged)

    def bind_steps(self, address: str, driver: str) -> Iterator[Uevent]:
        """`bind`, uevent by uevent."""
        plugged = self._find(address)
        if plugged.driver is not None:
            raise ValueError(f"{address} is bound to {plugged.driver} already; unbind it first")
        yield from self._bind(plugged, driver)

    def unbind_steps(self, address: str) -> Iterator[Uevent]:
        """`unbind`, uevent by uevent. Stopped before the end, it is an unbind that waits for its holder."""
        plugged = self._find(address)
        if plugged.driver is None:
            raise ValueError(f"{address} is bound to no driver")
        yield from self._unbind(plugged)

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
        """Reading the attribute hangs until `end_hang`: it is a FIFO that nobody writes to."""
        path = self.device_dir(address) / name
        self._clear(path)
        os.mkfifo(path)

    def end_hang(self, address: str, name: str, content: bytes) -> None:
        """Whoever hangs in the attribute reads an end of file, later readers read `content`."""
        path = self.device_dir(address) / name
        # Opened for both ends it blocks nobody, and readers that hang in open() come through.
        descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        path.unlink()
        path.write_bytes(content)
        os.close(descriptor)

    def remove_attribute(self, address: str, name: str) -> None:
        """An attribute or link is not there."""
        self._clear(self.device_dir(address) / name)

    def hollow(self, address: str) -> None:
        """The function vanishes half way: listed on the bus, but its directory is gone. `unplug` finishes it."""
        shutil.rmtree(self.device_dir(address))

    def remove_node(self, node: str) -> None:
        """A device node (path of the host, `/dev/vfio/51`) is not there."""
        (self.root / node.removeprefix("/")).unlink()

    def restore_node(self, node: str) -> None:
        """A removed device node is there again."""
        self._node(node.removeprefix("/dev/"))

    # --- functions ------------------------------------------------------------------------------------------

    def _find(self, address: str) -> _Plugged:
        if address not in self._functions:
            raise ValueError(f"{address} is not plugged in")
        return self._functions[address]

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

    def _unbind(self, plugged: _Plugged) -> Iterator[Uevent]:
        """The links go at once, then the driver's own things, then the uevent: dd.c, __device_release_driver."""
        driver, plugged.driver = plugged.driver, None
        (self.root / f"sys{plugged.devpath}/driver").unlink(missing_ok=True)
        (self.root / f"sys/bus/pci/drivers/{driver}/{plugged.spec.address}").unlink(missing_ok=True)
        if plugged.vfio is not None and plugged.spec.group is not None:
            yield from self._drop_vfio(plugged, plugged.spec.group, plugged.vfio)
        yield self._pci_uevent("unbind", plugged)

    def _make_vfio(self, plugged: _Plugged, group: int) -> Iterator[Uevent]:
        number = next(n for n in range(len(self._vfio_numbers) + 1) if n not in self._vfio_numbers)
        first_of_group = self._vfio_bound_members(group) == 0
        plugged.vfio = number
        self._vfio_numbers.add(number)
        if first_of_group:
            directory = f"{self.root}/sys/devices/virtual/vfio/{group}"
            os.makedirs(directory)
            _write(f"{directory}/dev", f"{_GROUP_MAJOR}:{group}\n")
            os.symlink(f"../../devices/virtual/vfio/{group}", f"{self.root}/sys/class/vfio/{group}")
            self._node(f"vfio/{group}")
            yield self._group_uevent("add", group)
        directory = f"{self.root}/sys{plugged.devpath}/vfio-dev/vfio{number}"
        os.makedirs(directory)
        _write(f"{self.root}/sys{plugged.devpath}/power/runtime_status", "suspended\n")
        os.symlink(
            f"../..{plugged.devpath}/vfio-dev/vfio{number}", f"{self.root}/sys/class/vfio-dev/vfio{number}"
        )
        if self.cdev:
            _write(f"{directory}/dev", f"{_CDEV_MAJOR}:{number}\n")
            self._node(f"vfio/devices/vfio{number}")
        yield self._vfio_dev_uevent("add", plugged, number)

    def _drop_vfio(self, plugged: _Plugged, group: int, number: int) -> Iterator[Uevent]:
        (self.root / f"dev/vfio/devices/vfio{number}").unlink(missing_ok=True)
        (self.root / f"sys/class/vfio-dev/vfio{number}").unlink(missing_ok=True)
        # The kernel removes `vfio-dev/` as well: it is a glue directory (drivers/base/core.c, cleanup_glue_dir).
        shutil.rmtree(self.root / f"sys{plugged.devpath}/vfio-dev", ignore_errors=True)
        plugged.vfio = None
        self._vfio_numbers.discard(number)
        yield self._vfio_dev_uevent("remove", plugged, number)
        if self._vfio_bound_members(group) == 0:
            (self.root / f"dev/vfio/{group}").unlink(missing_ok=True)
            (self.root / f"sys/class/vfio/{group}").unlink(missing_ok=True)
            shutil.rmtree(self.root / f"sys/devices/virtual/vfio/{group}", ignore_errors=True)
            yield self._group_uevent("remove", group)

    def _vfio_bound_members(self, group: int) -> int:
        return sum(self._functions[address].vfio is not None for address in self._members.get(group, ()))

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

    def _node(self, name: str) -> None:
        _write(f"{self.root}/dev/{name}", "")

    def _clear(self, path: Path) -> None:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _write(path: str, content: str) -> None:
    # Not pathlib: a tree of 4,096 functions is made of some 50,000 files and links.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        os.write(descriptor, content.encode())
    finally:
        os.close(descriptor)
