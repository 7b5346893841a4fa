"""vGPUs by vendor VFIO: virtual functions that an administrator gives a type, one resource for each profile, given away
by both APIs, each with a real QEMU; a type that is changed under a pod.

Virtual functions of QEMU's igb play them, on the stand-in for NVIDIA's driver (modules/vgpu_standin.c): a vfio driver
that is not vfio-pci, whose types have no uevent. Both shapes of its list of types are read. The daemon never binds,
unbinds or types a function.
"""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Final

from gpuactors import limits
from tests.support.kubelet_grpcio import HEALTHY, UNHEALTHY
from tests.support.patience import patient
from tests.vm.guest.kinds import POD, Scene
from tests.vm.guest.node import SLACK_S
from tests.vm.guest.qemu import Qemu
from tests.vm.guest.runner import Guest
from tests.vm.guest.sriov import IGB, PhysicalFunction
from tests.vm.guest.sysfs import Function, write
from tests.vm.kernels import BUILT_MODULES, SRIOV
from tests.vm.machine import VFIO_MODULES, Machine

DRIVER: Final = "nvidia"

MACHINE: Final = Machine(
    ports=("rp1",),
    functions=(IGB,),
    needs=frozenset({SRIOV, BUILT_MODULES}),
    modules=(*VFIO_MODULES, IGB.model, "vgpu_standin"),
    memory_mib=1536,
    scenario_timeout_s=420.0,
)

SELECTOR: Final = "vendor=8086,device=10ca"

NAMES_FIRST: Final = Path("/sys/module/vgpu_standin/parameters/names_first")

SMALL, LARGE = "1147", "1148"
"""Types of the stand-in."""

PROFILE: Final = {SMALL: "NVIDIA_L40S-1Q", LARGE: "NVIDIA_L40S-2Q"}

SEEN_WITHIN_S: Final = patient(30.0)
"""A type is set: no uevent tells of it, so the next periodic inspection finds it."""

LEFT_WITHIN_S: Final = limits.LEDGER_S + SLACK_S
"""A pod ends."""


def run(guest: Guest) -> None:
    """One daemon."""
    card = PhysicalFunction.booted(guest.machine, IGB)
    card.autoprobe(False)
    with Scene.running(guest, SELECTOR) as scene:
        with guest.step("two virtual functions on the vendor's driver, without a type: nobody gets them"):
            first, second = card.enable(2)
            for function in (first, second):
                write(function.path / "driver_override", f"{DRIVER}\n")
                function.probe()
            assert [function.driver for function in (first, second)] == [DRIVER] * 2
        _typed(scene, first, second)
        scene.claimed_in_qemu(first.address)
        assert (first.driver, _type_of(first)) == (DRIVER, SMALL)
        with _allocated(scene, first) as vm:
            with guest.step("its type is not changed while QEMU has it (the driver's rule)"):
                assert _errno_of_type(first, LARGE) == errno.EBUSY
            vm.kill()
        _changed_under_its_pod(scene, first, second)


def _typed(scene: Scene, first: Function, second: Function) -> None:
    with scene.guest.step(
        "each gets a type: a resource for each profile, by either shape of the list of types"
    ):
        _set_type(first, SMALL)
        scene.node.wait({first.address: HEALTHY}, SEEN_WITHIN_S)
        write(NAMES_FIRST, "1\n")
        _set_type(second, LARGE)
        scene.node.wait({first.address: HEALTHY, second.address: HEALTHY}, SEEN_WITHIN_S)
        for function, number in ((first, SMALL), (second, LARGE)):
            assert scene.resource_of(function.address).endswith(f"/{PROFILE[number]}")
        scene.wait_offered({first.address: "", second.address: ""})


def _allocated(scene: Scene, function: Function) -> Qemu:
    """A pod's virtual machine has it, by what Allocate says. Nobody gets it a second time."""
    guest = scene.guest
    with guest.step("allocated: a real QEMU starts with the function of the answer"):
        answer = scene.node.kubelet.allocate(scene.resource_of(function.address), [function.address], pod=POD)
        assert {device.host_path for device in answer.devices} == function.nodes
        ((name, value),) = answer.envs.items()
        assert name.startswith("PCI_RESOURCE_"), name
        vm = Qemu.start(Function(value), guest.artifacts / "qemu.log")
        vm.wait_taken()
        scene.wait_reason(function.address, f"allocated to pod default/{POD}")
    with guest.step("nobody gets it a second time: not by Allocate, not by a claim"):
        scene.not_allocated_again(function.address, vm)
        scene.not_claimed("second", function.address, POD)
    return vm


def _changed_under_its_pod(scene: Scene, first: Function, second: Function) -> None:
    """QEMU has ended and the pod has not, so the driver lets the type be changed."""
    old, new = (scene.resource_of(function.address) for function in (first, second))
    with scene.guest.step("the type is changed under the pod: Unhealthy in either resource"):
        _set_type(first, "0")
        _set_type(first, LARGE)
        changed = {first.address: UNHEALTHY, second.address: HEALTHY}
        scene.wait_lists({old: {first.address: UNHEALTHY}, new: changed}, SEEN_WITHIN_S)
        scene.not_claimed("changed", first.address, POD)
    with scene.guest.step("the pod ends: Healthy in the resource of the new profile alone"):
        scene.node.kubelet.end_pod(POD)
        scene.wait_lists(
            {new: {first.address: HEALTHY, second.address: HEALTHY}}, LEFT_WITHIN_S + SEEN_WITHIN_S
        )
        assert first.driver == DRIVER


def _set_type(function: Function, number: str) -> None:
    write(function.path / "nvidia" / "current_vgpu_type", f"{number}\n")


def _type_of(function: Function) -> str:
    return (function.path / "nvidia" / "current_vgpu_type").read_text(encoding="ascii").strip()


def _errno_of_type(function: Function, number: str) -> int | None:
    try:
        _set_type(function, number)
    except OSError as error:
        return error.errno
    return None
