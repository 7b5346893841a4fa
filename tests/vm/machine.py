"""What a machine is, as a value: a scenario declares one, and this module turns it into QEMU's command line.

Both sides read it: the host to start QEMU, the guest to find the functions that were declared. Must not start a
process or touch a file.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.vm.kernels import DEFAULT_KERNEL, KERNELS

VFIO_MODULES: Final = ("vfio_pci", "vfio_iommu_type1")
"""The modules the suite is about. Deliberately no driver for any emulated endpoint: a function that nobody has bound
has no driver, as a GPU on a node whose host driver is not installed."""

FIRST_PORT_SLOT: Final = 4
"""Slots 1 to 3 of the root bus hold the machine's own virtio devices, root ports come after them."""

SWITCH_BUS: Final = 2
"""Of the ports of a switch behind the first root port: that port's bus is 1."""

MAX_PORTS: Final = 24
"""Slots 4 to 27; q35 keeps the last ones for its own chipset."""

QMP_PORT_NAME: Final = "qmp"
"""Name of the virtio-serial port in the guest that leads to QEMU's monitor (QMP)."""

DEBUG_EXIT_PORT: Final = 0xF4
"""I/O port of isa-debug-exit; a byte written there ends QEMU with status 2 * byte + 1. `stage2` writes to it."""

GUEST_STATUS_BASE: Final = 16
"""Added to the scenario's exit status in the byte that ends QEMU. Without it a scenario that passed (0) would look
like a QEMU that could not start (exit status 1)."""

VFIO_USER: Final = "vfio-user-pci"
"""QEMU's model of a function that another process plays (QEMU docs/interop/vfio-user.rst)."""

CUT_MARKER: Final = "GPUACTORS-VM power cut after"
"""Written to the serial console by a guest whose power is to be cut: so many seconds (the next word) later QEMU is
killed, whatever the guest is doing then."""

DISK_SLOT: Final = 0x1C
"""Of the root bus: after the last root port."""

DISK_MODULES: Final = ("virtio_blk", "crc32c_generic", "ext4")

READY_MARKER: Final = "GPUACTORS-VM ready"
"""Written to the serial console when Python runs in the guest. Before it a boot may be retried once, after it never:
what fails then may be what the suite exists to find."""

LONGEST_STRETCH: Final = 10.0
"""By so much at most a guest that finds itself slow makes the limit of its scenario longer. It says so beside the
marker: the host may have measured itself in a quieter minute, and cannot see what emulation costs just now."""


@dataclass(frozen=True, slots=True)
class PciIds:
    """What a function says that it is, in hex as in sysfs but without `0x`: four digits each, the class code six."""

    vendor: str
    device: str
    class_code: str


@dataclass(frozen=True, slots=True)
class PciFunction:
    """An emulated PCI function.

    `model` is QEMU's name of the device (`edu`, `e1000e`, …); `port` the root port it sits behind. Functions of one
    port share slot 0 and therefore an IOMMU group; with more than one, their `function` numbers differ and 0 is among
    them. `properties` are further `key=value` pairs of the device; `before` are devices that QEMU makes first, as a
    property names one. With `ids`, and with them alone, the model is VFIO_USER: an inert function with just these ids,
    which `vfio_user.py` plays; it has no properties.
    """

    id: str
    model: str
    port: str
    function: int = 0
    properties: tuple[str, ...] = ()
    before: tuple[str, ...] = ()
    ids: PciIds | None = None

    def __post_init__(self) -> None:
        if (self.model == VFIO_USER) != (self.ids is not None) or (self.ids and self.properties):
            raise ValueError(
                f"function {self.id}: ids go with {VFIO_USER} and without properties, or not at all"
            )

    @property
    def socket_name(self) -> str:
        """File name of the socket where it is played, in the directory in which QEMU runs."""
        return f"{self.id}.sock"

    @property
    def backend(self) -> dict[str, object]:
        """What `device_add` is told of who plays it; nothing for QEMU's own models."""
        return {"socket": {"type": "unix", "path": self.socket_name}} if self.ids is not None else {}


