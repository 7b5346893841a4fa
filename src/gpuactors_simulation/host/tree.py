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
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import Final, final

from msgspec import Struct
from msgspec.structs import replace

from gpuactors_simulation.host import vgpu
from gpuactors_simulation.host.mediated import MediatedDevices
from gpuactors_simulation.host.tenants import Tenants
from gpuactors_simulation.host.uevents import Uevent
from gpuactors_simulation.host.vfio import BLOCKED, Device, Vfio, clear, replace_file, write
from gpuactors_simulation.host.vgpu import VGPU_HEADER, VgpuType

__all__ = ["VFIO_DRIVERS", "VGPU_HEADER", "HostTree", "PciSpec", "Uevent", "VgpuType"]

VFIO_DRIVERS: Final = frozenset({"vfio-pci", "nvgrace_gpu_vfio_pci", "xe-vfio-pci"})
"""Drivers that make a vfio device of what is bound to them."""

LEAVES_VIRTUAL_FUNCTIONS: Final = frozenset({"pci-pf-stub", "nvme"})
"""Drivers that can switch SR-IOV on, and leave it on when they go: the function has virtual ones and no driver then
(drivers/pci/pci-pf-stub.c and drivers/nvme/host/pci.c have no pci_disable_sriov; drivers/pci/iov.c, pci_iov_remove,
warns of it). The others switch it off first, as igb, virtio-pci, vfio-pci and NVIDIA's do."""

DRIVER_MANAGED_DMA: Final = VFIO_DRIVERS | {"pci-stub", "pcieport"}
"""Drivers beside which user space may have an IOMMU group: `driver_managed_dma` of struct pci_driver."""

_PORT_TOTAL: Final = "../aer_rootport_total_err_fatal"
"""The count of the root port directly above a function."""

_CONFIG_BYTES: Final = 64

_NO_RESOURCE: Final = f"{' '.join(3 * ['0x' + 16 * '0'])}\n"
_RESOURCES: Final = "0x00000000d0000000 0x00000000d0ffffff 0x0000000000040200\n" + 12 * _NO_RESOURCE
"""The BARs of a function with one of 16 MiB: first and last byte, flags (drivers/pci/pci-sysfs.c, resource_show)."""

_MODES: Final = {"vfio/vfio": 0o666, "iommu": 0o660}
"""Of the nodes below /dev: as drivers/vfio/container.c and drivers/iommu/iommufd/main.c have them; others have that of
devtmpfs, 0600."""


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
    vf_device: str | None = None
    """The device id of its virtual functions (`sriov_vf_device`); None if they have its own."""
    vf_group: int | None = None
    """The IOMMU group of its first virtual function; None: a free one."""
    vfs_share_group: bool = False
    """Its virtual functions are in one IOMMU group, for want of ACS."""
    vgpu_types: tuple[VgpuType, ...] = ()
    """The types of vGPU that its virtual functions can have on the driver `nvidia`."""
    vgpu_names_first: bool = False
    """Its driver lists them as `NAME NUMBER`, see `vgpu.creatable`."""


@dataclass(slots=True)
class _Plugged(Device):
    """A function that is in the tree, and what the kernel keeps about it."""

    spec: PciSpec = field(kw_only=True)
    virtual: tuple[str, ...] = ()
    """The addresses of its virtual functions, in the order of their numbers. One that was removed by hand is still
    counted."""
    physical: str | None = None
    """Of a virtual function."""
    is_losing_children: bool = False
    """Its virtual functions or mediated devices are being removed, and one may wait for its holder."""
    vgpu: int = 0
    """The number of its type of vGPU; 0 without one."""


