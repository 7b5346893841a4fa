"""A GPU that dies by a fatal PCIe error, free or in use, or loses its power: out of both APIs, and back when the kernel
has enumerated it again.

QEMU's monitor injects the error (`pcie_aer_inject_error`) into an emulated virtio function, which plays the GPU: of
QEMU's models it is one whose error reporting can be switched on. The kernel's own AER driver counts it and resets the
link. The power of another one's slot is switched off at its port, so that it reads all ones. Also what the daemon
believes about the files and uevents of such an error, asked of the kernel.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from gpuactors import limits
from tests.support.kubelet_grpcio import HEALTHY, UNHEALTHY
from tests.support.patience import patient
from tests.vm.guest.kinds import POD, Scene
from tests.vm.guest.node import SLACK_S
from tests.vm.guest.qemu import Qemu
from tests.vm.guest.runner import Guest, eventually
from tests.vm.guest.sysfs import Function, function_behind, rescan
from tests.vm.machine import Machine, PciFunction

FREE, HELD, UNPOWERED = (
    PciFunction(name, "virtio-rng-pci", port, properties=("aer=on",))
    for name, port in (("free", "rp1"), ("held", "rp2"), ("unpowered", "rp3"))
)

MACHINE: Final = Machine(
    ports=("rp1", "rp2", "rp3"),
    functions=(FREE, HELD, UNPOWERED),
    kernels=("6.1", "6.12"),
    memory_mib=1536,
    scenario_timeout_s=420.0,
)

SELECTOR: Final = "vendor=1af4,device=1044"

DATA_LINK_PROTOCOL_ERROR: Final = "0x10"
"""PCI_ERR_UNC_DLP (include/uapi/linux/pci_regs.h), which is fatal by the register's default."""

_COMMAND, _COMMAND_SERR = 0x04, 0x100
_CAPABILITIES, _EXPRESS = 0x34, 0x10
_DEVICE_CONTROL, _REPORT_FATAL = 0x08, 0x04
_SLOT_CONTROL, _POWER_OFF = 0x18, 0x0400
"""PCI_COMMAND and PCI_COMMAND_SERR, PCI_CAPABILITY_LIST, PCI_CAP_ID_EXP, PCI_EXP_DEVCTL and PCI_EXP_DEVCTL_FERE,
PCI_EXP_SLTCTL and PCI_EXP_SLTCTL_PCC (include/uapi/linux/pci_regs.h)."""

DEAD_WITHIN_S: Final = patient(2.0)
"""From the error to kubelet's device list, which is promised."""

LOOKED_AT_S: Final = 5.0
"""For so long it must not come back by itself: the recovery has ended, and a repeated inspection has come."""

FATAL: Final = "has had a fatal PCIe error"
SILENT: Final = "does not answer"


def run(guest: Guest) -> None:
    """One daemon."""
    free, held, unpowered = functions = tuple(
        function_behind(guest.machine, card.port) for card in (FREE, HELD, UNPOWERED)
    )
    with guest.step("the files that the daemon reads, as the kernel has them"):
        for function in functions:
            _bind(function)
            _check_files(function)
    with Scene.running(guest, SELECTOR) as scene:
        scene.node.wait(dict.fromkeys((f.address for f in functions), HEALTHY), SLACK_S)
        scene.wait_offered(dict.fromkeys((f.address for f in functions), ""))
        _free_one(scene, free, held, unpowered)
        _held_one(scene, held)
        _unpowered_one(scene, unpowered)
        with guest.step("each removed, found again by a rescan and bound: Healthy"):
            for function in functions:
                function.remove()
            rescan()
            for function in functions:
                _bind(function)
            scene.node.wait(dict.fromkeys((f.address for f in functions), HEALTHY), SLACK_S)
            scene.wait_offered(dict.fromkeys((f.address for f in functions), ""))


def _free_one(scene: Scene, free: Function, *others: Function) -> None:
    guest, node = scene.guest, scene.node
    healthy = {function.address: HEALTHY for function in others}
    with guest.step("a free one has a fatal error: Unhealthy within 2 s, and no other one"):
        node.timed(
            "error_to_unhealthy_ms",
            lambda: _inject(guest, FREE),
            {free.address: UNHEALTHY, **healthy},
            DEAD_WITHIN_S,
        )
        scene.wait_reason(free.address, FATAL)
    with guest.step("the port above has counted it, and the function has not: Linux before 6.16"):
        assert (_port_errors(free), _fatal_errors(free)) == (1, 0)
    with guest.step("neither a pod nor a claim gets it"):
        assert FATAL in scene.not_allocated(free.address)
        scene.wait_offered({free.address: "Dead", **dict.fromkeys(healthy, "")})
        scene.not_claimed("dead", free.address, FATAL)
    with guest.step("the kernel has tried to recover it, and it is not back"):
        time.sleep(LOOKED_AT_S)
        assert free.driver == "vfio-pci"
        node.wait({free.address: UNHEALTHY, **healthy}, SLACK_S)


