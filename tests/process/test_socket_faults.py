"""Sockets that cannot be made, are taken, or are talked to by somebody who speaks no gRPC.

One resource's trouble is one resource's: the sentence names the path and the remedy, the others go on, and when the
cause is gone the resource registers by itself.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.process.daemon import eventually
from tests.process.node import A100, H100, HEALTHY, K40S, address, open_node, refusal
from tests.support import directories
from tests.support.device_plugin_grpcio import message, stub
from tests.support.mounts import mount, tmpfs
from tests.support.tiny_plugin import TinyPlugin

GPU, OTHER, THIRD = address(0x23), address(0x31), address(0x51)


# --- sockets that cannot be made --------------------------------------------------------------------------


def test_something_is_in_the_way_of_a_socket() -> None:
    with open_node() as node, ExitStack() as cleanup:
        node.plug(0x23, "2330", driver="vfio-pci")
        node.plug(0x31, "20b0", driver="vfio-pci")
        node.plug(0x51, "1024", driver="vfio-pci")
        # A process listens at one path (this one), a plain file is at the next, a stale socket at the third.
        squatter = cleanup.enter_context(_listening(node.endpoint(H100)))
        node.endpoint(A100).write_text("precious")
        with _listening(node.endpoint(K40S)):
            pass
        with node.daemon() as daemon:
            node.wait_device_lists({K40S: {THIRD: HEALTHY}})
            daemon.wait_event(
                "plugin.unregistered",
                resource=H100,
                has=[f"process {os.getpid()} listens on {node.endpoint(H100)}", "stop that one first"],
            )
            daemon.wait_event(
                "plugin.unregistered",
                resource=A100,
                has=[f"{node.endpoint(A100)} exists and is not a socket", "remove it"],
            )
            assert node.endpoint(A100).read_text() == "precious"
            squatter.close()
            node.endpoint(A100).unlink()
            node.wait_device_lists({H100: {GPU: HEALTHY}, A100: {OTHER: HEALTHY}, K40S: {THIRD: HEALTHY}})
            assert len(node.accepted(K40S)) == 1
            node.assert_sound(daemon)


def test_a_daemon_follows_one_that_was_killed() -> None:
    with open_node() as node:
        node.plug(0x23, "2330", driver="vfio-pci")
        device_lists = {H100: {GPU: HEALTHY}}
        with node.daemon() as killed:
            node.wait_device_lists(device_lists)
            killed.signal(signal.SIGKILL)
            assert killed.wait_exit() == -signal.SIGKILL
        assert node.endpoint(H100).is_socket(), "a stale socket stays"
        assert node.uevents.is_socket()
        with node.daemon() as first:
            node.wait_device_lists(device_lists)
            node.assert_sound(first)


@pytest.mark.parametrize("deleted", [False, True])
def test_two_daemons_with_different_state_directories_find_each_other(deleted: bool) -> None:
    """An update with another --state-dir; or its directory is deleted under the first one, and made anew."""
    with open_node() as node:
        node.plug(0x23, "2330", driver="vfio-pci")
        device_lists = {H100: {GPU: HEALTHY}}
        with node.daemon() as first:
            node.wait_device_lists(device_lists)
            if deleted:
                directories.remove(node.directory / "s")
            other = node.directory / ("s" if deleted else "s2")
            with node.daemon(f"--uevents=unix:{node.directory / 'u2'}", f"--state-dir={other}") as second:
                second.wait_event("daemon.serving", predecessor=f"process {first.pid} has handed over")
                first.wait_event("daemon.handed_over")
                node.kubelet.wait_for(lambda _: len(node.accepted(H100)) == 2, 20)
                node.wait_device_lists(device_lists)
                second.signal(signal.SIGTERM)
                assert second.wait_exit() == 0
            # As nobody has the node's socket, the first one serves again.
            node.kubelet.wait_for(lambda _: len(node.accepted(H100)) == 3, 30)
            node.wait_device_lists(device_lists)
            node.assert_sound(first)


def test_a_daemon_that_cannot_be_asked_is_waited_for() -> None:
    """One of a version without the node's socket, and with another state directory."""
    with open_node() as node:
        node.plug(0x23, "2330", driver="vfio-pci")
        name = node.endpoint(H100).name
        older = TinyPlugin(node.kubelet.socket_dir, name)
        with node.daemon() as daemon:
            daemon.wait_event("hand_over.blocked", has=[name, "another state directory", "--state-dir"])
            assert not [line for line in daemon.log if line["event"] == "daemon.serving"]
            older.server.stop(grace=None).wait()
            daemon.wait_event("daemon.serving")
            node.wait_device_lists({H100: {GPU: HEALTHY}})
            node.assert_sound(daemon)


