"""Where the host's files are: the only place that contains /sys, /dev and /proc. A path has two forms: the *host's own*
(`/dev/vfio/51`), which is sent to kubelet, and the *real* one, which is read by this process: the same below
`--host-root`. Must not read anything.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct

PCI_DEVICES: Final = "/sys/bus/pci/devices"
PCI_DRIVERS: Final = "/sys/bus/pci/drivers"
DRIVERS_PROBE: Final = "/sys/bus/pci/drivers_probe"
MDEV_DEVICES: Final = "/sys/bus/mdev/devices"
"""A link for each mediated device, to `<parent>/<uuid>`; no such directory without the module mdev."""
EGMS: Final = "/sys/class/egm"
"""A directory for each EGM (`egm4`) of Grace superchips; not there without NVIDIA's kernel and its module."""
INFINIBAND: Final = "/sys/class/infiniband"
"""A directory for each device of the host's RDMA drivers, with a link `device` to its function."""
IOMMU_GROUPS: Final = "/sys/kernel/iommu_groups"
IOMMUS: Final = "/sys/class/iommu"
"""The directory with an entry per IOMMU that the kernel drives: `dmar0`, `ivhd0`, `smmu3.0x…`."""
VFIO_DEVICES: Final = "/sys/class/vfio-dev"
"""A link for each vfio device, to `<function>/vfio-dev/<name>`."""

PLATFORM_DEVICES: Final = "/sys/bus/platform/devices"
PLATFORM_DRIVERS: Final = "/sys/bus/platform/drivers"
CGROUPS: Final = "/sys/fs/cgroup"

PROC: Final = "/proc"
MEMORY_MAP: Final = "/proc/iomem"
"""The owners of physical addresses, which are zeros without CAP_SYS_ADMIN."""
INTERRUPTS: Final = "/proc/interrupts"
BOOT_ID: Final = "/proc/sys/kernel/random/boot_id"
"""The id of this boot, the same in every namespace: it is read without the prefix, as a pod lacks the host's /proc."""

COMMAND_LINE: Final = "/proc/cmdline"
OS_RELEASE: Final = "/proc/sys/kernel/osrelease"
MODULES: Final = "/lib/modules"
MODPROBE: Final = "/proc/sys/kernel/modprobe"
"""The program that the kernel itself has load a module, by its path on the host."""
FIRST_PROCESS_ROOT: Final = "/proc/1/root"
"""The host's whole file system, as its first process sees it (man 5 proc_pid_root); asks for CAP_SYS_PTRACE."""

NVIDIA_GPUS: Final = "/proc/driver/nvidia/gpus"
"""The directory of NVIDIA's driver with a directory per GPU, by PCI address."""
NVIDIA_CAPABILITIES: Final = "/proc/driver/nvidia/capabilities"
"""The directory of NVIDIA's driver with `gpu<minor>/mig/gi<number>` for each part of a GPU in MIG mode."""
DEVICE_NUMBERS: Final = "/proc/devices"
FABRIC_IMEX_MGMT: Final = "/proc/driver/nvidia/capabilities/fabric-imex-mgmt"
"""The file of NVIDIA's driver about the capability to manage IMEX: text with the minor number of its device."""
NVIDIA_PARAMS: Final = "/proc/driver/nvidia/params"
"""The file of NVIDIA's driver with its parameters, one a line."""
GPU_FEATURES: Final = "/etc/kubernetes/node-feature-discovery/features.d/gfd"
"""The output file of NVIDIA's GPU Feature Discovery about this node's GPUs, one label a line (its --output-file)."""
PCI_IDS: Final = ("/usr/share/hwdata/pci.ids", "/usr/share/misc/pci.ids", "/usr/share/pci.ids")
"""The paths of pci.ids in distributions."""
CONTAINERD_CONFIGS: Final = (
    "/etc/containerd/config.toml",
    "/var/lib/rancher/k3s/agent/etc/containerd/config.toml",
    "/var/lib/rancher/rke2/agent/etc/containerd/config.toml",
    "/etc/k0s/containerd.toml",
)
"""The paths of containerd's configuration: its own, and those of distributions that ship it."""
CRIO_CONFIG: Final = "/etc/crio/crio.conf"
CRIO_CONFIGS: Final = "/etc/crio/crio.conf.d"
PERSISTENCED_SOCKET: Final = "/run/nvidia-persistenced/socket"

DEV: Final = "/dev"
GROUP_NODES: Final = "/dev/vfio"
CDEV_NODES: Final = "/dev/vfio/devices"
DRM_NODES: Final = "/dev/dri"
CONTAINER_NODE: Final = "/dev/vfio/vfio"
IOMMUFD_NODE: Final = "/dev/iommu"


def group_node(group: int) -> str:
    """Return the node of an IOMMU group, as the host's own path."""
    return f"{GROUP_NODES}/{group}"


def module_parameter(module: str, name: str) -> str:
    """Return the value of a loaded module's parameter, by the host's own path; a module's name has `_` here."""
    return f"/sys/module/{module}/parameters/{name}"


def cdev_node(name: str) -> str:
    """Return the character device of one vfio device (`vfio0`), as the host's own path."""
    return f"{CDEV_NODES}/{name}"


class HostRoot(Struct, frozen=True):
    """The directory under which the host's /sys, /dev and /proc are seen."""

    prefix: str = "/"

    def real(self, path: str) -> str:
        """Return the path at which this process reads the host's `path`."""
        return self.prefix.rstrip("/") + path
