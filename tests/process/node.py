"""A whole node for one daemon process: a host tree, a socket for its uevents, and grpcio's kubelet stand-in.

Everything lies in one short directory, as a unix socket's path has at most 107 bytes.
"""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import grpc

from gpuactors_simulation.host.tree import HostTree, PciSpec
from gpuactors_simulation.host.uevents import Uevent
from tests.process.daemon import WAIT_S, DaemonProcess, eventually
from tests.support.kubelet_grpcio import KubeletStandIn
from tests.support.kubelet_seen import Allocated, DeviceNode, Frame, ListedDevice, Registration
from tests.support.tiny_plugin import TinyPlugin

PCI_IDS: Final = """\
# The names that this node's daemons are given; the shapes are those of the real file.
10de  NVIDIA Corporation
\t2330  GH100 [H100 SXM5 80GB]
\t\t10de 16c1  a subsystem, which names no model
\t20b0  GA100 [A100 SXM4 40GB]
\t2bb1  GB202GL [RTX PRO 6000 Blackwell]
\t2bb4  GB202GL [RTX PRO 6000 Blackwell]
\t1024  GK110BGL [Tesla K40s] *
\t22a3  GH100 [H100 NVSwitch]
1af4  Red Hat, Inc.
\t1050  Virtio GPU
"""

H100: Final = "nvidia.com/GH100_H100_SXM5_80GB"
A100: Final = "nvidia.com/GA100_A100_SXM4_40GB"
RTX: Final = "nvidia.com/GB202GL_RTX_PRO_6000_BLACKWELL"
K40S: Final = "nvidia.com/GK110BGL_TESLA_K40S"
NVSWITCH: Final = "nvidia.com/GH100_H100_NVSWITCH"
UNKNOWN: Final = "nvidia.com/29ff"
"""What the ids above are called; the last one is in no pci.ids file at all."""

HEALTHY: Final = "Healthy"
UNHEALTHY: Final = "Unhealthy"


@dataclass
class Node:
    """One node. Its directories are gone when `open_node` ends."""

    directory: Path
    tree: HostTree
    kubelet: KubeletStandIn
    _uevents: socket.socket = field(default_factory=lambda: socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))

    @property
    def kubelet_dir(self) -> Path:
        """What `--kubelet-dir` is given."""
        return self.kubelet.socket_dir.parent

    @property
    def directories(self) -> tuple[str, ...]:
        """The flags by which any command finds this node: never the machine's own kubelet."""
        return (
            f"--host-root={self.tree.root}",
            f"--kubelet-dir={self.kubelet_dir}",
            f"--device-plugin-dir={self.kubelet.socket_dir}",
            f"--state-dir={self.directory / 's'}",
        )

    @property
    def uevents(self) -> Path:
        """Where the daemon binds its socket for uevents."""
        return self.directory / "u"

    @property
    def http(self) -> Path:
        """Where the daemon serves its HTTP endpoints."""
        return self.directory / "m"

    def daemon(
        self,
        *words: str,
        tolerated: Collection[str] = (),
        bounds: Mapping[str, float] | None = None,
        planted: str = "",
        starts: bool = False,
    ) -> DaemonProcess:
        """A daemon for this node; `words` come last, so they win. The rest is as for `DaemonProcess`."""
        return DaemonProcess(
            *self.directories,
            f"--uevents=unix:{self.uevents}",
            f"--pci-ids={self.directory / 'pci.ids'}",
            f"--http-address=unix:{self.http}",
            *words,
            tolerated=tolerated,
            bounds=bounds,
            planted=planted,
            starts=starts,
        )

    def endpoint(self, resource: str) -> Path:
        """The socket at which `resource` is served."""
        return self.kubelet.socket_dir / f"gpuactors-{resource.replace('/', '_')}.sock"

    # --- the host -----------------------------------------------------------------------------------------

    def plug(
        self, slot: int, device: str, *, driver: str | None = None, function: int = 0,
        class_code: str = "030200", group: int | None = None, numa_node: int = -1, vendor: str = "10de",
    ) -> tuple[Uevent, ...]:  # fmt: skip
        """Plugs function `function` of `slot` in, of which nobody is told yet; its group is the slot unless named."""
        group = slot if group is None else group
        name = address(slot, function)
        return self.tree.plug(
            PciSpec(name, vendor, device, class_code, group, numa_node=numa_node, driver=driver)
        )

    def tell(self, uevents: Iterable[Uevent]) -> None:
        """Sends uevents to the daemon, waiting for room and for its socket."""
        for uevent in uevents:
            self.tell_raw(uevent.encode())

    def tell_raw(self, datagram: bytes) -> None:
        """Sends any datagram to the daemon."""

        def sent() -> bool:
            try:
                self._uevents.sendto(datagram, socket.MSG_DONTWAIT, str(self.uevents))
            except (BlockingIOError, FileNotFoundError, ConnectionRefusedError):
                return False
            return True

        eventually(sent, "a uevent's delivery")

    # --- the device lists ---------------------------------------------------------------------------------

    def device_lists(self) -> dict[str, dict[str, str]]:
        """What kubelet believes: health by device by resource."""
        return {resource: dict(devices) for resource, devices in self.kubelet.snapshot().items()}

    def wait_device_lists(self, expected: Mapping[str, Mapping[str, str]], within_s: float = WAIT_S) -> None:
        """Waits until kubelet's device lists are exactly `expected`, and have a stream behind each resource.

        An emptied resource is in them with no device. Raises TimeoutError that shows the device lists.
        """
        self.kubelet.wait_for(
            lambda device_lists: (
                device_lists == expected and all(self.streams_open(r) == 1 for r in expected)
            ),
            within_s,
            f"{expected} with one open stream each",
        )

    def streams_open(self, resource: str) -> int:
        """Open ListAndWatch streams of a resource, seen from kubelet. To be called inside `wait_for` as well."""
        ended = {end.client for end in self.kubelet.stream_ends(resource)}
        return len({frame.client for frame in self.kubelet.frames(resource)} - ended)

    def accepted(self, resource: str) -> tuple[Registration, ...]:
        """The registrations of a resource that kubelet accepted."""
        return tuple(r for r in self.kubelet.registrations if r.resource == resource and r.error is None)

    def last_frame(self, resource: str) -> Frame:
        """The frame that kubelet was sent last."""
        return self.kubelet.frames(resource)[-1]

    def assert_sound(self, daemon: DaemonProcess) -> None:
        """The daemon is the process that was started, and kubelet would still live."""
        daemon.assert_alive()
        assert self.kubelet.panics == (), self.kubelet.panics


