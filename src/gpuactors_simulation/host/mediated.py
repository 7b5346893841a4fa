"""The mediated devices of a fake node: parents, their types, and devices that are made and removed.

Plays drivers/vfio/mdev/{mdev_core,mdev_sysfs}.c (6.1 and newer) and the emulated IOMMU groups of drivers/vfio/group.c.
Must not decide anything about devices: it plays the kernel, not the daemon.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import final

from msgspec import Struct

from gpuactors_simulation.host.uevents import Uevent
from gpuactors_simulation.host.vfio import Device, NewUevent, Vfio, replace_file, write


class MdevType(Struct, frozen=True):
    """A type of mediated device that a parent offers."""

    id: str
    """The name of its directory: `nvidia-105`, `mtty-2`."""
    name: str | None
    """The content of its file `name`; None without that file."""
    instances: int
    """How many of it the parent has room for."""
    device_api: str = "vfio-pci"


@dataclass(slots=True)
class _Parent:
    """A device that mediated devices are made of."""

    name: str
    devpath: str
    subsystem: str
    types: Mapping[str, MdevType]
    driver: str
    """The driver of its mediated devices."""
    first_group: int
    """The lowest number of an IOMMU group of its devices."""
    children: list[str] = field(default_factory=list)
    """The UUIDs of its mediated devices."""

    def available(self, mdev_type: MdevType, made: Sequence[MdevType]) -> int:
        """Return how many more of this type there is room for beside those."""
        free = 1 - sum((Fraction(1, each.instances) for each in made), Fraction())
        return int(free * mdev_type.instances)


@dataclass(slots=True)
class _Mediated(Device):
    """A mediated device."""

    parent: str = field(kw_only=True)
    mdev_type: MdevType = field(kw_only=True)
    is_made: bool = False
    """The write to `create` has returned."""
    then: Iterator[Uevent] | None = None
    """The rest of its parent's unregistration, which waits for that."""


