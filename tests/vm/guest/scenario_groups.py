"""A GPU alone in its IOMMU group, and one with an audio function, with NVIDIA's ids and the default selectors.

The group is lent as a whole: as long as a host driver has the audio function no virtual machine can have the GPU, and
who holds the audio function holds the GPU. The audio function itself is nothing that anybody asks kubelet for. The host
driver is the real one: Debian's snd_hda_intel takes the audio function at boot, as it does on a node.
"""

from __future__ import annotations

import errno
import os
import re
from dataclasses import dataclass
from typing import Final

import grpc

from gpuactors import limits
from gpuactors.core.host.inspections import UNSETTLED_INSPECTIONS_S
from gpuactors.core.host.schedule import POLL_FAST_S
from gpuactors.core.host.usage import POLL_S
from tests.support.kubelet_grpcio import HEALTHY, UNHEALTHY
from tests.vm.guest.daemon import DaemonProcess
from tests.vm.guest.node import NAMED_WITHIN_S, SLACK_S, Node, arguments, last_reason
from tests.vm.guest.runner import Guest, eventually
from tests.vm.guest.sysfs import Function, function_behind, functions_behind, rescan
from tests.vm.guest.tenant import Tenant
from tests.vm.machine import VFIO_MODULES, VFIO_USER, Machine, PciFunction, PciIds

HOST_DRIVER: Final = "snd_hda_intel"

NEW_MODEL: Final = PciFunction("new", VFIO_USER, "rp3", ids=PciIds("10de", "2fff", "030200"))
"""So new that pci.ids does not know it."""

MACHINE: Final = Machine(
    ports=("rp1", "rp2", "rp3"),
    functions=(
        PciFunction("h100", VFIO_USER, "rp1", ids=PciIds("10de", "2330", "030200")),
        PciFunction("gpu", VFIO_USER, "rp2", function=0, ids=PciIds("10de", "2684", "030000")),
        PciFunction("audio", VFIO_USER, "rp2", function=1, ids=PciIds("10de", "22ba", "040300")),
    ),
    spares=(NEW_MODEL,),
    modules=(*VFIO_MODULES, HOST_DRIVER),
)

ALONE: Final = "nvidia.com/GH100_H100_SXM5_80GB"
PAIRED: Final = "nvidia.com/AD102_GEFORCE_RTX_4090"
NEW: Final = "nvidia.com/2fff"
"""Resources as NVIDIA's own plugin names them, from pci.ids or, where it has no name, from the device id."""

FRAME_WITHIN_S: Final = UNSETTLED_INSPECTIONS_S[0] + SLACK_S
"""From a write to sysfs to kubelet's device lists, registering included. The daemon waits for nothing on that way,
unless its inspection came before the node was there."""

SEEN_WITHIN_S: Final = POLL_S + SLACK_S
"""An external process opens a function; only a poll shows it."""

RELEASE_SEEN_WITHIN_S: Final = POLL_FAST_S + SLACK_S
"""The external process closes it."""

LEFT_WITHIN_S: Final = limits.LEDGER_S + SLACK_S
"""A pod ends."""

POD: Final = "vm-1"

GROUP_NODE: Final = re.compile(r"/dev/vfio/\d+")


def run(guest: Guest) -> None:
    """One daemon process, which is told of no selector."""
    h100 = function_behind(guest.machine, "rp1")
    gpu, audio = functions_behind(guest.machine, "rp2")
    with Node.with_kubelet(guest) as node:
        with guest.step("NVIDIA's ids, and the host's own driver has taken the audio function"):
            assert (h100.ids, gpu.ids, audio.ids) == (("10de", "2330"), ("10de", "2684"), ("10de", "22ba"))
            assert gpu.group == audio.group != h100.group
            eventually(
                f"{HOST_DRIVER} at {audio.address}", lambda: audio.driver == HOST_DRIVER, timeout_s=SLACK_S
            )
            assert (h100.driver, gpu.driver) == (None, None)
        with DaemonProcess.start(arguments(), guest.artifacts / "daemon.log") as daemon:
            scene = _Scene(node, daemon, h100, gpu, audio)
            with guest.step("nothing is bound to vfio-pci: nothing is registered"):
                daemon.wait_until_it_listens()
                assert not node.kubelet.registrations
            _alone(scene)
            _not_viable(scene)
            _viable(scene)
            _held_by_its_companion(scene)
            _held_by_its_pod(scene)
            _found_again(scene)
            _new_model(scene)
            with guest.step("three resources of one process, none for the audio function"):
                assert node.resources == tuple(sorted((ALONE, PAIRED, NEW))), node.resources
                assert all(audio.address not in frame.ids for frame in node.frames)
                alone = [device for frame in node.kubelet.frames(ALONE) for device in frame.devices]
                assert {(device.id, device.health) for device in alone} == {(h100.address, HEALTHY)}, alone
                assert daemon.terminate() == 0
                daemon.check_one_life()


