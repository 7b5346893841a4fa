"""Partitions of an NVLink fabric, with a daemon process, the operator's command, and grpcio as kubelet."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
import pytest

from tests.process.daemon import WAIT_S, DaemonProcess, eventually, gpuactors
from tests.process.node import H100, HEALTHY, Node, address, open_node, refusal, remove_sockets
from tests.support.claims import NODE, Api, plugin_of, prepare, unprepare, write_kubeconfig
from tests.support.fabric_manager import FabricManagerStandIn, Moment

A, B, C, D = (address(slot) for slot in (0x23, 0x24, 0x25, 0x26))
PARTITIONS = {"1": [A, B], "2": [C, D], "3": [A, B, C, D]}


@contextmanager
def board() -> Iterator[tuple[Node, FabricManagerStandIn]]:
    with open_node() as node:
        for slot in (0x23, 0x24, 0x25, 0x26):
            node.plug(slot, "2330", driver="vfio-pci")
        yield node, FabricManagerStandIn(node.directory / "f", PARTITIONS)


def daemon_of(node: Node, manager: FabricManagerStandIn, *words: str) -> DaemonProcess:
    command = f"--partition-command={manager.path}"
    words = (command, "--partition-activation=on", "--sets=require", *words)
    return node.daemon(*words, bounds={"limits.LEDGER_SETTLE_S": 3.0, "limits.LEDGER_S": 1.0})


def offered(node: Node) -> None:
    node.wait_device_lists({H100: dict.fromkeys((A, B, C, D), HEALTHY)})


def prestart(node: Node, *devices: str) -> None:
    """What kubelet does until it succeeds: it calls again after a refusal."""

    def succeeds() -> bool:
        try:
            node.kubelet.prestart(H100, devices or [A, B])
        except grpc.RpcError:
            return False
        return True

    eventually(succeeds, "PreStartContainer")


def runs(node: Node, manager: FabricManagerStandIn) -> None:
    """The pod's virtual machine starts: it needs its partition."""
    assert manager.active == {"1"}
    for group in (0x23, 0x24):
        node.tree.open_group(group, pid=7)


def ends(node: Node) -> None:
    """The pod is deleted, and its virtual machine ends."""
    node.kubelet.end_pod("vm")
    node.tell(node.tree.kill(7))


def is_left(node: Node, manager: FabricManagerStandIn) -> bool:
    """Whether a partition or an intent is left."""
    return bool(manager.active) or '"id"' in (node.directory / "s" / "partitions.json").read_text()


def test_a_pods_partition_is_active_before_it_starts_and_inactive_after_it() -> None:
    with board() as (node, manager), daemon_of(node, manager) as daemon:
        offered(node)
        node.kubelet.allocate(H100, [A, B], pod="vm")
        prestart(node)
        runs(node, manager)
        daemon.wait_event("partition.changed", partition="1", state="Active")
        told = gpuactors("explain", A, f"--state-dir={node.directory / 's'}").stdout
        assert f"1 with {B}: Active; 3 with {B}, {C}, {D}: inactive" in " ".join(told.split()), told
        ends(node)
        eventually(lambda: not is_left(node, manager), "the end of the partition")
        daemon.wait_event("partition.changed", partition="1", state="Absent")
        assert manager.acts == ["activate 1", "deactivate 1"]
        node.assert_sound(daemon)


