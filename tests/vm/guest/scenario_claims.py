"""Claims: a GPU and its companion are bound for a virtual machine and returned; a pre-bound one stays on vfio-pci.

By the daemon's own writes to sysfs, from the pod of deploy/overlays/dra, with a real QEMU that has the group that the
CDI file names. Pre-bound are a GPU that vfio-pci took by its ids at boot, and one that a boot script bound, beside an
identical one that is on the host's driver: only that one is returned, also by a daemon that did not bind it. At last a
pre-bound one is claimed of a daemon that cannot write to sysfs at all.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Final

from gpuactors import limits
from tests.support.claims import unprepare
from tests.support.kubelet_grpcio import HEALTHY, UNHEALTHY
from tests.vm.guest import confined
from tests.vm.guest.claims import (
    ANSWER_WITHIN_S,
    CLAIMS_MACHINE,
    GPU_DRIVER,
    Cluster,
    Gpus,
    failed_as,
    prebound_pod,
    under_way,
)
from tests.vm.guest.daemon import DaemonProcess, mounts_of, status_of
from tests.vm.guest.node import KUBELET_DIR, SLACK_S, Node
from tests.vm.guest.qemu import Qemu
from tests.vm.guest.runner import Guest, eventually
from tests.vm.guest.sysfs import Function

MACHINE: Final = replace(CLAIMS_MACHINE, memory_mib=1536)

TRIED_WITHIN_S: Final = limits.CLAIM_RETRY_S + SLACK_S
"""From an unprepare to the first try, which finds who has the GPU open."""

CAPABILITIES: Final = sum(1 << confined.CAPABILITIES[name] for name in ("DAC_READ_SEARCH", "SYS_PTRACE"))
"""DAC_READ_SEARCH and SYS_PTRACE, to see who has a GPU open; sysfs asks for none."""

WRITABLE: Final = {
    "/var/lib/kubelet/device-plugins",
    "/var/lib/kubelet/plugins/gpu.nvidia.com",
    "/var/lib/kubelet/plugins_registry",
    "/var/lib/gpuactors",
    "/var/run/cdi",
    "/host/sys/bus/pci",
    "/host/sys/devices",
}
"""All that is writable in the pod, besides what a runtime mounts into every container (/proc, /dev)."""


@dataclass(frozen=True, slots=True)
class _Scene:
    guest: Guest
    node: Node
    cluster: Cluster
    gpus: Gpus
    daemon: DaemonProcess
    plugin: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A claim of the first daemon, which the second one is to release."""

    name: str
    uid: str
    function: Function
    node: tuple[int, int]
    """The group's, when it was prepared: another one, or a younger one, after an unbind."""


def run(guest: Guest) -> None:
    """Three daemons, one after the other."""
    gpus = Gpus.of(guest.machine)
    with ExitStack() as stack:
        node = stack.enter_context(Node.with_kubelet(guest))
        cluster = stack.enter_context(Cluster.running(guest, KUBELET_DIR))
        prebound = {gpus.h100.address: HEALTHY, gpus.twin.address: HEALTHY}
        with cluster.start("first") as daemon, cluster.plugin(daemon) as plugin:
            scene = _Scene(guest, node, cluster, gpus, daemon, plugin)
            with guest.step("four GPUs are offered, whatever driver they are on; two to the device plugin"):
                cluster.wait_offered(gpus)
                node.wait(prebound, SLACK_S)
            with guest.step("it is in the pod of deploy/overlays/dra, with no more than that"):
                _check_pod(daemon, CAPABILITIES, WRITABLE)
            _bound_held_and_returned(scene, prebound)
            before = _prepared_before_the_restart(scene)
            with guest.step("SIGTERM: 0; what was prepared stays so"):
                _ended(daemon)
                assert [claim.function.driver for claim in before] == ["vfio-pci"] * 3
        with cluster.start("second") as daemon, cluster.plugin(daemon) as plugin:
            _released_after_the_restart(_Scene(guest, node, cluster, gpus, daemon, plugin), before)
            with guest.step("SIGTERM: 0"):
                _ended(daemon)
        with cluster.start("prebound", pod=prebound_pod) as daemon, cluster.plugin(daemon) as plugin:
            _unprivileged(_Scene(guest, node, cluster, gpus, daemon, plugin))
            _ended(daemon)


def _check_pod(daemon: DaemonProcess, capabilities: int, writable: set[str]) -> None:
    pid = daemon.process.pid
    status = status_of(pid)
    for kind in ("Prm", "Eff", "Bnd"):
        assert int(status[f"Cap{kind}"], 16) == capabilities, status
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2"), status
    found = {target for target, options in mounts_of(pid).items() if "ro" not in options}
    assert {target for target in found if target.split("/")[1] not in ("proc", "dev")} == writable, found