@dataclass(frozen=True, slots=True)
class _Scene:
    node: Node
    daemon: DaemonProcess
    h100: Function
    gpu: Function
    audio: Function

    def listed(self, health: str) -> dict[str, str]:
        """Device lists with both GPUs: the one alone is Healthy whatever happens to the other."""
        return {self.h100.address: HEALTHY, self.gpu.address: health}

    def wait_reason(self, *parts: str) -> None:
        """Wait until the log says all of that of the paired GPU's health."""
        eventually(
            " and ".join(parts),
            lambda: all(part in last_reason(self.daemon, self.gpu.address) for part in parts),
            timeout_s=NAMED_WITHIN_S,
        )

    def check_allocation(self, resource: str, function: Function, pod: str | None = None) -> None:
        """Its one group, which opens, and a variable that names it alone."""
        allocated = self.node.kubelet.allocate(resource, [function.address], pod=pod)
        variable = "PCI_RESOURCE_" + resource.upper().replace("/", "_").replace(".", "_")
        assert allocated.envs == {variable: function.address}, allocated.envs
        paths = [node.host_path for node in allocated.devices]
        assert all(map(os.path.exists, paths)), paths
        assert [path for path in paths if GROUP_NODE.fullmatch(path)] == [str(function.group_node)], paths
        os.close(os.open(function.group_node, os.O_RDWR))


def _alone(scene: _Scene) -> None:
    node, h100 = scene.node, scene.h100
    with node.guest.step("a GPU alone: late bind, a resource with its name, Allocate"):
        node.timed("first_bind_to_frame_ms", h100.bind_vfio, {h100.address: HEALTHY}, FRAME_WITHIN_S)
        assert node.resources == (ALONE,)
        scene.check_allocation(ALONE, h100)


def _not_viable(scene: _Scene) -> None:
    node, gpu, audio = scene.node, scene.gpu, scene.audio
    with node.guest.step("a GPU beside a host driver: Unhealthy, with that driver's name and a remedy"):
        node.timed(
            "bind_beside_host_driver_to_frame_ms", gpu.bind_vfio, scene.listed(UNHEALTHY), FRAME_WITHIN_S
        )
        scene.wait_reason("not viable", f"{audio.address} is bound to {HOST_DRIVER}", "bind it to vfio-pci")
    with node.guest.step("the kernel says the same to a virtual machine, and so does Allocate"):
        node.figure("refusal_of_the_tenant", _refusal_of_the_tenant(gpu))
        assert f"{audio.address} is bound to {HOST_DRIVER}" in _refusal_of_allocate(node, gpu)


def _refusal_of_the_tenant(gpu: Function) -> str:
    with Tenant.start() as tenant:
        try:
            tenant.open_device(gpu.group_node, gpu.address)
        except RuntimeError as refused:
            return str(refused)
    raise AssertionError("the kernel let a group be used that a host driver is in")


def _refusal_of_allocate(node: Node, gpu: Function) -> str:
    try:
        node.kubelet.allocate(PAIRED, [gpu.address])
    except grpc.RpcError as refused:
        return str(refused)
    raise AssertionError("a group that is not viable was handed out")


