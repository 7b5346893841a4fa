"""The daemon's assumptions about the kernel, checked: the order of uevents, what exists when they are read, and which
process can open a group. No daemon here: a failure means that the kernel differs, not the daemon."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import Final

from tests.support.patience import patient
from tests.vm.guest.runner import Guest, eventually
from tests.vm.guest.sysfs import (
    Function,
    blocked_reads,
    function_behind,
    functions_behind,
    in_background,
    let_vfio_take,
)
from tests.vm.guest.tenant import Tenant
from tests.vm.guest.uevents import Uevent, UeventListener, assert_order
from tests.vm.kernels import CDEV, KERNELS
from tests.vm.machine import Machine, PciFunction

MACHINE: Final = Machine(
    ports=("rp1", "rp2", "rp3"),
    functions=(
        PciFunction("edu1", "edu", "rp1"),
        PciFunction("nic0", "e1000e", "rp2", function=0),
        PciFunction("edu2", "edu", "rp2", function=1),
    ),
    kernels=("6.1", "6.12"),
)

EVENT_TIMEOUT_S: Final = patient(10.0)
"""Measured: within 65 ms."""

NOTHING_FOR_S: Final = 0.3
"""How long silence is listened to; what would come comes within 10 ms."""

ATTRIBUTES: Final = (
    "class", "config", "device", "driver_override", "enable", "irq", "modalias", "numa_node", "power/control",
    "power/runtime_status", "reset_method", "resource", "uevent", "vendor",
)  # fmt: skip
"""What somebody might read of a function, the daemon among them."""

BLOCKS_WHILE_UNBOUND: Final[Mapping[str, frozenset[str]]] = MappingProxyType(
    {
        "6.1": frozenset({"driver_override", "uevent"}),
        "6.12": frozenset(),
        "iommufd": frozenset(),
    }
)
"""Of these, what waits for the device's lock, which an unbind has until the holder lets go. (6.12.95; what the kernel
guards by that lock changes with stable updates too.)"""

EARLY_WHILE_UNBOUND: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {"6.1": (), "6.12": ("remove vfio-dev",), "iommufd": ("remove vfio-dev",)}
)
"""What the kernel says while the unbind hangs."""

ALL_OF_UNBIND: Final = ("remove vfio-dev", "remove vfio", "unbind pci")


def run(guest: Guest) -> None:
    """Every fact once, in the order of a device's life."""
    edu = function_behind(guest.machine, "rp1")
    with UeventListener() as uevents:
        _bind_and_unbind(guest, uevents, edu)
        _open_group(guest, uevents, edu)
        _unbind_while_held(guest, uevents, edu)
        _shared_group(guest, uevents)
        _hot_plug(guest, uevents)
        guest.figures["uevents"] = [str(event) for event in uevents.heard]


def _bind_and_unbind(guest: Guest, uevents: UeventListener, edu: Function) -> None:
    with guest.step("driver_override alone says nothing"):
        (edu.path / "driver_override").write_text("vfio-pci\n", encoding="ascii")
        assert uevents.silence(for_s=NOTHING_FOR_S) == []
        assert edu.driver is None
        assert not edu.group_node.exists()

    with guest.step("bind: add vfio, add vfio-dev, bind pci; then the group opens"):
        edu.bind_vfio()
        events = uevents.until(_pci("bind"), timeout_s=EVENT_TIMEOUT_S)
        # At the moment when `bind` is read, not later: this is what Allocate may rely on.
        assert edu.open_error() is None
        assert_order(events, "add vfio", "add vfio-dev", "bind pci")
        group, device, bound = events
        assert group.devpath == f"/devices/virtual/vfio/{edu.group}"
        assert group.properties["DEVNAME"] == f"vfio/{edu.group}"
        assert _is_below(device, edu)
        # Debian's kernels have no CONFIG_VFIO_DEVICE_CDEV: the directory exists, the node does not.
        has_cdev = CDEV in KERNELS[guest.kernel].has
        assert ("DEVNAME" in device.properties) == has_cdev
        assert Path("/dev/vfio/devices").exists() == has_cdev
        assert Path("/dev/iommu").exists() == has_cdev
        assert bound.properties["PCI_SLOT_NAME"] == edu.address
        assert bound.properties["DRIVER"] == "vfio-pci"
        assert bound.properties["PCI_ID"] == "1234:11E8"
        assert list(edu.path.glob("vfio-dev/vfio*"))
        guest.figures["bind_spread_ms"] = round((bound.at_s - group.at_s) * 1000, 3)

    with guest.step("unbind: remove vfio-dev, remove vfio, unbind pci without a driver"):
        node = edu.group_node
        edu.unbind()
        events = uevents.until(_pci("unbind"), timeout_s=EVENT_TIMEOUT_S)
        assert_order(events, *ALL_OF_UNBIND)
        assert "DRIVER" not in events[-1].properties
        assert events[-1].properties["PCI_SLOT_NAME"] == edu.address
        assert edu.driver is None
        assert not node.exists()


def _open_group(guest: Guest, uevents: UeventListener, edu: Function) -> None:
    with guest.step("a group opens once; opening and closing say nothing"):
        edu.bind_vfio()
        uevents.until(_pci("bind"), timeout_s=EVENT_TIMEOUT_S)
        first = os.open(edu.group_node, os.O_RDWR)
        try:
            assert edu.open_error() == errno.EBUSY
        finally:
            os.close(first)
        assert edu.open_error() is None
        assert uevents.silence(for_s=NOTHING_FOR_S) == []
        edu.unbind()
        uevents.until(_pci("unbind"), timeout_s=EVENT_TIMEOUT_S)