@dataclass(frozen=True, slots=True)
class Machine:
    """A guest: its root ports (each one its own IOMMU group, each one a place for hot plug), what is plugged at boot,
    kernel and limits.

    `spares` are functions with ids that are not plugged at boot but played all the same, for the scenario to plug.
    `kernels` (names of `kernels.KERNELS`) are those on which the scenario belongs into the default suite: one more than
    the default where something differs there, or none (`NOT_BY_DEFAULT`). `needs` is what a kernel must have for the
    scenario to run on it at all.
    `kernel_arguments` go on the kernel's command line, `vfio_pci_parameters` to the vfio-pci module (`ids=1234:11e8`).
    `boot_timeout_s` runs to the ready marker, `scenario_timeout_s` from there to the end; both are several times what a
    quiet machine takes, because emulation suffers badly from neighbours (7 s to boot alone, 18 s beside two busy
    processes).

    With `image` the image of deploy/Containerfile has been built on the host, for the pod that runs it.
    The ports `without_acs`, the first ones if there are any, are those of a switch that keeps nothing apart, as on many
    boards: functions of one device without ACS, so that all that is behind them is in one IOMMU group.
    With `disk_mib` there is a disk with an empty ext4 (`/dev/vda` in the guest), behind `disk_port` if one is named.
    With `power_cuts` the machine lives so many times and once more, with the same disk: each life but the last is
    ended by the power cut that it announces (CUT_MARKER).
    """

    ports: tuple[str, ...]
    functions: tuple[PciFunction, ...] = ()
    spares: tuple[PciFunction, ...] = ()
    kernels: tuple[str, ...] = (DEFAULT_KERNEL,)
    needs: frozenset[str] = frozenset()
    modules: tuple[str, ...] = VFIO_MODULES
    kernel_arguments: tuple[str, ...] = ()
    vfio_pci_parameters: tuple[str, ...] = ()
    memory_mib: int = 1024
    cpus: int = 2
    boot_timeout_s: float = 90.0
    scenario_timeout_s: float = 300.0
    without_acs: tuple[str, ...] = ()
    disk_mib: int = 0
    disk_port: str = ""
    power_cuts: int = 0
    image: bool = False

    def __post_init__(self) -> None:
        if len(set(self.ports)) != len(self.ports) or len(self.ports) > MAX_PORTS:
            raise ValueError(f"root ports must be distinct and at most {MAX_PORTS}: {self.ports}")
        places = [(function.port, function.function) for function in self.functions]
        if len(set(places)) != len(places):
            raise ValueError(f"two functions at one place: {places}")
        if not {*self.without_acs, *filter(None, [self.disk_port])} <= set(self.ports):
            raise ValueError(f"no root ports: {self.without_acs}, {self.disk_port}")
        if self.without_acs != self.ports[: len(self.without_acs)]:
            raise ValueError(f"ports without ACS come first: {self.without_acs}")
        for function in (*self.functions, *self.spares):
            if function.port not in self.ports:
                raise ValueError(f"function {function.id} is at {function.port}, which is not a root port")
        for kernel in self.kernels:
            if kernel not in KERNELS or self.lacks(kernel):
                raise ValueError(f"kernel {kernel} is unknown, or lacks one of {set(self.needs)}")

    def lacks(self, kernel: str) -> frozenset[str]:
        """What the kernel would have to have besides; empty where the scenario can run on it."""
        return self.needs - KERNELS[kernel].has

    def port_address(self, port: str) -> str:
        """PCI address of a root port in the guest, e.g. `0000:00:04.0`. Functions are at the bus behind it."""
        if port in self.without_acs:
            return f"0000:{SWITCH_BUS:02x}:00.{self.without_acs.index(port)}"
        return f"0000:00:{FIRST_PORT_SLOT + self.ports.index(port):02x}.0"