def _viable(scene: _Scene) -> None:
    node, audio = scene.node, scene.audio
    with node.guest.step("the host driver lets go: viable; takes it again: not viable; lets go"):
        node.timed("host_driver_unbind_to_frame_ms", audio.unbind, scene.listed(HEALTHY), FRAME_WITHIN_S)
        node.timed(
            "host_driver_bind_to_frame_ms",
            lambda: audio.bind_to(HOST_DRIVER), scene.listed(UNHEALTHY), FRAME_WITHIN_S,
        )  # fmt: skip
        node.timed("second_unbind_to_frame_ms", audio.unbind, scene.listed(HEALTHY), FRAME_WITHIN_S)


def _held_by_its_companion(scene: _Scene) -> None:
    node, gpu, audio = scene.node, scene.gpu, scene.audio
    frames = len(node.frames)
    with node.guest.step("the audio function goes to vfio-pci as well"):
        audio.bind_vfio()
    with (
        node.guest.step(
            "an external process opens it, and not the GPU: the GPU is Unhealthy until it lets go"
        ),
        Tenant.start() as external,
    ):
        node.timed(
            "companion_opened_to_frame_ms",
            lambda: external.open_device(gpu.group_node, audio.address),
            scene.listed(UNHEALTHY), SEEN_WITHIN_S,
        )  # fmt: skip
        scene.wait_reason(f"enable of {audio.address} is 1", "kubelet has given it to no pod")
        node.timed(
            "companion_closed_to_frame_ms", external.close, scene.listed(HEALTHY), RELEASE_SEEN_WITHIN_S
        )
        assert len(node.frames) == frames + 2, "kubelet was told of the audio function's bind as well"


def _held_by_its_pod(scene: _Scene) -> None:
    node, gpu, audio = scene.node, scene.gpu, scene.audio
    with node.guest.step("Allocate: one group for both functions, the variable names the GPU"):
        scene.check_allocation(PAIRED, gpu, pod=POD)
    frames = len(node.frames)
    with (
        node.guest.step("the pod holds the GPU, the audio function is free: no host driver can have it"),
        Tenant.start() as pods_process,
    ):
        audio.unbind()
        audio.forget_override()
        pods_process.open_device(gpu.group_node, gpu.address)
        node.figure("refusal_of_the_host_driver", _refusal_of_the_host_driver(audio))
        assert audio.driver is None
        scene.wait_reason(f"allocated to pod default/{POD}")
        pods_process.close()
        node.kubelet.end_pod(POD)
        # The release shows in a poll, and the poll leads to a read of kubelet's ledger, where the pod has ended.
        eventually("free", lambda: last_reason(scene.daemon, gpu.address) == "free", timeout_s=LEFT_WITHIN_S)
        assert len(node.frames) == frames, "kubelet was told of something"


def _refusal_of_the_host_driver(audio: Function) -> str:
    """What the kernel says to it: the errno's name."""
    try:
        audio.bind_to(HOST_DRIVER)
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    raise AssertionError("the kernel let a host driver into a group that a virtual machine has")


def _found_again(scene: _Scene) -> None:
    node, audio = scene.node, scene.audio
    with node.guest.step("the audio function is removed and found again: the host driver is first"):
        frames = len(node.frames)
        audio.remove()
        assert not audio.path.exists()
        node.timed("rescan_to_frame_ms", rescan, scene.listed(UNHEALTHY), FRAME_WITHIN_S)
        assert (audio.driver, audio.group) == (HOST_DRIVER, scene.gpu.group)
        scene.wait_reason("not viable", f"{audio.address} is bound to {HOST_DRIVER}")
        assert len(node.frames) == frames + 1, "a group that has lost a function can be lent as before"
        node.timed("last_unbind_to_frame_ms", audio.unbind, scene.listed(HEALTHY), FRAME_WITHIN_S)


def _new_model(scene: _Scene) -> None:
    node = scene.node
    with node.guest.step("hot plug of a model that nobody knows: once bound, a resource of its own"):
        frames = len(node.frames)
        node.guest.qmp.plug(NEW_MODEL)
        new = function_behind(node.guest.machine, NEW_MODEL.port)
        assert (new.ids, new.driver) == (("10de", "2fff"), None)
        assert len(node.frames) == frames
        wanted = {**scene.listed(HEALTHY), new.address: HEALTHY}
        node.timed("new_model_bind_to_frame_ms", new.bind_vfio, wanted, FRAME_WITHIN_S)
        scene.check_allocation(NEW, new)
