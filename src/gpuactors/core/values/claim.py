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
"""A decoded JSON value. Arrays are tuples. What is in them is `Any`: the journal's reader takes no type that contains
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
        """Its namespace and name are known: NVIDIA's driver keeps only the UID of a claim that it has prepared."""
        return bool(self.name)

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}" if self.is_known else f"(UID {self.uid})"


class AllocatedDevice(Struct, frozen=True, gc=False):
    """One entry of `status.allocation.devices.results` that names our driver."""

    request: str
    """The full name of the request: `gpu`, or `gpu/any` for a subrequest of a prioritized list."""
    pool: str
    device: str
    """The name of the device in the ResourceSlice: `gpu-0000-23-00-0`."""
    share_id: str | None = None
    """Echoed in the answer (consumable capacity)."""
    admin_access: bool = False
    """The device is not exclusive to this claim; nothing is done to it."""

    @property
    def base_request(self) -> str:
        """The request without its subrequest; kubelet knows these only."""
        return self.request.split("/", 1)[0]


PARAMETER_FIELDS: Final = frozenset(
    {"apiVersion", "kind", "iommu", "backendPolicy", "enableAPIDevice", "domainID", "allocationMode"}
)
"""Every field of the configurations that our drivers take. A mistake in another one is told by its name: what a user
has put there may be anything, and the journal goes to whoever looks into an incident."""


class OpaqueConfig(Struct, frozen=True, gc=False):
    """One entry of `status.allocation.devices.config` for our driver, in the order of the list."""

    from_class: bool
    """`source: FromClass`; else FromClaim. The class's come first, the claim's override them."""
    requests: tuple[str, ...]
    """The requests it is for; empty: all. `main` covers `main/sub`."""
    parameters: Json
    """Of a field that no configuration of ours has only the name is kept (PARAMETER_FIELDS)."""
    problem: str = ""
    """How the parameters are no JSON that can be decoded, as a part of a sentence; they are None then."""


class Claim(Struct, frozen=True, gc=False):
    """A ResourceClaim as the API server has it, reduced to what one node's driver needs."""

    name: ClaimName
    pod_claim_name: str | None
    """The annotation `resource.kubernetes.io/pod-claim-name`: made from a template, under this name of the pod."""
    generation: int
    results: tuple[AllocatedDevice, ...] | None
    """None: the claim is not allocated. Results of other drivers and other nodes' pools are left out."""
    configs: tuple[OpaqueConfig, ...] = ()


AttributeValue = str | int | bool
"""The value of a device's attribute, as it is in the ResourceSlice."""


class DeviceEdits(Struct, frozen=True, gc=False):
    """One device of a claim in its files."""

    result: AllocatedDevice
    edits: Json
    """The changes to the container (CDI, `containerEdits`); not empty."""
    attributes: Mapping[str, AttributeValue] = {}
    """Those that the metadata file of its request has."""


class ClaimAbsent(Struct, frozen=True, gc=False):
    """The API server has no claim of this name. (That it does not serve claims at all is another error.)"""


class ClaimReplaced(Struct, frozen=True, gc=False):
    """The claim of this name is another one."""

    uid: ClaimUid
    """The UID of the one that is there."""


ClaimAnswer = Claim | ClaimAbsent | ClaimReplaced
"""The API server's answer about one claim. Of an unallocated one `results` is None."""


class Target(StrEnum):
    """The driver to bind a device to."""

    VFIO = "vfio"
    """Any vfio driver. A function that is on one stays as it is."""
    ORIGINAL_DRIVER = "original-driver"
    """The driver found on it before any act of gpuactors."""


class OriginalDriver(Struct, frozen=True, gc=False):
    """The driver found on a function before any act of gpuactors; None: without a driver. It belongs to the function's
    presence: one that was unplugged and plugged in again is found anew."""

    address: PciAddress
    driver: str | None
    vfio: bool = False
    """It is a vfio driver (`PciFunction.vfio_bound`): the function is pre-bound."""
    presence: int = 0
    """See `PciFunction.presence`."""
    was_bound: bool = False
    """An act of gpuactors has bound it to vfio and ended: a `driver_override` found now is somebody else's."""
    persistence: bool = False
    """nvidia-persistenced gets it back; see `BoundFunction.persistence`."""
    ids: str = ""
    """Its model (`inventory.ids_of`); empty where it is not known: an older daemon has noted it."""


OriginalDrivers = Mapping[PciAddress, OriginalDriver]
"""By address."""

ClaimedModels = Mapping[ClaimUid, Mapping[DeviceKey, str]]
"""The model of each device that a claim has had, by the claim and the device's address (`OriginalDriver.ids`)."""


class BoundFunction(Struct, frozen=True, gc=False):
    """The driver of a function after an act; group and cdev are read anew after each bind."""

    address: PciAddress
    driver: str | None
    iommu_group: int | None
    cdev: str | None
    """`vfio3`: its node is `/dev/vfio/devices/vfio3`; None where the kernel makes none, or no `/dev/iommu`."""
    vfio: bool = False
    """The driver is a vfio driver, by name or because the kernel made `vfio-dev/` below the function."""
    presence: int = 0
    """See `PciFunction.presence`."""
    persistence: bool = False
    """nvidia-persistenced had it open, and has let it go for the act."""

    @property
    def nodes(self) -> frozenset[int | str]:
        """The group and the cdev that the files of a claim may name for it."""
        return frozenset(node for node in (self.iommu_group, self.cdev) if node is not None)


BoundFunctions = Mapping[PciAddress, BoundFunction]
"""By address."""


class ActFault(StrEnum):
    """Why an act on a device did not reach its goal."""

    BLOCKED = "blocked"
    """An earlier act on this group still waits in the kernel; nothing was written."""
    HANGS = "hangs"
    """A write has not returned in time. Its process waits in the kernel, and nothing else is written meanwhile."""
    IN_USE = "in-use"
    """A process has the device, or a companion, open; or it cannot be known. Nothing was written."""
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
    """The kernel refused a write, or did not do it. The device stays where it is."""
    DIRECTORY_LEFT = "directory-left"
    """Of the act on a claim's files: they are gone, and of a directory that its container had mounted something is
    left."""


class FitnessCheck(Struct, frozen=True, gc=False):
    """One check of several devices: one pass over all processes."""

    number: int
    devices: tuple[DeviceKey, ...]
    """Those whose answer is used: not one that has changed since."""


class FitnessFinding(Struct, frozen=True, gc=False):
    """Whether a claim could bind a GPU that is on its host's driver."""

    device: DeviceKey
    fault: ActFault | None = None
    """The reason for which an act on it would fail; None if it could be bound."""
    reason: str = ""
    """The same as a sentence; empty if it could be bound."""


# --- answers ------------------------------------------------------------------------------------------------


class PreparedDevice(Struct, frozen=True, gc=False):
    """One device of the answer to a prepare (dra v1 `Device`). A repeated one gets the same, in the same order:
    kubelets before July 2026 append what they are given (kubernetes issue 140471)."""

    requests: tuple[str, ...]
    """Base names: a subrequest is not known to kubelet."""
    pool: str
    device: str
    cdi_ids: tuple[str, ...]
    share_id: str | None = None


class Prepared(Struct, frozen=True, gc=False):
    """The claim's devices are ready: its containers may start."""

    devices: tuple[PreparedDevice, ...]


class Unprepared(Struct, frozen=True, gc=False):
    """Nothing of the claim is left that its next owner could meet."""


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
