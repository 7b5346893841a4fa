"""A daemon that has no descriptors left for some seconds (issue 10, 4): it lives, says so, and serves afterwards."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import grpc
import pytest

from tests.process.daemon import DaemonProcess, gpuactors
from tests.process.node import H100, HEALTHY, Node, address, open_node, refusal

GIVEN, FREE, MORE = address(0x23), address(0x24), address(0x25)
BOTH = {H100: {GIVEN: HEALTHY, FREE: HEALTHY}}
SHORT = ["no file descriptors left (EMFILE)", "raise its limit", "retried automatically"]


@contextmanager
def no_descriptors(daemon: DaemonProcess) -> Iterator[None]:
    """Whatever it opens fails with EMFILE; what it has open it keeps."""
    used = {int(name) for name in os.listdir(f"/proc/{daemon.pid}/fd")}
    lowest_free = next(number for number in range(len(used) + 1) if number not in used)
    before = resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (lowest_free, before[1]))
    try:
        yield
    finally:
        with suppress(ProcessLookupError):  # it has died of it
            resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, before)


def test_no_descriptors_for_some_seconds() -> None:
    """Six failures of an actor ended the process, within some four seconds; an Allocate is refused after twelve.

    Meanwhile the ledger cannot be read, no GPU inspected, no use of one seen
    and nobody who dials is answered.
    """
    with open_node() as node:
        for slot in (0x23, 0x24):
            node.plug(slot, "2330", driver="vfio-pci")
        with node.daemon() as daemon:
            node.wait_device_lists(BOTH)
            node.kubelet.allocate(H100, [GIVEN], pod="vm")
            daemon.wait_event("device.changed", device=GIVEN, has=["allocated to pod"])
            mark = daemon.mark()
            with no_descriptors(daemon):
                daemon.wait_event("ledger.unreadable", has=SHORT, after=mark)
                node.tell(node.plug(0x25, "2330", driver="vfio-pci"))
                compare_at(node, FREE)
                daemon.wait_event("inspection.failed", address=FREE, has=SHORT, after=mark)
                daemon.wait_event(
                    "device.changed",
                    device=FREE,
                    health=HEALTHY,
                    has=["last known state", *SHORT],
                    after=mark,
                )
                sockets = [dial(node.endpoint(H100)), dial(node.directory / "s" / "gpuactors.sock")]
                with pytest.raises(grpc.RpcError) as refused:
                    node.kubelet.allocate(H100, [FREE], pod="too-early")
                status, text = refusal(refused.value)
                assert (status, [part for part in SHORT if part not in text]) == ("UNAVAILABLE", [])
                daemon.assert_alive()
            for dialled in sockets:
                dialled.close()
            node.wait_device_lists({H100: {GIVEN: HEALTHY, FREE: HEALTHY, MORE: HEALTHY}})
            assert node.kubelet.allocate(H100, [FREE], pod="later").envs
            assert {d.health for frame in node.kubelet.frames(H100) for d in frame.devices} == {HEALTHY}
            shown = gpuactors("inspect", f"--state-dir={node.directory / 's'}", "-o", "json")
            assert (shown.returncode, shown.stderr) == (0, "")
            node.assert_sound(daemon)


def dial(path: Path) -> socket.socket:
    """A connection that the kernel has taken, and the daemon cannot."""
    dialled = socket.socket(socket.AF_UNIX)
    dialled.connect(str(path))
    return dialled


def compare_at(node: Node, name: str) -> None:
    """A uevent about a function."""
    devpath = f"/devices/pci0000:20/{name}"
    pairs = f"ACTION=change\0DEVPATH={devpath}\0SUBSYSTEM=pci\0PCI_SLOT_NAME={name}\0SEQNUM=1\0"
    node.tell_raw(f"change@{devpath}\0{pairs}".encode())
