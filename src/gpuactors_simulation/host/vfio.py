"""The vfio devices of a fake node: group nodes, cdevs, their uevents, and the unbind that waits for a holder.

Plays drivers/vfio/{group,vfio_main}.c for PCI functions and mediated devices alike. Must not know which driver makes a
vfio device of what: `tree.py` and `mediated.py` do.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Final, Protocol, final

from gpuactors_simulation.host.tenants import Tenants
from gpuactors_simulation.host.uevents import Uevent

BLOCKED: Final = ("uevent", "driver_override")
"""Attributes that take the device's lock when they are read, on kernel 6.1; nothing else reads them here, so they are
only there when that lock is held."""

_GROUP_MAJOR: Final = 243
_CDEV_MAJOR: Final = 511


@dataclass(slots=True)
class Device:
    """A device that a driver can have, and what the kernel keeps about it."""

    name: str
    """Its name on its bus: a PCI address, or the UUID of a mediated device."""
    devpath: str
    group: int | None
    """Its IOMMU group."""
    driver: str | None = None
    vfio: int | None = None
    """N of `vfio-dev/vfioN`."""
    waiting: Iterator[Uevent] | None = None
    """The rest of an unbind or removal that waits for the holder of the device."""


class NewUevent(Protocol):
    """Makes the next uevent of the node."""

    def __call__(self, action: str, devpath: str, subsystem: str, *properties: tuple[str, str]) -> Uevent: ...


@final
class Vfio:
    """The vfio devices of one node, and the members of its IOMMU groups."""

    def __init__(
        self,
        root: Path,
        tenants: Tenants,
        new_uevent: NewUevent,
        make_node: Callable[[str], None],
        *,
        cdev: bool,
        waits_silently: bool,
    ) -> None:
        self._root = root
        self._tenants = tenants
        self._new_uevent = new_uevent
        self._make_node = make_node
        self._cdev = cdev
        self._waits_silently = waits_silently
        self._numbers: set[int] = set()
        self.members: dict[int, dict[str, Device]] = {}
        """The devices of each IOMMU group, by name."""

    def is_open(self, device: Device) -> bool:
        """Return whether a process has the device open."""
        return self._tenants.opener_of(device.name) is not None

    # --- IOMMU groups -----------------------------------------------------------------------------------------

    def join_group(self, device: Device, group: int) -> None:
        """The device is a member of the group, which is made with its first one."""
        device.group = group
        self.members.setdefault(group, {})[device.name] = device
        directory = f"{self._root}/sys/kernel/iommu_groups/{group}"
        os.makedirs(f"{directory}/devices", exist_ok=True)
        # By hand: `os.path.relpath` is slow for thousands of functions.
        up = "../" * (device.devpath.count("/") - 1)
        os.symlink(f"{up}../kernel/iommu_groups/{group}", f"{self._root}/sys{device.devpath}/iommu_group")
        os.symlink(f"../../../..{device.devpath}", f"{directory}/devices/{device.name}")

    def leave_group(self, device: Device) -> None:
        """The device is no member any more; the group goes with its last one."""
        group = device.group
        assert group is not None
        (self._root / f"sys{device.devpath}/iommu_group").unlink(missing_ok=True)
        directory = self._root / f"sys/kernel/iommu_groups/{group}"
        (directory / "devices" / device.name).unlink(missing_ok=True)
        del self.members[group][device.name]
        if not self.members[group]:
            del self.members[group]
            shutil.rmtree(directory)

    # --- vfio devices -----------------------------------------------------------------------------------------

    def register_steps(self, device: Device) -> Iterator[Uevent]:
        """A driver registers the device: the group's node with its first one, then the device's own."""
        group = device.group
        assert group is not None
        number = next(n for n in range(len(self._numbers) + 1) if n not in self._numbers)
        is_first_of_group = self._registered(group) == 0
        device.vfio = number
        self._numbers.add(number)
        # Before there is a node to open: vfio_pci_core_register_device, drivers/vfio/pci/vfio_pci_core.c.
        self.set_status(device, "suspended")
        if is_first_of_group:
            directory = f"{self._root}/sys/devices/virtual/vfio/{group}"
            os.makedirs(directory)
            write(f"{directory}/dev", f"{_GROUP_MAJOR}:{group}\n")
            os.symlink(f"../../devices/virtual/vfio/{group}", f"{self._root}/sys/class/vfio/{group}")
            self._make_node(f"vfio/{group}")
            yield self._group_uevent("add", group)
        directory = f"{self._root}/sys{device.devpath}/vfio-dev/vfio{number}"
        os.makedirs(directory)
        os.symlink(
            f"../..{device.devpath}/vfio-dev/vfio{number}", f"{self._root}/sys/class/vfio-dev/vfio{number}"
        )
        if self._cdev:
            write(f"{directory}/dev", f"{_CDEV_MAJOR}:{number}\n")
            self._make_node(f"vfio/devices/vfio{number}")
        yield self._device_uevent("add", device, number)

    def unregister_steps(self, device: Device, rest: Iterator[Uevent]) -> Iterator[Uevent]:
        """A driver lets the device go, then the `rest` follows, which is to drop the group (`drop_group`). While a
        process has the device open, the rest waits for its end."""
        number = device.vfio
        if number is None:
            yield from rest
            return
        if self._waits_silently and self.is_open(device):
            device.waiting = self._wake(device, number, rest)
            for name in BLOCKED:
                path = self._root / f"sys{device.devpath}/{name}"
                clear(path)
                os.mkfifo(path)
            return
        yield from self._drop_device(device, number)
        if self.is_open(device):
            device.waiting = self._free(number, rest)
        else:
            yield from self._free(number, rest)

    def in_turn(
        self, removals: Iterator[tuple[Device, Iterator[Uevent]]], rest: Iterable[Uevent]
    ) -> Iterator[Uevent]:
        """Remove one device after the other, then the `rest`. What follows one that waits for its holder waits as
        well; so does the removal of a device that is being unbound or removed already, for its lock."""
        for device, steps in removals:
            if device.waiting is None:
                yield from steps
            if device.waiting is not None:
                device.waiting = chain(device.waiting, steps, self.in_turn(removals, rest))
                return
        yield from rest

    def drop_group(self, group: int) -> Iterator[Uevent]:
        """The group's node goes with the last device, even if a process has only the node open (seen on 6.1): only an
        open device delays an unbind."""
        if self._registered(group) != 0:
            return
        self._tenants.node_removed(group)
        (self._root / f"dev/vfio/{group}").unlink(missing_ok=True)
        (self._root / f"sys/class/vfio/{group}").unlink(missing_ok=True)
        shutil.rmtree(self._root / f"sys/devices/virtual/vfio/{group}", ignore_errors=True)
        yield self._group_uevent("remove", group)

    def wake(self, devices: Iterable[Device]) -> Iterator[Uevent]:
        """Continue what waited for a holder that has closed these devices."""
        for device in devices:
            if device.waiting is not None and not self.is_open(device):
                rest, device.waiting = device.waiting, None
                yield from rest

    def set_status(self, device: Device, status: str) -> None:
        """The device sleeps or wakes up."""
        with suppress(OSError):  # a fault was put there, the function is hollow, or it has none
            replace_file(f"{self._root}/sys{device.devpath}/power/runtime_status", f"{status}\n")

    def _free(self, number: int, rest: Iterator[Uevent]) -> Iterator[Uevent]:
        self._numbers.discard(number)
        yield from rest

    def _wake(self, device: Device, number: int, rest: Iterator[Uevent]) -> Iterator[Uevent]:
        """Continue after an unbind that has waited silently."""
        for name in BLOCKED:
            clear(self._root / f"sys{device.devpath}/{name}")
        yield from self._drop_device(device, number)
        yield from self._free(number, rest)

    def _drop_device(self, device: Device, number: int) -> Iterator[Uevent]:
        (self._root / f"dev/vfio/devices/vfio{number}").unlink(missing_ok=True)
        (self._root / f"sys/class/vfio-dev/vfio{number}").unlink(missing_ok=True)
        # The kernel removes `vfio-dev/` as well: it is a glue directory (drivers/base/core.c, cleanup_glue_dir).
        shutil.rmtree(self._root / f"sys{device.devpath}/vfio-dev", ignore_errors=True)
        device.vfio = None
        yield self._device_uevent("remove", device, number)

    def _registered(self, group: int) -> int:
        """Count those that are on vfio, or leave it and wait for their holder."""
        members = self.members.get(group, {}).values()
        return sum(device.vfio is not None or device.waiting is not None for device in members)

    # --- uevents ----------------------------------------------------------------------------------------------

    def _group_uevent(self, action: str, group: int) -> Uevent:
        return self._new_uevent(
            action,
            f"/devices/virtual/vfio/{group}",
            "vfio",
            ("MAJOR", str(_GROUP_MAJOR)),
            ("MINOR", str(group)),
            ("DEVNAME", f"vfio/{group}"),
        )

    def _device_uevent(self, action: str, device: Device, number: int) -> Uevent:
        node = (
            (
                ("MAJOR", str(_CDEV_MAJOR)),
                ("MINOR", str(number)),
                ("DEVNAME", f"vfio/devices/vfio{number}"),
            )
            if self._cdev
            else ()
        )
        return self._new_uevent(action, f"{device.devpath}/vfio-dev/vfio{number}", "vfio-dev", *node)


def write(path: str, content: str) -> None:
    """Make a file. Raises `OSError`."""
    # Not pathlib: a tree of 4,096 functions is made of some 50,000 files and links.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        os.write(descriptor, content.encode())
    finally:
        os.close(descriptor)


def replace_file(path: str, content: str) -> None:
    """Change a file while others read it: they find the old content or the new one. Raises `OSError`."""
    if not os.path.isfile(path):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
    write(f"{path}.new", content)
    os.replace(f"{path}.new", path)


def clear(path: Path) -> None:
    """Remove a file, a link or a directory, if it is there. Raises `OSError`."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
