"""A GPU is unbound, or pulled out, while a process holds it: the kernel waits, the daemon does not.

Such an unbind sleeps in the kernel until the holder lets go. A newer kernel says `remove` of the vfio device at once
and the rest at the release; 6.1 says nothing before, and whoever reads `driver_override` or `uevent` of that function
sleeps as well. Two processes of the daemon, one after the other: the first one meets an unbind and an unplug under a
external process, then an unplug under a pod, and is ended while that hangs; the second one starts meanwhile, so that
its first scan of the bus meets it too.
"""

from __future__ import annotations

import platform
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc

from gpuactors import limits
from gpuactors.core.host.inspections import UNSETTLED_INSPECTIONS_S
from gpuactors.core.host.usage import POLL_S
from gpuactors.core.ledger.ledger import LEDGER_SETTLING_S
from gpuactors.core.step import CALL_SETTLE_S
from gpuactors.daemon.app import STOP_DEADLINE_S
from tests.support.kubelet_grpcio import HEALTHY, UNHEALTHY
from tests.support.patience import patient
from tests.vm.guest.daemon import DaemonProcess
from tests.vm.guest.node import NAMED_WITHIN_S, SLACK_S, Node, arguments, last_reason
from tests.vm.guest.runner import Guest, eventually
from tests.vm.guest.sysfs import Function, function_behind, functions_behind
from tests.vm.guest.tenant import Tenant, closed_on_failure
from tests.vm.machine import Machine, PciFunction

HELD: Final = PciFunction("edu1", "edu", "rp1")

MACHINE: Final = Machine(
    ports=("rp1", "rp2", "rp3"),
    functions=(HELD, PciFunction("edu2", "edu", "rp2"), PciFunction("edu3", "edu", "rp3")),
)

RESOURCE: Final = "pci-1234/11e8"

BUSYBOX: Final = "/run/busybox"

SERVED: Final = ("bound_before", "bound_meanwhile")
"""The GPUs that are handed out while another one hangs."""

HELD_POD: Final = "vm-held"

WAITS: Final = "its unbind or unplug waits in the kernel until no process has it open"
"""The daemon's words, once it has inspected the function."""

ANNOUNCED: Final = tuple(map(int, platform.release().split("-")[0].split(".")[:2])) >= (6, 6)
"""The kernel takes the vfio device away, and says so, before it waits (drivers/vfio/vfio_main.c, since cdevs came)."""

FRAME_WITHIN_S: Final = UNSETTLED_INSPECTIONS_S[0] + SLACK_S
"""From a change that the kernel announces to kubelet's device lists."""

FIRST_FRAME_WITHIN_S: Final = LEDGER_SETTLING_S + limits.DISCONNECT_WAIT_S + SLACK_S
"""From the first scan to the first frame: the ledger, a poll, Register."""

EXTERNAL_WITHIN_S: Final = POLL_S + SLACK_S
"""An external process opens a device, which sysfs shows to the next poll."""

RELEASED_WITHIN_S: Final = CALL_SETTLE_S + FRAME_WITHIN_S
"""From the holder's close to the device lists: only then the kernel goes on, and says so. After a call the list keeps
what it has for a while."""

LEFT_WITHIN_S: Final = limits.LEDGER_S + SLACK_S
"""A pod is gone from kubelet's ledger."""

CALL_WITHIN_S: Final = SLACK_S
"""A call waits for an inspection and a poll, which have no period to wait for; neither may meet the function that
hangs."""

HANGS_FOR_S: Final = POLL_S + 0.5
"""How long it is watched that nothing moves: a poll has been made meanwhile, and what it changed is told."""

UNPLUG_TIMEOUT_S: Final = patient(15.0)
"""From QEMU's word to the kernel's: pciehp waits for five seconds after the button was pressed."""

STOP_WITHIN_S: Final = STOP_DEADLINE_S + SLACK_S


def run(guest: Guest) -> None:
    """An external process, then a pod; two daemons."""
    edus = [function_behind(guest.machine, port) for port in guest.machine.ports]
    for edu in edus[:2]:
        edu.bind_vfio()
    with ExitStack() as stack:
        node = stack.enter_context(Node.with_kubelet(guest))
        scene = _Scene(node, *edus)
        with _started(node, "first") as daemon:
            # Beside it, as a process takes seconds to start here.
            external, vm = (stack.enter_context(Tenant.start()) for _ in range(2))
            with closed_on_failure(external, vm):
                with guest.step("the first daemon starts"):
                    daemon.wait_until_it_listens()
                    node.wait(scene.listed(held=HEALTHY), FIRST_FRAME_WITHIN_S)
                _unbound_under_an_external_process(scene, daemon, external)
                _unplugged_under_an_external_process(scene, daemon, external)
                _unplugged_under_a_pod(scene, daemon, vm)
                with guest.step("SIGTERM while the unplug hangs: 0, in time"):
                    _terminate_in_time(node, daemon, "stop_while_unplug_hangs_s")
        scene.end_pods("unplug_hangs")
        with _started(node, "second") as daemon, closed_on_failure(vm):
            _started_while_it_hangs(scene, daemon, vm)
            with guest.step("SIGTERM: 0, in time"):
                _terminate_in_time(node, daemon, "stop_s")


