"""The values of a claim: its name, the devices that the scheduler allocated to it, and what is known of them.

Frozen values, as in `core/values/model.py`. `claim_states.py` decides what a claim may do, and when (ADR 0009).
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Final, NewType

from msgspec import Struct

from gpuactors.core.values.model import DeviceKey, PciAddress

ClaimUid = NewType("ClaimUid", str)
"""The UID of a ResourceClaim object. Two claims of one name in succession have two UIDs."""

Json = None | bool | int | float | str | tuple[Any, ...] | Mapping[str, Any]
"""A decoded JSON value. Arrays are tuples. The elements are `Any`: the journal's reader takes no type that contains
itself."""


class ClaimsOf(StrEnum):
    """A set of claims: those of one DRA driver, with a checkpoint and sockets of their own."""

    GPUS = "gpus"
    DOMAINS = "domains"


class ClaimName(Struct, frozen=True, gc=False):
    """A ResourceClaim, as kubelet names it in a prepare or unprepare (dra v1 `Claim`)."""

    namespace: str
    name: str
    uid: ClaimUid

    @property
    def is_known(self) -> bool:
        """True if namespace and name are known: NVIDIA's driver keeps only the UID of a claim that it has prepared."""
        return bool(self.name)

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}" if self.is_known else f"(UID {self.uid})"


class AllocatedDevice(Struct, frozen=True, gc=False):
    """One entry of `status.allocation.devices.results` that names this driver."""

    request: str
    """The full name of the request: `gpu`, or `gpu/any` for a subrequest of a prioritized list."""
    pool: str
    device: str
    """The name of the device in the ResourceSlice: `gpu-0000-23-00-0`."""
    share_id: str | None = None
    """The share's ID, returned in the answer (consumable capacity)."""
    admin_access: bool = False
    """True if the device is not exclusive to this claim; nothing is done to it."""

    @property
    def base_request(self) -> str:
        """The request without its subrequest; kubelet knows only such names."""
        return self.request.split("/", 1)[0]


PARAMETER_FIELDS: Final = frozenset(
    {"apiVersion", "kind", "iommu", "backendPolicy", "enableAPIDevice", "domainID", "allocationMode"}
)
"""Every field of the configurations that gpuactors accepts. Of another field only the name is kept: its value may be
anything, and the journal is passed on when an incident is investigated."""


class OpaqueConfig(Struct, frozen=True, gc=False):
    """One entry of `status.allocation.devices.config` for this driver, in the order of the list."""

    from_class: bool
    """True for `source: FromClass`, else FromClaim. The class's entries come first, the claim's override them."""
    requests: tuple[str, ...]
    """The requests that it is for; empty for all. `main` covers `main/sub`."""
    parameters: Json
    """The parameters; of a field that is not in PARAMETER_FIELDS only the name."""
    problem: str = ""
    """Why the parameters cannot be decoded as JSON, as a part of a sentence; they are None then."""


class Claim(Struct, frozen=True, gc=False):
    """A ResourceClaim as the API server has it, reduced to what one node's driver needs."""

    name: ClaimName
    pod_claim_name: str | None
    """The annotation `resource.kubernetes.io/pod-claim-name`: the pod's name for a claim made from a template."""
    generation: int
    results: tuple[AllocatedDevice, ...] | None
    """The allocated devices, without those of other drivers and other nodes' pools; None if it is not allocated."""
    configs: tuple[OpaqueConfig, ...] = ()


AttributeValue = str | int | bool
"""The value of a device's attribute, as it is in the ResourceSlice."""


class DeviceEdits(Struct, frozen=True, gc=False):
    """One device of a claim in its files."""

    result: AllocatedDevice
    edits: Json
    """The changes to the container (CDI, `containerEdits`); not empty."""
    attributes: Mapping[str, AttributeValue] = {}
    """The device's attributes in the metadata file of its request."""


class ClaimAbsent(Struct, frozen=True, gc=False):
    """The API server has no claim of this name. (If it does not serve claims at all, that is another error.)"""


class ClaimReplaced(Struct, frozen=True, gc=False):
    """The claim of this name has another UID."""

    uid: ClaimUid
    """The UID that it has."""


ClaimAnswer = Claim | ClaimAbsent | ClaimReplaced
"""The API server's answer about one claim."""


class Target(StrEnum):
    """The driver to bind a device to."""

    VFIO = "vfio"
    """Any vfio driver: a function that is on one stays as it is."""
    ORIGINAL_DRIVER = "original-driver"
    """The driver that the device was on before any act of gpuactors."""


