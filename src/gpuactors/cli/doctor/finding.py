"""The result of a check: one finding, with its level and remedy. Must not know how anything is checked."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final

from msgspec import Struct

from gpuactors.core.values.cause import Cause


class Level(StrEnum):
    """The severity of a finding."""

    PASS = "PASS"
    WARN = "WARN"
    """It works, but worse than it should, or not for every GPU."""
    FAIL = "FAIL"
    """GPUs cannot be given to virtual machines, or would be given wrongly."""


class Check(StrEnum):
    """The checks, by the words that programs know them by; the text below each is its row in
    docs/troubleshoot.md."""

    HOST_READABLE = "HostReadable"
    """The host's PCI bus, `/sys` and `/dev` can be read."""
    IOMMU_ON = "IommuOn"
    """The kernel has IOMMU groups."""
    NO_IOMMU_MODE = "NoIommuMode"
    """vfio is not allowed to work without an IOMMU."""
    GPUS_SELECTED = "GpusSelected"
    """The selectors match functions of this node."""
    MODEL_NAMES = "ModelNames"
    """Each model has a name in the pci.ids file, which is its resource's name; the names that a newer file would
    change."""
    GPUS_USABLE = "GpusUsable"
    """A virtual machine could open each selected GPU: driver, IOMMU group, nodes, use. The finding has the cause."""
    VFIO_PCI = "VfioPci"
    """The driver vfio-pci is loaded, or at least there."""
    IDLE_D3 = "IdleD3"
    """vfio-pci suspends GPUs that are not in use (`disable_idle_d3` is off)."""
    NODE_MODES = "NodeModes"
    """The permissions of the nodes below `/dev/vfio` are the kernel's."""
    BOOT_FRAMEBUFFER = "BootFramebuffer"
    """The framebuffer of the firmware's console keeps no part of a selected GPU's memory. To see where it is needs root
    with CAP_SYS_ADMIN: run it on the node."""
    INTERRUPT_REMAPPING = "InterruptRemapping"
    """The IOMMU remaps interrupts, without which vfio refuses a virtual machine (x86)."""
    LOCKED_MEMORY = "LockedMemory"
    """The limit of locked memory that the container runtime gives to containers: KubeVirt raises it, others may not."""
    VARIANT_DRIVER = "VariantDriver"
    """GPUs for which the kernel has a variant of vfio-pci, such as `nvgrace_gpu_vfio_pci`, can be on that driver: it is
    loaded, and none is on vfio-pci."""
    EGM = "Egm"
    """Each EGM of a Grace superchip has a device node and a list of GPUs that can be read."""
    IOMMUFD = "Iommufd"
    """With `/dev/iommu`, each GPU on vfio has its node below `/dev/vfio/devices`."""
    KUBELET_DIRECTORY = "KubeletDirectory"
    """Kubelet's `device-plugins` directory is there, and writable."""
    KUBELET_RUNS = "KubeletRuns"
    """Kubelet listens at its registration socket."""
    POD_RESOURCES = "PodResources"
    """Kubelet says by PodResources which pod has which device, and lists its own healthy ones."""
    OTHER_PLUGINS = "OtherPlugins"
    """No other device plugin serves a resource of gpuactors."""
    DAEMON_RUNS = "DaemonRuns"
    """The daemon answers on its control socket, and serves."""
    REGISTERED = "Registered"
    """Each resource is registered with kubelet."""
    KUBELET_LIST = "KubeletList"
    """Kubelet's healthy devices of each resource are the daemon's."""
    FREE_COUNT = "FreeCount"
    """No resource has more devices allocated than Healthy ones, so that the scheduler places no pod."""
    DAEMON_SEES = "DaemonSees"
    """The daemon knows of each GPU what this command sees; it receives uevents, kubelet and the ledger."""
    CDI_DIRECTORY = "CdiDirectory"
    """The directory of the claims' CDI files is writable, or can be made."""
    PLUGIN_DIRECTORIES = "PluginDirectories"
    """Kubelet's directories for DRA drivers are there, and writable."""
    API_SERVER = "ApiServer"
    """The API server answers, knows this node, and serves what claims need."""
    CLAIMS_SERVED = "ClaimsServed"
    """The daemon serves claims, and its ResourceSlices have every GPU."""
    RUNTIME_CDI = "RuntimeCdi"
    """CDI is on in the container runtime, which reads the directory of the claims' files. Judged by its configuration
    files: run it on the node."""
    DEVICE_CLASSES = "DeviceClasses"
    """No DeviceClass has a resource of the device plugin as its `extendedResourceName`, with both APIs on."""
    IMEX = "Imex"
    """The host has IMEX channels for compute domains."""
    PERMITTED_HOST_DEVICES = "PermittedHostDevices"
    """The resources that KubeVirt must permit: the report ends with the YAML to add. With `--kubevirt FILE`: it permits
    them, leaves them to gpuactors, and deletes no mediated device."""
    NODE_DRAINED = "NodeDrained"
    """With `--before-nvidia`: no claim or pod has a GPU or channel of this node, by the running daemon, and no compute
    domain has its label."""
    NVIDIA_CHECKPOINT = "NvidiaCheckpoint"
    """With `--before-nvidia`: no checkpoint of NVIDIA's DRA driver names claims that have ended."""
    LEFT_ON_VFIO = "LeftOnVfio"
    """With `--before-nvidia`: no unused GPU is on vfio, where no container gets it."""
    STATE_DIRECTORY = "StateDirectory"
    """The state directory is writable, or can be made; the control socket's path is not too long."""
    JOURNAL_SPACE = "JournalSpace"
    """The disk of the state directory has room for the journal."""


