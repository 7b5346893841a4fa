"""The daemon's assumptions about mediated devices, checked: the order of uevents, the group and the nodes, what waits
for a device that is held, and what a UUID means. No daemon here: a failure means that the kernel differs, not the
daemon.

The devices are those of the kernel's own sample driver mtty, built for the guest's kernel.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Callable
from typing import Final

from tests.support.patience import patient
from tests.vm.guest.mdev import ON_BUS, ONE_PORT, PARENT, TWO_PORTS, Mediated
from tests.vm.guest.qemu import Qemu
from tests.vm.guest.runner import Guest, eventually
from tests.vm.guest.sysfs import DEV_VFIO, in_background
from tests.vm.guest.uevents import WATCHED, UeventListener
from tests.vm.kernels import BUILT_MODULES
from tests.vm.machine import VFIO_MODULES, Machine

MACHINE: Final = Machine(
    ports=(),
    needs=frozenset({BUILT_MODULES}),
    modules=(*VFIO_MODULES, "mtty"),
    memory_mib=1536,
)

DEVICE: Final = Mediated("83b8f4f2-509f-382f-3c1e-e6bfe0fa1001")

EVENT_TIMEOUT_S: Final = patient(10.0)

NOTHING_FOR_S: Final = 0.3
"""How long silence is listened to; what would come comes within 10 ms."""

SUBSYSTEMS: Final = WATCHED | {"mdev"}

CREATED: Final = ("add mdev", "add vfio", "add vfio-dev", "bind mdev")
REMOVED: Final = ("remove vfio-dev", "remove vfio", "unbind mdev", "remove mdev")

BUSY: Final = r"(Could not|failed to) open '?{node}'?: Device or resource busy"


def run(guest: Guest) -> None:
    """Every fact once, in the order of a device's life."""
    with UeventListener() as uevents:
        _created(guest, uevents)
        _held_and_removed(guest, uevents)
        _made_anew(guest, uevents)
        guest.figures["uevents"] = [str(event) for event in uevents.heard]


def _until(uevents: UeventListener, *wanted: str) -> None:
    """Check that the watched subsystems say `wanted`, in this order."""
    told: list[str] = []
    uevents.until(
        lambda event: _note(told, event.action, event.subsystem) == wanted[-1], timeout_s=EVENT_TIMEOUT_S
    )
    assert told == list(wanted), told


def _note(told: list[str], action: str, subsystem: str) -> str:
    if subsystem in SUBSYSTEMS:
        told.append(f"{action} {subsystem}")
    return told[-1] if told else ""


def _silent(uevents: UeventListener) -> bool:
    return not any(event.subsystem in SUBSYSTEMS for event in uevents.silence(for_s=NOTHING_FOR_S))


def _created(guest: Guest, uevents: UeventListener) -> None:
    with guest.step("a parent that is no PCI device: it has a link in mdev_bus and types with names"):
        assert (PARENT / "mdev_supported_types" / ONE_PORT / "name").read_text(
            encoding="ascii"
        ) == "Single port serial\n"
        assert not (PARENT / "numa_node").exists()
    with guest.step("created: add mdev, add vfio, add vfio-dev, bind mdev; a group and a node of its own"):
        DEVICE.create(ONE_PORT)
        _until(uevents, *CREATED)
        assert _silent(uevents), "the link to the type has a uevent"
        assert DEVICE.type_id == ONE_PORT
        assert DEVICE.path.resolve() == PARENT / DEVICE.uuid
        assert DEVICE.group_node.exists()
        # One member, which is no PCI function: the group's own list does not name it.
        assert [entry.name for entry in (DEVICE.path / "iommu_group" / "devices").iterdir()] == [DEVICE.uuid]
        assert list(DEVICE.path.glob("vfio-dev/vfio*"))
    with guest.step("the same UUID again, in either case: EEXIST"):
        assert _errno_of(lambda: DEVICE.create(TWO_PORTS)) == errno.EEXIST
        assert _errno_of(lambda: Mediated(DEVICE.uuid.upper()).create(TWO_PORTS)) == errno.EEXIST


def _held_and_removed(guest: Guest, uevents: UeventListener) -> None:
    node = DEVICE.group_node
    with Qemu.start(DEVICE, guest.artifacts / "qemu.log") as vm:
        with guest.step("a real QEMU has it by sysfsdev, without a uevent; a second one fails"):
            vm.wait_taken()
            with Qemu.start(DEVICE, guest.artifacts / "qemu-second.log") as second:
                assert re.search(BUSY.format(node=node), second.wait_refused()), second.said
            assert _silent(uevents)
        with guest.step("removed while it is held: off the bus at once, nothing is said, its node stays"):
            remove = in_background(DEVICE.remove)
            eventually("the entry gone", lambda: not DEVICE.path.is_symlink(), timeout_s=EVENT_TIMEOUT_S)
            assert _silent(uevents)
            assert remove.is_alive()
            assert node.exists()
            assert list(ON_BUS.iterdir()) == []
            assert _errno_of(lambda: DEVICE.create(ONE_PORT)) == errno.EEXIST
        with guest.step("QEMU is killed: remove vfio-dev, remove vfio, unbind mdev, remove mdev"):
            vm.kill()
            _until(uevents, *REMOVED)
            remove.join(timeout=EVENT_TIMEOUT_S)
            assert not remove.is_alive()
            assert not node.exists()


def _made_anew(guest: Guest, uevents: UeventListener) -> None:
    with guest.step("the same UUID of another type, from upper case: another device, in lower case"):
        Mediated(DEVICE.uuid.upper()).create(TWO_PORTS)
        _until(uevents, *CREATED)
        assert [entry.name for entry in ON_BUS.iterdir()] == [DEVICE.uuid]
        eventually("its type", lambda: DEVICE.type_id == TWO_PORTS, timeout_s=EVENT_TIMEOUT_S)
        DEVICE.remove()
        _until(uevents, *REMOVED)
        assert [entry.name for entry in DEV_VFIO.iterdir()] == ["vfio"]


def _errno_of(act: Callable[[], object]) -> int | None:
    try:
        act()
    except OSError as error:
        return error.errno
    return None
