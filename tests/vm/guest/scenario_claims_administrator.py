"""Claims beside an administrator: what he binds stays where he put it, and a module that is not loaded holds no claim.

A GPU is bound to vfio-pci by hand between two claims, and back; it loses its driver and gets it again by the kernel's
own probe; the host's driver is unloaded while a claim has the GPU, and loaded again later. The vfio driver is unloaded,
and loaded by the daemon (`--load-modules on`, in the pod of deploy/overlays/load-modules). What the daemon takes for
facts is looked at beside that: the number of a function's directory, and its interrupts.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from gpuactors.core.gpus.returns import RETURN_RETRY_S
from tests.support.patience import patient
from tests.vm.guest.claims import (
    BY_IDS_PARAMETER,
    CLAIMS_MACHINE,
    GPU_DRIVER,
    Cluster,
    Gpus,
    load_modules_pod,
    override_of,
)
from tests.vm.guest.daemon import DaemonProcess
from tests.vm.guest.node import KUBELET_DIR, SLACK_S, Node
from tests.vm.guest.runner import Guest, eventually
from tests.vm.guest.sysfs import Function, rescan
from tests.vm.provision import cached_kernel

MACHINE: Final = replace(CLAIMS_MACHINE, scenario_timeout_s=600.0)

BUSYBOX: Final = "/run/busybox"

MODPROBE: Final = Path("/run/modprobe")
"""What the guest's kernel takes for it: the guest has busybox's insmod, and its modules are elsewhere."""

RETURNED_WITHIN_S: Final = RETURN_RETRY_S + patient(15.0)
"""From the driver that is there to the GPU that is on it."""


@dataclass(frozen=True, slots=True)
class _Scene:
    guest: Guest
    cluster: Cluster
    gpus: Gpus
    daemon: DaemonProcess
    plugin: Mapping[str, Any]

    def claimed(self, name: str, function: Function) -> str:
        """A claim of this GPU is prepared; its UID."""
        uid = self.cluster.api.claim(name, function.address)
        self.cluster.prepared(self.plugin, name, uid)
        _check_on(function, "vfio-pci")
        return uid

    def claimed_and_released(self, name: str, function: Function) -> None:
        """A claim of it comes and goes."""
        self.cluster.unprepared(self.plugin, name, self.claimed(name, function))


def run(guest: Guest) -> None:
    """One daemon."""
    gpus = Gpus.of(guest.machine)
    with guest.step("what the daemon takes for facts is as it thinks"):
        _facts(guest, gpus.alone)
    with ExitStack() as stack:
        stack.enter_context(Node.with_kubelet(guest))
        cluster = stack.enter_context(Cluster.running(guest, KUBELET_DIR))
        daemon = stack.enter_context(cluster.start("daemon", pod=load_modules_pod))
        plugin = stack.enter_context(cluster.plugin(daemon))
        scene = _Scene(guest, cluster, gpus, daemon, plugin)
        cluster.wait_offered(gpus)
        _module_not_loaded(scene)
        _without_a_driver(scene)
        _bound_by_hand(scene)
        _vfio_driver_not_loaded(scene)
        with guest.step("SIGTERM: 0"):
            assert daemon.terminate() == 0
        assert gpus.at_rest, gpus.drivers
        gpus.check_overrides()


def _facts(guest: Guest, function: Function) -> None:
    presence = _presence(function)
    guest.figures["interrupts of the host's driver"] = _interrupts(function)
    assert _interrupts(function) > 0, "e1000e has its vectors from its probe on"
    function.unbind()
    assert _interrupts(function) == 0, "no driver, no vectors"
    function.bind_vfio()
    assert _interrupts(function) == 0, "nobody has it open"
    function.unbind()
    function.forget_override()
    function.bind_to(GPU_DRIVER)
    assert _presence(function) == presence, "a bind changes no directory's number"
    function.remove()
    rescan()
    eventually("it is back", lambda: function.driver == GPU_DRIVER, timeout_s=SLACK_S)
    assert _presence(function) != presence, "found again, it is another one"


def _bound_by_hand(scene: _Scene) -> None:
    function = scene.gpus.alone
    with scene.guest.step("after a claim the GPU is on its host's driver again"):
        scene.claimed_and_released("first", function)
        _check_on(function, GPU_DRIVER)
    with scene.guest.step("an administrator binds it to vfio-pci: the next claim leaves it there"):
        function.unbind()
        function.bind_vfio()
        function.forget_override()
        node = function.group_node.stat().st_ino
        scene.claimed_and_released("second", function)
        _check_on(function, "vfio-pci")
        assert function.group_node.stat().st_ino == node, "it was unbound meanwhile"
    with scene.guest.step("he binds it back: the next claim returns it to that driver"):
        function.unbind()
        function.bind_to(GPU_DRIVER)
        scene.claimed_and_released("third", function)
        _check_on(function, GPU_DRIVER)
    with scene.guest.step("driverctl binds it while a claim has it: it stays, with its override"):
        uid = scene.claimed("fourth", function)
        function.override_vfio()
        scene.cluster.unprepared(scene.plugin, "fourth", uid)
        assert (function.driver, override_of(function)) == ("vfio-pci", "vfio-pci")
        function.unbind()
        function.forget_override()
        function.bind_to(GPU_DRIVER)


def _without_a_driver(scene: _Scene) -> None:
    function = scene.gpus.alone
    with scene.guest.step("a GPU that was plugged in without a driver is given to the one that takes it"):
        _unload()
        function.remove()
        rescan()
        eventually("it is back", lambda: function.group is not None, timeout_s=SLACK_S)
        _check_on(function, None)
        uid = scene.claimed("fifth", function)
        _load(scene.guest)
        scene.cluster.unprepared(scene.plugin, "fifth", uid)
        _check_on(function, GPU_DRIVER)
        assert override_of(function) == "(null)"


def _module_not_loaded(scene: _Scene) -> None:
    function = scene.gpus.alone
    with scene.guest.step("the host's driver is unloaded under a claim: its end is answered, the GPU stays"):
        uid = scene.claimed("sixth", function)
        _unload()
        scene.cluster.unprepared(scene.plugin, "sixth", uid)
        _check_on(function, "vfio-pci")
        assert len(scene.daemon.said("claim.return_owed")) == 1
    with scene.guest.step("it can be claimed again meanwhile"):
        scene.claimed_and_released("seventh", function)
        _check_on(function, "vfio-pci")
    with scene.guest.step("the module is loaded: the GPU is returned by itself"):
        _load(scene.guest)
        eventually("the return", lambda: function.driver == GPU_DRIVER, timeout_s=RETURNED_WITHIN_S)
        eventually("its word", lambda: scene.daemon.said("claim.return_done"), timeout_s=SLACK_S)
        eventually("the other one", lambda: scene.gpus.gpu.driver == GPU_DRIVER, timeout_s=SLACK_S)


def _vfio_driver_not_loaded(scene: _Scene) -> None:
    function, module = scene.gpus.alone, _module(scene.guest, "vfio-pci")
    with scene.guest.step("vfio-pci is unloaded: the host's modprobe loads it for the next claim"):
        MODPROBE.write_text(
            f'#!{BUSYBOX} sh\n[ "$*" = "-- vfio-pci" ] && exec {BUSYBOX} insmod {module} {BY_IDS_PARAMETER}\n',
            encoding="utf-8",
        )
        MODPROBE.chmod(0o700)
        Path("/proc/sys/kernel/modprobe").write_text(f"{MODPROBE}\n", encoding="ascii")
        subprocess.run([BUSYBOX, "rmmod", "vfio_pci"], check=True)
        assert not Path("/sys/bus/pci/drivers/vfio-pci").exists()
        scene.claimed_and_released("eighth", function)
        _check_on(function, GPU_DRIVER)
        (said,) = scene.daemon.said("module.loaded")
        assert (said["device"], said["driver"]) == (function.address, "vfio-pci"), said


def _check_on(function: Function, driver: str | None) -> None:
    assert function.driver == driver, function.driver


def _presence(function: Function) -> int:
    return os.stat(function.path).st_ino


def _interrupts(function: Function) -> int:
    """How many vectors of MSI or MSI-X its driver has."""
    try:
        return len(os.listdir(function.path / "msi_irqs"))
    except FileNotFoundError:
        return 0


def _unload() -> None:
    """The host's driver is gone."""
    subprocess.run([BUSYBOX, "rmmod", GPU_DRIVER], check=True)


def _load(guest: Guest) -> None:
    """The host's driver is there again: the module as it was fetched on the host."""
    subprocess.run([BUSYBOX, "insmod", _module(guest, GPU_DRIVER)], check=True)


def _module(guest: Guest, name: str) -> str:
    """Its file, as it was fetched on the host."""
    (found,) = cached_kernel(guest.kernel).modules.glob(f"kernel/**/{name}.ko")
    return str(found)
