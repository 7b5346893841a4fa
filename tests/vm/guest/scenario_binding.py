"""Every way to bind a function to vfio-pci and to unbind it reaches kubelet, within the bound, by one process.

Bound before the daemon starts (vfio-pci's parameter `ids=`), later by an override with `bind` or with `drivers_probe`,
by an id given to the driver (`new_id`), by that id and `drivers_probe`; unbound and bound again; removed and found by a
rescan, bound or not. The periodic scan is an hour away: all of it is heard from the kernel.
"""

from __future__ import annotations

import errno
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from gpuactors import limits
from gpuactors.core.host.inspections import UNSETTLED_INSPECTIONS_S
from tests.support.kubelet_grpcio import HEALTHY
from tests.vm.guest.daemon import DaemonProcess
from tests.vm.guest.node import SLACK_S, Node, arguments
from tests.vm.guest.runner import Guest
from tests.vm.guest.sysfs import Function, function_behind, let_vfio_forget, let_vfio_take, rescan
from tests.vm.machine import Machine, PciFunction

MACHINE: Final = Machine(
    ports=("rp1", "rp2", "rp3"),
    functions=(
        PciFunction("edu1", "edu", "rp1"),
        PciFunction("edu2", "edu", "rp2"),
        PciFunction("nic", "e1000e", "rp3", properties=("romfile=",)),
    ),
    # What `vfio-pci.ids=` on the kernel's command line comes to where vfio-pci is a module: modprobe passes it on.
    vfio_pci_parameters=("ids=8086:10d3",),
)

EDU_IDS: Final = ("1234", "11e8")

FIRST_FRAME_WITHIN_S: Final = limits.DISCONNECT_WAIT_S + SLACK_S
"""From the daemon's first scan to the first frame: Register and the stream that kubelet opens."""

FRAME_WITHIN_S: Final = UNSETTLED_INSPECTIONS_S[0] + SLACK_S
"""From a write to sysfs to kubelet's device lists. The daemon waits for nothing between the uevent and the frame,
unless its inspection came before the node was there."""

REBINDS: Final = 30
"""Enough for a median; the largest stands for p99."""


def run(guest: Guest) -> None:
    """One daemon process, and every way in and out."""
    edu1, edu2, nic = (function_behind(guest.machine, port) for port in ("rp1", "rp2", "rp3"))
    with Node.with_kubelet(guest) as node:
        with guest.step("early bind by ids=: bound before any daemon runs, and nothing else is"):
            assert nic.driver == "vfio-pci"
            assert (edu1.driver, edu2.driver) == (None, None)
        selectors = ("vendor=1234,device=11e8", "vendor=8086,device=10d3")
        with DaemonProcess.start(arguments(*selectors), guest.artifacts / "daemon.log") as daemon:
            scene = _Scene(node, daemon, edu1, edu2, nic)
            with guest.step("early bind: it is in the first frame"):
                daemon.wait_until_it_listens()
                node.wait(scene.healthy(), FIRST_FRAME_WITHIN_S)
                assert node.frames[0].ids == (nic.address,)
            _by_override(scene)
            _by_id(scene)
            _again_and_again(scene)
            _removed_and_found(scene)
            with guest.step("one process from the beginning to the end, and 0 on SIGTERM"):
                assert daemon.terminate() == 0
                daemon.check_one_life()
                # A resource each, registered once: no stream of either ever ended before the daemon did.
                assert len(node.kubelet.registrations) == 2, node.kubelet.registrations


@dataclass(frozen=True, slots=True)
class _Scene:
    node: Node
    daemon: DaemonProcess
    edu1: Function
    edu2: Function
    nic: Function

    def healthy(self, *functions: Function) -> dict[str, str]:
        """Device lists in which these are Healthy, and the early bound one, which nobody touches."""
        return {function.address: HEALTHY for function in (self.nic, *functions)}

    def leads_to(self, name: str, act: Callable[[], None], *functions: Function) -> float:
        """Do `act`: within the bound these are in kubelet's device lists, and nothing but these. The milliseconds."""
        took_ms = self.node.timed(name, act, self.healthy(*functions), FRAME_WITHIN_S)
        self.daemon.check_alive()
        return took_ms


def _by_override(scene: _Scene) -> None:
    step, edu1, edu2 = scene.node.guest.step, scene.edu1, scene.edu2
    with step("driver_override, then the address into vfio-pci's bind"):
        assert _bind_error(edu1) == errno.ENODEV, "vfio-pci took a function that it was not told of"
        edu1.override_vfio()
        scene.leads_to("override_and_bind_to_first_frame_ms", edu1.bind_by_address, edu1)
    with step("driver_override, then drivers_probe"):
        edu2.override_vfio()
        scene.leads_to("override_and_probe_to_frame_ms", edu2.probe, edu1, edu2)
    with step("unbind of one, then of the other"):
        scene.leads_to("unbind_to_frame_ms", edu2.unbind, edu1)
        scene.leads_to("last_unbind_to_frame_ms", edu1.unbind)


def _by_id(scene: _Scene) -> None:
    step, edu1, edu2 = scene.node.guest.step, scene.edu1, scene.edu2
    edu1.forget_override()
    edu2.forget_override()
    with step("new_id: every function of that id at once"):
        scene.leads_to("new_id_to_frame_of_two_ms", lambda: let_vfio_take(*EDU_IDS), edu1, edu2)
    with step("unbind, then drivers_probe alone: the driver knows the id"):
        scene.leads_to("unbind_with_id_to_frame_ms", edu1.unbind, edu2)
        scene.leads_to("probe_with_id_to_frame_ms", edu1.probe, edu1, edu2)


def _again_and_again(scene: _Scene) -> None:
    step, edu1, edu2 = scene.node.guest.step, scene.edu1, scene.edu2
    with step(f"unbind and rebind, {REBINDS} times"):
        unbinds, binds = [], []
        for _ in range(REBINDS):
            unbinds.append(scene.leads_to("unbind_to_frame_last_ms", edu1.unbind, edu2))
            binds.append(scene.leads_to("rebind_to_frame_last_ms", edu1.bind_by_address, edu1, edu2))
        for name, values in (("unbind_to_frame", unbinds), ("rebind_to_frame", binds)):
            scene.node.figure(f"{name}_p50_ms", round(statistics.median(values), 1))
            scene.node.figure(f"{name}_max_ms", max(values))


def _removed_and_found(scene: _Scene) -> None:
    step, edu1, edu2 = scene.node.guest.step, scene.edu1, scene.edu2
    with step("remove, then rescan: found and, as the driver knows the id, bound"):
        scene.leads_to("remove_to_frame_ms", edu1.remove, edu2)
        assert not edu1.path.exists()
        scene.leads_to("rescan_to_frame_ms", rescan, edu1, edu2)
    with step("remove, then rescan with the id forgotten: found without a driver, offered when it is bound"):
        let_vfio_forget(*EDU_IDS)
        edu1.override_vfio()
        scene.leads_to("second_remove_to_frame_ms", edu1.remove, edu2)
        frames = len(scene.node.frames)
        rescan()
        assert function_behind(scene.node.guest.machine, "rp1") == edu1
        assert edu1.driver is None, "an override does not outlive the removal"
        assert len(scene.node.frames) == frames
        scene.leads_to("bind_after_rescan_to_frame_ms", edu1.bind_vfio, edu1, edu2)


def _bind_error(function: Function) -> int | None:
    """The errno of binding it by its address, None where that works."""
    try:
        function.bind_by_address()
    except OSError as error:
        return error.errno
    return None