def test_the_nodes_socket_cannot_be_made_at_first() -> None:
    """A file is in its place: kubelet is served all the same, and the socket is made when the place is free."""
    with open_node() as node:
        node.plug(0x23, "2330", driver="vfio-pci")
        place = node.kubelet.socket_dir / "gpuactors"
        place.write_text("")
        with node.daemon() as daemon:
            daemon.wait_event("control.unavailable", has=[str(place)])
            node.wait_device_lists({H100: {GPU: HEALTHY}})
            place.unlink()
            eventually((place / "gpuactors.sock").is_socket, "the node's socket")
            node.assert_sound(daemon)


def test_the_socket_directory_is_a_file() -> None:
    with open_node(started=False) as node:
        node.plug(0x23, "2330", driver="vfio-pci")
        node.kubelet.socket_dir.write_text("")
        with node.daemon() as daemon:
            directory = str(node.kubelet.socket_dir)
            daemon.wait_event("plugin.unregistered", resource=H100, has=[f"{directory} is not a directory"])
            daemon.wait_event("kubelet.gone", has=[directory])
            node.kubelet.socket_dir.unlink()
            with node.kubelet:
                node.wait_device_lists({H100: {GPU: HEALTHY}})
                # And under a living kubelet: what is registered stays, what is new waits.
                moved = node.directory / "moved"
                mark = daemon.mark()
                node.kubelet.socket_dir.rename(moved)
                node.kubelet.socket_dir.write_text("")
                daemon.wait_event("kubelet.gone", has=[directory], after=mark)
                node.tell(node.plug(0x31, "20b0", driver="vfio-pci"))
                daemon.wait_event(
                    "plugin.unregistered", resource=A100, has=[f"{directory} is not a directory"]
                )
                node.tell(node.plug(0x24, "2330", driver="vfio-pci"))
                device_lists = {H100: {GPU: HEALTHY, address(0x24): HEALTHY}}
                node.wait_device_lists(device_lists)
                node.kubelet.socket_dir.unlink()
                moved.rename(node.kubelet.socket_dir)
                node.wait_device_lists(device_lists | {A100: {OTHER: HEALTHY}})
                node.assert_sound(daemon)


def test_the_socket_directory_is_full_and_then_read_only() -> None:
    with open_node(started=False) as node, tmpfs(node.kubelet_dir, inodes=13):
        node.plug(0x23, "2330", driver="vfio-pci")
        with node.kubelet, node.daemon() as daemon:
            device_lists = {H100: {GPU: HEALTHY}}
            node.wait_device_lists(device_lists)
            directory = str(node.kubelet.socket_dir)

            fillers = list(_fill(node.kubelet_dir))
            node.tell(node.plug(0x31, "20b0", driver="vfio-pci"))
            node.tell(node.plug(0x24, "2330", driver="vfio-pci"))
            daemon.wait_event("plugin.unregistered", resource=A100, has=[directory, "is full", "make room"])
            device_lists[H100][address(0x24)] = HEALTHY
            node.wait_device_lists(device_lists)
            for filler in fillers:
                filler.unlink()
            device_lists[A100] = {OTHER: HEALTHY}
            node.wait_device_lists(device_lists)

            mount("remount,ro", node.kubelet_dir)
            node.tell(node.plug(0x51, "1024", driver="vfio-pci"))
            daemon.wait_event("plugin.unregistered", resource=K40S, has=[directory, "read-only", "writable"])
            node.tell(node.tree.unbind(OTHER))
            device_lists[A100] = {}
            node.wait_device_lists(device_lists)
            # A stream that ends meanwhile comes back: its socket is there.
            node.kubelet.cut_stream(H100)
            node.kubelet.wait_for(lambda _: len(node.accepted(H100)) == 2, 20)
            node.wait_device_lists(device_lists)
            mount("remount,rw", node.kubelet_dir)
            device_lists[K40S] = {THIRD: HEALTHY}
            node.wait_device_lists(device_lists)
            node.assert_sound(daemon)


def test_socket_paths_near_and_over_the_kernels_limit() -> None:
    # kubelet.sock fits in both. In the first, a digest takes the place of a readable name; in the second, nothing fits.
    for length_bytes, fits in ((64, True), (79, False)):
        # The directory is /tmp/ga-XXXXXXXX/…
        deep = "k" * (length_bytes - len("/tmp/ga-12345678/"))
        with open_node(kubelet_dir=deep) as node:
            assert len(os.fsencode(node.kubelet_dir)) == length_bytes
            node.plug(0x23, "2330", driver="vfio-pci")
            with node.daemon() as daemon:
                if fits:
                    node.wait_device_lists({H100: {GPU: HEALTHY}})
                    (registration,) = node.kubelet.registrations
                    assert registration.endpoint.startswith("gpuactors-")
                    assert "H100" not in registration.endpoint
                else:
                    daemon.wait_event(
                        "plugin.unregistered",
                        resource=H100,
                        has=[f"{node.kubelet.socket_dir}/gpuactors-", "122 bytes", "at most 107", "shorter directory"],
                    )  # fmt: skip
                    # It goes on inspecting the host, and logs what it finds.
                    node.tell(node.plug(0x31, "20b0", driver="vfio-pci"))
                    daemon.wait_event("plugin.unregistered", resource=A100, has=["at most 107"])
                    assert node.kubelet.registrations == ()
                node.assert_sound(daemon)