@dataclass(frozen=True, slots=True)
class _Scene:
    """`held` is what this is about, `other` is bound all the time, `late` is bound while `held` hangs."""

    node: Node
    held: Function
    other: Function
    late: Function

    def listed(self, *, held: str | None = None, late: str | None = None) -> dict[str, str]:
        """Kubelet's device lists: `other` is Healthy in all of them; None is not listed."""
        lists = {self.held.address: held, self.other.address: HEALTHY, self.late.address: late}
        return {address: health for address, health in lists.items() if health is not None}

    def allocate_in_time(self, figure: str, function: Function, pod: str) -> None:
        """Allocate for `pod`, with exactly the nodes that there are, within the bound."""
        started = time.monotonic()
        allocated = self.node.kubelet.allocate(RESOURCE, [function.address], pod=pod)
        self._in_time(figure, started)
        paths = sorted(device.host_path for device in allocated.devices)
        assert {"/dev/vfio/vfio", str(function.group_node)} <= function.nodes
        assert paths == sorted(function.nodes), paths

    def refused_in_time(self, figure: str, function: Function, *, pre_start: bool = False) -> str:
        """Allocate (or PreStartContainer) is refused within the bound; the refusal's words."""
        call = self.node.kubelet.prestart if pre_start else self.node.kubelet.allocate
        started = time.monotonic()
        try:
            call(RESOURCE, [function.address])
        except grpc.RpcError as error:
            # What grpcio's blocking calls raise is a Call as well, which its types do not say.
            refusal: Any = error
        else:
            raise AssertionError(f"{function.address} was handed out although the kernel is unbinding it")
        self._in_time(figure, started)
        assert refusal.code() is grpc.StatusCode.FAILED_PRECONDITION, refusal
        return str(refusal.details())

    def served_meanwhile(self, prefix: str, held: str) -> None:
        """While `held` hangs: another GPU is bound and handed out, one more is handed out, `held` stays as it is."""
        started_ns = time.monotonic_ns()
        self.node.timed(
            f"{prefix}_bind_of_another_to_frame_ms", self.late.bind_vfio,
            self.listed(held=held, late=HEALTHY), FRAME_WITHIN_S,
        )  # fmt: skip
        for name, function in zip(SERVED, (self.other, self.late), strict=True):
            self.allocate_in_time(f"{prefix}_allocate_{name}_ms", function, f"vm-{prefix}-{name}")
        time.sleep(HANGS_FOR_S)
        self.node.check_always(self.listed(held=held), started_ns)

    def end_pods(self, prefix: str) -> None:
        """The pods of `served_meanwhile` end."""
        for name in SERVED:
            self.node.kubelet.end_pod(f"vm-{prefix}-{name}")

    def _in_time(self, figure: str, started: float) -> None:
        took_s = time.monotonic() - started
        assert took_s <= CALL_WITHIN_S, f"{figure}: {took_s:.3f} s, at most {CALL_WITHIN_S:g} s are promised"
        self.node.figure(figure, round(took_s * 1000, 1))


def _unbound_under_an_external_process(scene: _Scene, daemon: DaemonProcess, external: Tenant) -> None:
    node, step, held = scene.node, scene.node.guest.step, scene.held
    with ExitStack() as stack:
        with step("an external process opens the device: Unhealthy"):
            external.open_device(held.group_node, held.address)
            node.wait(scene.listed(held=UNHEALTHY), EXTERNAL_WITHIN_S)
        with step("its unbind hangs: no link, and whoever reads driver_override may hang with it"):
            unbind = stack.enter_context(_Hanging.shell(f"echo {held.address} >{held.path}/driver/unbind"))
            _wait_until_taken(held)
            readers = {
                name: stack.enter_context(_Hanging.shell(f"cat {held.path}/{name}"))
                for name in ("driver_override", "uevent")
            }
        with step("unbind hangs: other GPUs are bound and handed out; this one stays listed, Unhealthy"):
            scene.served_meanwhile("unbind_hangs", UNHEALTHY)
            assert "enable" in last_reason(daemon, held.address), last_reason(daemon, held.address)
            assert (WAITS in last_reason(daemon, held.address)) is ANNOUNCED, (
                "it has inspected it, or it has not"
            )
            assert unbind.hangs
            for name, reader in readers.items():
                node.figure(f"unbind_hangs_reader_of_{name}_too", reader.hangs)
                assert reader.hangs or ANNOUNCED
            assert held.group_node.exists()
            _check_nothing_hangs(daemon)
        with step("the external process closes: the unbind ends, and the device goes"):
            node.timed(
                "unbind_hung_close_to_frame_ms", external.close, scene.listed(late=HEALTHY), RELEASED_WITHIN_S
            )
            for process in (unbind, *readers.values()):
                process.ends()
    with step("bound again: Healthy"):
        scene.end_pods("unbind_hangs")
        node.timed(
            "rebind_to_frame_ms", held.bind_vfio, scene.listed(held=HEALTHY, late=HEALTHY), FRAME_WITHIN_S
        )