def _plugged(spec: PciSpec, physical: str | None = None) -> _Plugged:
    devpath = "/".join(("/devices", spec.pcie_root, *spec.bridges, spec.address))
    return _Plugged(spec.address, devpath, spec.group, spec=spec, physical=physical)


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
        self._retired: Final = root / ".retired"
        """The directories of functions that are gone, empty."""
        self._seqnum = 1000
        self._tenants = Tenants(root) if tenants is None else tenants
        self._vfio = Vfio(
            root, self._tenants, self._uevent, self.make_node, cdev=cdev, waits_silently=waits_silently
        )
        self.mediated = MediatedDevices(root, self._vfio, self._uevent)
        """The mediated devices of the node."""
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
        return frozenset(self._vfio.members.get(group, ()))

    def free_group(self) -> int:
        """Return the number of the next IOMMU group: the lowest that is free (drivers/iommu/iommu.c, ida_alloc)."""
        return next(number for number in count() if number not in self._vfio.members)

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
        members = self._vfio.members.get(group, {})
        devices = [device for name, device in members.items() if name not in beside]
        directory = self.root / f"sys/kernel/iommu_groups/{group}"
        others = [
            m for m in directory.glob("devices/*") if m.name not in members and (m / "driver").is_symlink()
        ]
        regions = directory / "reserved_regions"
        is_reserved = regions.is_file() and any(
            line.endswith(" direct") for line in regions.read_text().splitlines()
        )
        return all(map(self._leaves_dma, devices)) and not others and not is_reserved

    def _leaves_dma(self, device: Device) -> bool:
        return device.driver is None or device.driver in DRIVER_MANAGED_DMA or device.vfio is not None

    def holder_of(self, group: int) -> int | None:
        """Return the PID of the tenant that has a group open."""
        return self._tenants.holder_of(group)

    def is_waiting(self, address: str) -> bool:
        """An unbind or unplug of the function waits for its holder, or for that of one of its virtual functions or
        mediated devices. Raises `KeyError` if it is not plugged."""
        plugged = self._functions[address]
        return plugged.waiting is not None or plugged.is_losing_children

    def waits_for_holder(self, address: str) -> bool:
        """An unbind or unplug of the function waits for its own holder. Raises `KeyError` if it is not plugged."""
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
        yield from self._plug(_plugged(spec))
        if spec.driver is not None:
            yield from self._bind(self._functions[spec.address], spec.driver)

    def _plug(self, plugged: _Plugged) -> Iterator[Uevent]:
        self._functions[plugged.name] = plugged
        self._make_function(plugged)
        if plugged.group is not None:
            self._vfio.join_group(plugged, plugged.group)
        yield self._pci_uevent("add", plugged)

    def unplug_steps(self, address: str) -> Iterator[Uevent]:
        """`unplug`, uevent by uevent. The directory goes with the last one, when the reader may already have it."""
        plugged = self._find(address)
        self._refuse_if_waiting(plugged)
        if plugged.driver is not None:
            yield from self._unbind(plugged, self._remove(plugged))
        else:
            yield from self._without_children(plugged, self._remove(plugged))

    def virtualize(self, address: str, count: int, driver: str | None = None) -> tuple[Uevent, ...]:
        """A function gets so many virtual functions, 0: it loses them (`sriov_numvfs`). `driver` takes them at once."""
        return tuple(self.virtualize_steps(address, count, driver))

    def virtualize_steps(self, address: str, count: int, driver: str | None = None) -> Iterator[Uevent]:
        """`virtualize`, uevent by uevent: drivers/pci/iov.c, sriov_enable and sriov_disable. A virtual function is
        added before the links say that it is one; when they go no uevent names the physical function. While a process
        has one open, its removal waits, and those after it with it. Raises `ValueError` for more than it can have, or
        if it has some."""
        plugged = self._find(address)
        self._refuse_if_waiting(plugged)
        if count > plugged.spec.total_vfs:
            raise ValueError(f"{address} can have {plugged.spec.total_vfs} virtual functions")
        if count and plugged.virtual:
            raise ValueError(f"{address} has {len(plugged.virtual)} virtual functions; write 0 first")
        if count and self.has_stale_links(address):
            raise ValueError(f"{address} has a link to a virtual function that was removed by hand (EEXIST)")
        if count:
            yield from self._enable_sriov(plugged, count, driver)
        else:
            yield from self._disable_sriov(plugged, iter(()))

    def _enable_sriov(self, plugged: _Plugged, count: int, driver: str | None) -> Iterator[Uevent]:
        physical = plugged.spec
        group = physical.vf_group
        if group is None and physical.group is not None:
            group = max(self._vfio.members, default=0) + 1
        for number, address in enumerate(virtual_addresses(physical.address, count)):
            spec = replace(
                physical,
                address=address,
                device=physical.vf_device or physical.device,
                group=group if group is None or physical.vfs_share_group else group + number,
                driver=None,
                total_vfs=0,
                vgpu_types=(),
            )
            virtual = _plugged(spec, physical.address)
            yield from self._plug(virtual)
            os.symlink(f"../{address}", self.device_dir(physical.address) / f"virtfn{number}")
            os.symlink(f"../{physical.address}", self.device_dir(address) / "physfn")
            plugged.virtual = (*plugged.virtual, address)
            yield self._pci_uevent("change", virtual)
            if driver is not None:
                yield from self._bind(virtual, driver)
        yield self._pci_uevent("change", plugged)
        self.set_attribute(physical.address, "sriov_numvfs", f"{count}\n".encode())

    def _disable_sriov(self, plugged: _Plugged, rest: Iterator[Uevent]) -> Iterator[Uevent]:
        plugged.is_losing_children = True
        yield from self._vfio.in_turn(self._virtual_removals(plugged), self._virtual_gone(plugged, rest))
        if plugged.is_losing_children and plugged.virtual:
            # Readers wait for its lock, as those of sriov_vf_total_msix do.
            for name in ("sriov_numvfs", *(BLOCKED if self.waits_silently else ())):
                self.make_hang(plugged.name, name)

    def _virtual_removals(self, plugged: _Plugged) -> Iterator[tuple[Device, Iterator[Uevent]]]:
        """drivers/pci/iov.c, pci_iov_remove_virtfn: the link to one that was removed by hand stays."""
        for number, address in enumerate(plugged.virtual):
            if address in self._functions:
                self.remove_attribute(plugged.name, f"virtfn{number}")
                self.remove_attribute(address, "physfn")
                yield self._functions[address], self._unplug_if_there(address)

    def _unplug_if_there(self, address: str) -> Iterator[Uevent]:
        """`unplug`, unless it was removed by hand while this waited for its lock."""
        if address in self._functions:
            yield from self.unplug_steps(address)

    def _virtual_gone(self, plugged: _Plugged, rest: Iterator[Uevent]) -> Iterator[Uevent]:
        plugged.virtual = ()
        plugged.is_losing_children = False
        if plugged.spec.total_vfs:
            self.end_hang(plugged.name, "sriov_numvfs", b"0\n")
        for name in BLOCKED if self.waits_silently else ():
            self.remove_attribute(plugged.name, name)
        yield from rest

    def _without_children(self, plugged: _Plugged, rest: Iterator[Uevent]) -> Iterator[Uevent]:
        """The driver or the function goes, and its mediated devices and virtual functions before it."""
        plugged.is_losing_children = self.mediated.is_parent(plugged.name) or bool(plugged.virtual)
        yield from self.mediated.unregister_steps(plugged.name, self._disable_sriov(plugged, rest))

    def virtual_functions(self, address: str) -> tuple[str, ...]:
        """Return the addresses of a function's virtual functions that are there."""
        return tuple([virtual for virtual in self._functions[address].virtual if virtual in self._functions])

    def has_stale_links(self, address: str) -> bool:
        """A virtual function was removed by hand, and its link is still there after SR-IOV was switched off: no virtual
        functions can be made again (EEXIST). Raises `KeyError` if it is not plugged."""
        return not self._functions[address].virtual and any(self.device_dir(address).glob("virtfn*"))

    def physical_function(self, address: str) -> str | None:
        """Return the address of a virtual function's physical function; None of any other function."""
        return self._functions[address].physical

    def bind_steps(self, address: str, driver: str) -> Iterator[Uevent]:
        """`bind`, uevent by uevent."""
        plugged = self._find(address)
        self._refuse_if_waiting(plugged)
        if plugged.driver is not None:
            raise ValueError(f"{address} is bound to {plugged.driver} already; unbind it first")
        yield from self._bind(plugged, driver)

    def unbind_steps(self, address: str) -> Iterator[Uevent]:
        """`unbind`, uevent by uevent. Stopped before the end, it is an unbind that waits for its holder."""
        yield from self.unbind_when_iterated(address)

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
        included). With `device` also EPERM, as VFIO_GROUP_SET_CONTAINER says while the group is not viable, and EACCES,
        as VFIO_GROUP_GET_DEVICE_FD says of a virtual function whose physical one is on a vfio driver: it wants a token
        (vfio_pci_validate_vf_token).
        """
        self._check_open(f"/dev/vfio/{group}", group)
        if device and not self.is_viable(group):
            raise OSError(errno.EPERM, os.strerror(errno.EPERM), f"/dev/vfio/{group}")
        if device and any(map(self._wants_token, self._vfio.members.get(group, ()))):
            raise OSError(errno.EACCES, os.strerror(errno.EACCES), f"/dev/vfio/{group}")
        if pid not in self._tenants:
            self._tenants.start(pid, command, pod_uid)
        self._tenants.open_group(pid, group)
        if device:
            for name, member in sorted(self._vfio.members.get(group, {}).items()):
                if member.vfio is not None:
                    self.open_device(name, pid)

    def _wants_token(self, name: str) -> bool:
        physical = self._functions[name].physical if name in self._functions else None
        return physical is not None and self._functions[physical].driver in VFIO_DRIVERS

    def open_device(self, name: str, pid: int) -> None:
        """A process that has the group of a function or mediated device open gets its device: a function wakes up and
        is enabled.

        Raises `ValueError` if the group is not open, the device is open already, or the function is bound to no vfio
        driver.
        """
        device = self._device(name)
        if device.vfio is None or device.group is None or self.holder_of(device.group) != pid:
            raise ValueError(
                f"process {pid} cannot open {name}: it does not hold its group, or it is not on vfio"
            )
        if self._vfio.is_open(device):
            raise ValueError(f"process {pid} has {name} open already")
        self._tenants.open_device(pid, name)
        self._vfio.set_status(device, "active")
        self._count(device, +1)

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
        return tuple(self._vfio.wake([*self._functions.values(), *self.mediated.devices]))

    def is_open(self, address: str) -> bool:
        """A tenant has the device of a function or mediated device open. Raises `KeyError` if it is not there."""
        return self._vfio.is_open(self._device(address))

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
        members = [device for _, device in sorted(self._vfio.members.get(group, {}).items())]
        for device in members:
            if self._tenants.opener_of(device.name) == pid:
                self._tenants.close_device(pid, device.name)
                self._count(device, -1)
                self._vfio.set_status(device, "suspended")
        self._tenants.close_group(pid, group)
        yield from self._vfio.wake(members)

    def _count(self, device: Device, change: int) -> None:
        """Change `enable`, which is a count: an operator may have written to it."""
        path = f"{self.root}/sys{device.devpath}/enable"
        with suppress(
            OSError, ValueError
        ):  # a fault was put there, or it is a mediated device, which has none
            replace_file(path, f"{int(Path(path).read_bytes()) + change}\n")

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

    # --- errors of the hardware -----------------------------------------------------------------------------

    def fall_silent(self, address: str) -> None:
        """The function no longer answers: its configuration space reads all ones. There is no uevent."""
        self.set_attribute(address, "config", b"\xff" * _CONFIG_BYTES)

    def answer_again(self, address: str) -> None:
        """The function answers again. There is no uevent."""
        plugged = self._find(address)
        self.set_attribute(address, "config", _config(plugged.spec, is_virtual=plugged.physical is not None))

    def fail_fatally(self, address: str, *, by_port: bool = False) -> tuple[Uevent, ...]:
        """The function reports a fatal PCIe error, and the kernel resets its link: drivers/pci/pcie/aer.c,
        aer_print_error, counts it before pcie_do_recovery sends the uevents (err.c; vfio-pci votes CAN_RECOVER).

        With `by_port` only the root port above counts it, as kernels before Linux 6.16 do. Raises `ValueError` if there
        is no port directly below the root."""
        plugged = self._find(address)
        if by_port:
            if len(plugged.spec.bridges) != 1:
                raise ValueError(f"there is no root port directly above {address}")
            name, value = _PORT_TOTAL, f"{int((self.device_dir(address) / _PORT_TOTAL).read_text()) + 1}\n"
        else:
            total = int((self.device_dir(address) / "aer_dev_fatal").read_text().rsplit(maxsplit=1)[1])
            name, value = "aer_dev_fatal", _fatal_errors(total + 1)
        self.set_attribute(address, name, value.encode())
        return self.recovery_begins(address), self.recovery_succeeds(address)

    def recovery_begins(self, address: str) -> Uevent:
        """The kernel begins to recover from an error of the function: drivers/pci/pci-driver.c, pci_uevent_ers. With
        DPC it has cut off the link by then, and counts nothing at the function."""
        return self._error_uevent(address, "BEGIN_RECOVERY", "0")

    def recovery_succeeds(self, address: str) -> Uevent:
        """The link is there again, and the function's driver did not object."""
        return self._error_uevent(address, "SUCCESSFUL_RECOVERY", "1")

    def _error_uevent(self, address: str, event: str, online: str) -> Uevent:
        plugged = self._find(address)
        return self._pci_uevent("change", plugged, ("ERROR_EVENT", event), ("DEVICE_ONLINE", online))

    def suspend(self, address: str, state: str) -> None:
        """The function is in this power state: `D3hot`, `D3cold`. In D3cold its configuration space reads all ones,
        although it is well."""
        self.set_attribute(address, "power_state", f"{state}\n".encode())
        if state == "D3cold":
            self.fall_silent(address)

    # --- faults ---------------------------------------------------------------------------------------------

    def set_attribute(self, address: str, name: str, content: bytes) -> None:
        """An attribute reads as `content`, sense or nonsense."""
        path = self.device_dir(address) / name
        clear(path)
        path.write_bytes(content)

    def make_unreadable(self, address: str, name: str) -> None:
        """Reading the attribute fails, for root as well: it is a directory now (EISDIR)."""
        path = self.device_dir(address) / name
        clear(path)
        path.mkdir()

    def make_hang(self, address: str, name: str) -> None:
        """Reading the attribute hangs until `end_hang`: it is a FIFO without a writer."""
        path = self.device_dir(address) / name
        clear(path)
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
        clear(self.device_dir(address) / name)

    def hollow(self, address: str) -> None:
        """The function vanishes half way: listed on the bus, but its directory is gone. `unplug` finishes it."""
        self._retire(self.device_dir(address))

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

    def _device(self, name: str) -> Device:
        """Return a function or a mediated device. Raises `ValueError` if it is not there."""
        return self._functions.get(name) or self.mediated.find(name)

    def _refuse_if_waiting(self, plugged: _Plugged) -> None:
        """The kernel would let the caller sleep on the device's lock as well."""
        if plugged.waiting is not None or plugged.is_losing_children:
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
            ("power_state", "D0\n"),
            ("resource", _RESOURCES),
            ("reset_method", "flr bus\n"),
            ("aer_dev_fatal", _fatal_errors(0)),
        ):
            write(f"{directory}/{name}", content)
        port = Path(f"{directory}/{_PORT_TOTAL}")
        if len(spec.bridges) == 1 and not port.exists():
            port.write_text("0\n")
        Path(f"{directory}/config").write_bytes(_config(spec, is_virtual=plugged.physical is not None))
        if spec.total_vfs:
            write(f"{directory}/sriov_totalvfs", f"{spec.total_vfs}\n")
            write(f"{directory}/sriov_numvfs", "0\n")
        if plugged.physical is not None:
            write(f"{directory}/sriov_vf_msix_count", "")  # Linux 5.13 and newer; only for writers
        os.symlink(f"{up}bus/pci", f"{directory}/subsystem")
        os.symlink(f"../../..{plugged.devpath}", f"{self.root}/sys/bus/pci/devices/{spec.address}")

    # --- drivers --------------------------------------------------------------------------------------------

    def _bind(self, plugged: _Plugged, driver: str) -> Iterator[Uevent]:
        """Link, then probe, then the uevent: drivers/base/dd.c, really_probe."""
        plugged.driver = driver
        drivers = f"{self.root}/sys/bus/pci/drivers/{driver}"
        os.makedirs(drivers, exist_ok=True)
        up = "../" * (2 + len(plugged.spec.bridges) + 1)
        os.symlink(f"../../../..{plugged.devpath}", f"{drivers}/{plugged.spec.address}")
        os.symlink(f"{up}bus/pci/drivers/{driver}", f"{self.root}/sys{plugged.devpath}/driver")
        if self.has_vgpus(plugged.name, driver):
            plugged.vgpu = 0
            vgpu.make_attributes(self.device_dir(plugged.name))
            self._list_creatable(plugged.physical or "")
        if self.makes_vfio(plugged.name, driver) and plugged.group is not None:
            yield from self._vfio.register_steps(plugged)
        yield self._pci_uevent("bind", plugged)

    def makes_vfio(self, address: str, driver: str) -> bool:
        """Return whether the driver makes a vfio device of the function."""
        return driver in VFIO_DRIVERS or self.has_vgpus(address, driver)

    def unbind_when_iterated(self, address: str) -> Iterator[Uevent]:
        """Remove the driver's links at once, and return the rest of `unbind`, for a driver that waits before it goes.
        Raises `ValueError` as `unbind`."""
        plugged = self._find(address)
        self._refuse_if_waiting(plugged)
        if plugged.driver is None:
            raise ValueError(f"{address} is bound to no driver")
        return self._unbind(plugged, iter(()))

    def _unbind(self, plugged: _Plugged, uevents_after: Iterator[Uevent]) -> Iterator[Uevent]:
        """The links go at once, then the driver's own things, then the uevent: dd.c, __device_release_driver.

        `uevents_after` follow the unbind; while a process has the device open, they wait with the rest for its end.
        """
        driver, plugged.driver = plugged.driver, None
        (self.root / f"sys{plugged.devpath}/driver").unlink(missing_ok=True)
        (self.root / f"sys/bus/pci/drivers/{driver}/{plugged.spec.address}").unlink(missing_ok=True)
        rest = self._finish_unbind(plugged, driver, plugged.vfio is not None, uevents_after)
        steps = self._vfio.unregister_steps(plugged, rest)
        return steps if driver in LEAVES_VIRTUAL_FUNCTIONS else self._without_children(plugged, steps)

    def has_user(self, group: int) -> bool:
        """A process has a device of the group open: the group is user space's as a whole."""
        return any(map(self._vfio.is_open, self._vfio.members.get(group, {}).values()))

    def _finish_unbind(
        self, plugged: _Plugged, driver: str | None, was_vfio: bool, uevents_after: Iterator[Uevent]
    ) -> Iterator[Uevent]:
        if was_vfio and plugged.group is not None:
            # vfio_pci_core_unregister_device forbids runtime power management, which resumes the function.
            self._vfio.set_status(plugged, "active")
            yield from self._vfio.drop_group(plugged.group)
        self.remove_attribute(plugged.name, "nvidia")
        if self.has_vgpus(plugged.name, driver):
            plugged.vgpu = 0
            self._list_creatable(plugged.physical or "")
        yield self._pci_uevent("unbind", plugged)
        yield from uevents_after

    def _remove(self, plugged: _Plugged) -> Iterator[Uevent]:
        """The function itself goes: drivers/pci/remove.c, pci_destroy_dev."""
        os.unlink(self.root / "sys/bus/pci/devices" / plugged.spec.address)
        if plugged.group is not None:
            self._vfio.leave_group(plugged)
        del self._functions[plugged.spec.address]
        self._retire(self.root / f"sys{plugged.devpath}")
        yield self._pci_uevent("remove", plugged)

    def _retire(self, directory: Path) -> None:
        """Remove a function's directory, whose inode is never used again, as in sysfs (fs/kernfs, kernfs_ino)."""
        if not directory.is_dir():
            return
        for path in list(directory.iterdir()):
            clear(path)
        self._retired.mkdir(exist_ok=True)
        directory.rename(self._retired / str(directory.stat().st_ino))

    # --- vGPUs of NVIDIA's vendor VFIO ------------------------------------------------------------------------

    def has_vgpus(self, address: str, driver: str | None) -> bool:
        """Return whether the function can be a vGPU on this driver: it is a virtual function of such a card."""
        physical = self._functions[address].physical
        return driver == "nvidia" and physical is not None and bool(self._functions[physical].spec.vgpu_types)

    def set_vgpu_type(self, address: str, number: int) -> None:
        """A number is written to `nvidia/current_vgpu_type`, 0: the vGPU is gone. There is no uevent.

        Raises `OSError`: EBUSY while a process has it open, EINVAL for a type that the card has no room for, which
        leaves the function without a type (docs.nvidia.com, vGPU user guide).
        """
        plugged = self._find(address)
        path = str(self.device_dir(address) / "nvidia/current_vgpu_type")
        physical = self._functions.get(plugged.physical or "")
        if physical is None or not self.has_vgpus(address, plugged.driver):
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        if self._vfio.is_open(plugged):
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), path)
        plugged.vgpu = 0
        is_possible = number == 0 or any(t.number == number for t in self._creatable(physical))
        plugged.vgpu = number if is_possible else 0
        vgpu.show_type(self.device_dir(address), plugged.vgpu)
        self._list_creatable(physical.name)
        if not is_possible:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)

    def vgpu_type(self, address: str) -> int:
        """Return the number of the function's type of vGPU; 0 without one. Raises `KeyError` if it is not plugged."""
        return self._functions[address].vgpu

    def register_vgpu(self, address: str, creatable: str = VGPU_HEADER) -> tuple[Uevent, ...]:
        """NVIDIA's driver, which has the virtual function, registers it with vfio and makes its directory `nvidia/`,
        without a vGPU. For a card whose types the tree does not know: `creatable` is the list of the types. Raises
        `ValueError` if it is on no driver, or in no group."""
        plugged = self._find(address)
        if plugged.driver is None or plugged.group is None or plugged.vfio is not None:
            raise ValueError(f"{address} is on no driver that could make a vGPU of it")
        uevents = tuple(self._vfio.register_steps(plugged))
        vgpu.make_attributes(self.device_dir(address))
        self.set_vgpu(address, 0, creatable)
        return uevents

    def set_vgpu(self, address: str, number: int, creatable: str = VGPU_HEADER) -> None:
        """Show a vGPU type of a card whose types the tree does not know, 0: none. There is no uevent. `creatable`: the
        list of the types that can be set now; by default that of a card that is full."""
        directory = self.device_dir(address)
        (directory / "nvidia").mkdir(exist_ok=True)
        vgpu.show_type(directory, number)
        self.set_attribute(address, "nvidia/creatable_vgpu_types", creatable.encode())

    def _creatable(self, physical: _Plugged) -> tuple[VgpuType, ...]:
        numbers = [self._functions[virtual].vgpu for virtual in self.virtual_functions(physical.name)]
        return vgpu.creatable(physical.spec.vgpu_types, numbers)

    def _list_creatable(self, physical: str) -> None:
        plugged = self._functions[physical]
        text = vgpu.listed(self._creatable(plugged), names_first=plugged.spec.vgpu_names_first)
        for virtual in self.virtual_functions(physical):
            with suppress(FileNotFoundError):  # it is on another driver
                replace_file(str(self.device_dir(virtual) / "nvidia/creatable_vgpu_types"), text)

    # --- uevents --------------------------------------------------------------------------------------------

    def _uevent(self, action: str, devpath: str, subsystem: str, *properties: tuple[str, str]) -> Uevent:
        self._seqnum += 1
        return Uevent(action, devpath, subsystem, (*properties, ("SEQNUM", str(self._seqnum))))

    def _pci_uevent(self, action: str, plugged: _Plugged, *more: tuple[str, str]) -> Uevent:
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
            *more,
        )

    # --- files ----------------------------------------------------------------------------------------------

    def make_node(self, name: str) -> None:
        """The node of a device appears below `/dev`."""
        path = f"{self.root}/dev/{name}"
        self._make_node_at(path)
        os.chmod(path, _MODES.get(name, 0o600))