@final
class MediatedDevices:
    """Makes and removes them. Each operation comes twice, as those of `HostTree`."""

    def __init__(self, root: Path, vfio: Vfio, new_uevent: NewUevent) -> None:
        self._root = root
        self._vfio = vfio
        self._new_uevent = new_uevent
        self._parents: dict[str, _Parent] = {}
        self._devices: dict[str, _Mediated] = {}

    # --- what is there ----------------------------------------------------------------------------------------

    @property
    def types(self) -> Mapping[str, str]:
        """The type (`nvidia-105`) of each device, by UUID."""
        return MappingProxyType({uuid: device.mdev_type.id for uuid, device in self._devices.items()})

    @property
    def devices(self) -> tuple[Device, ...]:
        """Every device, also one whose removal waits for its holder."""
        return tuple(self._devices.values())

    def find(self, uuid: str) -> Device:
        """Return a device. Raises `KeyError` if there is none."""
        return self._devices[uuid]

    def is_parent(self, name: str) -> bool:
        """Return whether the device of this name can have mediated devices."""
        return name in self._parents

    def children(self, parent: str) -> tuple[str, ...]:
        """Return the UUIDs of the parent's devices. Raises `KeyError` if it is no parent."""
        return tuple(self._parents[parent].children)

    def group_of(self, uuid: str) -> int | None:
        """Return the number of the device's IOMMU group. Raises `KeyError` if there is none."""
        return self._devices[uuid].group

    def device_dir(self, uuid: str) -> Path:
        """Return the device's real directory below `sys/devices`. Raises `KeyError` if there is none."""
        return self._root / f"sys{self._devices[uuid].devpath}"

    # --- parents ----------------------------------------------------------------------------------------------

    def register(
        self,
        devpath: str,
        types: Sequence[MdevType],
        driver: str,
        *,
        subsystem: str = "pci",
        first_group: int = 0,
    ) -> tuple[Uevent, ...]:
        """A device offers these types, by a `driver` of mediated devices (`nvidia-vgpu-vfio`, `mtty`):
        mdev_register_parent. `devpath` is that of a PCI function (`/devices/pci0000:20/0000:23:00.0`), or of another
        device, which is made if it is not there (`/devices/virtual/mtty/mtty`). The IOMMU groups of its devices have
        the lowest free numbers from `first_group` on. Raises `ValueError` if it does so already."""
        name = devpath.rpartition("/")[2]
        if name in self._parents:
            raise ValueError(f"{name} is a parent already")
        parent = _Parent(name, devpath, subsystem, {each.id: each for each in types}, driver, first_group)
        self._parents[name] = parent
        for made in ("bus/mdev/devices", f"bus/mdev/drivers/{driver}", "class/mdev_bus"):
            (self._root / "sys" / made).mkdir(parents=True, exist_ok=True)
        directory = self._root / f"sys{devpath}"
        if not directory.exists():
            directory.mkdir(parents=True)
            (self._root / f"sys/class/{subsystem}").mkdir(parents=True, exist_ok=True)
            self._link(directory / "subsystem", f"class/{subsystem}")
        self._link(self._root / f"sys/class/mdev_bus/{name}", devpath)
        for each in types:
            offered = directory / "mdev_supported_types" / each.id
            (offered / "devices").mkdir(parents=True)
            write(f"{offered}/create", "")
            write(f"{offered}/device_api", f"{each.device_api}\n")
            write(f"{offered}/available_instances", f"{each.instances}\n")
            if each.name is not None:
                write(f"{offered}/name", f"{each.name}\n")
        return (self._parent_uevent(parent, "registered"),)

    def unregister(self, parent: str) -> tuple[Uevent, ...]:
        """The parent's driver lets it go, and its devices before it. Raises `ValueError` if it is no parent."""
        if parent not in self._parents:
            raise ValueError(f"{parent} is no parent of mediated devices")
        return tuple(self.unregister_steps(parent, iter(())))

    def unregister_steps(self, name: str, rest: Iterator[Uevent]) -> Iterator[Uevent]:
        """`unregister`, uevent by uevent, then the `rest`: mdev_unregister_parent. Nothing but the rest if it is no
        parent. First it waits for creations and removals that are under way (its `unreg_sem`)."""
        parent = self._parents.get(name)
        if parent is None:
            yield from rest
            return
        if (making := next((d for d in self._children(parent) if not d.is_made), None)) is not None:
            making.then = self.unregister_steps(name, rest)
            return
        (self._root / f"sys/class/mdev_bus/{name}").unlink()
        children = sorted(parent.children, key=lambda uuid: self._devices[uuid].waiting is None)
        removals = ((self._devices[uuid], self._remove_if_there(uuid)) for uuid in children)
        yield from self._vfio.in_turn(removals, self._unregistered(parent, rest))

    def _remove_if_there(self, uuid: str) -> Iterator[Uevent]:
        """`remove`, unless a removal that was under way has done it."""
        if uuid in self._devices:
            yield from self.remove_steps(uuid)

    def _unregistered(self, parent: _Parent, rest: Iterator[Uevent]) -> Iterator[Uevent]:
        shutil.rmtree(self._root / f"sys{parent.devpath}/mdev_supported_types", ignore_errors=True)
        del self._parents[parent.name]
        yield self._parent_uevent(parent, "unregistered")
        yield from rest

    # --- devices ----------------------------------------------------------------------------------------------

    def create(self, uuid: str, parent: str, mdev_type: str) -> tuple[Uevent, ...]:
        """A UUID is written to the `create` of a parent's type (`mtty-2`). Raises `OSError`: ENOENT without such a
        parent or type, EEXIST for a UUID that is there, on whatever parent, ENOSPC if there is no room."""
        return tuple(self.create_steps(uuid, parent, mdev_type))

    def create_steps(self, uuid: str, parent: str, mdev_type: str) -> Iterator[Uevent]:
        """`create`, uevent by uevent: mdev_device_create. Its link `mdev_type` comes after the last one."""
        owner = self._parents.get(parent)
        if owner is None or mdev_type not in owner.types:
            raise _error(errno.ENOENT, mdev_type)
        if uuid.lower() in self._devices:
            raise _error(errno.EEXIST, uuid)
        chosen = owner.types[mdev_type]
        if owner.available(chosen, self._made(owner)) < 1:
            raise _error(errno.ENOSPC, uuid)
        name = uuid.lower()  # dev_set_name, %pUl
        device = _Mediated(name, f"{owner.devpath}/{name}", None, parent=parent, mdev_type=chosen)
        self._devices[name] = device
        owner.children.append(name)
        directory = self.device_dir(name)
        (directory / "power").mkdir(parents=True)
        write(f"{directory}/remove", "")
        self._link(directory / "subsystem", "bus/mdev")
        self._link(self._root / f"sys/bus/mdev/devices/{name}", device.devpath)
        yield self._new_uevent("add", device.devpath, "mdev")
        device.driver = owner.driver
        self._link(directory / "driver", f"bus/mdev/drivers/{owner.driver}")
        self._link(self._root / f"sys/bus/mdev/drivers/{owner.driver}/{name}", device.devpath)
        # vfio_noiommu_group_alloc makes those of emulated devices as well, with this name.
        group = next(number for number in count(owner.first_group) if number not in self._vfio.members)
        self._vfio.join_group(device, group)
        write(f"{self._root}/sys/kernel/iommu_groups/{group}/name", "vfio-noiommu\n")
        yield from self._vfio.register_steps(device)
        yield self._new_uevent("bind", device.devpath, "mdev", ("DRIVER", owner.driver))
        offered = f"{owner.devpath}/mdev_supported_types/{mdev_type}"
        self._link(self._root / f"sys{offered}/devices/{name}", device.devpath)
        self._link(directory / "mdev_type", offered)
        self._count(owner)
        device.is_made = True
        if (rest := device.then) is not None:
            device.then = None
            yield from rest

    def remove(self, uuid: str) -> tuple[Uevent, ...]:
        """1 is written to the device's `remove`. Raises `OSError` (ENOENT) if it is not there, or is being removed."""
        return tuple(self.remove_steps(uuid))

    def remove_steps(self, uuid: str) -> Iterator[Uevent]:
        """`remove`, uevent by uevent: mdev_device_remove. The link `mdev_type` and the one on the bus go first. While a
        process has the device open the rest waits for its end."""
        device = self._devices.get(uuid)
        if device is None or device.driver is None:
            raise _error(errno.ENOENT, uuid)
        owner = self._parents[device.parent]
        driver, device.driver = device.driver, None
        offered = self._root / f"sys{owner.devpath}/mdev_supported_types/{device.mdev_type.id}"
        directory = self.device_dir(uuid)
        for path in (
            directory / "mdev_type",
            offered / "devices" / uuid,
            directory / "remove",
            self._root / f"sys/bus/mdev/devices/{uuid}",
            directory / "driver",
            self._root / f"sys/bus/mdev/drivers/{driver}/{uuid}",
        ):
            path.unlink(missing_ok=True)
        yield from self._vfio.unregister_steps(device, self._finish_remove(device, owner))

    def _finish_remove(self, device: _Mediated, owner: _Parent) -> Iterator[Uevent]:
        group = device.group
        assert group is not None
        self._vfio.leave_group(device)
        yield from self._vfio.drop_group(group)
        yield self._new_uevent("unbind", device.devpath, "mdev")
        del self._devices[device.name]
        owner.children.remove(device.name)
        self._count(owner)
        shutil.rmtree(self._root / f"sys{device.devpath}", ignore_errors=True)
        yield self._new_uevent("remove", device.devpath, "mdev")

    # --- files ------------------------------------------------------------------------------------------------

    def _children(self, owner: _Parent) -> list[_Mediated]:
        return [self._devices[uuid] for uuid in owner.children]

    def _made(self, owner: _Parent) -> list[MdevType]:
        return [device.mdev_type for device in self._children(owner)]

    def _count(self, owner: _Parent) -> None:
        for each in owner.types.values():
            path = f"{self._root}/sys{owner.devpath}/mdev_supported_types/{each.id}/available_instances"
            replace_file(path, f"{owner.available(each, self._made(owner))}\n")

    def _link(self, path: Path, target: str) -> None:
        """Make a link to a path below `/sys`."""
        path.symlink_to(os.path.relpath(self._root / "sys" / target.lstrip("/"), path.parent))

    def _parent_uevent(self, parent: _Parent, state: str) -> Uevent:
        named = (("PCI_SLOT_NAME", parent.name),) if parent.subsystem == "pci" else ()
        return self._new_uevent("change", parent.devpath, parent.subsystem, *named, ("MDEV_STATE", state))


def _error(number: int, path: str) -> OSError:
    return OSError(number, os.strerror(number), path)
