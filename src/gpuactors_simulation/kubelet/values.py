"""The values of the fake kubelet: what it lists, gives away and remembers, and what can be seen of it.

Frozen, and without any rule: the rules are in `device_manager.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from msgspec import Struct, field

from gpuactors.replay.counts import Counts
from gpuactors_simulation.kubelet.dra.values import DraView


class AdmissionError(Exception):
    """Kubelet does not admit the pod; the text is kubelet's own."""

    def __init__(self, text: str, asked_for: tuple[str, ...] = ()) -> None:
        super().__init__(text)
        self.asked_for = asked_for
        """The devices of the Allocate that failed; none if there was none."""


class KubeletPanicError(Exception):
    """Here kubelet 1.36 dereferences a nil pointer and its process ends."""


# --- pods -----------------------------------------------------------------------------------------------------


class Phase(StrEnum):
    """The phase of a pod. Kubernetes' words, except that Pending is split by what the pod waits for."""

    PENDING = "Pending"
    """No room for it by the scheduler's arithmetic."""
    ADMITTING = "Admitting"
    """Placed on the node; kubelet is choosing and allocating devices."""
    STARTING = "ContainerCreating"
    """It has its devices; its container is about to start (PreStartContainer)."""
    RUNNING = "Running"
    TERMINATING = "Terminating"
    """It was deleted; its container may still run."""
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"


class Claim(Struct, frozen=True):
    """One device of a DRA claim that a pod has."""

    name: str
    driver: str
    pool: str
    device: str
    """The device's name in its ResourceSlice: `gpu-0000-23-00-0`."""
    cdi_ids: tuple[str, ...] = ()
    """As its driver answered to the prepare; empty: one by the claim's name."""


class Pod(Struct, frozen=True):
    """A pod of one container, as the API server would show it."""

    name: str
    requests: tuple[tuple[str, int], ...]
    """Resource name and number of devices."""
    phase: Phase
    message: str
    """The reason for its phase, as `kubectl describe pod` shows it."""
    uid: str
    """A pod that is made anew under the same name has another one."""
    namespace: str = "default"
    claims: tuple[Claim, ...] = ()
    asked_for: tuple[str, ...] = ()
    """The devices of the Allocate that failed it, which its message does not name; none if none did."""
    uses: tuple[str, ...] = ()
    """The names of the ResourceClaims that kubelet has to prepare for it; `claims` are those that need nothing."""
    bound: bool = False
    """It was created with `spec.nodeName`: no scheduler looks for room, and kubelet alone admits it."""


class DoubleHandOut(Struct, frozen=True):
    """A virtual machine got EBUSY on a device that kubelet had just allocated to its pod."""

    pod: str
    devices: tuple[str, ...]
    message: str
    """In QEMU's words."""


# --- devices --------------------------------------------------------------------------------------------------


class ListedDevice(Struct, frozen=True):
    """One device of a ListAndWatch list."""

    id: str
    healthy: bool
    numa_nodes: tuple[int, ...] = ()
    empty_topology: bool = False
    """The plugin sent a topology, without a node."""


class Endpoint(Struct, frozen=True):
    """Kubelet's record of a resource's plugin."""

    client: int | None
    """Number of the connection; None for the placeholder that a restart makes out of the checkpoint."""
    pre_start_required: bool
    preferred_allocation: bool
    stopped_at: float | None


class Choice(Struct, frozen=True):
    """The open part of the choice of devices for one resource of one pod."""

    pod: str
    uid: str
    resource: str
    endpoint: Endpoint
    available: tuple[str, ...]
    """Healthy devices that no pod has, in no order."""
    size: int


class Allocated(Struct, frozen=True):
    """The plugin's answer to Allocate for one container."""

    envs: Mapping[str, str]
    nodes: tuple[str, ...]
    """Device nodes that the container gets, as paths of the host."""
    response: bytes = b""
    """The container's part of AllocateResponse, encoded."""
    cdi_ids: tuple[str, ...] = ()
    """The CDI devices that the container runtime is to find, by their full names."""


class LedgerEntry(Struct, frozen=True):
    """Kubelet's record of one allocation (podDevices, and the checkpoint file)."""

    devices: tuple[str, ...]
    numa_nodes: Mapping[str, tuple[int, ...]]
    envs: Mapping[str, str]
    nodes: tuple[str, ...]
    response: bytes
    cdi_ids: tuple[str, ...] = ()


class Checkpoint(Struct, frozen=True):
    """The content of `kubelet_internal_checkpoint`."""

    entries: Mapping[tuple[str, str], LedgerEntry] = field(default_factory=dict)
    """(pod UID, resource) → what it was given."""
    registered: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Resource → its Healthy devices."""


# --- what can be seen -----------------------------------------------------------------------------------------


class PodListing(Struct, frozen=True):
    """A pod in PodResources."""

    pod: Pod
    devices: tuple[tuple[str, LedgerEntry], ...]
    """By resource."""


class DeviceRow(Struct, frozen=True):
    """One device as kubelet knows it, and the pod that has it."""

    resource: str
    id: str
    health: str
    """`Healthy`, `Unhealthy`, or `not listed` for a device that a pod has and that the plugin does not list any
    more."""
    numa_nodes: tuple[int, ...]
    pod: str | None


class KubeletView(Struct, frozen=True):
    """The state of kubelet and the scheduler at one moment: lists, counts, pods and the ledger."""

    running: bool
    """Kubelet's process lives. While it does not, the counts are its last ones."""
    resources: Mapping[str, Counts]
    devices: tuple[DeviceRow, ...]
    pods: Mapping[str, Pod]
    holdings: Mapping[tuple[str, str], LedgerEntry]
    """(pod, resource) → the ledger's entry of a pod that has not ended."""
    connected: frozenset[str]
    """Resources with a plugin whose end kubelet has not seen."""
    registrations: int
    """Register calls that succeeded, ever."""
    lists: int
    """Device lists received, ever."""
    dra: DraView = field(default_factory=DraView)
    """Claims and their drivers."""
