"""Claims of a GPU that a process of the host has open by its host's driver: refused and said, and bound when it closes.

The e1000e that plays the GPU has one character device below it, its PTP clock, as NVIDIA's GPU has /dev/nvidia0. The
process opens it after the daemon has looked at the GPU and found it free, so that a later look has to see it. That a
driver keeps a GPU started although nobody has it open cannot be shown here: no driver of Debian's does.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

from gpuactors import limits
from gpuactors.core.gpus.fitness import FITNESS_CHECK_S, FITNESS_RETRY_S
from tests.support.claims import DRIVER, device_of, prepare
from tests.support.patience import patient
from tests.vm.guest.claims import (
    ANSWER_WITHIN_S,
    CLAIMS_MACHINE,
    GPU_DRIVER,
    Cluster,
    Gpus,
    failed_as,
    under_way,
)
from tests.vm.guest.node import KUBELET_DIR, SLACK_S, Node
from tests.vm.guest.runner import Guest, eventually
from tests.vm.guest.sysfs import Function

MACHINE: Final = replace(CLAIMS_MACHINE, scenario_timeout_s=600.0)

BUSYBOX: Final = "/run/busybox"
CAUSE: Final = "InUseOnHost"

SEEN_WITHIN_S: Final = FITNESS_CHECK_S + patient(15.0)
"""From an open of a GPU that was found free to the look that sees it."""
FREE_WITHIN_S: Final = FITNESS_RETRY_S + patient(15.0)
"""From its close to the look that does not see it any more."""
TRIED_WITHIN_S: Final = limits.CLAIM_RETRY_S + SLACK_S


def run(guest: Guest) -> None:
    """One daemon."""
    gpus = Gpus.of(guest.machine)
    function = gpus.alone
    with ExitStack() as stack:
        stack.enter_context(Node.with_kubelet(guest))
        cluster = stack.enter_context(Cluster.running(guest, KUBELET_DIR))
        daemon = stack.enter_context(cluster.start("daemon"))
        plugin = stack.enter_context(cluster.plugin(daemon))
        cluster.wait_offered(gpus)
        with guest.step("a GPU on its host's driver is offered without a taint"):
            assert _taints(cluster, function) == []
            assert not daemon.said("device.unclaimable")
        with (
            guest.step("a process of the host opens it: a later look says so, and it is tainted"),
            _user(function),
        ):
            eventually("the look", lambda: daemon.said("device.unclaimable") or None, timeout_s=SEEN_WITHIN_S)
            (said,) = daemon.said("device.unclaimable")
            assert (said["address"], said["cause"]) == (function.address, CAUSE), said
            eventually("the taint", lambda: _taints(cluster, function) == [CAUSE], timeout_s=SLACK_S)
        with guest.step("the process closes it: the taint goes"):
            eventually("the look", lambda: daemon.said("device.claimable") or None, timeout_s=FREE_WITHIN_S)
            eventually("no taint", lambda: _taints(cluster, function) == [], timeout_s=SLACK_S)
        with (
            guest.step("a claim meets a process that has opened it since: refused by its name"),
            _user(function) as user,
        ):
            uid = cluster.api.claim("vm", function.address)
            call = under_way(prepare, plugin, "vm", uid)
            named = f"process {user.pid}"
            eventually(
                f"a try that names {named}", lambda: failed_as(daemon, named), timeout_s=TRIED_WITHIN_S
            )
            assert (call.is_over, function.driver) == (False, GPU_DRIVER)
        with guest.step("the process closes it: the prepare that waits succeeds"):
            assert call.answer(ANSWER_WITHIN_S).error == ""
            assert function.driver == "vfio-pci"
            cluster.unprepared(plugin, "vm", uid)
        with guest.step("SIGTERM: 0"):
            assert daemon.terminate() == 0
        assert gpus.at_rest, gpus.drivers
        gpus.check_overrides()


@contextmanager
def _user(function: Function) -> Iterator[subprocess.Popen[bytes]]:
    """A process that has the function open by its driver's character device."""
    (clock,) = (function.path / "ptp").iterdir()
    with (Path("/dev") / clock.name).open("rb") as device:
        process = subprocess.Popen([BUSYBOX, "sleep", "3600"], stdin=device)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _taints(cluster: Cluster, function: Function) -> list[str]:
    """The values of the taints that the GPU has in its slice."""
    slices = cluster.api.do(cluster.api.server.slices, DRIVER)
    devices = [d for s in slices for d in s["spec"].get("devices") or ()]
    (device,) = (d for d in devices if d["name"] == device_of(function.address))
    return [taint["value"] for taint in device.get("taints") or ()]
