"""An unbind for a claim hangs in the kernel: other claims and GetInfo are served, also by the next daemon.

A process has the descriptor of a claimed device in a message that nobody has received yet: no table of open files shows
it, so the daemon cannot refuse, and the kernel waits for it. The write waits in a process of its own, which outlives
the daemon, and a SIGKILL; it is made once. When the descriptor is closed the next daemon returns the GPU by itself.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from gpuactors import limits
from tests.support.claims import unprepare
from tests.vm.guest.claims import (
    ACT_WITHIN_S,
    CLAIMS_MACHINE,
    COMPANION_DRIVER,
    GPU_DRIVER,
    Cluster,
    Gpus,
    failed_as,
    override_of,
    state_of,
    under_way,
)
from tests.vm.guest.daemon import DaemonProcess
from tests.vm.guest.node import KUBELET_DIR, SLACK_S, Node
from tests.vm.guest.runner import Guest, eventually
from tests.vm.guest.tenant import Tenant, closed_on_failure

MACHINE: Final = CLAIMS_MACHINE

GIVEN_UP_WITHIN_S: Final = limits.SYSFS_WRITE_DEADLINE_S + SLACK_S

BLOCKED_WITHIN_S: Final = limits.CLAIM_RETRY_S + SLACK_S
"""To the next try, which finds the lock taken."""


@dataclass(frozen=True, slots=True)
class _Scene:
    guest: Guest
    cluster: Cluster
    gpus: Gpus
    daemon: DaemonProcess
    plugin: Mapping[str, Any]


def run(guest: Guest) -> None:
    """Two daemons, one after the other; the unbind hangs from the first one's life into the second one's."""
    gpus = Gpus.of(guest.machine)
    with ExitStack() as stack:
        stack.enter_context(Node.with_kubelet(guest))
        cluster = stack.enter_context(Cluster.running(guest, KUBELET_DIR))
        with cluster.start("first") as daemon:
            tenant = stack.enter_context(
                Tenant.start()
            )  # beside it, as a process takes seconds to start here
            with closed_on_failure(tenant), cluster.plugin(daemon) as plugin:
                scene = _Scene(guest, cluster, gpus, daemon, plugin)
                cluster.wait_offered(gpus)
                uid, writer = _hangs(scene, tenant)
                _others_are_served(scene, writer)
                with guest.step("SIGTERM while it hangs: 0; the process that waits for the write lives on"):
                    _ended(daemon)
                    _check_hangs(gpus, writer)
                with guest.step(
                    "a container runtime kills what is left of the container: the kernel waits on"
                ):
                    os.kill(writer, signal.SIGKILL)
                    eventually("an uninterruptible wait", lambda: state_of(writer) == "D", timeout_s=SLACK_S)
                    _check_hangs(gpus, writer)
        with cluster.start("second") as daemon, closed_on_failure(tenant), cluster.plugin(daemon) as plugin:
            scene = _Scene(guest, cluster, gpus, daemon, plugin)
            _the_next_daemon_knows(scene, writer)
            _goes_on_by_itself(scene, tenant, uid, writer)
            with guest.step("SIGTERM: 0"):
                _ended(daemon)


def _hangs(scene: _Scene, tenant: Tenant) -> tuple[str, int]:
    """The claim's UID, and the process whose write hangs."""
    step, cluster, gpus = scene.guest.step, scene.cluster, scene.gpus
    uid = cluster.api.claim("held", gpus.alone.address)
    with step("a process passes on the device of a claim, and nobody receives it"):
        cluster.prepared(scene.plugin, "held", uid)
        tenant.open_device(gpus.alone.group_node, gpus.alone.address)
        tenant.hide()
    with step("the claim is released: its unbind hangs, in a process of its own"):
        under_way(unprepare, scene.plugin, "held", uid)
        eventually("the driver's link going", lambda: gpus.alone.driver is None, timeout_s=ACT_WITHIN_S)
        lock = cluster.plugin_dir / "acts" / f"iommu-group-{gpus.alone.group}.lock"
        writer = int(lock.read_text(encoding="ascii").split()[0])
        waits_in = Path(f"/proc/{writer}/wchan")
        eventually("the kernel's wait", lambda: "vfio" in waits_in.read_text(), timeout_s=SLACK_S)
        cluster.figure("hangs_in", waits_in.read_text(encoding="ascii"))
    return uid, writer


