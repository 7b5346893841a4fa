"""The facts that the checks judge: everything that was read of the node, once. Values only; `gather.py` reads them."""

from __future__ import annotations

from typing import TypeAlias, TypeVar

from msgspec import Struct

from gpuactors.config import Config
from gpuactors.control.client import Running
from gpuactors.control.view import NodeView
from gpuactors.core.gpus.device_classes import DeviceClass
from gpuactors.core.kinds.sets import NO_SETS, KnownSets
from gpuactors.core.values.domain import ImexFacts
from gpuactors.core.values.model import PciFunction, ResourceName
from gpuactors.host.pci_ids import Names
from gpuactors.host.preflight import Preflight
from gpuactors.host.runtime import Runtime
from gpuactors.host.variants import Variant
from gpuactors.host.vfio import VfioHost
from gpuactors.kubelet.look import PluginDirectory
from gpuactors.ports.node import LedgerContents

T = TypeVar("T")


class Unknown(Struct, frozen=True):
    """A fact that could not be read."""

    reason: str
    """The sentence: what could not be read, where, and why."""


Known: TypeAlias = T | Unknown


class NoDaemon(Struct, frozen=True):
    """No daemon runs with this state directory."""

    reason: str


class Devices(Struct, frozen=True):
    """The node's functions, and what the daemon's own core makes of them."""

    functions: tuple[PciFunction, ...]
    """The selected ones, and those in their IOMMU groups."""
    view: NodeView
    """The view of a daemon that is started now."""


class ModelNames(Struct, frozen=True):
    """The names of the selected models, by the file that the daemon takes them from and by a newer one."""

    used: Names
    newer: Names | None
    """The names by the newer file; None if the host has none, and none is shipped."""


class Place(Struct, frozen=True):
    """A directory that a daemon writes to."""

    path: str
    is_directory: bool
    nearest: str
    """The directory, or its nearest ancestor that exists, in which it would be made."""
    writable: bool
    """True if this process may write to `nearest`."""


class State(Struct, frozen=True):
    """The state directory."""

    place: Place
    path_problem: str
    """Why no control socket can be in it, in the daemon's words; empty if one can."""
    free_bytes: int
    """The free bytes of its disk, for this process."""
    journal_bytes: int
    """The bytes that the journal already takes."""


class NewerCheckpoint(Struct, frozen=True):
    """The checkpoint of a newer gpuactors, which this one cannot follow."""

    path: str
    version: int


class Claims(Struct, frozen=True):
    """The directories that claims need, with DRA or compute domains on."""

    cdi: Place
    registry: Place
    """Kubelet's `plugins_registry`."""
    plugins: tuple[Place, ...]
    """The directory of each driver below kubelet's `plugins`."""
    newer: tuple[NewerCheckpoint, ...] = ()
    """The newer checkpoints in these directories."""


class TheirFile(Struct, frozen=True):
    """The checkpoint of NVIDIA's DRA driver."""

    path: str
    driver: str
    """The name of the DRA driver, which is that of gpuactors as well."""
    claims: tuple[str, ...]
    """The UIDs of the claims that are prepared by this file, in this boot."""


class ApiServer(Struct, frozen=True):
    """An API server that has answered every request."""

    address: str


class PermittedDevice(Struct, frozen=True, order=True):
    """One entry of `permittedHostDevices` in the custom resource KubeVirt."""

    resource: str
    selector: str
    """The value of `pciVendorSelector`, `10DE:2330`, or of `mdevNameSelector`, `NVIDIA A40-12Q`."""
    is_external: bool
    """The value of `externalResourceProvider`."""


class KubeVirt(Struct, frozen=True):
    """The parts of the custom resource KubeVirt that decide over devices."""

    pci: tuple[PermittedDevice, ...]
    """The entries of `pciHostDevices`."""
    mediated: tuple[PermittedDevice, ...]
    """The entries of `mediatedDevices`."""
    permits_by_list: bool
    """True if `permittedHostDevices` is there; without it KubeVirt refuses no name."""
    deletes_mediated: bool
    """True if virt-handler deletes mediated devices that it was not told to make."""


class Facts(Struct, frozen=True):
    """All facts. None if not read, as the settings or `--pre` make it irrelevant."""

    pre: bool
    """True before installation: no part of gpuactors is expected."""
    config: Config
    node: str
    user: int
    """The user ID of this command; 0 is root."""
    settings: str
    """The origin of the settings, in words."""
    host: Known[VfioHost]
    devices: Known[Devices]
    directory: Known[PluginDirectory]
    names: Known[ModelNames]
    resources: frozenset[ResourceName]
    """The resources whose list was requested from kubelet."""
    ledger: Known[LedgerContents]
    daemon: Known[Running] | NoDaemon | None
    claims: Known[Claims] | None = None
    api: Known[ApiServer] | None = None
    classes: Known[tuple[DeviceClass, ...]] | None = None
    """The DeviceClasses, read where both APIs are on and the API server has answered the rest."""
    imex: Known[ImexFacts] | None = None
    state: Known[State] | None = None
    egms: Known[KnownSets] = NO_SETS
    """The EGMs of the host."""
    variants: Known[tuple[Variant, ...]] = ()
    """The selected functions that the kernel has a variant of vfio-pci for."""
    egm_module: Known[bool] = False
    """True if the kernel has the module of EGM, and it is not loaded."""
    preflight: Known[Preflight] | None = None
    runtimes: Known[tuple[Runtime, ...]] | None = None
    """The container runtimes' configurations, read where claims are wanted."""
    before_nvidia: Known[tuple[TheirFile, ...]] | None = None
    """NVIDIA's checkpoints of the drivers that are on; None without `--before-nvidia`."""
    kubevirt: Known[KubeVirt] | None = None
    """The custom resource KubeVirt, if the operator has given it (`--kubevirt`)."""


def offers_gpus(config: Config) -> bool:
    """Return whether either API offers GPUs. If not, only compute domains are on, and the GPUs are the host's."""
    return config.device_plugin == "on" or config.dra == "on"


def offers_by_both(config: Config) -> bool:
    """Return whether both APIs offer GPUs."""
    return config.device_plugin == config.dra == "on"


def wants_claims(config: Config) -> bool:
    """Return whether DRA or compute domains are on."""
    return config.dra == "on" or config.compute_domains != "off"
