"""The host of the real node: PCI functions that are not there, in a sysfs that acts, with device nodes and uevents.

The daemon's pods get `/sys` from here; `/dev`, `/proc` and every other path are the node's own, in its own mount
namespace. To be made inside that namespace, by root.
"""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final, final

from gpuactors.host.root import CGROUPS
from gpuactors_simulation.host.kernel import DRIVERS, NVIDIA, FakeKernel
from gpuactors_simulation.host.mediated import MdevType
from gpuactors_simulation.host.tree import HostTree, PciSpec
from gpuactors_simulation.host.uevents import Uevent
from gpuactors_simulation.host.vgpu import VgpuType
from tests.node.lane import DRIVERS_ROOTS, OWN_DIRECTORIES
from tests.node.real_tenants import GROUPS, RealTenants, make_node
from tests.node.sysfs_mount import SysfsMount
from tests.node.uevents import broadcast

HOST: Final = Path("/run/k8s/host")
"""Where the mounted parts are: `sys`."""

BACKING: Final = Path("/run/k8s/host-files")
"""The plain files behind them."""

H100: Final = "2330"
A100: Final = "20b0"
L40S: Final = "26b9"
AUDIO: Final = "22ba"

H100_RESOURCE: Final = "nvidia.com/GH100_H100_SXM5_80GB"
A100_RESOURCE: Final = "nvidia.com/GA100_A100_SXM4_40GB"
L40S_RESOURCE: Final = "nvidia.com/AD102GL_L40S"

ALIASES: Final = "alias vfio_pci:v*d*sv*sd*bc*sc*i* vfio_pci\n"

_GPUS: Final = frozenset({"030000", "030200"})

_MODULES_LOADED: Final = ("vfio_pci", "vfio", "nvidia")


def address(slot: int, function: int = 0) -> str:
    """The PCI address of a function: `0000:23:00.0` for slot 0x23."""
    return f"0000:{slot:02x}:00.{function}"


@final
class FakeHost:
    """The PCI devices of the node. Safe to use from several threads."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._tenants = RealTenants(BACKING)
        self.tree = HostTree(BACKING, tenants=self._tenants, make_node=make_node)
        self.kernel = FakeKernel(self.tree, DRIVERS, deliver=self.tell)
        for module in _MODULES_LOADED:
            (BACKING / "sys/module" / module / "parameters").mkdir(parents=True, exist_ok=True)
        (BACKING / "sys/class/iommu/dmar0").mkdir(parents=True, exist_ok=True)
        self.silent = False
        """No uevent is sent while this is so."""

    def tell(self, uevents: tuple[Uevent, ...]) -> None:
        """Has the kernel send these uevents to the pods."""
        self._show_gpus_to_nvml()
        if not self.silent:
            broadcast(uevents)

    def _show_gpus_to_nvml(self) -> None:
        """Removes `/dev/nvidiaN` of each GPU that has left NVIDIA's driver. Nothing does so on a real host, but the
        mock of NVML takes a node for a GPU. Containers have nodes from another directory (`nvidia/driver_root.py`)."""
        mine = {f"nvidia{number}" for number in self.kernel.minors.values()}
        for path in Path("/dev").glob("nvidia[0-9]*"):
            if path.name not in mine:
                path.unlink()

    # --- what can happen ----------------------------------------------------------------------------------------------

    def plug(
        self, slot: int, device: str = H100, *, driver: str | None = "vfio-pci", group: int | None = None,
        function: int = 0, class_code: str = "030200", numa_node: int = -1, vendor: str = "10de", total_vfs: int = 0,
        vgpu_types: tuple[VgpuType, ...] = (),
    ) -> str:  # fmt: skip
        """A function appears, and a driver takes it; its group is the slot unless named. Its PCI address."""
        name = address(slot, function)
        group = slot if group is None else group
        with self.lock:
            self._tenants.group_of[name] = group
            self.kernel.plug(
                PciSpec(
                    name, vendor, device, class_code, group, numa_node=numa_node, driver=driver, total_vfs=total_vfs,
                    vgpu_types=vgpu_types,
                )
            )  # fmt: skip
        return name

    def virtualize(self, name: str, count: int, driver: str | None = "vfio-pci") -> list[str]:
        """A function gets so many virtual functions, which a driver takes; with 0 it loses them. Their addresses."""
        with self.lock:
            before = set(self.tree.functions)
            self.tell(self.tree.virtualize(name, count, driver))
            virtual = sorted(set(self.tree.functions) - before)
            groups = {one: self.tree.functions[one].group for one in virtual}
            self._tenants.group_of |= {one: group for one, group in groups.items() if group is not None}
        return virtual

    def set_vgpu_type(self, name: str, number: int) -> None:
        """An administrator gives a virtual function a type of vGPU, 0: takes it. Raises `OSError` while it is open."""
        with self.lock:
            self.tree.set_vgpu_type(name, number)

    def offer_mediated(self, name: str, *types: MdevType) -> None:
        """The driver of a function can make mediated devices of these types."""
        with self.lock:
            devpath = self.tree.device_dir(name).relative_to(BACKING / "sys")
            self.tell(
                self.tree.mediated.register(
                    f"/{devpath}", types, "nvidia-vgpu-vfio", first_group=GROUPS.start
                )
            )

    def make_mediated(self, uuid: str, parent: str, mdev_type: str) -> None:
        """An administrator makes a mediated device."""
        with self.lock:
            uevents = self.tree.mediated.create(uuid, parent, mdev_type)
            group = self.tree.mediated.group_of(uuid)
            assert group is not None
            self._tenants.group_of[uuid] = group
        self.tell(uevents)

    def remove_mediated(self, uuid: str) -> None:
        """An administrator removes a mediated device; it is gone once its holder lets go."""
        with self.lock:
            self.tell(self.tree.mediated.remove(uuid))

    def group_of(self, name: str) -> int:
        """The IOMMU group of a function or mediated device. Raises `KeyError` if it is not there."""
        with self.lock:
            spec = self.tree.functions.get(name)
            group = self.tree.mediated.group_of(name) if spec is None else spec.group
        assert group is not None
        return group

    def unplug(self, name: str) -> None:
        """A function disappears, once its holder lets go."""
        with self.lock:
            self.tell(self.tree.unplug(name))

    def bind(self, name: str, driver: str = "vfio-pci") -> None:
        """An administrator has a driver take a function that has none."""
        with self.lock:
            self.tell(self.tree.bind(name, driver))

    def unbind(self, name: str) -> None:
        """An administrator takes a function from its driver."""
        with self.lock:
            self.tell(self.tree.unbind(name))

    def wake(self) -> None:
        """What waits for a tenant that has let go goes on."""
        with self.lock:
            self.kernel.wake()

    def drivers(self) -> Mapping[str, str | None]:
        """The driver of each function."""
        with self.lock:
            return {name: self.tree.driver_of(name) for name in self.tree.functions}

    def clear(self) -> None:
        """Every function is gone, whatever waits."""
        with self.lock:
            self.kernel.forget_plans()
            self.kernel.release()
            self.wake()
            for name in list(self.tree.functions):
                if name in self.tree.functions:  # a virtual function goes with its physical one
                    self.tell(self.tree.unplug(name))
            self.kernel.power_off()

    def gpus(self) -> list[str]:
        """The addresses of NVIDIA's whole GPUs, in order."""
        with self.lock:
            functions = self.tree.functions.items()
            return sorted(
                address
                for address, spec in functions
                if spec.vendor == "10de"
                and spec.class_code in _GPUS
                and self.tree.physical_function(address) is None
            )

    def owners(self) -> Mapping[int, frozenset[str]]:
        """Who has each group open: `pod UID` or `process PID`."""
        return self._tenants.owners()


