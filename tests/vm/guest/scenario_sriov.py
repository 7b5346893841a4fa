"""Virtual functions of a card that the host's driver keeps: made late, given away by both APIs, and removed while a
virtual machine has one.

QEMU's igb plays the GPU: its driver makes virtual functions after the daemon has started. A real QEMU gets what
Allocate says. While the kernel waits for that QEMU to let go, no link says that the function is one of the card's, and
the card has no link to any: neither may be taken for a whole GPU then. Then the card is on vfio-pci itself, where
nobody can open its virtual functions without a token. At last those of another card, QEMU's nvme, have the card's own
ids and outlive its driver.
"""

from __future__ import annotations

import platform
import time
from threading import Thread
from typing import Final

from gpuactors import limits
from gpuactors.core.host.usage import POLL_S
from tests.support.claims import device_of
from tests.support.kubelet_grpcio import HEALTHY, UNHEALTHY
from tests.vm.guest.claims import override_of
from tests.vm.guest.kinds import POD, Scene
from tests.vm.guest.node import SLACK_S
from tests.vm.guest.qemu import Qemu
from tests.vm.guest.runner import Guest, eventually
from tests.vm.guest.sriov import IGB, NVME, PhysicalFunction, physical_function_of
from tests.vm.guest.sysfs import Function, in_background
from tests.vm.guest.tenant import Tenant, closed_on_failure
from tests.vm.kernels import SRIOV
from tests.vm.machine import VFIO_MODULES, Machine

MACHINE: Final = Machine(
    ports=("rp1", "rp2"),
    functions=(IGB, NVME),
    needs=frozenset({SRIOV}),
    modules=(*VFIO_MODULES, IGB.model, NVME.model),
    vfio_pci_parameters=("enable_sriov=1",),
    memory_mib=1536,
    scenario_timeout_s=420.0,
)

SELECTORS: Final = ("vendor=8086,device=10c9", "vendor=8086,device=10ca")

POLLED_WITHIN_S: Final = POLL_S + SLACK_S
"""An external process opens a function."""

ANNOUNCED: Final = not platform.release().startswith("6.1.")
"""Whether the kernel says at once that a held function is on its way out."""

WAITS: Final = "its unbind or unplug waits in the kernel until no process has it open"

HANGS_FOR_S: Final = POLL_S + 0.5
"""How long a removal that waits is looked at."""


def run(guest: Guest) -> None:
    """One daemon."""
    card, nvme = (PhysicalFunction.booted(guest.machine, card) for card in (IGB, NVME))
    whole = card.function.address
    for physical in (card, nvme):
        physical.autoprobe(False)
    selectors = (*SELECTORS, *(f"address={nvme.address_of(number)}" for number in (1, 2)))
    with Scene.running(guest, *selectors) as scene:
        with guest.step("a card on its host's driver, without virtual functions, is offered to claims alone"):
            scene.wait_offered({whole: ""})
            assert not scene.node.kubelet.registrations
        first, last = _made_late(scene, card)
        _claimed(scene, card, first)
        _bound(scene, first, last)
        with _allocated(scene, last) as vm:
            removal = _removed_while_held(scene, card, first, last)
            with guest.step("QEMU is killed: the function goes, and the card is offered as a whole again"):
                vm.kill()
                removal.join(SLACK_S)
                assert not removal.is_alive()
                scene.node.kubelet.end_pod(POD)
                scene.node.wait({}, limits.LEDGER_S + SLACK_S)
                scene.wait_offered({whole: ""})
        _first_removed_while_held(scene, card)
        _card_on_vfio(scene, card)
        with guest.step("no resource ever had the card and a virtual function"):
            _check_resources(scene, card)
        _left_by_the_driver(scene, nvme)


def _made_late(scene: Scene, card: PhysicalFunction) -> tuple[Function, Function]:
    with scene.guest.step("two are made late, on no driver: claims may have each, and nobody the card"):
        first, last = card.enable(2)
        scene.wait_offered({first.address: "", last.address: "", card.function.address: "VirtualFunctions"})
        assert not scene.node.kubelet.registrations
    return first, last


