"""Claims of a GPU whose IOMMU group has the host's disk and network card: slots without ACS, as on many boards.

The kernel itself refuses such a group to user space; that is asked first, by the ioctl of a virtual machine. A claim is
refused with the function's name, the disk stays mounted and the network card up. When the operator has taken both from
their drivers, the claim binds the GPU and its companion, and still writes to neither of the two.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.support.claims import DRIVER, device_of, prepare
from tests.support.kubelet_grpcio import UNHEALTHY
from tests.vm.guest.claims import COMPANION_DRIVER, GPU_DRIVER, MODULES, Cluster, override_of
from tests.vm.guest.node import KUBELET_DIR, SLACK_S, Node
from tests.vm.guest.runner import Guest, eventually
from tests.vm.guest.sysfs import DEV_VFIO, Function, functions_behind
from tests.vm.machine import DISK_MODULES, Machine, PciFunction

GPU, DISK, NIC = PORTS = "rp1", "rp2", "rp3"
VIRTIO: Final = "virtio-pci"
MACHINE: Final = Machine(
    ports=PORTS,
    functions=(
        PciFunction("gpu", GPU_DRIVER, GPU),
        PciFunction("audio", "ich9-intel-hda", GPU, function=1),
        PciFunction("nic", "virtio-net-pci", NIC),
    ),
    modules=(*MODULES, *DISK_MODULES, "virtio_net"),
    without_acs=PORTS,
    disk_mib=64,
    disk_port=DISK,
    scenario_timeout_s=420.0,
)

BUSYBOX: Final = "/run/busybox"
MOUNTED: Final = Path("/run/disk")
CAUSE: Final = "GroupNotViable"
VFIO_GROUP_SET_CONTAINER: Final = ord(";") << 8 | 104
"""include/uapi/linux/vfio.h: the kernel gives the group to user space here, or EPERM."""


@dataclass(frozen=True, slots=True)
class _Host:
    """The four functions of the group that are no root ports."""

    gpu: Function
    audio: Function
    disk: Function
    nic: Function

    @property
    def drivers(self) -> tuple[str | None, ...]:
        return tuple(f.driver for f in (self.gpu, self.audio, self.disk, self.nic))

    def check_are_on(self, *drivers: str | None) -> None:
        """Raises AssertionError."""
        assert self.drivers == drivers, self.drivers

    def check_its_own(self, content: str) -> None:
        """The disk is mounted and takes writes, the network card is up, and nobody has written to either."""
        assert (self.disk.driver, self.nic.driver) == (VIRTIO, VIRTIO), self.drivers
        assert [override_of(f) for f in (self.disk, self.nic)] == ["(null)", "(null)"]
        assert os.path.ismount(MOUNTED)
        (MOUNTED / "file").write_text(content, encoding="ascii")
        os.sync()
        assert int((_interface(self.nic) / "flags").read_text(encoding="ascii"), 16) & 1, "it is down"


def run(guest: Guest) -> None:
    """One daemon."""
    host = _host(guest.machine)
    with guest.step("a disk is mounted and a network card is up, in the GPU's IOMMU group"):
        groups = [path.parts[-3:] for path in Path("/sys/kernel/iommu_groups").glob("*/devices/*")]
        assert len({f.group for f in (host.gpu, host.audio, host.disk, host.nic)}) == 1, groups
        MOUNTED.mkdir()
        subprocess.run([BUSYBOX, "mount", "-t", "ext4", "/dev/vda", str(MOUNTED)], check=True)
        subprocess.run([BUSYBOX, "ip", "link", "set", _interface(host.nic).name, "up"], check=True)
        host.check_its_own("before")
    with guest.step("the kernel gives the group to nobody while these two have drivers"):
        for function in (host.gpu, host.audio):
            function.unbind()
            function.bind_vfio()
        assert not _is_given(host.gpu)
    with ExitStack() as stack:
        node = stack.enter_context(Node.with_kubelet(guest))
        cluster = stack.enter_context(Cluster.running(guest, KUBELET_DIR))
        daemon = stack.enter_context(cluster.start("daemon"))
        plugin = stack.enter_context(cluster.plugin(daemon))
        with guest.step("the device plugin says so of a GPU on vfio-pci"):
            node.wait({host.gpu.address: UNHEALTHY}, SLACK_S)
            _returned(host)
            node.wait({}, SLACK_S)
        with guest.step("the GPU has a taint, and its claim is refused with the function's name"):
            eventually("the taint", lambda: _taints(cluster, host.gpu) == [CAUSE], timeout_s=SLACK_S)
            uid = cluster.api.claim("vm", host.gpu.address)
            reason = prepare(plugin, "vm", uid).error
            assert f"{host.disk.address} is bound to {VIRTIO} and is no part of the GPU" in reason, reason
            host.check_are_on(GPU_DRIVER, COMPANION_DRIVER, VIRTIO, VIRTIO)
            host.check_its_own("after the refusal")
            assert cluster.files == []
        with guest.step(
            "the operator takes both from their drivers: the taint goes, and the claim is prepared"
        ):
            subprocess.run([BUSYBOX, "umount", str(MOUNTED)], check=True)
            host.nic.unbind()
            assert _taints(cluster, host.gpu) == [CAUSE]
            host.disk.unbind()
            eventually("no taint", lambda: _taints(cluster, host.gpu) == [], timeout_s=SLACK_S)
            cluster.prepared(plugin, "vm", uid)
            host.check_are_on("vfio-pci", "vfio-pci", None, None)
            assert {override_of(f) for f in (host.gpu, host.audio, host.disk, host.nic)} == {"(null)"}
            assert _is_given(host.gpu)
        with guest.step("an unprepare returns the GPU and its companion, and nothing else"):
            cluster.unprepared(plugin, "vm", uid)
            host.check_are_on(GPU_DRIVER, COMPANION_DRIVER, None, None)
        with guest.step("the disk has what was written to it"):
            host.disk.bind_to(VIRTIO)
            eventually("the disk", lambda: Path("/dev/vda").exists(), timeout_s=SLACK_S)
            subprocess.run([BUSYBOX, "mount", "-t", "ext4", "/dev/vda", str(MOUNTED)], check=True)
            assert (MOUNTED / "file").read_text(encoding="ascii") == "after the refusal"


def _host(machine: Machine) -> _Host:
    """Waits until the drivers of the boot have taken them. Raises TimeoutError."""

    def found() -> _Host | None:
        behind = [functions_behind(machine, port) for port in PORTS]
        if list(map(len, behind)) != [2, 1, 1]:
            return None
        host = _Host(*behind[0], *behind[1], *behind[2])
        return host if host.drivers == (GPU_DRIVER, COMPANION_DRIVER, VIRTIO, VIRTIO) else None

    return eventually("the host's drivers", found, timeout_s=SLACK_S)


def _interface(nic: Function) -> Path:
    (interface,) = nic.path.glob("virtio*/net/*")
    return interface


def _is_given(function: Function) -> bool:
    """Whether the kernel gives the function's group to a process."""
    container = os.open(DEV_VFIO / "vfio", os.O_RDWR)
    group = os.open(function.group_node, os.O_RDWR)
    try:
        fcntl.ioctl(group, VFIO_GROUP_SET_CONTAINER, container.to_bytes(4, "little"))
    except PermissionError:
        return False
    finally:
        os.close(group)
        os.close(container)
    return True


def _returned(host: _Host) -> None:
    for function, driver in ((host.audio, COMPANION_DRIVER), (host.gpu, GPU_DRIVER)):
        function.unbind()
        function.forget_override()
        function.bind_to(driver)


def _taints(cluster: Cluster, function: Function) -> list[str] | None:
    """The values of the taints that the GPU has in its slice; None while it is in none."""
    slices = cluster.api.do(cluster.api.server.slices, DRIVER)
    devices = [d for s in slices for d in s["spec"].get("devices") or ()]
    found = [d for d in devices if d["name"] == device_of(function.address)]
    return [taint["value"] for d in found for taint in d.get("taints") or ()] if found else None