_BACK: Final = "docs/migrate.md#back-to-nvidias-dra-driver"
_INSTALL: Final = "docs/install.md"
_KUBELET: Final = "deploy/README.md#what-the-container-may-do"

DOCUMENTS: Final[Mapping[Check, str]] = {
    Check.HOST_READABLE: _KUBELET,
    Check.IOMMU_ON: f"{_INSTALL}#1-the-iommu",
    Check.NO_IOMMU_MODE: f"{_INSTALL}#1-the-iommu",
    Check.GPUS_SELECTED: "docs/reference.md#selectors",
    Check.MODEL_NAMES: "docs/reference.md#configuration",
    Check.GPUS_USABLE: "docs/reference.md#causes",
    Check.VFIO_PCI: f"{_INSTALL}#2-vfio-pci-at-boot",
    Check.IDLE_D3: f"{_INSTALL}#2-vfio-pci-at-boot",
    Check.NODE_MODES: "docs/operate.md#files-on-the-node",
    Check.BOOT_FRAMEBUFFER: "docs/troubleshoot.md#the-boot-framebuffer",
    Check.INTERRUPT_REMAPPING: f"{_INSTALL}#1-the-iommu",
    Check.LOCKED_MEMORY: "docs/troubleshoot.md#what-is-checked",
    Check.VARIANT_DRIVER: "docs/reference.md#egm-of-grace-superchips",
    Check.EGM: "docs/reference.md#egm-of-grace-superchips",
    Check.IOMMUFD: f"{_INSTALL}#2-vfio-pci-at-boot",
    Check.KUBELET_DIRECTORY: _KUBELET,
    Check.KUBELET_RUNS: "docs/troubleshoot.md#the-daemon",
    Check.POD_RESOURCES: _KUBELET,
    Check.OTHER_PLUGINS: "docs/migrate.md#from-nvidias-kubevirt-device-plugin",
    Check.DAEMON_RUNS: "docs/troubleshoot.md#the-daemon",
    Check.REGISTERED: "docs/troubleshoot.md#the-daemon",
    Check.KUBELET_LIST: "docs/migrate.md#from-nvidias-kubevirt-device-plugin",
    Check.FREE_COUNT: "docs/troubleshoot.md#the-count-is-wrong",
    Check.DAEMON_SEES: "docs/troubleshoot.md#the-daemon",
    Check.CDI_DIRECTORY: "deploy/README.md#claims-dra",
    Check.PLUGIN_DIRECTORIES: "deploy/README.md#claims-dra",
    Check.API_SERVER: "deploy/README.md#claims-dra",
    Check.CLAIMS_SERVED: "docs/dra.md#errors-of-claims",
    Check.RUNTIME_CDI: "docs/dra.md#gpus-as-claims",
    Check.DEVICE_CLASSES: "docs/dra.md#both-apis-on-one-node",
    Check.IMEX: "docs/dra.md#what-gpuactors-reads-on-the-host",
    Check.PERMITTED_HOST_DEVICES: "docs/troubleshoot.md#the-doctor-and-kubevirt",
    Check.NODE_DRAINED: _BACK,
    Check.NVIDIA_CHECKPOINT: _BACK,
    Check.LEFT_ON_VFIO: _BACK,
    Check.STATE_DIRECTORY: "docs/operate.md#files-on-the-node",
    Check.JOURNAL_SPACE: "docs/reference.md#configuration",
}
"""The document of each check, in the repository."""


class Finding(Struct, frozen=True):
    """One result of a check."""

    check: Check
    level: Level
    message: str
    remedy: str = ""
    """The remedy; empty only for a PASS."""
    cause: Cause | None = None
    """The cause for which a GPU is not usable (docs/reference.md#causes)."""
    devices: tuple[str, ...] = ()
    """The PCI addresses of the devices that it is about."""

    def __post_init__(self) -> None:
        assert (self.level is Level.PASS) == (not self.remedy), (
            f"{self.check}: {self.level} and {self.remedy!r}"
        )


def sentence(remedy: str) -> str:
    """Make a sentence of a remedy that is part of one elsewhere."""
    return f"{remedy[0].upper()}{remedy[1:]}."


def passed(check: Check, message: str) -> Finding:
    """Report that all is well."""
    return Finding(check, Level.PASS, message)


def warned(check: Check, message: str, remedy: str) -> Finding:
    """Report that it works, but not as well as it should."""
    return Finding(check, Level.WARN, message, remedy)


def failed(check: Check, message: str, remedy: str) -> Finding:
    """Report that it does not work."""
    return Finding(check, Level.FAIL, message, remedy)