def _unbind_while_held(guest: Guest, uevents: UeventListener, edu: Function) -> None:
    early = EARLY_WHILE_UNBOUND[guest.kernel]
    with (
        guest.step(f"unbind while held: {', '.join(early) or 'nothing'}, and the rest at release"),
        Tenant.start() as tenant,
        ExitStack() as at_release,
    ):
        edu.bind_vfio()
        uevents.until(_pci("bind"), timeout_s=EVENT_TIMEOUT_S)
        tenant.open_device(edu.group_node, edu.address)
        assert uevents.silence(for_s=NOTHING_FOR_S) == []
        unbind = in_background(edu.unbind)
        at_release.callback(tenant.kill)
        eventually("the driver's link gone", lambda: edu.driver is None, timeout_s=EVENT_TIMEOUT_S)
        heard = uevents.silence(for_s=NOTHING_FOR_S)
        assert_order(heard, *early)
        assert edu.open_error() == errno.EBUSY
        blocked = blocked_reads(edu, ATTRIBUTES)
        guest.figures["blocked_while_unbound"] = sorted(blocked)
        assert blocked.keys() == BLOCKS_WHILE_UNBOUND[guest.kernel], blocked
        assert unbind.is_alive()
        tenant.kill()
        events = uevents.until(_pci("unbind"), timeout_s=EVENT_TIMEOUT_S)
        assert_order(events, *ALL_OF_UNBIND[len(early) :])
        for thread in (unbind, *blocked.values()):
            thread.join(timeout=EVENT_TIMEOUT_S)
            assert not thread.is_alive(), thread


def _shared_group(guest: Guest, uevents: UeventListener) -> None:
    with guest.step("two functions of one slot: one group, made by the first and removed with the last"):
        nic, edu = functions_behind(guest.machine, "rp2")
        assert nic.ids == ("8086", "10d3")
        assert edu.ids == ("1234", "11e8")
        assert nic.group == edu.group
        nic.bind_vfio()
        uevents.until(_pci("bind"), timeout_s=EVENT_TIMEOUT_S)
        edu.bind_vfio()
        events = uevents.until(_pci("bind"), timeout_s=EVENT_TIMEOUT_S)
        assert_order(events, "add vfio-dev", "bind pci")
        nic.unbind()
        events = uevents.until(_pci("unbind"), timeout_s=EVENT_TIMEOUT_S)
        assert_order(events, "remove vfio-dev", "unbind pci")
        assert edu.group_node.exists()
        edu.unbind()
        events = uevents.until(_pci("unbind"), timeout_s=EVENT_TIMEOUT_S)
        assert_order(events, "remove vfio-dev", "remove vfio", "unbind pci")


def _hot_plug(guest: Guest, uevents: UeventListener) -> None:
    plugged = PciFunction("late", "e1000e", "rp3", properties=("romfile=",))
    with guest.step("hot plug of a function that no driver knows: add pci, nothing else"):
        guest.qmp.plug(plugged)
        events = uevents.until(_pci("add"), timeout_s=EVENT_TIMEOUT_S)
        function = Function(events[-1].properties["PCI_SLOT_NAME"])
        assert function == function_behind(guest.machine, "rp3")
        assert function.ids == ("8086", "10d3")
        assert function.driver is None
        assert [event for event in uevents.silence(for_s=NOTHING_FOR_S) if _is_below(event, function)] == []

    with guest.step("plug out while bound: remove vfio-dev, remove vfio, unbind pci, remove pci"):
        function.bind_vfio()
        uevents.until(_pci("bind"), timeout_s=EVENT_TIMEOUT_S)
        _unplug(guest, uevents, plugged.id)
        assert not function.path.exists()

    with guest.step("hot plug of an id that vfio-pci knows: bound without anybody's help"):
        for other in (*functions_behind(guest.machine, "rp1"), *functions_behind(guest.machine, "rp2")):
            other.forget_override()
        let_vfio_take("8086", "10d3")
        # The other e1000e, driverless since its unbind, is taken at once.
        uevents.until(_pci("bind"), timeout_s=EVENT_TIMEOUT_S)
        guest.qmp.plug(plugged)
        events = uevents.until(_pci("bind"), timeout_s=EVENT_TIMEOUT_S)
        assert_order(events, "add pci", "add vfio", "add vfio-dev", "bind pci")
        assert Function(events[-1].properties["PCI_SLOT_NAME"]).open_error() is None
        _unplug(guest, uevents, plugged.id)


def _unplug(guest: Guest, uevents: UeventListener, device_id: str) -> None:
    guest.qmp.unplug(device_id)
    events = uevents.until(_pci("remove"), timeout_s=EVENT_TIMEOUT_S)
    assert_order(events, "remove vfio-dev", "remove vfio", "unbind pci", "remove pci")
    guest.qmp.wait_unplugged(device_id, timeout_s=EVENT_TIMEOUT_S)


def _pci(action: str) -> Callable[[Uevent], bool]:
    return lambda event: event.key == (action, "pci")


def _is_below(event: Uevent, function: Function) -> bool:
    return f"/{function.address}/" in event.devpath
