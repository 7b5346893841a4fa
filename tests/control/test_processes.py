"""Two daemons on one node, as processes: what kubelet (grpcio) sees of an upgrade, and of one that goes wrong."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from tests.process.daemon import PATIENT_LOOKS, DaemonProcess, eventually, gpuactors
from tests.process.node import A100, H100, HEALTHY, Node, address, open_node, refusal
from tests.process.slow_inspection import allocate_in_flight, slow_inspection
from tests.support.patience import patient

DEVICE_LISTS = {H100: {address(slot): HEALTHY for slot in range(1, 9)}}
GPU = address(1)
HOLDER = 4711
HANDING_OVER = "gpuactors is handing over to its successor: ask again"
HUNG_S = patient(30.0)
"""The bounds of a take-over from a daemon that hangs, and of its noticing it, added up and doubled."""


@pytest.fixture
def node() -> Iterator[Node]:
    """Eight GPUs, bound before the daemon starts."""
    with open_node() as it:
        for slot in range(1, 9):
            it.plug(slot, "2330", driver="vfio-pci")
        yield it


def control_socket(node: Node) -> Path:
    return node.directory / "s" / "gpuactors.sock"


def serves(node: Node, daemon: DaemonProcess, *, accepted: int) -> None:
    """Kubelet has all GPUs, from one stream, after `accepted` registrations in all."""
    daemon.wait_event("daemon.serving")
    node.wait_device_lists(DEVICE_LISTS)
    eventually(lambda: len(node.accepted(H100)) == accepted, f"{accepted} registrations")


def test_an_upgrade(node: Node) -> None:
    with node.daemon("--uevents=off") as old:
        serves(node, old, accepted=1)
        with node.daemon("--uevents=off") as new:
            line = new.wait_event("daemon.serving")
            assert line["predecessor"] == f"process {old.pid} has handed over"
            old.wait_event("daemon.handed_over")
            serves(node, new, accepted=2)
            (end,) = node.kubelet.stream_ends(H100)
            assert end.noticed
            # The old one lives on, does nothing, and takes nothing with it when it is ended.
            old.assert_alive()
            assert not [name for name in os.listdir(node.kubelet.socket_dir) if name.startswith(".")]
            old.signal(signal.SIGTERM)
            assert old.wait_exit() == 0
            assert control_socket(node).is_socket()
            assert node.endpoint(H100).is_socket()
            assert node.kubelet.allocate(H100, [address(3)]).envs
            node.wait_device_lists(DEVICE_LISTS)
            assert len(node.kubelet.stream_ends(H100)) == 1
            node.assert_sound(new)


def test_upgrade_after_upgrade(node: Node) -> None:
    with node.daemon("--uevents=off") as first:
        serves(node, first, accepted=1)
        with node.daemon("--uevents=off") as second:
            serves(node, second, accepted=2)
            with node.daemon("--uevents=off") as third:
                serves(node, third, accepted=3)
                for idle in (first, second):
                    idle.assert_alive()
    assert node.kubelet.panics == ()


def test_a_successor_that_ends_gives_the_node_back(node: Node) -> None:
    with node.daemon("--uevents=off") as old:
        serves(node, old, accepted=1)
        with node.daemon("--uevents=off") as new:
            serves(node, new, accepted=2)
        mark = old.mark()
        old.wait_event("daemon.successor_lost")
        old.wait_event("daemon.serving", after=mark)
        node.wait_device_lists(DEVICE_LISTS)


def test_two_started_at_once(node: Node) -> None:
    with node.daemon("--uevents=off") as one, node.daemon("--uevents=off") as other:
        both = (one, other)
        eventually(lambda: all(_said(it, "daemon.serving") for it in both), "both to have served")
        eventually(lambda: sum(_said(it, "daemon.handed_over") for it in both) == 1, "one to hand over")
        node.wait_device_lists(DEVICE_LISTS)
        node.assert_sound(one)
        node.assert_sound(other)


def test_a_daemon_that_hangs_is_taken_over_and_yields_when_it_lives_again(node: Node) -> None:
    with node.daemon("--uevents=off") as old:
        serves(node, old, accepted=1)
        old.signal(signal.SIGSTOP)
        try:
            with node.daemon("--uevents=off") as new:
                line = new.wait_event("daemon.serving")
                assert str(line["predecessor"]).startswith("did not hand over, taken over anyway")
                new.wait_event("plugin.registered")
                assert len(node.accepted(H100)) == 2
                assert node.kubelet.stream_ends(H100) == ()
                old.signal(signal.SIGCONT)
                old.wait_event("daemon.handed_over", within_s=HUNG_S)
                # Kubelet finds the client by name when the old stream ends, and cuts off the new one (1.36).
                node.wait_device_lists(DEVICE_LISTS, within_s=HUNG_S)
                assert node.kubelet.stream_ends(H100)[0].client == 0
                assert node.kubelet.allocate(H100, [address(5)]).envs
                assert control_socket(node).is_socket()
                node.assert_sound(new)
        finally:
            old.signal(signal.SIGCONT)


def test_a_daemon_that_was_killed_leaves_nothing_in_the_way(node: Node) -> None:
    with node.daemon("--uevents=off") as old:
        serves(node, old, accepted=1)
        old.signal(signal.SIGKILL)
        old.wait_exit()
    assert control_socket(node).is_socket()
    with node.daemon("--uevents=off") as new:
        assert new.wait_event("daemon.serving")["predecessor"] == "none"
        serves(node, new, accepted=2)


def test_a_file_in_the_place_of_the_control_socket(node: Node) -> None:
    control_socket(node).parent.mkdir()
    control_socket(node).write_text("precious")
    with node.daemon("--uevents=off") as daemon:
        daemon.wait_event("control.unavailable", has=["is not a socket"])
        serves(node, daemon, accepted=1)
    assert control_socket(node).read_text() == "precious"


def test_a_state_directory_that_cannot_be_had(node: Node) -> None:
    (node.directory / "s").touch()
    with node.daemon("--uevents=off") as daemon:
        daemon.wait_event("control.unavailable", has=["is not a directory", "--state-dir", "inspect"])
        daemon.wait_event("daemon.serving", predecessor="none")
        node.wait_device_lists(DEVICE_LISTS)
        assert sum(line["event"] == "daemon.serving" for line in daemon.log) == 1
        assert sum(line["event"] == "control.unavailable" for line in daemon.log) == 1


def test_another_process_on_the_control_socket(node: Node) -> None:
    control_socket(node).parent.mkdir()
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(control_socket(node)))
        other.listen()
        with node.daemon("--uevents=off") as daemon:
            serves(node, daemon, accepted=1)
            assert json.loads(_asked(node, "explain", "01:00.0", "-o", "json"))["source"] == "daemon"


# --- calls in flight --------------------------------------------------------------------------------------


def test_an_allocate_in_flight_is_finished_by_the_old_one(node: Node) -> None:
    with node.daemon("--uevents=off", bounds=PATIENT_LOOKS) as old:
        serves(node, old, accepted=1)
        with allocate_in_flight(node, H100, GPU) as (call, inspection):
            inspection.let_others_look()
            with node.daemon("--uevents=off") as new:
                new.wait_event("host.scanned")
                assert not call.done()
                assert node.kubelet.stream_ends(H100) == (), "kubelet would fail the pod"
                inspection.end()
                assert call.result(timeout=patient(10)).envs
                handed_over(node, old, new)


def test_an_allocate_that_cannot_be_finished_is_refused_and_holds_nothing_up(node: Node) -> None:
    with node.daemon("--uevents=off", bounds=PATIENT_LOOKS) as old:
        serves(node, old, accepted=1)
        with allocate_in_flight(node, H100, GPU) as (call, inspection):
            inspection.let_others_look()
            with node.daemon("--uevents=off") as new:
                with pytest.raises(grpc.RpcError) as error:
                    call.result(timeout=patient(20))
                status, reason = refusal(error.value)
                assert status == "UNAVAILABLE"
                assert reason.startswith(f"the inspection of {GPU} has not come back in time")
                handed_over(node, old, new)
                assert node.kubelet.allocate(H100, [GPU]).envs


def test_a_container_that_waits_to_start_may_start_while_the_old_one_still_answers(node: Node) -> None:
    with node.daemon("--uevents=off") as old, ThreadPoolExecutor() as calls:
        serves(node, old, accepted=1)
        call = waits_to_start(node, calls)
        with node.daemon("--uevents=off") as new:
            new.wait_event("host.scanned")
            assert not call.done()
            assert node.kubelet.stream_ends(H100) == ()
            node.tree.kill(HOLDER)
            call.result(timeout=patient(10))
            handed_over(node, old, new)


def test_a_container_that_waits_longer_waits_for_the_new_one(node: Node) -> None:
    with node.daemon("--uevents=off") as old, ThreadPoolExecutor() as calls:
        serves(node, old, accepted=1)
        call = waits_to_start(node, calls)
        with node.daemon("--uevents=off") as new:
            with pytest.raises(grpc.RpcError) as error:
                call.result(timeout=patient(20))
            assert refusal(error.value) == ("UNAVAILABLE", HANDING_OVER)
            handed_over(node, old, new)
            again = calls.submit(node.kubelet.prestart, H100, [GPU])
            with pytest.raises(TimeoutError):
                again.result(timeout=0.5)
            node.tree.kill(HOLDER)
            again.result(timeout=10)


def test_another_resource_does_not_stand_still_for_a_call_in_flight(node: Node) -> None:
    node.plug(0x31, "20b0", driver="vfio-pci")
    device_lists = {**DEVICE_LISTS, A100: {address(0x31): HEALTHY}}
    with node.daemon("--uevents=off") as old, ThreadPoolExecutor() as calls:
        node.wait_device_lists(device_lists)
        call = waits_to_start(node, calls)
        with node.daemon("--uevents=off") as new:
            with pytest.raises(grpc.RpcError):
                call.result(timeout=patient(20))
            refused_at = old.wait_event("call.refused")["timestamp"]
            new.wait_event("daemon.serving")
            node.wait_device_lists(device_lists)
            handed_over_at = old.wait_event("daemon.handed_over")["timestamp"]
            assert handed_over_at <= refused_at, "the streams end together, after the last call"


def waits_to_start(node: Node, calls: ThreadPoolExecutor) -> Future[None]:
    """A PreStartContainer that has reached the daemon and waits, as somebody still holds the pod's GPU."""
    node.kubelet.allocate(H100, [GPU], pod="vm")
    node.tree.open_group(1, HOLDER, "qemu-system-x86")
    with slow_inspection(node.tree, GPU) as inspection:
        call = calls.submit(node.kubelet.prestart, H100, [GPU])
        inspection.wait_until_hanging()
    return call


