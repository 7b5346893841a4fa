"""A GPU that dies by a fatal PCIe error, free or in use: out of both APIs within 2 s, and back when the kernel has
enumerated it again.

QEMU's monitor injects the error (`pcie_aer_inject_error`) into an emulated network function, which plays the GPU; the
kernel's own AER driver counts it and resets the link. Also what the daemon believes about the files and uevents of such
an error, asked of the kernel. The functions of QEMU's model answer on after the reset: what reads all ones is shown on
trees.
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
from tests.vm.kernels import NOT_BY_DEFAULT
from tests.vm.machine import Machine, PciFunction

FREE: Final = PciFunction("free", "e1000e", "rp1", properties=("romfile=",))
HELD: Final = PciFunction("held", "e1000e", "rp2", properties=("romfile=",))

MACHINE: Final = Machine(
    ports=("rp1", "rp2"),
    functions=(FREE, HELD),
    kernels=NOT_BY_DEFAULT,  # it has not been run yet
    memory_mib=1536,
)

SELECTOR: Final = "vendor=8086,device=10d3"

DATA_LINK_PROTOCOL_ERROR: Final = "0x10"
"""PCI_ERR_UNC_DLP (include/uapi/linux/pci_regs.h), which is fatal by the register's default."""

DEAD_WITHIN_S: Final = patient(2.0)
"""From the error to kubelet's device list, which is promised."""

LOOKED_AT_S: Final = 5.0
"""For so long it must not come back by itself: the recovery has ended, and a repeated inspection has come."""

SIGN: Final = "has had a fatal PCIe error"


def run(guest: Guest) -> None:
    """One daemon."""
    free, held = (function_behind(guest.machine, card.port) for card in (FREE, HELD))
    with guest.step("the files that the daemon reads, as the kernel has them"):
        for function in (free, held):
            function.bind_vfio()
            _check_files(function)
    with Scene.running(guest, SELECTOR) as scene:
        scene.node.wait({free.address: HEALTHY, held.address: HEALTHY}, SLACK_S)
        scene.wait_offered({free.address: "", held.address: ""})
        _free_one(scene, free, held)
        _held_one(scene, free, held)
        _enumerated_again(scene, free, held)


def _free_one(scene: Scene, free: Function, held: Function) -> None:
    node = scene.node
    with scene.guest.step("a free one has a fatal error: Unhealthy within 2 s, and the other is not touched"):
        node.timed(
            "error_to_unhealthy_ms",
            lambda: _inject(scene.guest, FREE),
            {free.address: UNHEALTHY, held.address: HEALTHY},
            DEAD_WITHIN_S,
        )
        scene.wait_reason(free.address, SIGN)
        assert _fatal_errors(free) == 1, "counted once, before the recovery"
    with scene.guest.step("neither a pod nor a claim gets it"):
        assert SIGN in scene.not_allocated(free.address)
        scene.wait_offered({free.address: "Dead", held.address: ""})
        scene.not_claimed("dead", free.address, SIGN)
    with scene.guest.step("the kernel has recovered it, and it is not back"):
        time.sleep(LOOKED_AT_S)
        assert free.driver == "vfio-pci"
        node.wait({free.address: UNHEALTHY, held.address: HEALTHY}, SLACK_S)


def _held_one(scene: Scene, free: Function, held: Function) -> None:
    """Of a pod with a real QEMU."""
    guest, node = scene.guest, scene.node
    with guest.step("a pod gets the other, and a real QEMU has it"):
        node.kubelet.allocate(scene.resource_of(held.address), [held.address], pod=POD)
        vm = Qemu.start(held, guest.artifacts / "qemu.log")
    with vm:
        vm.wait_taken()
        with guest.step("it has a fatal error: it stays Healthy, as kubelet subtracts it already"):
            _inject(guest, HELD)
            eventually("the error counted", lambda: _fatal_errors(held) == 1, timeout_s=SLACK_S)
            time.sleep(LOOKED_AT_S)
            node.wait({free.address: UNHEALTHY, held.address: HEALTHY}, SLACK_S)
    with guest.step("its pod ends: Unhealthy, and no pod gets it"):
        node.kubelet.end_pod(POD)
        node.wait({free.address: UNHEALTHY, held.address: UNHEALTHY}, limits.LEDGER_S + SLACK_S)
        scene.wait_reason(held.address, SIGN)
        assert SIGN in scene.not_allocated(held.address)


def _enumerated_again(scene: Scene, free: Function, held: Function) -> None:
    with scene.guest.step("removed, found again by a rescan and bound: Healthy"):
        for function in (free, held):
            function.remove()
        rescan()
        for function in (free, held):
            function.bind_vfio()
            assert _fatal_errors(function) == 0, "the counters begin at zero"
        scene.node.wait({free.address: HEALTHY, held.address: HEALTHY}, SLACK_S)
        scene.wait_offered({free.address: "", held.address: ""})


def _inject(guest: Guest, function: PciFunction) -> None:
    """Let the function send ERR_FATAL to its root port."""
    line: Mapping[str, object] = {
        "command-line": f"pcie_aer_inject_error {function.id} {DATA_LINK_PROTOCOL_ERROR}"
    }
    said = str(guest.qmp.command("human-monitor-command", **line))
    assert said.startswith("OK"), said


def _check_files(function: Function) -> None:
    assert _fatal_errors(function) == 0
    assert _read(function, "power_state") in ("D0", "D3hot", "D3cold")
    assert (function.path / "config").read_bytes()[:4] != b"\xff" * 4, "a read wakes it"
    methods, has_reset = function.path / "reset_method", (function.path / "reset").exists()
    assert methods.exists() is has_reset, "Linux 5.15 and newer"


def _fatal_errors(function: Function) -> int:
    total = _read(function, "aer_dev_fatal").splitlines()[-1]
    assert total.startswith("TOTAL_ERR_FATAL "), total
    return int(total.split()[1])


def _read(function: Function, attribute: str) -> str:
    return Path(function.path / attribute).read_text(encoding="ascii").strip()