def _unplugged_under_an_external_process(scene: _Scene, daemon: DaemonProcess, external: Tenant) -> None:
    """At once after he has opened it, before any poll can have seen him."""
    node, step, held = scene.node, scene.node.guest.step, scene.held
    with step("unplug hangs: Allocate of the very device is refused in time, and says what waits for what"):
        external.open_device(held.group_node, held.address)
        node.guest.qmp.unplug(HELD.id)
        _wait_until_taken(held)
        text = scene.refused_in_time("unplug_hangs_refusal_ms", held)
        assert (
            f"{held.address}: IOMMU group {held.group} is in use (enable of {held.address} is 1)" in text
        ), text
        assert WAITS in text, text
    with step("unplug hangs: it stays listed, Unhealthy, with that reason"):
        node.wait(scene.listed(held=UNHEALTHY, late=HEALTHY), FRAME_WITHIN_S)
        started_ns = time.monotonic_ns()
        time.sleep(HANGS_FOR_S)
        node.check_always(scene.listed(held=UNHEALTHY, late=HEALTHY), started_ns)
        assert WAITS in last_reason(daemon, held.address), last_reason(daemon, held.address)
        assert held.path.exists()
        _check_nothing_hangs(daemon)
    with step("the external process is killed: the function goes, and the device with it"):
        node.timed(
            "unplug_hung_sigkill_to_frame_ms", external.kill, scene.listed(late=HEALTHY), RELEASED_WITHIN_S
        )
        node.guest.qmp.wait_unplugged(HELD.id, timeout_s=UNPLUG_TIMEOUT_S)
        assert functions_behind(node.guest.machine, HELD.port) == []
    with step("plugged in and bound again: Healthy"):
        node.guest.qmp.plug(HELD)
        assert function_behind(node.guest.machine, HELD.port) == held
        node.timed(
            "replug_bind_to_frame_ms",
            held.bind_vfio,
            scene.listed(held=HEALTHY, late=HEALTHY),
            FRAME_WITHIN_S,
        )


def _wait_until_taken(held: Function) -> None:
    """Wait until the kernel has begun to take it from its driver: it cannot end that before the holder lets go."""
    eventually("the driver's link going", lambda: held.driver is None, timeout_s=UNPLUG_TIMEOUT_S)
    vfio_dev = held.path / "vfio-dev"
    if ANNOUNCED:
        eventually("the vfio device going", lambda: not vfio_dev.exists(), timeout_s=SLACK_S)
    assert vfio_dev.exists() is not ANNOUNCED


def _unplugged_under_a_pod(scene: _Scene, daemon: DaemonProcess, vm: Tenant) -> None:
    node, step, held = scene.node, scene.node.guest.step, scene.held
    with step("a pod is given the device and opens it: Healthy, as it is counted already"):
        scene.allocate_in_time("allocate_ms", held, HELD_POD)
        vm.open_device(held.group_node, held.address)
        _wait_reason(daemon, held, f"allocated to pod default/{HELD_POD}", NAMED_WITHIN_S)
    with step("the pods that were served before are gone: what was bound for one is unbound"):
        _wait_reason(daemon, scene.late, "free", LEFT_WITHIN_S)
        scene.late.unbind()
        node.wait(scene.listed(held=HEALTHY), CALL_SETTLE_S + FRAME_WITHIN_S)
    # Unhealthy as soon as the daemon inspects it: a lost device is subtracted, whosever it is.
    seen = UNHEALTHY if ANNOUNCED else HEALTHY
    with step("it is pulled out: the kernel waits for the pod"):
        node.guest.qmp.unplug(HELD.id)
        _wait_until_taken(held)
        node.wait(scene.listed(held=seen), FRAME_WITHIN_S)
    with step("unplug hangs: other GPUs are bound and handed out; this one stays as kubelet counts it"):
        scene.served_meanwhile("unplug_hangs", seen)
        assert held.path.exists()
        _check_nothing_hangs(daemon)
    with step("unplug hangs: PreStartContainer of it is refused, and says why; listed, Unhealthy"):
        text = scene.refused_in_time("unplug_hangs_start_refusal_ms", held, pre_start=True)
        assert f"{held.address}: allocated to pod default/{HELD_POD}; {WAITS}" in text, text
        node.wait(scene.listed(held=UNHEALTHY, late=HEALTHY), FRAME_WITHIN_S)
        _wait_reason(daemon, held, f"allocated to pod default/{HELD_POD}; {WAITS}", SLACK_S)
        _check_nothing_hangs(daemon)