def handed_over(node: Node, old: DaemonProcess, new: DaemonProcess) -> None:
    """The new daemon serves because the old one let it, and kubelet has never missed a GPU."""
    assert new.wait_event("daemon.serving")["predecessor"] == f"process {old.pid} has handed over"
    serves(node, new, accepted=2)
    assert {frame.ids for frame in node.kubelet.frames(H100)} == {tuple(DEVICE_LISTS[H100])}
    node.assert_sound(new)


# --- inspect and explain ----------------------------------------------------------------------------------


def test_inspect_and_explain_ask_the_daemon(node: Node) -> None:
    alone = json.loads(_asked(node, "inspect", "-o", "json"))
    assert json.loads(_asked(node, "explain", address(1), "-o", "json"))["source"] == "inspection"
    with node.daemon() as daemon:
        serves(node, daemon, accepted=1)
        asked = json.loads(_asked(node, "inspect", "-o", "json"))
        assert (alone["source"], asked["source"]) == ("inspection", "daemon")
        assert all(device.pop("since_s") is not None for device in asked["devices"])
        assert all(device.pop("since_s") is None for device in alone["devices"])
        assert asked["devices"] == alone["devices"]
        known = json.loads(_asked(node, "explain", "01:00.0", "-o", "json"))
        assert (known["source"], known["registered"], known["address"]) == ("daemon", True, address(1))
        assert f"the running daemon (process {daemon.pid}" in _asked(node, "explain", address(1))
        # A model that is gone is explained by its history, which only the daemon knows.
        node.tell(node.tree.unplug(address(1)))
        gone = {a: h for a, h in DEVICE_LISTS[H100].items() if a != address(1)}
        node.wait_device_lists({H100: gone})
        known = json.loads(_asked(node, "explain", address(1), "-o", "json"))
        assert (known["present"], known["history"][-1]["health"]) == (False, None)


def test_an_address_that_is_not_there(node: Node) -> None:
    done = gpuactors("explain", "ff:1f.7", *_where(node))
    assert done.returncode == 1
    assert "no GPU at ff:1f.7; there are 0000:01:00.0, " in done.stderr
    assert done.stdout == ""


def test_a_host_that_cannot_be_read(node: Node) -> None:
    done = gpuactors("explain", address(1), *_where(node), f"--host-root={node.directory / 'nowhere'}")
    assert done.returncode == 69
    assert done.stderr.startswith("gpuactors: ")


def _where(node: Node) -> tuple[str, ...]:
    return node.directories


def _asked(node: Node, *words: str) -> str:
    done = gpuactors(*words, *_where(node))
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def _said(daemon: DaemonProcess, event: str) -> bool:
    return any(line["event"] == event for line in daemon.log)
