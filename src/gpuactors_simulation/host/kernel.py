"""The effect of a write to sysfs on a fake node: `driver_override`, a driver's `bind`, `unbind` and `new_id`,
`drivers_probe`, `sriov_numvfs`, the `create` and `remove` of mediated devices, `current_vgpu_type`; and what a module
that is loaded or unloaded does.

It plays the kernel's part of binding over a `HostTree`: which driver takes which function, what is refused with which
error (drivers/base/bus.c, bind_store and unbind_store; drivers/pci/pci-driver.c, pci_match_device), and when the writer
sleeps. Writes reach it in two ways: by `memory/acts.py`, through which the real act writes in a simulation
on a mock clock, with every error; and by `watch.py`, for the real files that a real process writes, where only the
effect can be played.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final, final
from uuid import NAMESPACE_OID, uuid5

from msgspec.structs import replace

from gpuactors_simulation.host.tree import (
    DRIVER_MANAGED_DMA,
    VFIO_DRIVERS,
    HostTree,
    PciSpec,
    virtual_addresses,
)
from gpuactors_simulation.host.uevents import Uevent

NVIDIA: Final = "nvidia"

DRIVERS: Final[Mapping[str, frozenset[str]]] = MappingProxyType(
    {
        "vfio-pci": frozenset(),
        NVIDIA: frozenset({"10de:2330", "10de:2342", "10de:20b0", "10de:1eb8"}),
        "snd_hda_intel": frozenset({"10de:22ba", "10de:10f8"}),
    }
)
"""The drivers that are loaded, with the ids (`vendor:device`) that each takes by itself."""

_NO_OVERRIDE: Final = "(null)\n"


_INFORMATION: Final = (
    "Model: \t\t NVIDIA H200\nIRQ:   \t\t 41\nGPU UUID: \t {uuid}\nVideo BIOS: \t 96.00.a5.00.1a\n"
    "Bus Type: \t PCIe\nDMA Size: \t 52 bits\nDMA Mask: \t 0xfffffffffffff\nBus Location: \t {address}\n"
    "Device Minor: \t {minor}\nGPU Firmware: \t 580.159.04\nGPU Excluded:\t No\n"
)
"""`/proc/driver/nvidia/gpus/ADDRESS/information` of an H200, recorded under the driver 580.159.04."""


def uuid_of(address: str) -> str:
    """Return the UUID of the GPU at this address, as NVIDIA's driver and device plugin write it."""
    return f"GPU-{uuid5(NAMESPACE_OID, address)}"


