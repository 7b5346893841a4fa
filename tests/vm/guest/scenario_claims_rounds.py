"""GPUs are claimed and returned again and again, and a real QEMU that has one is killed: how long each takes.

A GPU with a companion, one alone, and a pre-bound one; each is where it belongs after every call. QEMU is killed as by
a container runtime: first the process, then kubelet's unprepare.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Final

from tests.vm.guest.claims import (
    CLAIMS_MACHINE,
    Cluster,
    Gpus,
)
from tests.vm.guest.node import KUBELET_DIR, Node
from tests.vm.guest.qemu import Qemu
from tests.vm.guest.runner import Guest
from tests.vm.guest.sysfs import Function
from tests.vm.kernels import NOT_BY_DEFAULT

MACHINE: Final = replace(CLAIMS_MACHINE, memory_mib=1536, kernels=NOT_BY_DEFAULT)  # figures

ROUNDS: Final = 10
VIRTUAL_MACHINES: Final = 3


@dataclass(frozen=True, slots=True)
class _Scene:
    guest: Guest
    cluster: Cluster
    gpus: Gpus
    plugin: Mapping[str, Any]


def run(guest: Guest) -> None:
    """One daemon."""
    gpus = Gpus.of(guest.machine)
    with ExitStack() as stack:
        stack.enter_context(Node.with_kubelet(guest))
        cluster = stack.enter_context(Cluster.running(guest, KUBELET_DIR))
        daemon = stack.enter_context(cluster.start("daemon"))
        scene = _Scene(guest, cluster, gpus, stack.enter_context(cluster.plugin(daemon)))
        cluster.wait_offered(gpus)
        _rounds(scene, "two_functions", gpus.gpu, gpus.audio)
        _rounds(scene, "one_function", gpus.alone)
        _rounds(scene, "a_prebound", gpus.h100)
        _killed(scene)
        with guest.step("nothing is left; SIGTERM: 0"):
            gpus.check_nothing_is_left(cluster)
            assert daemon.terminate() == 0
            daemon.check_one_life()


def _rounds(scene: _Scene, what: str, *functions: Function) -> None:
    """`functions` are those that are bound by a claim for the first one."""
    cluster, gpus = scene.cluster, scene.gpus
    prepares, unprepares, infos = list[float](), list[float](), list[float]()
    with scene.guest.step(f"{what}: {ROUNDS} claims, one after the other"):
        for number in range(ROUNDS):
            name = f"{what.replace('_', '-')}-{number}"
            uid = cluster.api.claim(name, functions[0].address)
            prepares.append(cluster.prepared(scene.plugin, name, uid))
            assert {function.driver for function in functions} == {"vfio-pci"}
            cluster.check_cdi(uid, functions[0])
            unprepares.append(cluster.unprepared(scene.plugin, name, uid))
            infos.append(cluster.get_info())
            assert gpus.at_rest, gpus.drivers
            gpus.check_overrides()
        cluster.figures(f"prepare_of_{what}", prepares)
        cluster.figures(f"unprepare_of_{what}", unprepares)
        cluster.figures(f"get_info_after_{what}", infos)


def _killed(scene: _Scene) -> None:
    cluster, gpus, returned = scene.cluster, scene.gpus, []
    with scene.guest.step(
        f"a real QEMU has a GPU with its companion and is killed, {VIRTUAL_MACHINES} times"
    ):
        for number in range(VIRTUAL_MACHINES):
            name = f"vm-{number}"
            uid = cluster.api.claim(name, gpus.gpu.address)
            cluster.prepared(scene.plugin, name, uid)
            with Qemu.start(gpus.gpu, scene.guest.artifacts / f"qemu-{number}.log") as vm:
                vm.wait_taken()
                killed_at = time.monotonic()
                vm.kill()
                cluster.unprepared(scene.plugin, name, uid)
                returned.append(round((time.monotonic() - killed_at) * 1000, 1))
            assert gpus.at_rest, gpus.drivers
        cluster.figures("kill_to_returned", returned)