def _claimed(scene: Scene, card: PhysicalFunction, function: Function) -> None:
    """The daemon binds it for a claim, and returns it to no driver."""
    guest, cluster = scene.guest, scene.cluster
    uid = cluster.api.claim("vm", function.address)
    with guest.step("one on no driver is claimed: it is on vfio-pci, the card is not touched"):
        cluster.prepared(scene.plugin, "vm", uid)
        assert (function.driver, card.function.driver) == ("vfio-pci", IGB.model)
        cluster.check_cdi(uid, function)
    with guest.step("a real QEMU has it"), Qemu.start(function, guest.artifacts / "qemu-claim.log") as vm:
        vm.wait_taken()
    with guest.step("unprepared: on no driver again, and nothing is left"):
        cluster.unprepared(scene.plugin, "vm", uid)
        assert (function.driver, override_of(function)) == (None, "(null)")
        assert cluster.files == [], cluster.files


def _bound(scene: Scene, first: Function, last: Function) -> None:
    with scene.guest.step("both are bound to vfio-pci by an operator: Healthy in kubelet's list"):
        for function in (first, last):
            function.bind_vfio()
        scene.node.wait({first.address: HEALTHY, last.address: HEALTHY}, SLACK_S)


def _allocated(scene: Scene, function: Function) -> Qemu:
    """A pod's virtual machine has it, by what Allocate says. Nobody gets it a second time."""
    guest, node = scene.guest, scene.node
    with guest.step("one is allocated: a real QEMU starts with the function of the answer"):
        answer = node.kubelet.allocate(scene.resource_of(function.address), [function.address], pod=POD)
        assert {device.host_path for device in answer.devices} == function.nodes
        ((name, value),) = answer.envs.items()
        assert name.startswith("PCI_RESOURCE_"), name
        assert value == function.address
        vm = Qemu.start(Function(value), guest.artifacts / "qemu-pod.log")
        vm.wait_taken()
        scene.wait_reason(function.address, f"allocated to pod default/{POD}")
    with guest.step("nobody gets it a second time: not by Allocate, not by a claim"):
        scene.not_allocated_again(function.address, vm)
        scene.not_claimed("second", function.address, POD)
    return vm


def _removed_while_held(scene: Scene, card: PhysicalFunction, first: Function, last: Function) -> Thread:
    """SR-IOV is switched off under the pod: the first function goes, the last waits for its QEMU."""
    node = scene.node
    seen = UNHEALTHY if ANNOUNCED else HEALTHY
    with scene.guest.step(
        "SR-IOV is switched off while QEMU has the last: the first goes, the last is listed"
    ):
        resource = scene.resource_of(last.address)
        removal = in_background(card.disable)
        eventually("the driver's link gone", lambda: last.driver is None, timeout_s=SLACK_S)
        assert (physical_function_of(last), card.virtual_functions) == (None, ()), (
            "the kernel keeps the links"
        )
        assert not first.path.exists()
        node.wait({last.address: seen}, SLACK_S)
    with scene.guest.step("the card has no link to any, and no claim gets it, as the pod has a part of it"):
        scene.not_claimed("whole", card.function.address, last.address)
        assert (removal.is_alive(), card.function.driver) == (True, IGB.model)
    with scene.guest.step(
        "it has no link to the card, and does not become a whole GPU: Unhealthy when it is inspected"
    ):
        assert WAITS in scene.not_allocated(last.address, pre_start=True)
        time.sleep(HANGS_FOR_S)
        node.wait({last.address: UNHEALTHY}, SLACK_S)
        assert scene.resource_of(last.address) == resource
        taints = scene.cluster.taints
        assert taints.get(device_of(card.function.address)) != "", taints
        scene.not_claimed("whole-still", card.function.address, last.address)
    return removal


