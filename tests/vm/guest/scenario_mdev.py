"""Mediated devices: made late, given away by both APIs, removed while a virtual machine has one, and made anew of
another type under the same UUID.

The kernel's sample driver mtty plays the vGPU driver; its devices have no PCI parent. A real QEMU gets what a claim's
files say, and what Allocate says. While its pod is there, its UUID is that pod's, whatever device has it by then.
"""

from __future__ import annotations

from typing import Final

from gpuactors import limits
from tests.support.kubelet_grpcio import HEALTHY, UNHEALTHY
from tests.vm.guest.kinds import POD, Scene
from tests.vm.guest.mdev import ONE_PORT, TWO_PORTS, Mediated
from tests.vm.guest.node import SLACK_S
from tests.vm.guest.qemu import Qemu
from tests.vm.guest.runner import Guest, eventually
from tests.vm.guest.sysfs import in_background
from tests.vm.kernels import BUILT_MODULES
from tests.vm.machine import VFIO_MODULES, Machine

MACHINE: Final = Machine(
    ports=(),
    needs=frozenset({BUILT_MODULES}),
    modules=(*VFIO_MODULES, "mtty"),
    memory_mib=1536,
    scenario_timeout_s=420.0,
)

DEVICE: Final = Mediated("83b8f4f2-509f-382f-3c1e-e6bfe0fa1001")
KEY: Final = DEVICE.uuid

SINGLE: Final = "mdev-mtty/Single_port_serial"
DUAL: Final = "mdev-mtty/Dual_port_serial"

LEFT_WITHIN_S: Final = limits.LEDGER_S + SLACK_S
"""A pod ends."""


def run(guest: Guest) -> None:
    """One daemon."""
    with Scene.running(guest, f"mdev={ONE_PORT}", f"mdev={TWO_PORTS}") as scene:
        with guest.step("made late: Healthy in a resource of its type, and in the slices"):
            assert not scene.node.kubelet.registrations
            DEVICE.create(ONE_PORT)
            scene.wait_lists({SINGLE: {KEY: HEALTHY}}, SLACK_S)
            scene.wait_offered({KEY: ""})
        scene.claimed_in_qemu(KEY)
        assert DEVICE.type_id == ONE_PORT
        with _allocated(scene) as vm:
            _removed_while_held(scene, vm)
        _made_anew(scene)


def _allocated(scene: Scene) -> Qemu:
    """A pod's virtual machine has it, by what Allocate says. Nobody gets it a second time."""
    guest = scene.guest
    with guest.step("allocated: a real QEMU starts with the UUID of the answer"):
        answer = scene.node.kubelet.allocate(SINGLE, [KEY], pod=POD)
        assert {device.host_path for device in answer.devices} == {str(DEVICE.group_node), "/dev/vfio/vfio"}
        ((name, value),) = answer.envs.items()
        assert name == "MDEV_PCI_RESOURCE_MDEV-MTTY_SINGLE_PORT_SERIAL", name
        vm = Qemu.start(Mediated(value), guest.artifacts / "qemu.log")
        vm.wait_taken()
        scene.wait_reason(KEY, f"allocated to pod default/{POD}")
    with guest.step("nobody gets it a second time: not by Allocate, not by a claim"):
        scene.not_allocated_again(KEY, vm)
        scene.not_claimed("second", KEY, POD)
    return vm


def _removed_while_held(scene: Scene, vm: Qemu) -> None:
    """The kernel takes it off the bus at once, says nothing of it, and waits for QEMU."""
    with scene.guest.step(
        "removed while QEMU has it: listed in its resource, Unhealthy as soon as it is inspected"
    ):
        removal = in_background(DEVICE.remove)
        eventually("the entry gone", lambda: not DEVICE.path.is_symlink(), timeout_s=SLACK_S)
        assert "gone" in scene.not_allocated(KEY, pre_start=True)
        scene.wait_lists({SINGLE: {KEY: UNHEALTHY}}, SLACK_S)
        assert removal.is_alive()
    with scene.guest.step("QEMU is killed: the device goes, and stays listed until its pod ends"):
        vm.kill()
        removal.join(SLACK_S)
        assert not removal.is_alive()
        scene.wait_lists({SINGLE: {KEY: UNHEALTHY}}, SLACK_S)


def _made_anew(scene: Scene) -> None:
    with scene.guest.step(
        "made anew of another type: Unhealthy in either resource while the UUID is a pod's"
    ):
        DEVICE.create(TWO_PORTS)
        scene.wait_lists({SINGLE: {KEY: UNHEALTHY}, DUAL: {KEY: UNHEALTHY}}, SLACK_S)
        assert DEVICE.type_id == TWO_PORTS
        scene.not_claimed("anew", KEY, POD)
    with scene.guest.step("the pod ends: Healthy in the resource of the new type alone"):
        scene.node.kubelet.end_pod(POD)
        scene.wait_lists({DUAL: {KEY: HEALTHY}}, LEFT_WITHIN_S)
        scene.wait_offered({KEY: ""})