class OriginalDriver(Struct, frozen=True, gc=False):
    """The driver of a function before any act of gpuactors. It belongs to the function's presence: a function that was
    unplugged and plugged in again gets a new one."""

    address: PciAddress
    driver: str | None
    """The driver's name; None if it had no driver."""
    vfio: bool = False
    """True if it is a vfio driver (`PciFunction.vfio_bound`): the function is pre-bound."""
    presence: int = 0
    """The same as `PciFunction.presence`."""
    was_bound: bool = False
    """True if an act of gpuactors has bound it to vfio and ended: a present `driver_override` is not gpuactors'."""
    persistence: bool = False
    """True if nvidia-persistenced gets it back; see `BoundFunction.persistence`."""
    ids: str = ""
    """Its model (`inventory.ids_of`); empty if unknown, as an older daemon recorded the driver."""


OriginalDrivers = Mapping[PciAddress, OriginalDriver]
"""The original drivers, by address."""

ClaimedModels = Mapping[ClaimUid, Mapping[DeviceKey, str]]
"""The model of each device that a claim has had, by the claim and the device's key (`OriginalDriver.ids`, or
`ClaimedGpu.model`)."""


class BoundFunction(Struct, frozen=True, gc=False):
    """The driver of a function after an act; group and cdev are read again after each bind."""

    address: PciAddress
    driver: str | None
    iommu_group: int | None
    cdev: str | None
    """Its cdev: `vfio3` has the node `/dev/vfio/devices/vfio3`. None if the kernel makes none, or no `/dev/iommu`."""
    vfio: bool = False
    """True if the driver is a vfio driver, by name or because the kernel made `vfio-dev/` below the function."""
    presence: int = 0
    """The same as `PciFunction.presence`."""
    persistence: bool = False
    """True if nvidia-persistenced had it open, and closed it for the act."""

    @property
    def nodes(self) -> frozenset[int | str]:
        """The group and the cdev that the files of a claim may name for it."""
        return frozenset(node for node in (self.iommu_group, self.cdev) if node is not None)


BoundFunctions = Mapping[PciAddress, BoundFunction]
"""The functions after acts, by address."""


class ActFault(StrEnum):
    """Why an act on a device did not reach its goal."""

    BLOCKED = "blocked"
    """An earlier act on this group still waits in the kernel; nothing was written."""
    HANGS = "hangs"
    """A write has not returned in time. Its process waits in the kernel, and nothing else is written meanwhile."""
    IN_USE = "in-use"
    """A process has the device, or a companion, open, or that cannot be determined. Nothing was written."""
    VIRTUAL_FUNCTIONS = "virtual-functions"
    """Its virtual functions are active. Nothing was written."""
    NO_DRIVER = "no-driver"
    """The driver that it is to be bound to is not loaded. Nothing was written."""
    UNKNOWN_FUNCTION = "unknown-function"
    """A function of its group was not there when the intent was written. Nothing was written."""
    NOT_VIABLE = "not-viable"
    """The host uses another member of its group. Nothing was written."""
    GONE = "gone"
    """It is not there, or has no IOMMU group."""
    REFUSED = "refused"
    """The kernel refused a write, or a write had no effect. The device stays where it is."""
    DIRECTORY_LEFT = "directory-left"
    """The claim's files were removed, but not all of a directory that its container had mounted."""


class FitnessCheck(Struct, frozen=True, gc=False):
    """One check of several devices: one pass over all processes."""

    number: int
    devices: tuple[DeviceKey, ...]
    """The devices whose answer is used: without those that changed since."""


class FitnessFinding(Struct, frozen=True, gc=False):
    """Whether a claim could bind a GPU that is on its host's driver."""

    device: DeviceKey
    fault: ActFault | None = None
    """Why an act on it would fail; None if it could be bound."""
    reason: str = ""
    """The same as a sentence; empty if it could be bound."""


# --- answers ------------------------------------------------------------------------------------------------


class PreparedDevice(Struct, frozen=True, gc=False):
    """One device of the answer to a prepare (dra v1 `Device`). A repeated prepare gets the same devices in the same
    order: kubelets before July 2026 append them (kubernetes issue 140471)."""

    requests: tuple[str, ...]
    """The base names of the requests: kubelet does not know subrequests."""
    pool: str
    device: str
    cdi_ids: tuple[str, ...]
    share_id: str | None = None


class Prepared(Struct, frozen=True, gc=False):
    """The claim's devices are ready: its containers may start."""

    devices: tuple[PreparedDevice, ...]


class Unprepared(Struct, frozen=True, gc=False):
    """Nothing is left of the claim that could affect the next owner of its devices."""


class DraHealth(StrEnum):
    """A device's health in kubelet's stream (dra-health v1 `HealthStatus`)."""

    HEALTHY = "HEALTHY"
    UNHEALTHY = "UNHEALTHY"
    UNKNOWN = "UNKNOWN"


class DeviceHealth(Struct, frozen=True, gc=False):
    """The health of one offered device, as kubelet writes it into the status of the pod that has it."""

    pool: str
    device: str
    health: DraHealth
    message: str
    """Why, as a sentence; empty when healthy. Cut by the adaptor to kubelet's bound."""