def virtual_addresses(physical: str, count: int) -> tuple[str, ...]:
    """Return the addresses of so many virtual functions, as NVIDIA's cards number them: the first is the fourth
    function after the physical one (`sriov_offset` 4, `sriov_stride` 1)."""
    head, _, tail = physical.rpartition(":")
    slot, _, function = tail.partition(".")
    first = int(slot, 16) * 8 + int(function) + 4
    return tuple([f"{head}:{n // 8:02x}.{n % 8}" for n in range(first, first + count)])


def _config(spec: PciSpec, *, is_virtual: bool) -> bytes:
    """The header of its configuration space, as far as it is fixed: ids, command, status, class, header type. The ids
    of a virtual function read all ones (SR-IOV specification, 3.4.1.1 and 3.4.1.2)."""
    ids = b"".join(int(number, 16).to_bytes(2, "little") for number in (spec.vendor, spec.device))
    own = b"\xff" * 4 if is_virtual else ids
    command_and_status, revision = b"\x06\x00\x10\x00", b"\xa1"
    code = bytes.fromhex(spec.class_code)[::-1]
    return (own + command_and_status + revision + code).ljust(_CONFIG_BYTES, b"\0")


def _fatal_errors(total: int) -> str:
    """The attribute `aer_dev_fatal`. Only the total counts an error whose status register was not read."""
    return f"Undefined 0\nDLP 0\nSDES 0\nTLP 0\nTOTAL_ERR_FATAL {total}\n"


def _plain_file(path: str) -> None:
    write(path, "")