@pytest.mark.parametrize(
    ("word", "moment"),
    [("query", "before"), ("activate", "before"), ("activate", "after"), ("", "before")],
    ids=["before the intent", "after the intent", "active before the answer", "after the answer"],
)
@pytest.mark.parametrize("lives", [True, False], ids=["the pod lives", "the pod ends"])
def test_a_daemon_that_is_killed_in_an_activation(word: str, moment: Moment, lives: bool) -> None:
    """The command of the killed daemon may go on. Nothing is used that is not active, and nothing is left."""
    with board() as (node, manager), ThreadPoolExecutor(1) as thread:
        with daemon_of(node, manager) as first:
            offered(node)
            if word:
                manager.hold(word, moment)
            node.kubelet.allocate(H100, [A, B], pod="vm")
            call = thread.submit(node.kubelet.prestart, H100, [A, B])
            if word:
                eventually(lambda: manager.is_held(word, moment), "the moment")
                assert not call.done(), "it was answered before"
            else:
                call.result(WAIT_S)
            first.signal(signal.SIGKILL)
            first.wait_exit()
        if not lives:
            node.kubelet.end_pod("vm")
        with daemon_of(node, manager) as second:
            manager.let_go()
            offered(node) if not lives else second.wait_event("plugin.registered", resource=H100)
            if lives:
                prestart(node)
                runs(node, manager)
                ends(node)
            eventually(lambda: (node.directory / "s" / "partitions.json").exists() or not lives, "the intent")
            eventually(lambda: not manager.active, "the end of the partition")
            eventually(lambda: not node.kubelet.taken(H100), "kubelet's release of the devices")
            node.kubelet.allocate(H100, [A, B, C, D], pod="another")
            prestart(node, A, B, C, D)
            assert manager.active == {"3"}, "it is not in the way of another one"
            node.assert_sound(second)


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_daemon_that_is_killed_in_a_deactivation(moment: Moment) -> None:
    with board() as (node, manager):
        with daemon_of(node, manager) as first:
            offered(node)
            node.kubelet.allocate(H100, [A, B], pod="vm")
            prestart(node)
            runs(node, manager)
            manager.hold("deactivate", moment)
            ends(node)
            eventually(lambda: manager.is_held("deactivate", moment), "the moment")
            first.signal(signal.SIGKILL)
            first.wait_exit()
        with daemon_of(node, manager) as second:
            manager.let_go()
            offered(node)
            node.kubelet.allocate(H100, [A, B], pod="vm")
            prestart(node)
            runs(node, manager)
            ends(node)
            eventually(lambda: not is_left(node, manager), "the end of the partition")
            node.assert_sound(second)


def test_what_another_program_has_activated_is_refused_and_left() -> None:
    with board() as (node, manager):
        manager.restart(active=["3"])
        with daemon_of(node, manager) as daemon:
            offered(node)
            node.kubelet.allocate(H100, [A, B], pod="vm")
            with pytest.raises(grpc.RpcError) as error:
                node.kubelet.prestart(H100, [A, B])
            status, text = refusal(error.value)
            assert status == "FAILED_PRECONDITION"
            assert "partition 3 is active, and not by gpuactors" in text
            assert (manager.active, manager.acts) == ({"3"}, [])
            manager.restart()
            prestart(node)
            assert manager.active == {"1"}
            node.assert_sound(daemon)


def test_a_partition_that_is_lost_is_activated_before_the_next_start_of_its_container() -> None:
    with board() as (node, manager), daemon_of(node, manager) as daemon:
        offered(node)
        node.kubelet.allocate(H100, [A, B], pod="vm")
        prestart(node)
        runs(node, manager)
        manager.restart()
        node.tell(node.tree.kill(7))
        prestart(node)
        runs(node, manager)
        assert manager.acts == ["activate 1", "activate 1"]
        node.assert_sound(daemon)


def test_a_successor_finds_the_partition_of_a_pod_and_ends_it() -> None:
    with board() as (node, manager), daemon_of(node, manager) as first:
        offered(node)
        node.kubelet.allocate(H100, [A, B], pod="vm")
        prestart(node)
        runs(node, manager)
        with daemon_of(node, manager) as second:
            first.wait_event("daemon.handed_over")
            second.wait_event("partition.changed", partition="1", state="Active")
            assert manager.acts == ["activate 1"]
            ends(node)
            eventually(lambda: not is_left(node, manager), "the end of the partition")
            assert manager.acts == ["activate 1", "deactivate 1"]
            node.assert_sound(second)


def test_where_allocate_waits_it_waits_for_the_partition() -> None:
    with board() as (node, manager), daemon_of(node, manager, "--wait-in=allocate") as daemon:
        offered(node)
        node.kubelet.allocate(H100, [C, D], pod="vm", timeout_s=None)
        assert manager.active == {"2"}
        node.assert_sound(daemon)