def _unprivileged(scene: _Scene) -> None:
    """Where every GPU is pre-bound nothing of the host is written but kubelet's and CDI's directories."""
    cluster, function = scene.cluster, scene.gpus.twin
    with scene.guest.step(
        "a pre-bound GPU is claimed and unprepared by a daemon without any capability or sysfs"
    ):
        _check_pod(scene.daemon, 0, WRITABLE - {"/host/sys/bus/pci", "/host/sys/devices"})
        claim = _prepared(scene, "unprivileged", function)
        cluster.unprepared(scene.plugin, claim.name, claim.uid)
        assert _node_of(function) == claim.node
        scene.gpus.check_nothing_is_left(cluster)


def _bound_held_and_returned(scene: _Scene, prebound: Mapping[str, str]) -> None:
    step, cluster, gpus = scene.guest.step, scene.cluster, scene.gpus
    uid = cluster.api.claim("vm", gpus.gpu.address)
    with step("a GPU on the host's driver is claimed: it and its companion are on vfio-pci"):
        cluster.prepared(scene.plugin, "vm", uid)
        assert gpus.drivers == ("vfio-pci", "vfio-pci", "vfio-pci", GPU_DRIVER, "vfio-pci"), gpus.drivers
        gpus.check_overrides()
        cluster.check_cdi(uid, gpus.gpu)
    with step("one owner: the device plugin does not offer it"):
        scene.node.wait({**prebound, gpus.gpu.address: UNHEALTHY}, SLACK_S)
    with step("a real QEMU has it"), Qemu.start(gpus.gpu, scene.guest.artifacts / "qemu.log") as vm:
        vm.wait_taken()
        _unprepared_too_early(scene, uid, vm)
    with step("returned, each to its original driver, and nothing is left"):
        gpus.check_nothing_is_left(cluster)
        scene.node.wait(prebound, SLACK_S)


def _unprepared_too_early(scene: _Scene, uid: str, vm: Qemu) -> None:
    """Kubelet is early, or QEMU slow to die: nothing is written before it has let go."""
    with scene.guest.step("an unprepare while QEMU lives: not answered, and nothing is unbound"):
        call = under_way(unprepare, scene.plugin, "vm", uid)
        eventually(
            f"a try that names {vm}", lambda: failed_as(scene.daemon, str(vm)), timeout_s=TRIED_WITHIN_S
        )
        assert not call.is_over, call
        assert scene.gpus.drivers[:2] == ("vfio-pci", "vfio-pci"), scene.gpus.drivers
    with scene.guest.step("QEMU is killed: the GPU is returned"):
        killed_at = time.monotonic()
        vm.kill()
        assert call.answer(ANSWER_WITHIN_S).error == ""
        scene.cluster.figure("kill_to_early_unprepare_ms", round((call.ended_at - killed_at) * 1000, 1))


def _prepared_before_the_restart(scene: _Scene) -> list[_Prepared]:
    gpus, found = scene.gpus, []
    for name, function in (("by-ids", gpus.h100), ("by-script", gpus.twin)):
        with scene.guest.step(f"a pre-bound GPU is claimed ({name}): it is not unbound"):
            node = _node_of(function)
            found.append(_prepared(scene, name, function))
            assert found[-1].node == node
    with scene.guest.step("a GPU on the host's driver, identical to a pre-bound one, is claimed"):
        found.append(_prepared(scene, "identical", gpus.alone))
        gpus.check_overrides()
    return found


def _prepared(scene: _Scene, name: str, function: Function) -> _Prepared:
    uid = scene.cluster.api.claim(name, function.address)
    scene.cluster.prepared(scene.plugin, name, uid)
    scene.cluster.check_cdi(uid, function)
    return _Prepared(name, uid, function, _node_of(function))


def _released_after_the_restart(scene: _Scene, before: list[_Prepared]) -> None:
    cluster, gpus = scene.cluster, scene.gpus
    for claim in before:
        with scene.guest.step(f"after a restart {claim.name} is unprepared"):
            assert _node_of(claim.function) == claim.node
            cluster.unprepared(scene.plugin, claim.name, claim.uid)
            if claim.function != gpus.alone:
                assert _node_of(claim.function) == claim.node, "it was unbound"
    with scene.guest.step(
        "both pre-bound GPUs are still on vfio-pci, the third one is on its original driver"
    ):
        assert gpus.alone.driver == GPU_DRIVER
        gpus.check_nothing_is_left(cluster)


def _node_of(function: Function) -> tuple[int, int]:
    found = function.group_node.stat()
    return found.st_ino, found.st_ctime_ns


def _ended(daemon: DaemonProcess) -> None:
    assert daemon.terminate() == 0
    daemon.check_one_life()