def _held_one(scene: Scene, held: Function) -> None:
    """Of a pod with a real QEMU."""
    guest, node = scene.guest, scene.node
    with guest.step("a pod gets another, and a real QEMU has it"):
        node.kubelet.allocate(scene.resource_of(held.address), [held.address], pod=POD)
        vm = Qemu.start(held, guest.artifacts / "qemu.log")
    with vm:
        vm.wait_taken()
        with guest.step("it has a fatal error: it stays Healthy, as kubelet subtracts it already"):
            _let_report(held)
            _inject(guest, HELD)
            eventually("the error counted", lambda: _port_errors(held) == 1, timeout_s=SLACK_S)
            time.sleep(LOOKED_AT_S)
            scene.wait_health(held.address, HEALTHY)
    with guest.step("its pod ends: Unhealthy, and no pod gets it"):
        node.kubelet.end_pod(POD)
        eventually(
            "the dead one Unhealthy",
            lambda: node.kubelet.snapshot()[scene.resource_of(held.address)][held.address] == UNHEALTHY,
            timeout_s=limits.LEDGER_S + SLACK_S,
        )
        scene.wait_reason(held.address, FATAL)
        assert FATAL in scene.not_allocated(held.address)


def _unpowered_one(scene: Scene, unpowered: Function) -> None:
    guest = scene.guest
    with guest.step(
        "one loses its power without any event: Allocate is refused at once, and it is Unhealthy"
    ):
        scene.wait_health(unpowered.address, HEALTHY)
        _switch_power(unpowered, on=False)
        assert (unpowered.path / "config").read_bytes()[:16] == b"\xff" * 16
        began = time.monotonic()
        assert SILENT in scene.not_allocated(unpowered.address)
        scene.wait_health(unpowered.address, UNHEALTHY)
        scene.node.figure("allocate_to_unhealthy_ms", round((time.monotonic() - began) * 1000, 1))
        scene.wait_reason(unpowered.address, SILENT)
        scene.not_claimed("silent", unpowered.address, SILENT)
    with guest.step("it answers again, with its addresses lost: it is not back"):
        _switch_power(unpowered, on=True)
        config = (unpowered.path / "config").read_bytes()
        assert (config[:4], config[4:6]) == (b"\xf4\x1a\x44\x10", b"\0\0"), config[:64].hex()
        assert SILENT in scene.not_allocated(unpowered.address)
        scene.wait_health(unpowered.address, UNHEALTHY)


def _bind(function: Function) -> None:
    # The host's driver for the function is there, as the machine itself has virtio devices.
    if function.driver not in (None, "vfio-pci"):
        function.unbind()
    function.bind_vfio()


def _inject(guest: Guest, function: PciFunction) -> None:
    """Let the function send ERR_FATAL to its root port."""
    line: Mapping[str, object] = {
        "command-line": f"pcie_aer_inject_error {function.id} {DATA_LINK_PROTOCOL_ERROR}"
    }
    said = str(guest.qmp.command("human-monitor-command", **line))
    assert said.startswith("OK"), said


def _let_report(function: Function) -> None:
    """Switch on the report of fatal errors, as its guest would: vfio-pci leaves a function reset, and QEMU's own reset
    has no error reporting."""
    config = (function.path / "config").read_bytes()
    place = _express(config)
    _write_config(function.path, place + _DEVICE_CONTROL, set_bits=_REPORT_FATAL)
    _write_config(function.path, _COMMAND, set_bits=_COMMAND_SERR)


def _switch_power(function: Function, *, on: bool) -> None:
    """Write the power controller bit of the slot, at the port above. The kernel does not look at it: no hot plug driver
    of PCI Express has the port (its firmware keeps that, `_OSC`)."""
    port = function.path.resolve().parent
    at = _express((port / "config").read_bytes()) + _SLOT_CONTROL
    _write_config(port, at, set_bits=0 if on else _POWER_OFF, clear_bits=_POWER_OFF if on else 0)


def _express(config: bytes) -> int:
    """Where its PCI Express capability is."""
    place = config[_CAPABILITIES]
    while config[place] != _EXPRESS:
        place = config[place + 1]
        assert 0 < place < 0xFF, "no such capability, or all ones"
    return place


def _write_config(directory: Path, place: int, *, set_bits: int, clear_bits: int = 0) -> None:
    with (directory / "config").open("r+b", buffering=0) as config:
        config.seek(place)
        before = int.from_bytes(config.read(2), "little")
        config.seek(place)
        config.write((before & ~clear_bits | set_bits).to_bytes(2, "little"))


def _check_files(function: Function) -> None:
    assert (_port_errors(function), _fatal_errors(function)) == (0, 0)
    assert _read(function, "power_state") in ("D0", "D3hot", "D3cold")
    assert (function.path / "config").read_bytes()[:4] != b"\xff" * 4, "a read wakes it"
    methods, has_reset = function.path / "reset_method", (function.path / "reset").exists()
    assert methods.exists() is has_reset, "Linux 5.15 and newer"


def _port_errors(function: Function) -> int:
    return int((function.path.resolve().parent / "aer_rootport_total_err_fatal").read_text(encoding="ascii"))


def _fatal_errors(function: Function) -> int:
    total = _read(function, "aer_dev_fatal").splitlines()[-1]
    assert total.startswith("TOTAL_ERR_FATAL "), total
    return int(total.split()[1])


def _read(function: Function, attribute: str) -> str:
    return Path(function.path / attribute).read_text(encoding="ascii").strip()