def test_a_fabric_manager_that_is_away_is_said_and_waited_for() -> None:
    bounds = {"core.deviceplugin.calls.PRE_START_WAIT_S": 1.0}
    with board() as (node, manager):
        manager.go_away()
        words = (f"--partition-command={manager.path}", "--partition-activation=on")
        with node.daemon(*words, bounds=bounds) as daemon:
            offered(node)
            node.kubelet.allocate(H100, [A, B], pod="vm")
            with pytest.raises(grpc.RpcError) as error:
                node.kubelet.prestart(H100, [A, B])
            status, text = refusal(error.value)
            assert status == "UNAVAILABLE"
            assert "Failed to connect to Fabric Manager instance." in text
            manager.come_back()
            prestart(node)
            assert manager.active == {"1"}
            node.assert_sound(daemon)


def claims_daemon(node: Node, manager: FabricManagerStandIn) -> DaemonProcess:
    kubeconfig = node.directory / "kubeconfig"
    words = (
        "--dra=on",
        f"--node-name={NODE}",
        f"--kubeconfig={kubeconfig}",
        f"--cdi-dir={node.directory / 'cdi'}",
    )
    return daemon_of(node, manager, *words)


def test_a_claims_partition_from_prepare_to_unprepare() -> None:
    with board() as (node, manager), Api() as api:
        write_kubeconfig(node.directory / "kubeconfig", api.port)
        with claims_daemon(node, manager) as daemon, plugin_of(node.kubelet_dir) as plugin:
            eventually(lambda: len(api.devices()) == 4, "the slice")
            uid = api.claim("one", A, B)
            assert prepare(plugin, "one", uid).error == ""
            assert manager.active == {"1"}
            assert prepare(plugin, "one", uid).error == "", "kubelet asks again"
            assert unprepare(plugin, "one", uid).error == ""
            eventually(lambda: not is_left(node, manager), "the end of the partition")
            assert manager.acts == ["activate 1", "deactivate 1"]
            node.assert_sound(daemon)


def test_a_claim_that_needs_what_another_program_has_activated_is_refused() -> None:
    with board() as (node, manager), Api() as api:
        write_kubeconfig(node.directory / "kubeconfig", api.port)
        manager.restart(active=["3"])
        with claims_daemon(node, manager), plugin_of(node.kubelet_dir) as plugin:
            eventually(lambda: len(api.devices()) == 4, "the slice")
            uid = api.claim("one", A, B)
            assert "partition 3 is active, and not by gpuactors" in prepare(plugin, "one", uid).error
            assert list((node.directory / "cdi").glob("*.json")) == []
            manager.restart()
            eventually(lambda: prepare(plugin, "one", uid).error == "", "the prepare")
            assert manager.active == {"1"}


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("lives", [True, False], ids=["the claim lives", "the claim ends"])
def test_a_daemon_that_is_killed_while_it_activates_for_a_claim(moment: Moment, lives: bool) -> None:
    with board() as (node, manager), Api() as api, ThreadPoolExecutor(1) as thread:
        write_kubeconfig(node.directory / "kubeconfig", api.port)
        with claims_daemon(node, manager) as first, plugin_of(node.kubelet_dir) as plugin:
            eventually(lambda: len(api.devices()) == 4, "the slice")
            uid = api.claim("one", A, B)
            manager.hold("activate", moment)
            call = thread.submit(prepare, plugin, "one", uid)
            eventually(lambda: manager.is_held("activate", moment), "the moment")
            assert not call.done(), "it was answered before"
            first.signal(signal.SIGKILL)
            first.wait_exit()
        remove_sockets(node.kubelet_dir / "plugins_registry")
        with claims_daemon(node, manager) as second:
            manager.let_go()
            second.wait_event("checkpoint.read", claims=1)
            with plugin_of(node.kubelet_dir) as plugin:
                if lives:
                    assert prepare(plugin, "one", uid).error == ""
                    assert manager.active == {"1"}
                assert unprepare(plugin, "one", uid).error == ""
            eventually(lambda: not is_left(node, manager), "the end of the partition")
            node.assert_sound(second)