def _first_removed_while_held(scene: Scene, card: PhysicalFunction) -> None:
    """By a process that kubelet knows nothing of. The kernel removes them in order, so the second waits behind it."""
    guest = scene.guest
    with Tenant.start() as tenant:
        with guest.step("made again, and an external process opens the first"):
            first, last = card.enable(2)
            _bound(scene, first, last)
            tenant.open_device(first.group_node, first.address)
            scene.node.wait({first.address: UNHEALTHY, last.address: HEALTHY}, POLLED_WITHIN_S)
        with (
            guest.step("SR-IOV is switched off while the first is held: the card still has one link"),
            closed_on_failure(tenant),
        ):
            removal = in_background(card.disable)
            eventually("the driver's link gone", lambda: first.driver is None, timeout_s=SLACK_S)
            assert (physical_function_of(first), card.virtual_functions) == (None, (last,))
            scene.not_claimed("beside", card.function.address, "virtual functions")
            assert scene.node.kubelet.snapshot()[scene.resource_of(first.address)][first.address] == UNHEALTHY
            assert removal.is_alive()
    with guest.step("the process ends: both go"):
        removal.join(SLACK_S)
        scene.node.wait({}, SLACK_S)
        scene.wait_offered({card.function.address: ""})


def _card_on_vfio(scene: Scene, card: PhysicalFunction) -> None:
    node = scene.node
    with scene.guest.step("the card is bound to vfio-pci: a whole GPU, in a resource of its own"):
        card.function.unbind()
        card.function.bind_vfio()
        node.wait({card.function.address: HEALTHY}, SLACK_S)
    with scene.guest.step(
        "it makes virtual functions there (enable_sriov): none is given away, nor is the card"
    ):
        made = card.enable(2)
        node.wait({function.address: UNHEALTHY for function in (card.function, *made)}, SLACK_S)
        for function in made:
            scene.wait_reason(function.address, "token")
            assert "token" in scene.not_allocated(function.address)
        scene.wait_reason(card.function.address, "virtual functions")
    with scene.guest.step("without them it is a whole GPU again"):
        card.disable()
        node.wait({card.function.address: HEALTHY}, SLACK_S)
    with scene.guest.step("back on its host's driver: in no list"):
        card.function.unbind()
        card.function.forget_override()
        card.function.bind_to(IGB.model)
        node.wait({}, SLACK_S)


def _left_by_the_driver(scene: Scene, card: PhysicalFunction) -> None:
    """The selectors name the virtual functions alone, so the card is read for their sake."""
    node = scene.node
    with scene.guest.step(
        "another card's virtual functions have its own ids: their resource has `_VF` behind it"
    ):
        made = card.enable(2)
        assert {function.ids for function in made} == {card.function.ids}
        for function in made:
            function.bind_vfio()
        keys = [function.address for function in made]
        node.wait(dict.fromkeys(keys, HEALTHY), SLACK_S)
        assert len({scene.resource_of(key) for key in keys}) == 1
        assert scene.resource_of(keys[0]).endswith("_VF")
    with scene.guest.step("its driver leaves them when it is unbound: Unhealthy, and nobody gets one"):
        card.function.unbind()
        node.wait(dict.fromkeys(keys, UNHEALTHY), SLACK_S)
        scene.wait_reason(keys[0], "which is bound to no driver")
        assert "which is bound to no driver" in scene.not_allocated(keys[1])
        assert [function.driver for function in made] == ["vfio-pci"] * 2
    with scene.guest.step("its driver is back: Healthy; they are removed: in no list"):
        card.function.bind_to(NVME.model)
        node.wait(dict.fromkeys(keys, HEALTHY), SLACK_S)
        card.disable()
        node.wait({}, SLACK_S)


def _check_resources(scene: Scene, card: PhysicalFunction) -> None:
    """A resource has the card or virtual functions; no list had a Healthy card beside a Healthy virtual function."""
    whole = card.function.address
    found: dict[str, set[str]] = {}
    for frame in scene.node.frames:
        found.setdefault(frame.resource, set()).update(frame.ids)
    assert not any(whole in ids and len(ids) > 1 for ids in found.values()), found