def qemu_arguments(
    machine: Machine,
    *,
    kernel_image: Path,
    initrd: Path,
    artifacts: Path,
    monitor_fd: int,
    guest_port_fd: int,
) -> list[str]:
    """QEMU's arguments (without the program).

    The host's `/` is exported read-only and `artifacts` writable over 9p. `monitor_fd` and `guest_port_fd` are the two
    ends of a connected socket pair: QEMU's monitor talks to a virtio-serial port of its own guest, so that the guest
    plugs and unplugs its own devices and each scenario reads as one story.
    """
    command_line = (
        "console=ttyS0", "quiet", "panic=-1", "intel_iommu=on",
        # No entropy or timer calibration to wait for under software emulation.
        "random.trust_cpu=on", "no_timer_check",
        # QEMU's own clock. The TSC is the host's, and its frequency, which the guest measures while it boots, comes out
        # at a fraction of it where QEMU is not let run in that moment: all of the guest's seconds are too short then
        # (seen: ten times).
        "clocksource=hpet", "tsc=reliable",
        # Nobody attacks this guest, and what guards its system calls is dear under emulation.
        "mitigations=off",
        *machine.kernel_arguments,
    )  # fmt: skip
    arguments = [
        # Software emulation by decision, not for want of better: /dev/kvm may be there and hang.
        "-machine", "q35,kernel-irqchip=split", "-accel", "tcg,thread=multi", "-cpu", "max",
        "-m", f"{machine.memory_mib}M", "-smp", str(machine.cpus),
        "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-serial", "stdio",
        "-kernel", str(kernel_image), "-initrd", str(initrd), "-append", " ".join(command_line),
        # Caching mode: vfio-user-pci must be told of every mapping.
        "-device", "intel-iommu,intremap=on,caching-mode=on",
        "-device", f"isa-debug-exit,iobase={DEBUG_EXIT_PORT:#x},iosize=0x04",
        "-fsdev", "local,id=host,path=/,security_model=none,readonly=on,multidevs=remap",
        "-device", "virtio-9p-pci,fsdev=host,mount_tag=host,bus=pcie.0,addr=1",
        "-fsdev", f"local,id=artifacts,path={_escaped(artifacts)},security_model=none",
        "-device", "virtio-9p-pci,fsdev=artifacts,mount_tag=artifacts,bus=pcie.0,addr=2",
        "-chardev", f"socket,id=monitor,fd={monitor_fd}", "-object", "monitor-qmp,id=qmp,chardev=monitor",
        "-chardev", f"socket,id=guestport,fd={guest_port_fd}",
        "-device", "virtio-serial-pci,id=serialbus,bus=pcie.0,addr=3",
        "-device", f"virtserialport,bus=serialbus.0,chardev=guestport,name={QMP_PORT_NAME}",
    ]  # fmt: skip
    if machine.disk_mib:
        # The host's cache outlives QEMU: what the guest's kernel has given to the disk is not lost, the rest is.
        disk = f"if=none,id=disk,format=raw,cache=writeback,file={_escaped(disk_image(artifacts))}"
        arguments += ["-drive", disk]
    if machine.without_acs:
        arguments += [
            "-device",
            f"pcie-root-port,id=above,bus=pcie.0,addr={FIRST_PORT_SLOT:#x},chassis=0,slot=0",
        ]
        arguments += ["-device", "x3130-upstream,id=switch,bus=above"]
    for number, port in enumerate(machine.ports):
        model, place = "pcie-root-port", f"bus=pcie.0,addr={FIRST_PORT_SLOT + number:#x}"
        if port in machine.without_acs:
            model, place = "xio3130-downstream", f"bus=switch,addr=0.{number},multifunction=on"
        arguments += ["-device", f"{model},id={port},{place},chassis={number + 1},slot={number + 1}"]
    if machine.disk_mib:
        place = f"bus={machine.disk_port}" if machine.disk_port else f"bus=pcie.0,addr={DISK_SLOT:#x}"
        arguments += ["-device", f"virtio-blk-pci,drive=disk,{place}"]
    for function in machine.functions:
        for device in (*function.before, _device(function, machine)):
            arguments += ["-device", device]
    return arguments


def disk_image(artifacts: Path) -> Path:
    """Where a machine's disk is on the host."""
    return artifacts / "disk.img"


def _device(function: PciFunction, machine: Machine) -> str:
    place = {"id": function.id, "bus": function.port, "addr": f"0.{function.function}"}
    # Each function says so, not the first alone: after a remove and rescan the kernel puts a function into the group of
    # its neighbours only if its own header tells of them (drivers/iommu/iommu.c, get_pci_function_alias_group).
    shared = sum(other.port == function.port for other in machine.functions) > 1
    if function.backend:
        # A property that is an object can be said in JSON alone.
        return json.dumps({"driver": function.model, **place, "multifunction": shared, **function.backend})
    options = [f"{name}={value}" for name, value in place.items()]
    return ",".join(
        (function.model, *options, *(["multifunction=on"] if shared else []), *function.properties)
    )


def _escaped(path: Path) -> str:
    # A comma ends an option in QEMU's syntax; a doubled one is a comma.
    return str(path).replace(",", ",,")