@contextmanager
def open_node(*, cdev: bool = False, kubelet_dir: str = "k", started: bool = True) -> Iterator[Node]:
    """A node with a running kubelet (unless not `started`) and nothing plugged in."""
    directory = Path(tempfile.mkdtemp(prefix="ga-", dir="/tmp"))
    try:
        tree = HostTree(directory / "h", cdev=cdev)
        (directory / "pci.ids").write_text(PCI_IDS)
        (directory / kubelet_dir).mkdir(parents=True)
        kubelet = KubeletStandIn(directory / kubelet_dir)
        node = Node(directory, tree, kubelet)
        with node._uevents:
            if not started:
                yield node
                return
            with kubelet:
                yield node
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def address(slot: int, function: int = 0) -> str:
    """The PCI address of a function: `0000:23:00.0` for slot 0x23."""
    return f"0000:{slot:02x}:00.{function}"


def listed(name: str, health: str = HEALTHY, numa_node: int | None = None) -> ListedDevice:
    """A device as a frame has it."""
    return ListedDevice(name, health, None if numa_node is None else (numa_node,))


def granted(variable: str, addresses: str, *nodes: str) -> Allocated:
    """The whole answer to Allocate: one variable, these device nodes under their own names, nothing else."""
    return Allocated(
        envs={variable: addresses},
        devices=tuple(DeviceNode(node, node, "mrw") for node in nodes),
        mounts=(),
        annotations={},
        cdi_devices=(),
    )


def refusal(error: grpc.RpcError) -> tuple[str, str]:
    """Name of the status, and the text."""
    status: Any = error
    return status.code().name, status.details()


@contextmanager
def other_plugin(node: Node) -> Iterator[TinyPlugin]:
    """Another plugin for our resource, made with grpcio: it has registered, and kubelet has its list."""
    other = TinyPlugin(node.kubelet.socket_dir, "kubevirt-gpu.sock")
    theirs = {"51": HEALTHY, "52": HEALTHY}
    try:
        other.register(resource=H100)
        other.lists.put([*theirs.items()])
        node.kubelet.wait_for(lambda device_lists: device_lists.get(H100) == theirs, WAIT_S, "their list")
        yield other
    finally:
        other.server.stop(grace=None).wait()


def remove_sockets(directory: Path) -> None:
    """Every socket in it, whoever listens."""
    for entry in directory.iterdir():
        if entry.is_socket():
            os.unlink(entry)