@contextmanager
def opened_host() -> Iterator[FakeHost]:
    """The host's files, mounted where pods find them; all gone afterwards. Raises `OSError`."""
    with ExitStack() as stack:
        BACKING.mkdir(parents=True, exist_ok=True)
        stack.enter_context(_mounted("tmpfs", "-t", "tmpfs", at=BACKING))
        # HostTree's device nodes are the node's own.
        (BACKING / "dev").symlink_to("/dev")
        for directory in OWN_DIRECTORIES:
            stack.enter_context(_own_directory(Path(directory)))
        # What a driver's container mounts in it later is to reach the pod; systemd makes all of a host shared.
        subprocess.run(("mount", "--make-shared", DRIVERS_ROOTS), check=True)
        host = FakeHost()
        release = os.uname().release
        (Path("/lib/modules") / release).mkdir()
        (Path("/lib/modules") / release / "modules.alias").write_text(ALIASES)
        (BACKING / "proc/driver/nvidia/gpus").mkdir(parents=True, exist_ok=True)
        devices = BACKING / "proc/devices"
        devices.write_text(Path("/proc/devices").read_text())
        stack.enter_context(_mounted(str(BACKING / "proc/driver"), "--bind", at=Path("/proc/driver")))
        stack.enter_context(_mounted(str(devices), "--bind", at=Path("/proc/devices")))
        for process in _sealed():
            stack.enter_context(_mounted("tmpfs", "-t", "tmpfs", at=process / "fd"))
        cgroups = Path(CGROUPS)
        (BACKING / cgroups.relative_to("/")).mkdir(parents=True, exist_ok=True)
        stack.enter_context(SysfsMount(host.kernel, host.lock).mounted(HOST / "sys"))
        # Those of the node's pods, which kubelet makes.
        stack.enter_context(_mounted(CGROUPS, "--rbind", at=HOST / cgroups.relative_to("/")))
        yield host


def _sealed() -> list[Path]:
    """The processes whose open files not even root may see here: a sandbox's, around this machine's work. They use no
    device of this node, and with them in sight the daemon would refuse to bind any."""
    found: list[Path] = []
    for process in (path for path in Path("/proc").iterdir() if path.name.isdigit()):
        try:
            for descriptor in os.listdir(process / "fd"):
                os.readlink(process / "fd" / descriptor)
        except PermissionError:
            found.append(process)
        except OSError:  # it has ended, or closed it
            continue
    return found


@contextmanager
def _own_directory(path: Path) -> Iterator[None]:
    """An empty file system at `path`."""
    path.mkdir(parents=True, exist_ok=True)
    with _mounted("tmpfs", "-t", "tmpfs", "-o", "mode=755", at=path):
        yield


@contextmanager
def _mounted(what: str, *options: str, at: Path) -> Iterator[None]:
    subprocess.run(("mount", *options, what, str(at)), check=True)
    try:
        yield
    finally:
        subprocess.run(("umount", "--lazy", str(at)), check=True)


__all__ = ["A100", "AUDIO", "H100", "HOST", "L40S", "NVIDIA", "FakeHost", "address", "opened_host"]