# --- whoever talks to our sockets -------------------------------------------------------------------------

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = b"\0\0\0\x04\0\0\0\0\0"


def test_garbage_on_our_socket_harms_nobody() -> None:
    with open_node() as node:
        node.plug(0x23, "2330", driver="vfio-pci")
        device_lists = {H100: {GPU: HEALTHY}}
        with node.daemon() as daemon:
            node.wait_device_lists(device_lists)
            endpoint = node.endpoint(H100)
            descriptors = daemon.descriptors
            for garbage in (
                b"",
                b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
                os.urandom(4096),
                PREFACE[:10],
                PREFACE + b"\xff" * 100,
                PREFACE
                + SETTINGS
                + b"\0\0\x04\x01\x05\0\0\0\x01\xff\xff\xff\xff",  # HEADERS that HPACK cannot read
                PREFACE
                + SETTINGS
                + b"\xff\xff\xff\0\0\0\0\0\x01",  # DATA of 16 MiB on a stream that is not open
                PREFACE + SETTINGS + b"\0\0\x04\x08\0\0\0\0\0\0\0\0\0",  # WINDOW_UPDATE by nothing
            ):
                with socket.socket(socket.AF_UNIX) as peer:
                    peer.connect(str(endpoint))
                    peer.sendall(garbage)
                    peer.shutdown(socket.SHUT_WR)
                    peer.settimeout(10)
                    _read_to_end(peer)
            with grpc.insecure_channel(f"unix:{endpoint}") as channel:
                assert _refused(channel, "NoSuchMethod", b"") == "UNIMPLEMENTED"
                assert _refused(channel, "Allocate", b"\xff\xff\xff") == "INTERNAL"
                assert _refused(channel, "Allocate", b"\x0a\x7fshort") == "INTERNAL"
                assert _refused(channel, "PreStartContainer", b"") == "INVALID_ARGUMENT"

                # Over 4 MiB, from another client and from kubelet.
                huge = message("AllocateRequest")(
                    container_requests=[message("ContainerAllocateRequest")(devices_ids=["x" * (4 << 20)])]
                )
                with pytest.raises(grpc.RpcError) as error:
                    stub(channel)["Allocate"](huge, timeout=10)
                assert refusal(error.value)[0] == "RESOURCE_EXHAUSTED"
            with pytest.raises(grpc.RpcError) as error:
                node.kubelet.allocate(H100, ["x" * (4 << 20)])
            assert refusal(error.value)[0] == "RESOURCE_EXHAUSTED"
            assert "4194304" in refusal(error.value)[1]

            # Another client that watches gets the list, and its end is not kubelet's.
            with grpc.insecure_channel(f"unix:{endpoint}") as channel:
                frames = stub(channel)["ListAndWatch"](message("Empty")(), timeout=10)
                assert [device.ID for device in next(iter(frames)).devices] == [GPU]
                frames.cancel()
            assert not node.kubelet.stream_ends(H100)
            assert len(node.kubelet.registrations) == 1
            node.tell(node.plug(0x24, "2330", driver="vfio-pci"))
            device_lists[H100][address(0x24)] = HEALTHY
            node.wait_device_lists(device_lists)
            assert node.kubelet.allocate(H100, [GPU]).envs

            # One who connects and says nothing holds up no registration.
            with socket.socket(socket.AF_UNIX) as silent:
                silent.connect(str(endpoint))
                node.kubelet.cut_stream(H100)
                node.kubelet.wait_for(lambda _: len(node.accepted(H100)) == 2, 20)
                node.wait_device_lists(device_lists)
            eventually(lambda: daemon.descriptors <= descriptors, "the end of every connection but kubelet's")
            node.assert_sound(daemon)


# --- helpers ----------------------------------------------------------------------------------------------


def _refused(channel: grpc.Channel, method: str, payload: bytes) -> str:
    """Status of a call whose request is `payload`, whatever that is."""
    call: Any = channel.unary_unary(f"/v1beta1.DevicePlugin/{method}")
    with pytest.raises(grpc.RpcError) as error:
        call(payload, timeout=10)
    return refusal(error.value)[0]


def _read_to_end(peer: socket.socket) -> None:
    try:
        while peer.recv(65536):
            pass
    except ConnectionResetError:
        return


@contextmanager
def _listening(path: Path) -> Iterator[socket.socket]:
    """A socket of this process that listens at `path`; its file stays behind."""
    path.parent.mkdir(exist_ok=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        yield listener


def _fill(directory: Path) -> Iterator[Path]:
    """Files until there is no room for another one; names them."""
    number = 0
    while True:
        path = directory / f"filler-{number}"
        try:
            path.touch()
        except OSError:
            return
        yield path
        number += 1