class SleepsError(Exception):
    """The writer sleeps in the kernel until the function's holder lets go, or until the test says so."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self.address = address


@dataclass(slots=True)
class Planned:
    """The plan for the next writes to a path that ends so."""

    path_end: str
    error: int | None = None
    """The errno that it fails with."""
    slow_s: float = 0.0
    """Seconds that it takes longer."""
    hangs: bool = False
    """It sleeps until `release`; then it is done."""
    nothing: bool = False
    """It returns without an error and does nothing."""
    times: int = 1


@final
class FakeKernel:
    """The drivers of one fake node. The files that are written are there for the functions that are in the tree when it
    is made or were plugged in through it, and for all of them after the first write."""

    def __init__(
        self,
        tree: HostTree,
        drivers: Mapping[str, frozenset[str]] = DRIVERS,
        deliver: Callable[[tuple[Uevent, ...]], None] = lambda uevents: None,
    ) -> None:
        self.tree = tree
        self.sriov_drivers: dict[str, str | None] = {NVIDIA: NVIDIA}
        """The drivers that can switch SR-IOV on, each with the driver that takes its virtual functions."""
        self.sriov_autoprobe = True
        """`sriov_drivers_autoprobe`: without it no driver takes a virtual function by itself."""
        self._deliver = deliver
        self._ids: dict[str, frozenset[str]] = {}
        self._overrides: dict[str, str] = {}
        self._minors: dict[str, int] = {}
        self._users: dict[str, set[int]] = {}
        self._asleep: dict[str, Callable[[], None]] = {}
        """The rest of each write that hangs by a plan."""
        self._awaiting_users: dict[str, Callable[[], None]] = {}
        """The rest of each unbind that waits for the last user of the function."""
        self._late_errors: dict[str, OSError] = {}
        self._planned: list[Planned] = []
        (tree.root / "sys/bus/pci/drivers_probe").write_text("")
        for driver, ids in drivers.items():
            self.load(driver, ids)
        for address in tree.functions:
            self._show(address)
            self._made(address, tree.driver_of(address))

    # --- what can happen ----------------------------------------------------------------------------------------------

    def load(self, driver: str, ids: frozenset[str] = frozenset()) -> None:
        """Load a driver's module, which takes no function by itself."""
        self._ids[driver] = ids
        directory = self._driver_dir(driver)
        directory.mkdir(parents=True, exist_ok=True)
        for name in ("bind", "unbind", "new_id"):
            (directory / name).write_text("")

    @property
    def drivers(self) -> frozenset[str]:
        """Those that are loaded."""
        return frozenset(self._ids)

    def modprobe(self, driver: str, ids: frozenset[str] = frozenset()) -> None:
        """A driver's module is loaded, and takes every function that is without a driver and matches
        (drivers/base/dd.c, driver_attach)."""
        self.load(driver, ids)
        self._attach(driver)

    def rmmod(self, driver: str) -> None:
        """A driver's module is unloaded: its functions are without one, and ids that were written to it are forgotten.
        Raises `OSError` (EBUSY) while a process has one of them open, or waits for one."""
        path = str(self._driver_dir(driver))
        mine = [a for a in self.tree.functions if self.tree.driver_of(a) == driver]
        if any(self._users.get(a) or self.tree.is_open(a) for a in mine) or any(map(self.sleeps, mine)):
            raise _error(errno.EBUSY, path)
        for address in [a for a in mine if self.tree.virtual_functions(a)]:
            self._deliver(self.tree.virtualize(address, 0))
        for address in [a for a in mine if a in self.tree.functions]:
            self._unmade(address)
            self._deliver(self.tree.unbind(address))
        del self._ids[driver]
        shutil.rmtree(path)
        self._show_all()

    def _attach(self, driver: str) -> None:
        for address in sorted(self.tree.functions):
            if self.tree.driver_of(address) is None and self._matches(driver, address):
                with suppress(OSError, SleepsError):
                    self._bind(str(self._driver_dir(driver) / "bind"), driver, address)
        self._show_all()

    def plug(self, spec: PciSpec) -> tuple[Uevent, ...]:
        """Make a function appear, on the driver of `spec` or on one that takes its ID."""
        uevents = self.tree.plug(spec)
        self._show(spec.address)
        self._deliver(uevents)
        self._made(spec.address, spec.driver)
        return uevents

    def remove(self, address: str) -> None:
        """A function is removed by hand (`remove` in sysfs) or pulled; its override goes with it."""
        self._unmade(address)
        self._overrides.pop(address, None)
        self._deliver(self.tree.unplug(address))

    def rescan(self, specs: Iterable[PciSpec]) -> None:
        """Functions that were removed are found in this order, each in a new IOMMU group of the lowest free number."""
        for spec in specs:
            self.plug(replace(spec, group=self.tree.free_group()))

    def use(self, address: str, pid: int, command: str = "python3", pod_uid: str | None = None) -> None:
        """Let a process open the GPU by the host's driver. Raises `ValueError` if it is not on it."""
        if self.tree.driver_of(address) != NVIDIA:
            raise ValueError(f"{address} is not on {NVIDIA}")
        if pid in self._users.get(address, ()):
            return
        self.tree.open_file(f"/dev/nvidia{self._minors[address]}", pid, command, pod_uid)
        self._users.setdefault(address, set()).add(pid)

    def close(self, address: str, pid: int) -> None:
        """Let a process close the GPU and live on; what waited for it goes on."""
        self.tree.close_file(f"/dev/nvidia{self._minors[address]}", pid)
        self._users[address].discard(pid)
        self._wake()

    def end(self, pid: int) -> None:
        """End a process and close all that it has open; what waited for it goes on."""
        self._deliver(self.tree.kill(pid))
        for users in self._users.values():
            users.discard(pid)
        self._wake()

    def wake(self) -> None:
        """Continue what waited for a holder that has closed the group by itself (`HostTree.wake`)."""
        self._deliver(self.tree.wake())
        self._wake()

    def _wake(self) -> None:
        for address, users in self._users.items():
            if not users and address in self._awaiting_users:
                self._awaiting_users.pop(address)()
        self._show_all()

    def plan(self, planned: Planned) -> None:
        """Plan a fault for the next writes to a path."""
        self._planned.append(planned)

    def forget_plans(self) -> None:
        """No planned fault strikes any more."""
        self._planned.clear()

    def release(self) -> None:
        """Let every write that hangs by a plan go on."""
        asleep, self._asleep = self._asleep, {}
        for go_on in asleep.values():
            go_on()
        self._show_all()

    def power_off(self) -> None:
        """The machine stops: no process has a GPU open, no write sleeps, and every function is without override. The
        functions come back by `plug`, and `/dev` is a new one."""
        for address in list(self._minors):
            for pid in self._users.get(address, ()):
                self.tree.kill(pid)
            self._unmade(address)
        for node in (self.tree.root / "dev").glob("nvidia[0-9]*"):
            node.unlink()
        for held in (
            self._users,
            self._asleep,
            self._awaiting_users,
            self._late_errors,
            self._overrides,
            self._planned,
        ):
            held.clear()

    # --- what is there ------------------------------------------------------------------------------------------------

    def override(self, address: str) -> str:
        """Return the function's driver_override; empty if it has none."""
        return self._overrides.get(address, "")

    def sleeps(self, address: str) -> bool:
        """A write for this function has not returned, or (the device's lock is taken) would not."""
        asleep = address in self._asleep or address in self._awaiting_users
        return asleep or (address in self.tree.functions and self.tree.is_waiting(address))

    # --- a write ------------------------------------------------------------------------------------------------------

    def take(self, path: str) -> Planned | None:
        """Return the fault that strikes a write to this path now."""
        for planned in self._planned:
            if path.endswith(planned.path_end):
                planned.times -= 1
                if planned.times <= 0:
                    self._planned.remove(planned)
                return planned
        return None

    def write(self, path: str, text: str, planned: Planned | None = None) -> None:
        """A write to a real path below the root. Raises `OSError` as write(2) would; `SleepsError` if it does not
        return: it is done later then, by itself."""
        relative = path.removeprefix(str(self.tree.root)).strip("/").split("/")
        if planned is not None and planned.error is not None:
            raise _error(planned.error, path)
        if planned is not None and planned.nothing:
            return
        if planned is not None and planned.hangs:
            address = text.strip() if text.strip() in self.tree.functions else relative[-2]
            self._late_errors.pop(address, None)  # of a writer that did not wait
            self._asleep[address] = lambda: self._dispatch_late(address, path, relative, text)
            raise SleepsError(address)
        try:
            self._dispatch(path, relative, text)
        finally:
            self._show_all()

    def _dispatch_late(self, address: str, path: str, relative: list[str], text: str) -> None:
        """A write that has slept goes on: what it meets now is its writer's, and may be another sleep."""
        try:
            self._dispatch(path, relative, text)
        except SleepsError:
            return
        except OSError as error:
            self._late_errors[address] = error

    def late_error(self, address: str) -> OSError | None:
        """Return the error of a write for this function after its sleep, returned once."""
        return self._late_errors.pop(address, None)

    def _dispatch(self, path: str, relative: list[str], text: str) -> None:
        match relative:
            case ["sys", *_, address, "driver_override"] if address in self.tree.functions:
                self._check_lock(address)
                self._overrides[address] = text.rstrip("\n")
            case ["sys", *_, address, "sriov_numvfs"] if address in self.tree.functions:
                self._virtualize(path, address, int(text))
            case ["sys", *_, address, "nvidia", "current_vgpu_type"] if address in self.tree.functions:
                self.tree.set_vgpu_type(address, int(text))
            case ["sys", *_, parent, "mdev_supported_types", mdev_type, "create"]:
                self._deliver(self.tree.mediated.create(text.strip(), parent, mdev_type))
            case ["sys", *_, uuid, "remove"] if uuid in self.tree.mediated.types:
                self._deliver(self.tree.mediated.remove(uuid))
                if uuid in self.tree.mediated.types:
                    raise SleepsError(uuid)
            case ["sys", "bus", "pci", "drivers", driver, "unbind"] if driver in self._ids:
                self._unbind(path, driver, text.strip())
            case ["sys", "bus", "pci", "drivers", driver, "bind"] if driver in self._ids:
                self._bind(path, driver, text.strip())
            case ["sys", "bus", "pci", "drivers", driver, "new_id"] if driver in self._ids:
                self._ids[driver] |= {":".join(text.split()[:2])}
                self._attach(driver)
            case ["sys", "bus", "pci", "drivers_probe"]:
                self._probe(path, text.strip())
            case _:
                raise _error(errno.ENOENT, path)

    def read(self, path: str) -> str:
        """Read an attribute. Raises `OSError`, `SleepsError`."""
        address = Path(path).parent.name
        if path.endswith("/driver_override") and address in self.tree.functions:
            if self.tree.waits_silently:
                self._check_lock(address)
            return self._shown_override(address)
        return Path(path).read_text()

    def _shown_override(self, address: str) -> str:
        override = self.override(address)
        return f"{override}\n" if override else _NO_OVERRIDE

    def _check_lock(self, address: str) -> None:
        if self.sleeps(address):
            raise SleepsError(address)

    def _unbind(self, path: str, driver: str, address: str) -> None:
        if address not in self.tree.functions or self.tree.driver_of(address) != driver:
            raise _error(errno.ENODEV, path)
        self._check_lock(address)
        if self._users.get(address):
            # The link goes at once; the driver waits for its last user with the rest.
            steps = self.tree.unbind_when_iterated(address)

            def go_on() -> None:
                self._unmade(address)
                self._deliver(tuple(steps))

            self._awaiting_users[address] = go_on
            raise SleepsError(address)
        self._unmade(address)
        self._deliver(self.tree.unbind(address))
        if self.tree.is_waiting(address):
            raise SleepsError(address)

    def _virtualize(self, path: str, address: str, count: int) -> None:
        """sriov_numvfs_store. NVIDIA's driver takes the virtual functions as well; vfio-pci, which may switch SR-IOV on
        with its parameter `enable_sriov`, gives them an override (vfio_pci_bus_notifier)."""
        self._check_lock(address)
        before = len(self.tree.virtual_functions(address))
        driver = self.tree.driver_of(address)
        if count > self.tree.functions[address].total_vfs:
            raise _error(errno.ERANGE, path)
        if count == before:
            return
        if driver is None or driver not in self.sriov_drivers:
            raise _error(errno.ENOENT, path)
        if count and before:
            raise _error(errno.EBUSY, path)
        if not count:
            for virtual in self.tree.virtual_functions(address):
                self._overrides.pop(virtual, None)
        elif driver in VFIO_DRIVERS:
            self._overrides |= dict.fromkeys(virtual_addresses(address, count), driver)
        taken_by = self.sriov_drivers[driver] if count and self.sriov_autoprobe else None
        self._deliver(self.tree.virtualize(address, count, taken_by))
        if self.tree.is_waiting(address):
            raise SleepsError(address)

    def _bind(self, path: str, driver: str, address: str) -> None:
        if address not in self.tree.functions:
            raise _error(errno.ENODEV, path)
        self._check_lock(address)
        if self.tree.driver_of(address) is not None:
            raise _error(errno.EBUSY, path)
        if not self._matches(driver, address):
            raise _error(errno.ENODEV, path)
        group = self.tree.functions[address].group
        if self.tree.makes_vfio(address, driver) and group is None:
            raise _error(errno.EINVAL, path)
        if driver in VFIO_DRIVERS and self.tree.virtual_functions(address):
            raise _error(errno.EBUSY, path)  # drivers/vfio/pci/vfio_pci_core.c, vfio_pci_core_register_device
        is_managed = driver in DRIVER_MANAGED_DMA or self.tree.makes_vfio(address, driver)
        if not is_managed and group is not None and self.tree.has_user(group):
            # No driver of the host beside user space in one group (drivers/iommu/iommu.c,
            # iommu_device_use_default_domain).
            raise _error(errno.EBUSY, path)
        self._deliver(self.tree.bind(address, driver))
        self._made(address, driver)

    def _probe(self, path: str, address: str) -> None:
        """drivers_probe_store: nobody takes it is no error."""
        if address not in self.tree.functions:
            raise _error(errno.ENODEV, path)
        self._check_lock(address)
        if self.tree.driver_of(address) is None:
            driver = next((d for d in self._ids if self._matches(d, address)), None)
            if driver is not None:
                self._bind(path, driver, address)

    def _matches(self, driver: str, address: str) -> bool:
        """pci_match_device: an override is the only one that matches, and matches whatever the ids."""
        if override := self.override(address):
            return override == driver
        spec = self.tree.functions[address]
        return f"{spec.vendor}:{spec.device}" in self._ids[driver]

    # --- files --------------------------------------------------------------------------------------------------------

    def _driver_dir(self, driver: str) -> Path:
        return self.tree.root / "sys/bus/pci/drivers" / driver

    def _show_all(self) -> None:
        for address in self.tree.functions:
            self._show(address)

    @property
    def minors(self) -> Mapping[str, int]:
        """The number of the node `/dev/nvidiaN` of each GPU that NVIDIA's driver has."""
        return dict(self._minors)

    def _show(self, address: str) -> None:
        """The attributes of a function that a write changes, unless reading them hangs now."""
        if address not in self.tree.functions or (self.tree.waits_silently and self.tree.is_waiting(address)):
            return
        spec = self.tree.functions[address]
        vendor, device, code = spec.vendor.upper(), spec.device.upper(), spec.class_code.upper()
        ids = f"v0000{vendor}d0000{device}sv0000{vendor}sd0000{device}"
        directory = self.tree.device_dir(address)
        for name, content in (
            ("driver_override", self._shown_override(address)),
            ("modalias", f"pci:{ids}bc{code[:2]}sc{code[2:4]}i{code[4:]}\n"),
        ):
            path = directory / name
            if not path.is_file() or path.read_text() != content:
                path.write_text(content)

    def _made(self, address: str, driver: str | None) -> None:
        """NVIDIA's driver makes a node for a whole GPU and says which."""
        if driver != NVIDIA or address in self._minors or self.tree.physical_function(address) is not None:
            return
        used = set(self._minors.values())
        minor = self._minors[address] = next(n for n in range(len(used) + 1) if n not in used)
        self.tree.make_node(f"nvidia{minor}")
        directory = self.tree.root / f"proc/driver/nvidia/gpus/{address}"
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "information").write_text(
            _INFORMATION.format(uuid=uuid_of(address), address=address, minor=minor)
        )

    def _unmade(self, address: str) -> None:
        """The node stays: nvidia-modprobe makes it, and nothing removes it. The next GPU gets its number."""
        if self._minors.pop(address, None) is not None:
            (self.tree.root / f"proc/driver/nvidia/gpus/{address}/information").unlink()


def _error(number: int, path: str) -> OSError:
    return OSError(number, os.strerror(number), path)
