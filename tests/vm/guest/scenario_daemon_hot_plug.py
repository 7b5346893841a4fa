"""The main job against the real kernel: GPUs that are added, removed or of a new model reach kubelet without a restart.

The daemon runs with its periodic scan an hour away, so whatever kubelet sees after the start came from uevents. The
emulated functions are no GPUs: they are selected by vendor and device, and no class is asked for.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from tests.support.kubelet_grpcio import HEALTHY, KubeletStandIn
from tests.support.kubelet_seen import Snapshot
from tests.support.patience import patient
from tests.vm.guest.daemon import DaemonProcess
from tests.vm.guest.runner import Guest
from tests.vm.guest.sysfs import Function, function_behind, functions_behind
from tests.vm.machine import Machine, PciFunction

MACHINE: Final = Machine(
    ports=("rp1", "rp2", "rp3"),
    functions=(PciFunction("edu1", "edu", "rp1"), PciFunction("edu2", "edu", "rp2")),
)

NEW_MODEL: Final = PciFunction("late", "e1000e", "rp3", properties=("romfile=",))

EDU_RESOURCE: Final = "pci-1234/11e8"
"""Neither the vendor nor the model has a name that would make one: four hex digits each."""

NEW_MODEL_DOMAIN: Final = "intel.com/"
"""What comes after it is the model's name in pci.ids, which may change with that file."""

KUBELET_DIR: Final = Path("/run/kubelet")

FRAME_TIMEOUT_S: Final = patient(60.0)  # what Allocate gave to no pod stays listed for GRANT_GRACE_S
"""From a change of the kernel's to kubelet's device lists: milliseconds; on an emulated and busy machine a multiple."""


def run(guest: Guest) -> None:
    """One daemon process from an empty node to an empty node."""
    edu1, edu2 = (function_behind(guest.machine, port) for port in ("rp1", "rp2"))
    with KubeletStandIn(KUBELET_DIR) as kubelet:
        arguments = (
            "--kubelet-dir", str(KUBELET_DIR),
            "--uevents", "kernel", "--resync-interval-s", "3600",
            "--select", "vendor=1234,device=11e8", "--select", "vendor=8086,device=10d3",
        )  # fmt: skip
        with guest.step("the daemon starts on a node without a bound function"):
            daemon = DaemonProcess.start(arguments, guest.artifacts / "daemon.log")
        with daemon:
            try:
                with guest.step("it scans, and listens to the kernel"):
                    daemon.wait_until_it_listens()
                _known_model(guest, kubelet, edu1, edu2)
                late = _new_model(guest, kubelet)
                _away_again(guest, kubelet, edu1, edu2, late)
                with guest.step("it ends with 0 on SIGTERM and takes its sockets along"):
                    # The very process that was started: had it died and another one taken its place, this one's
                    # status would be another and its log would have a second beginning.
                    assert daemon.terminate() == 0
                    daemon.check_one_life()
                    assert [path.name for path in kubelet.socket_dir.glob("*.sock")] == ["kubelet.sock"]
                assert not kubelet.panics, kubelet.panics
            finally:
                _save_frames(guest, kubelet)


def _known_model(guest: Guest, kubelet: KubeletStandIn, edu1: Function, edu2: Function) -> None:
    with guest.step("nothing is bound: nothing is registered"):
        assert not kubelet.registrations
        assert kubelet.snapshot() == {}

    with guest.step("late bind of one function: one device"):
        _timed(guest, "first_bind_to_frame_ms", edu1.bind_vfio, kubelet, {EDU_RESOURCE: {edu1.address}})

    with guest.step("late bind of a second: two devices, in one more frame of the same stream"):
        _timed(
            guest, "bind_to_frame_ms", edu2.bind_vfio, kubelet, {EDU_RESOURCE: {edu1.address, edu2.address}}
        )
        assert _count(kubelet) == 1
        assert not kubelet.stream_ends(EDU_RESOURCE)

    with guest.step("Allocate: the address, and nodes that exist and open"):
        _check_allocation(kubelet, EDU_RESOURCE, edu1)
        _check_allocation(kubelet, EDU_RESOURCE, edu2)


