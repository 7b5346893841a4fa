"""Kubelet comes, goes, restarts, dies, stalls and refuses; the daemon lives on and is registered in the end.

Registered means one open ListAndWatch stream: `Node.wait_device_lists` waits for exactly that.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import pytest

from tests.process.daemon import DaemonProcess, eventually
from tests.process.node import A100, H100, HEALTHY, UNHEALTHY, Node, address, open_node, remove_sockets
from tests.support import directories
from tests.support.kubelet_grpcio import EndpointStopped

GPU, SECOND, OTHER = address(0x23), address(0x24), address(0x31)


def plugged(node: Node) -> dict[str, dict[str, str]]:
    """Two models with a device each, and the device lists that follow."""
    node.plug(0x23, "2330", driver="vfio-pci")
    node.plug(0x31, "20b0", driver="vfio-pci")
    return {H100: {GPU: HEALTHY}, A100: {OTHER: HEALTHY}}


@contextmanager
def served() -> Iterator[tuple[Node, DaemonProcess, dict[str, dict[str, str]]]]:
    """The node that `plugged` makes, its daemon, and the device lists, which kubelet has."""
    with open_node() as node:
        device_lists = plugged(node)
        with node.daemon() as daemon:
            node.wait_device_lists(device_lists)
            yield node, daemon, device_lists


def test_kubelet_is_absent_at_first() -> None:
    with open_node(started=False) as node:
        device_lists = plugged(node)
        with node.daemon() as daemon:
            directory = str(node.kubelet.socket_dir)
            daemon.wait_event("kubelet.gone", has=[f"{directory} does not exist", "--device-plugin-dir"])
            daemon.wait_event("resource.appeared", resource=H100)
            # Only the directory: the endpoints are served there as soon as they can be, though nobody asks.
            node.kubelet.socket_dir.mkdir()
            daemon.wait_event("kubelet.gone", has=[f"{node.kubelet.socket} does not exist"])
            eventually(node.endpoint(H100).is_socket, "the endpoint's socket")
            # A plain file is no kubelet.
            node.kubelet.socket.write_text("")
            mark = daemon.mark()
            with node.kubelet:
                node.wait_device_lists(device_lists)
                daemon.wait_event("kubelet.appeared", after=mark)
                assert {r: len(node.accepted(r)) for r in device_lists} == {H100: 1, A100: 1}
                node.assert_sound(daemon)


def test_kubelet_has_its_root_directory_elsewhere() -> None:
    """As with --root-dir: PodResources and the plugins move with it, its directory of device plugins does not."""
    with open_node() as node:
        node.plug(0x23, "2330", driver="vfio-pci")
        root = node.directory / "data"
        root.mkdir()
        (node.kubelet_dir / "pod-resources").rename(root / "pod-resources")
        with node.daemon(f"--kubelet-dir={root}") as daemon:
            node.wait_device_lists({H100: {GPU: HEALTHY}})
            mark = daemon.mark()
            node.kubelet.allocate(H100, [GPU], pod="vm-1")
            daemon.wait_event(
                "device.changed", device=GPU, cause="Allocated", has=["default/vm-1"], after=mark
            )
            node.assert_sound(daemon)


def test_kubelet_restarts_is_killed_and_cuts_its_streams() -> None:
    with served() as (node, daemon, device_lists):
        kubelet = node.kubelet
        # A restart: all sockets gone, kubelet.sock new.
        mark = daemon.mark()
        kubelet.stop()
        daemon.wait_event("kubelet.gone", after=mark)
        kubelet.start()
        node.wait_device_lists(device_lists)
        assert {r: len(node.accepted(r)) for r in device_lists} == {H100: 2, A100: 2}

        # And again and again; nothing is left behind by it.
        descriptors = daemon.descriptors
        for _ in range(4):
            kubelet.stop()
            kubelet.start()
            node.wait_device_lists(device_lists)
        eventually(lambda: daemon.descriptors <= descriptors, f"{descriptors} open descriptors, as before")

        # What happens while there is none is in the first frame of the next life.
        kubelet.stop()
        node.tell(node.plug(0x24, "2330", driver="vfio-pci"))
        node.tell(node.tree.unbind(OTHER))
        daemon.wait_event("device.gone", device=OTHER)
        daemon.wait_event("device.changed", device=SECOND)
        seen = len(kubelet.frames(H100))
        kubelet.start()
        device_lists.update({H100: {GPU: HEALTHY, SECOND: HEALTHY}, A100: {}})
        node.wait_device_lists(device_lists)
        assert kubelet.frames(H100)[seen].ids == (GPU, SECOND)

        # Killed: kubelet.sock is still there, and nobody behind it.
        mark = daemon.mark()
        kubelet.stop(leave_sockets=True)
        daemon.wait_event("plugin.unregistered", has=["no process listens on it"], resource=H100, after=mark)
        node.tell(node.tree.bind(OTHER, "vfio-pci"))
        kubelet.start()
        device_lists[A100] = {OTHER: HEALTHY}
        node.wait_device_lists(device_lists)

        # One stream is cut, its end says nothing about the other one.
        accepted = {r: len(node.accepted(r)) for r in device_lists}
        kubelet.cut_stream(H100)
        kubelet.wait_for(lambda _: len(node.accepted(H100)) == accepted[H100] + 1, 10)
        node.wait_device_lists(device_lists)
        assert len(node.accepted(A100)) == accepted[A100]
        node.assert_sound(daemon)


def test_register_fails_and_register_takes_long() -> None:
    with open_node() as node:
        device_lists = plugged(node)
        kubelet = node.kubelet
        kubelet.fail_registers(4)
        with node.daemon() as daemon:
            node.wait_device_lists(device_lists)
            assert sum(r.error is not None for r in kubelet.registrations) == 4
            assert {r: len(node.accepted(r)) for r in device_lists} == {H100: 1, A100: 1}
            daemon.wait_event("plugin.unregistered", has=["UNKNOWN", "failed to dial device plugin"])

            # A stream is lost, and the first attempt to register again fails.
            kubelet.fail_registers(1, grpc.StatusCode.UNAVAILABLE, "the client connection is closing")
            kubelet.cut_stream(H100)
            kubelet.wait_for(lambda _: len(node.accepted(H100)) == 2, 10, "the second registration")
            node.wait_device_lists(device_lists)

            # Kubelet takes its time to answer; meanwhile it may ask, and the host may change.
            kubelet.stop()
            kubelet.hold_register_replies()
            kubelet.start()
            eventually(lambda: _answers(node, H100), "an endpoint that answers while its Register is held")
            held_at = time.monotonic()
            node.tell(node.plug(0x24, "2330", driver="vfio-pci"))
            daemon.wait_event("device.changed", device=SECOND)
            assert kubelet.allocate(H100, [SECOND]).envs
            assert node.device_lists() == {}
            eventually(lambda: time.monotonic() > held_at + 1.0, "the end of a slow Register")
            kubelet.release_register_replies()
            device_lists[H100] = {GPU: HEALTHY, SECOND: HEALTHY}
            node.wait_device_lists(device_lists)
            assert len(node.accepted(H100)) == 3, "a slow Register is waited for, not repeated"
            node.assert_sound(daemon)


def test_the_socket_directory_is_wiped_under_a_living_kubelet() -> None:
    with served() as (node, daemon, device_lists):
        kubelet = node.kubelet
        # All sockets, kubelet's own as well. The streams live, and go on telling the truth.
        mark = daemon.mark()
        remove_sockets(kubelet.socket_dir)
        daemon.wait_event("kubelet.gone", after=mark)
        node.tell(node.plug(0x24, "2330", driver="vfio-pci"))
        device_lists[H100][SECOND] = HEALTHY
        node.wait_device_lists(device_lists)
        assert not kubelet.stream_ends(H100)
        kubelet.stop()
        kubelet.start()
        node.wait_device_lists(device_lists)

        # Ours alone: when the stream ends, the socket is made anew before Register.
        node.endpoint(H100).unlink()
        kubelet.cut_stream(H100)
        kubelet.wait_for(lambda _: len(node.accepted(H100)) == 3, 10, "the third registration")
        node.wait_device_lists(device_lists)
        assert node.endpoint(H100).is_socket()
        node.assert_sound(daemon)


def test_the_socket_directory_is_removed_and_made_again() -> None:
    """`kubeadm reset` does that. Our own listening sockets hold the removed directory's inode, so inotify does not say
    IN_DELETE_SELF before they are closed."""
    with served() as (node, daemon, device_lists):
        kubelet = node.kubelet
        mark = daemon.mark()
        kubelet.stop()
        directories.remove(kubelet.socket_dir)
        daemon.wait_event("kubelet.gone", after=mark)
        kubelet.start()
        node.wait_device_lists(device_lists)
        node.tell(node.tree.unbind(OTHER))
        device_lists[A100] = {}
        node.wait_device_lists(device_lists)
        assert {r: len(node.accepted(r)) for r in device_lists} == {H100: 2, A100: 2}
        node.assert_sound(daemon)


def test_a_lost_stream_makes_its_devices_unhealthy_only_until_it_is_open_again() -> None:
    """The stand-in does what kubelet does at a stream's end; without this the tests above could not fail."""
    with served() as (node, daemon, device_lists):
        node.kubelet.hold_register_replies()
        node.kubelet.cut_stream(H100)
        node.kubelet.wait_for(lambda device_lists: device_lists[H100] == {GPU: UNHEALTHY}, 10)
        with pytest.raises(TimeoutError):
            node.wait_device_lists(device_lists, within_s=0.05)
        node.kubelet.release_register_replies()
        node.wait_device_lists(device_lists)
        node.assert_sound(daemon)


def _answers(node: Node, resource: str) -> bool:
    """Kubelet has dialled the endpoint (inside Register), and it answers."""
    try:
        return node.kubelet.preferred(resource, [GPU], [], 1) == (GPU,)
    except EndpointStopped:
        return False