def _check_hangs(gpus: Gpus, writer: int) -> None:
    """It still does."""
    assert state_of(writer) not in ("", "Z"), "nobody waits for the write any more"
    assert gpus.alone.driver is None


def _others_are_served(scene: _Scene, writer: int) -> None:
    """For as long as the write may take, and then the daemon gives it up."""
    cluster, gpus = scene.cluster, scene.gpus
    prepares: list[float] = []
    infos: list[float] = []
    with scene.guest.step("while it hangs GetInfo is answered, and another claim prepared and released"):
        deadline = time.monotonic() + GIVEN_UP_WITHIN_S
        while not failed_as(scene.daemon, "has not returned since"):
            assert time.monotonic() < deadline, "the write was not given up"
            infos.append(cluster.get_info())
            prepares.append(_another(scene, f"other-{len(prepares)}"))
        assert prepares, "it was given up at once"
        _check_hangs(gpus, writer)
        cluster.figures("unbind_hangs_get_info", infos)
        cluster.figures("unbind_hangs_prepare_of_another", prepares)
    with scene.guest.step("the next try names the process that waits, and writes nothing"):
        _wait_blocked(scene.daemon, writer)
        _check_hangs(gpus, writer)


def _another(scene: _Scene, name: str) -> float:
    """Claimed, bound with its companion, and returned; the milliseconds of the prepare."""
    cluster, gpus = scene.cluster, scene.gpus
    uid = cluster.api.claim(name, gpus.gpu.address)
    took_ms = cluster.prepared(scene.plugin, name, uid)
    cluster.check_cdi(uid, gpus.gpu)
    assert (gpus.gpu.driver, gpus.audio.driver) == ("vfio-pci", "vfio-pci")
    cluster.unprepared(scene.plugin, name, uid)
    assert (gpus.gpu.driver, gpus.audio.driver) == (GPU_DRIVER, COMPANION_DRIVER)
    assert override_of(gpus.gpu) == override_of(gpus.audio) == "(null)"
    return took_ms


def _the_next_daemon_knows(scene: _Scene, writer: int) -> None:
    cluster = scene.cluster
    with scene.guest.step("the next daemon finds the write waiting, and makes no second one"):
        _wait_blocked(scene.daemon, writer)
        _check_hangs(scene.gpus, writer)
    with scene.guest.step("it serves GetInfo and another claim as well"):
        cluster.figure("next_daemon_get_info_ms", cluster.get_info())
        cluster.figure("next_daemon_prepare_of_another_ms", _another(scene, "later"))
        _check_hangs(scene.gpus, writer)


def _goes_on_by_itself(scene: _Scene, tenant: Tenant, uid: str, writer: int) -> None:
    cluster, gpus = scene.cluster, scene.gpus
    with scene.guest.step("the process ends: the GPU is returned without another call"):
        killed_at = time.monotonic()
        tenant.kill()
        within_s = limits.CLAIM_RETRY_S + ACT_WITHIN_S
        eventually("the claim's end", partial(_unprepared, scene.daemon, uid), timeout_s=within_s)
        cluster.figure("close_to_unprepared_ms", round((time.monotonic() - killed_at) * 1000, 1))
        assert state_of(writer) == "", "the process that waited has not ended"
        gpus.check_nothing_is_left(cluster)
    with scene.guest.step("kubelet repeats the unprepare: nothing is left to do"):
        cluster.unprepared(scene.plugin, "held", uid)
        gpus.check_nothing_is_left(cluster)


def _wait_blocked(daemon: DaemonProcess, writer: int) -> None:
    sentence = f"is blocked by process {writer}"
    eventually(sentence, partial(failed_as, daemon, sentence), timeout_s=BLOCKED_WITHIN_S)


def _unprepared(daemon: DaemonProcess, uid: str) -> bool:
    return any(line["uid"] == uid for line in daemon.said("claim.unprepared"))


def _ended(daemon: DaemonProcess) -> None:
    assert daemon.terminate() == 0
    daemon.check_one_life()
