"""A node of Kata: the daemon as a process, kubelet's calls over real sockets, and the CDI files as Kata reads them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from gpuactors.core.values.device_spec import file_name
from gpuactors.core.values.model import ResourceName
from tests.process.daemon import WAIT_S, DaemonProcess, eventually, gpuactors
from tests.process.node import H100, HEALTHY, UNHEALTHY, UNKNOWN, Node, address, open_node, refusal
from tests.support import directories
from tests.support.kata import SandboxError, sandbox_nodes
from tests.support.kubelet_seen import PluginOptions

ONE, TWO = address(0x23), address(0x24)
FILE = file_name(ResourceName(H100))


@contextmanager
def kata_node(*slots: int) -> Iterator[tuple[Node, Path]]:
    with open_node(cdev=True) as node:
        for slot in slots:
            node.plug(slot, "2330", driver="vfio-pci")
        yield node, node.directory / "cdi"


def daemon_of(node: Node, cdi: Path, *words: str) -> DaemonProcess:
    return node.daemon("--preset=kata", f"--cdi-dir={cdi}", *words)


def resolves(cdi: Path, *devices: str) -> bool:
    try:
        return bool(sandbox_nodes([cdi], {H100: devices}))
    except SandboxError:
        return False


def test_a_pods_gpu_is_allocated_by_its_name_and_kata_resolves_it() -> None:
    with kata_node(0x23, 0x24) as (node, cdi), daemon_of(node, cdi) as daemon:
        node.wait_device_lists({H100: {ONE: HEALTHY, TWO: HEALTHY}})
        assert node.kubelet.options(H100) == PluginOptions(False, True), (
            "the machine runs before PreStartContainer"
        )
        answer = node.kubelet.allocate(H100, [TWO, ONE])
        assert answer.cdi_devices == (f"{H100}={ONE}", f"{H100}={TWO}")
        assert (answer.envs, answer.devices, answer.mounts, answer.annotations) == ({}, (), (), {})
        nodes = sandbox_nodes([cdi], {H100: [ONE, TWO]})
        assert nodes == {"/dev/vfio/vfio", "/dev/vfio/35", "/dev/vfio/36"}
        assert [path.name for path in cdi.iterdir()] == [FILE]
        node.assert_sound(daemon)


@pytest.mark.parametrize("how", ["removed", "torn", "directory"])
def test_a_file_that_somebody_removes_or_tears_is_written_again(how: str) -> None:
    with kata_node(0x23) as (node, cdi), daemon_of(node, cdi) as daemon:
        node.wait_device_lists({H100: {ONE: HEALTHY}})
        match how:
            case "removed":
                (cdi / FILE).unlink()
            case "torn":
                (cdi / FILE).write_text('{"cdiVersion"')
            case _:
                directories.remove(cdi)
        eventually(lambda: resolves(cdi, ONE), "the file")
        node.assert_sound(daemon)


def test_a_daemon_that_is_killed_before_a_file_is_written_leaves_one_that_offers_nothing_unwritten() -> None:
    """SIGKILL between the order and the list: what kubelet has as Healthy has been resolvable before."""
    with kata_node(0x23) as (node, cdi):
        for moment in ("before the file", "after the file", "after the list"):
            with daemon_of(node, cdi) as daemon:
                match moment:
                    case "before the file":
                        daemon.wait_event("resource.appeared", resource=H100)
                    case "after the file":
                        eventually((cdi / FILE).is_file, "the file")
                    case _:
                        node.wait_device_lists({H100: {ONE: HEALTHY}})
                daemon.signal(signal.SIGKILL)
                daemon.wait_exit()
            healthy = {d for frame in node.kubelet.frames(H100) for d in frame.devices if d.health == HEALTHY}
            assert not healthy or resolves(cdi, ONE), moment
        with daemon_of(node, cdi) as daemon:
            node.wait_device_lists({H100: {ONE: HEALTHY}})
            assert resolves(cdi, ONE)
            assert [path.name for path in cdi.iterdir()] == [FILE]


def test_where_the_directory_cannot_be_written_nothing_is_offered_and_the_reason_is_said() -> None:
    with kata_node(0x23) as (node, cdi):
        cdi.write_text("a file")
        with daemon_of(node, cdi) as daemon:
            node.wait_device_lists({H100: {ONE: UNHEALTHY}})
            daemon.wait_event(
                "device.changed", device=ONE, cause="CdiFileUnwritten", has=[f"{cdi} cannot be"]
            )
            cdi.unlink()
            node.wait_device_lists({H100: {ONE: HEALTHY}})
            assert resolves(cdi, ONE)


def test_a_name_that_is_no_kind_is_withheld_and_one_that_is_given_is_refused_at_once() -> None:
    with open_node() as node:
        cdi = node.directory / "cdi"
        node.plug(0x23, "29ff", driver="vfio-pci")
        with daemon_of(node, cdi):
            node.wait_device_lists({UNKNOWN: {ONE: UNHEALTHY}})
        with daemon_of(node, cdi, "--resource-name=10de:29ff=nvidia.com/GPU_29ff"):
            named = "nvidia.com/GPU_29ff"
            node.kubelet.wait_for(lambda lists: lists.get(named) == {ONE: HEALTHY}, WAIT_S, "its own name")
    for words in (("--preset=kata",), ("--allocate-as=cdi",)):
        done = gpuactors("run", *words, "--resource-name=10de:29ff=nvidia.com/29ff")
        assert done.returncode == os.EX_CONFIG
        assert "10de:29ff=nvidia.com/29ff" in done.stderr


def left_with_the_gpu_open(node: Node, daemon: DaemonProcess) -> None:
    """A pod is deleted by force, and its virtual machine still has its GPU open."""
    node.wait_device_lists({H100: {ONE: HEALTHY}})
    node.kubelet.allocate(H100, [ONE], pod="old")
    node.tree.open_group(35, pid=7)
    daemon.wait_event("device.changed", device=ONE, cause="Allocated")
    node.kubelet.force_delete("old")


def test_allocate_waits_for_a_machine_that_still_has_the_gpu_open() -> None:
    with kata_node(0x23) as (node, cdi), daemon_of(node, cdi) as daemon, ThreadPoolExecutor(1) as thread:
        left_with_the_gpu_open(node, daemon)
        answer = thread.submit(node.kubelet.allocate, H100, [ONE], pod="new", timeout_s=None)
        eventually(answer.running, "the call")
        node.tell(node.tree.kill(7))
        assert answer.result().cdi_devices == (f"{H100}={ONE}",)


def test_allocate_is_refused_if_the_machine_keeps_the_gpu() -> None:
    bounds = {"core.deviceplugin.calls.ALLOCATE_WAIT_S": 1.5, "limits.CALL_DEADLINE_S": 1.0}
    with kata_node(0x23) as (node, cdi):
        words = ("--preset=kata", f"--cdi-dir={cdi}")
        with node.daemon(*words, bounds=bounds) as daemon:
            left_with_the_gpu_open(node, daemon)
            with pytest.raises(grpc.RpcError) as error:
                node.kubelet.allocate(H100, [ONE], pod="new")
            assert refusal(error.value)[0] == "UNAVAILABLE"
            daemon.wait_event("call.refused", call="Allocate", causes=["HeldByOther"])


def test_signals_end_it_and_its_files_stay_for_the_pods_that_run() -> None:
    with kata_node(0x23) as (node, cdi):
        with daemon_of(node, cdi) as daemon:
            node.wait_device_lists({H100: {ONE: HEALTHY}})
            os.kill(daemon.pid, signal.SIGTERM)
            daemon.wait_exit()
        assert resolves(cdi, ONE)


def test_a_successor_keeps_the_file_and_what_a_pod_has_stays_healthy_throughout() -> None:
    with kata_node(0x23, 0x24) as (node, cdi), daemon_of(node, cdi) as first:
        node.wait_device_lists({H100: {ONE: HEALTHY, TWO: HEALTHY}})
        node.kubelet.allocate(H100, [ONE], pod="vm")
        first.wait_event("device.changed", device=ONE, cause="Allocated")
        before = len(node.kubelet.frames(H100))
        with daemon_of(node, cdi) as second:
            second.wait_event("plugin.registered", resource=H100)
            node.wait_device_lists({H100: {ONE: HEALTHY, TWO: HEALTHY}})
            frames = node.kubelet.frames(H100)[before:]
            assert {d.health for frame in frames for d in frame.devices if d.id == ONE} == {HEALTHY}
            assert resolves(cdi, ONE, TWO)
            (cdi / FILE).unlink()
            eventually(lambda: resolves(cdi, ONE, TWO), "the file, by the daemon that serves")
            first.signal(signal.SIGTERM)
            first.wait_exit()
            assert resolves(cdi, ONE, TWO)
