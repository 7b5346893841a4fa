"""PCI functions in the guest as an operator handles them: find, bind to vfio-pci, unbind, read.

Plain writes to sysfs with their plain errors. Must not share code with the daemon.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.support.patience import patient
from tests.vm.guest.runner import eventually
from tests.vm.machine import Machine

PCI: Final = Path("/sys/bus/pci")
VFIO_PCI: Final = PCI / "drivers" / "vfio-pci"
DEV_VFIO: Final = Path("/dev/vfio")

APPEAR_TIMEOUT_S: Final = patient(10.0)
"""A plugged function in sysfs. Measured: 10 to 65 ms."""

BLOCKED_FOR_S: Final = 0.5
"""A read that has not come back after so long waits for something. One that waits for nothing takes a millisecond."""


@dataclass(frozen=True, slots=True)
class Function:
    """A PCI function by its address."""

    address: str

    @property
    def path(self) -> Path:
        """Its directory in sysfs; may be gone."""
        return PCI / "devices" / self.address

    @property
    def ids(self) -> tuple[str, str]:
        """Vendor and device id, four hex digits each."""
        return (_hex(self.path / "vendor"), _hex(self.path / "device"))

    @property
    def driver(self) -> str | None:
        """Name of the bound driver."""
        return link_name(self.path / "driver")

    @property
    def group(self) -> str | None:
        """Number of its IOMMU group."""
        return link_name(self.path / "iommu_group")

    @property
    def group_node(self) -> Path:
        """`/dev/vfio/<group>`, there only while a function of the group is on a vfio driver."""
        group = self.group
        assert group is not None, f"{self.address} has no IOMMU group: the guest's IOMMU is off"
        return DEV_VFIO / group

    @property
    def qemu_device(self) -> str:
        """How QEMU gets it."""
        return f"vfio-pci,host={self.address}"

    @property
    def cdev_node(self) -> Path:
        """`/dev/vfio/devices/vfioN`, there only while it is on a vfio driver of a kernel with cdevs."""
        (device,) = self.path.glob("vfio-dev/vfio*")
        return DEV_VFIO / "devices" / device.name

    @property
    def nodes(self) -> set[str]:
        """What a virtual machine may open for it, as far as this kernel has it: container, group, cdev, iommufd."""
        nodes = (DEV_VFIO / "vfio", self.group_node, self.cdev_node, Path("/dev/iommu"))
        return {str(node) for node in nodes if node.exists()}

    def open_error(self) -> int | None:
        """The errno of opening (and closing) its group, None where it opens."""
        try:
            os.close(os.open(self.group_node, os.O_RDWR))
        except OSError as error:
            return error.errno
        return None

    @property
    def enable_count(self) -> int:
        """How often it is enabled: once more while somebody has the device open."""
        return int((self.path / "enable").read_text(encoding="ascii"))

    def bind_vfio(self) -> None:
        """driver_override and drivers_probe, as driverctl does. A plain OSError says what the kernel refused.

        Probes again while the function has no driver: just after a hot plug the kernel shows it, and announces it by
        `add`, but matches it with no driver yet (`match_driver`, set in pci_bus_add_device); drivers_probe then does
        nothing and says nothing. Raises TimeoutError.
        """

        def probed() -> bool:
            self.probe()
            return self.driver is not None

        self.override_vfio()
        eventually(f"vfio-pci taking {self.address}", probed, timeout_s=APPEAR_TIMEOUT_S)
        if self.driver != "vfio-pci":
            raise OSError(f"{self.address} is on {self.driver} after drivers_probe, not on vfio-pci")

    def override_vfio(self) -> None:
        """driver_override: only vfio-pci may have it, and may whatever its ids. Binds nothing yet."""
        write(self.path / "driver_override", "vfio-pci\n")

    def probe(self) -> None:
        """drivers_probe: the kernel binds it to whatever driver knows it, or to none."""
        write(PCI / "drivers_probe", f"{self.address}\n")

    def bind_by_address(self) -> None:
        """Its address into vfio-pci's own `bind`; ENODEV where neither an override nor an id lets that driver have
        it."""
        self.bind_to("vfio-pci")

    def bind_to(self, driver: str) -> None:
        """Its address into a driver's `bind`. A plain OSError says what the kernel or the driver refused."""
        write(PCI / "drivers" / driver / "bind", f"{self.address}\n")

    def unbind(self) -> None:
        """Take the driver away; the override stays. Blocks while somebody holds the device."""
        write(self.path / "driver" / "unbind", f"{self.address}\n")

    def forget_override(self) -> None:
        """Clear driver_override. A driverless function that still has it binds at *any* `new_id` of its driver: the
        kernel then tries every function it has, and an override matches whatever the id (seen on 6.1)."""
        write(self.path / "driver_override", "\n")

    def remove(self) -> None:
        """Take it out of the kernel's view, as before a repair; `rescan` finds it again. Blocks while held."""
        write(self.path / "remove", "1\n")