def _new_model(guest: Guest, kubelet: KubeletStandIn) -> Function:
    lists = {EDU_RESOURCE: {behind.address for behind in _edu_functions(guest)}}
    with guest.step("hot plug of a never-seen model without a driver: nothing yet"):
        frames = kubelet.frames(EDU_RESOURCE)
        guest.qmp.plug(NEW_MODEL)
        late = function_behind(guest.machine, NEW_MODEL.port)
        assert late.driver is None
        assert kubelet.frames(EDU_RESOURCE) == frames
        assert _count(kubelet) == 1

    with guest.step("its bind: a second resource registers"):
        started = time.monotonic_ns()
        late.bind_vfio()
        kubelet.wait_for(
            lambda lists: len(lists) == 2 and all(lists.values()), FRAME_TIMEOUT_S, "a second resource"
        )
        resource = kubelet.registrations[-1].resource
        assert resource.startswith(NEW_MODEL_DOMAIN), resource
        _expect(kubelet, {**lists, resource: {late.address}})
        guest.figures["new_model_bind_to_frame_ms"] = _ms(kubelet.frames(resource)[0].at_ns - started)
        guest.figures["new_model_resource"] = resource
        assert _count(kubelet) == 2

    with guest.step("Allocate of the new model"):
        _check_allocation(kubelet, resource, late)
    return late


def _away_again(
    guest: Guest, kubelet: KubeletStandIn, edu1: Function, edu2: Function, late: Function
) -> None:
    resource = kubelet.registrations[-1].resource

    with guest.step("unbind: gone"):
        _timed(
            guest, "unbind_to_frame_ms", edu2.unbind, kubelet,
            {EDU_RESOURCE: {edu1.address}, resource: {late.address}},
        )  # fmt: skip

    with guest.step("plug out while bound: gone"):
        _timed(
            guest, "unplug_to_frame_ms", lambda: guest.qmp.unplug(NEW_MODEL.id), kubelet,
            {EDU_RESOURCE: {edu1.address}, resource: set()},
        )  # fmt: skip
        guest.qmp.wait_unplugged(NEW_MODEL.id, timeout_s=FRAME_TIMEOUT_S)
        assert functions_behind(guest.machine, NEW_MODEL.port) == []

    with guest.step("rebind: back again; the other was there all the time"):
        _timed(
            guest, "rebind_to_frame_ms", edu2.bind_vfio, kubelet,
            {EDU_RESOURCE: {edu1.address, edu2.address}, resource: set()},
        )  # fmt: skip
        always = [edu1.address in frame.ids for frame in kubelet.frames(EDU_RESOURCE)]
        assert all(always), always
        assert not kubelet.stream_ends(EDU_RESOURCE)


def _check_allocation(kubelet: KubeletStandIn, resource: str, function: Function) -> None:
    """The answer as KubeVirt wants it, and the group really opens."""
    allocated = kubelet.allocate(resource, [function.address])
    variable = "PCI_RESOURCE_" + resource.upper().replace("/", "_").replace(".", "_")
    assert allocated.envs == {variable: function.address}, allocated.envs
    for node in allocated.devices:
        assert node.host_path == node.container_path, node
        assert node.permissions == "mrw", node
        assert os.path.exists(node.host_path), f"{node} does not exist on this node"
    paths = [node.host_path for node in allocated.devices]
    assert {"/dev/vfio/vfio", str(function.group_node)} <= function.nodes
    assert sorted(paths) == sorted(function.nodes), paths
    # A virtual machine would do just this now. EBUSY would say that somebody holds the group.
    os.close(os.open(function.group_node, os.O_RDWR))


def _timed(
    guest: Guest, figure: str, act: Callable[[], None], kubelet: KubeletStandIn, wanted: dict[str, set[str]]
) -> None:
    """Do `act`, wait for kubelet's device lists to be as `wanted`, and keep the time from the one to the other."""
    started = time.monotonic_ns()
    act()
    _expect(kubelet, wanted)
    last = max(frame.at_ns for resource in wanted for frame in kubelet.frames(resource))
    guest.figures[figure] = _ms(last - started)


def _expect(kubelet: KubeletStandIn, wanted: dict[str, set[str]]) -> None:
    """Wait until the device lists hold exactly these devices, all of them Healthy."""

    def as_wanted(lists: Snapshot) -> bool:
        return {resource: set(devices) for resource, devices in lists.items()} == wanted and all(
            health == HEALTHY for devices in lists.values() for health in devices.values()
        )

    kubelet.wait_for(as_wanted, FRAME_TIMEOUT_S, f"lists with {wanted}")


def _edu_functions(guest: Guest) -> list[Function]:
    return [function_behind(guest.machine, port) for port in ("rp1", "rp2")]


def _count(kubelet: KubeletStandIn) -> int:
    """How often anything registered so far."""
    return len(kubelet.registrations)


def _save_frames(guest: Guest, kubelet: KubeletStandIn) -> None:
    resources = sorted({registration.resource for registration in kubelet.registrations})
    text = "".join(
        f"{item}\n"
        for resource in resources
        for item in (*kubelet.frames(resource), *kubelet.stream_ends(resource))
    )
    registrations = "".join(f"{registration}\n" for registration in kubelet.registrations)
    (guest.artifacts / "kubelet.log").write_text(registrations + text, encoding="utf-8")


def _ms(nanoseconds: int) -> float:
    return round(nanoseconds / 1e6, 2)