def _started_while_it_hangs(scene: _Scene, daemon: DaemonProcess, vm: Tenant) -> None:
    node, step, held = scene.node, scene.node.guest.step, scene.held
    with step("a second daemon starts while the unplug hangs: its scan does not, its list is the same"):
        daemon.wait_until_it_listens()
        node.wait(scene.listed(held=UNHEALTHY, late=HEALTHY), FIRST_FRAME_WITHIN_S)
        _wait_reason(daemon, held, f"allocated to pod default/{HELD_POD}; {WAITS}", SLACK_S)
        assert held.path.exists(), "the unplug was over before this daemon had started"
        _check_nothing_hangs(daemon)
    with step("unplug hangs: it hands out a GPU whose pod ended in between"):
        scene.allocate_in_time("second_allocate_ms", scene.late, "vm-again")
    with step("the pod's process ends: the function goes; listed, Unhealthy, until the pod is gone too"):
        started = time.monotonic()
        vm.kill()
        _wait_reason(daemon, held, "the PCI function is gone from this node", RELEASED_WITHIN_S)
        node.figure("unplug_hung_sigkill_to_gone_ms", round((time.monotonic() - started) * 1000, 1))
        node.guest.qmp.wait_unplugged(HELD.id, timeout_s=UNPLUG_TIMEOUT_S)
        assert functions_behind(node.guest.machine, HELD.port) == []
        node.wait(scene.listed(held=UNHEALTHY, late=HEALTHY), SLACK_S)
    with step("the pod ends: no longer listed"):
        node.timed(
            "pod_end_to_frame_ms", lambda: node.kubelet.end_pod(HELD_POD), scene.listed(late=HEALTHY),
            LEFT_WITHIN_S,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Hanging:
    """A process that the kernel lets sleep: by itself, so that its sleep is nobody else's."""

    process: subprocess.Popen[bytes]

    @classmethod
    @contextmanager
    def shell(cls, command: str) -> Iterator[_Hanging]:
        """Start it; at the end it is killed, which the kernel may only do later."""
        process = subprocess.Popen(
            [BUSYBOX, "sh", "-c", command], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )
        try:
            yield cls(process)
        finally:
            process.kill()

    @property
    def hangs(self) -> bool:
        """It has not ended yet."""
        return self.process.poll() is None

    def ends(self) -> None:
        """It ends now, and well. Raises subprocess.TimeoutExpired."""
        status = self.process.wait(timeout=SLACK_S)
        assert status == 0, f"{self.process.args!r} ended with {status}"


def _started(node: Node, name: str) -> DaemonProcess:
    return DaemonProcess.start(arguments("vendor=1234,device=11e8"), node.guest.artifacts / f"{name}.log")


def _wait_reason(daemon: DaemonProcess, function: Function, part: str, within_s: float) -> None:
    """Wait until the log's last reason for it has that in it. Raises TimeoutError."""
    what = f"{part!r} as the reason for {function.address}"
    eventually(what, lambda: part in last_reason(daemon, function.address), timeout_s=within_s)


def _check_nothing_hangs(daemon: DaemonProcess) -> None:
    """It is alive, and none of its threads sleeps uninterruptibly for long (as who waits for a device's lock does)."""
    daemon.check_alive()
    eventually(
        "no thread of the daemon in state D", lambda: not _stuck(daemon.process.pid), timeout_s=SLACK_S
    )


def _stuck(pid: int) -> list[str]:
    stats = []
    for path in Path(f"/proc/{pid}/task").glob("*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that has just ended
            stats.append(path.read_text(encoding="ascii"))
    # The state is the first word after the command in parentheses, which may have spaces in it (proc(5)).
    return [stat for stat in stats if stat.rpartition(")")[2].split()[0] == "D"]


def _terminate_in_time(node: Node, daemon: DaemonProcess, figure: str) -> None:
    started = time.monotonic()
    assert daemon.terminate() == 0
    took_s = time.monotonic() - started
    assert took_s <= STOP_WITHIN_S, f"it took {took_s:.1f} s to end, at most {STOP_WITHIN_S:g} s are promised"
    assert not daemon.said("daemon.died")
    node.figure(figure, round(took_s, 2))