def functions_behind(machine: Machine, port: str) -> list[Function]:
    """The functions that are behind a root port now, by address.

    Only those that the kernel has finished adding: the directory is there first, then its attributes and the link in
    `/sys/bus/pci/devices`, then the IOMMU group.
    """
    bridge = PCI / "devices" / machine.port_address(port)
    functions = [Function(entry.name) for entry in sorted(bridge.glob("????:??:??.?"))]
    return [function for function in functions if function.path.exists() and function.group is not None]


def function_behind(machine: Machine, port: str) -> Function:
    """The one function behind a root port; waits for it. Raises TimeoutError, or ValueError for several."""
    found = eventually(
        f"a function behind root port {port}",
        lambda: functions_behind(machine, port) or None,
        timeout_s=APPEAR_TIMEOUT_S,
    )
    if len(found) > 1:
        raise ValueError(f"several functions behind {port}: {found}")
    return found[0]


def let_vfio_take(vendor: str, device: str) -> None:
    """`new_id`: vfio-pci takes every driverless function of this id, present and future."""
    write(VFIO_PCI / "new_id", f"{vendor} {device}\n")


def let_vfio_forget(vendor: str, device: str) -> None:
    """`remove_id`: undo `let_vfio_take`; what is bound stays bound."""
    write(VFIO_PCI / "remove_id", f"{vendor} {device}\n")


def rescan() -> None:
    """Look for functions on every PCI bus; returns when what was found is added and matched with drivers."""
    write(PCI / "rescan", "1\n")


def rescan_behind(machine: Machine, port: str) -> None:
    """The same behind one root port alone: so a scenario decides which of several functions is found first."""
    (bus,) = (PCI / "devices" / machine.port_address(port) / "pci_bus").iterdir()
    write(bus / "rescan", "1\n")


def in_background(act: Callable[[], object]) -> threading.Thread:
    """A thread that may wait in the kernel as long as it likes; it holds nobody up, not even at the end."""
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    return thread


def blocked_reads(function: Function, attributes: Iterable[str]) -> dict[str, threading.Thread]:
    """The attributes whose read waits for something in the kernel, with the thread that still waits."""
    readers = {name: in_background((function.path / name).read_bytes) for name in attributes}
    for reader in readers.values():
        reader.join(timeout=BLOCKED_FOR_S)
    return {name: reader for name, reader in readers.items() if reader.is_alive()}


def write(path: Path, text: str) -> None:
    """One write(2), no O_CREAT, no O_TRUNC: a missing attribute is an error, not a new file."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def _hex(path: Path) -> str:
    return path.read_text(encoding="ascii").strip().removeprefix("0x")


def link_name(path: Path) -> str | None:
    """The last part of a link's target; None where there is no link."""
    try:
        return os.path.basename(os.readlink(path))
    except FileNotFoundError:
        return None
