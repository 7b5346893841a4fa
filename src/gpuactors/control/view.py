"""The operator's view of a node, as values: every device with the one reason, its holders, and its history.

The daemon derives it from its state (`node_view.py`) for its control socket, as does a command that reads the node
itself. All other commands decode it, and import nothing else of what makes it. Must not import the core's state.
"""

from __future__ import annotations

from msgspec import Struct

from gpuactors.control.about import About
from gpuactors.core.values.model import Holder
from gpuactors.core.values.reported import ImexReport

NOT_LISTED = "not listed"
"""The health of a device that is gone and not advertised."""


# --- claims -----------------------------------------------------------------------------------------------


class ClaimView(Struct, frozen=True):
    """One claim."""

    namespace: str
    name: str
    uid: str
    state: str
    """A state of `core/values/claim_states.py`."""
    age_s: float
    """Seconds in this state, as far as this daemon has seen it."""
    devices: tuple[str, ...]
    """The devices that it has for itself or waits for: GPUs by PCI address, those of a compute domain by name."""
    admin_devices: tuple[str, ...]
    """The devices to which it has admin access."""
    problem: str
    """Why it stays in this state, as a sentence; empty if nothing is wrong."""
    waiting_calls: int
    """The number of kubelet's calls about it that wait for an answer."""
    domain: str = ""
    """The UID of the compute domain that it is for; empty of a claim of GPUs, and while it is not known."""

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}" if self.name else f"(UID {self.uid})"


class BlockedView(Struct, frozen=True):
    """A device that must not be given to a claim now."""

    name: str
    """The name in the slice; the PCI address if the device is never offered."""
    reason: str


class SlicesView(Struct, frozen=True):
    """The devices of this node that the API server has stored."""

    slices: int
    generation: int
    settled: bool
    """Whether the API server has all of it as it should be."""
    tainted: tuple[BlockedView, ...]
    withdrawn: tuple[BlockedView, ...]
    """The blocked devices that are not offered, as the server keeps no taints."""
    left_out: tuple[BlockedView, ...]
    """The devices that are never offered."""
    problem: str
    keeps_taints: str
    """Whether the API server keeps taints: `yes`, `no`, `unknown`."""
    keeps_counters: str = "unknown"


class ClaimsView(Struct, frozen=True):
    """The claims of one DRA driver on a node, and its slices."""

    driver: str
    """The name of the DRA driver."""
    problem: str
    """Why no claim is served, or why the checkpoint cannot be written; empty if all is well."""
    claims: tuple[ClaimView, ...]
    """The claims, in the order in which they came."""
    slices: SlicesView | None
    """The published slices; None while nothing is known of them."""

    def of(self, uid: str | None) -> ClaimView | None:
        """Return the claim with this UID; None if there is none."""
        return next((claim for claim in self.claims if claim.uid == uid), None)


class OriginalDriverView(Struct, frozen=True):
    """The driver that a function had in this boot before any act of gpuactors; None if it had none."""

    address: str
    driver: str | None


class DeviceOfClaimsView(Struct, frozen=True):
    """The ways in which claims may use one device; see `core.gpus.report.DeviceOfClaims`."""

    claim_uid: str | None
    stays: bool
    rule: str
    why: str
    first_drivers: tuple[OriginalDriverView, ...]
    offer: str
    blocked: str = ""


# --- compute domains --------------------------------------------------------------------------------------


class LabelView(Struct, frozen=True):
    """The node's label; as `report.LabelReport`."""

    status: str
    """A `LabelStatus`."""
    value: str | None
    said: str
    """Status and value in words."""
    problem: str


class DomainView(Struct, frozen=True):
    """One compute domain; as `report.DomainReport`."""

    uid: str
    name: str
    namespace: str
    status: str
    """A `DomainStatus`."""
    missing: str
    labelled: bool
    daemon_uid: str | None
    readiness: str | None
    """A `Readiness`."""
    problem: str
    since_s: float | None = None
    """Seconds in this status, as far as this daemon has seen it; None if not known."""
    read_s: float | None = None
    """Seconds since the API server last reported it; None if it has not."""

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}" if self.name else self.uid


class DomainsView(Struct, frozen=True):
    """The compute domains of a node, with its label, its IMEX and their claims."""

    mode: str
    """`on` or `host-managed`."""
    claims: ClaimsView
    """The claims of channels and daemons."""
    imex: ImexReport
    label: LabelView
    domains: tuple[DomainView, ...]
    """The domains, in the order in which their claims came."""

    def of(self, claim: ClaimView) -> DomainView | None:
        """Return the domain that a claim is for; None if it is not known."""
        return next((domain for domain in self.domains if domain.uid == claim.domain), None)


# --- pods, devices, resources -----------------------------------------------------------------------------


class PodView(Struct, frozen=True):
    """A pod that has a GPU by kubelet's ledger or had one until lately, or uses a claim without a GPU: one that waits,
    or is for a compute domain."""

    name: str
    """`default/vm-1`; empty where only the UID is known, as no kubelet runs."""
    uid: str
    """The pod's UID; empty where kubelet names the pod."""
    devices: tuple[str, ...]
    """The PCI addresses that kubelet has given it."""
    claims: tuple[str, ...]
    """The claims by which it has devices, and those without a GPU."""
    left: tuple[str, ...]
    """The PCI addresses that it had: it has left kubelet's ledger, and its process may still hold them."""
    vm: str = ""
    """The virtual machine that it runs: `default/vm-1`; empty if none is known."""

    def __str__(self) -> str:
        return self.name or f"with UID {self.uid}"


class Member(Struct, frozen=True):
    """A function of a device's IOMMU group."""

    address: str
    driver: str | None


class Change(Struct, frozen=True):
    """One change of a device's health or reason."""

    age_s: float
    """Seconds before the view was made."""
    health: str | None
    """The new health; None if the device left the list."""
    reason: str
    cause: str


class LastCallView(Struct, frozen=True):
    """The last answered call of its kind about a device."""

    kind: str
    """`Allocate` or `PreStartContainer`."""
    age_s: float
    refused: str
    """Why it was refused, as a sentence; empty if it was granted."""
    causes: tuple[str, ...]


class ReleaseView(Struct, frozen=True):
    """The end of one allocation of a device."""

    tenant: str
    """The name of the pod or claim that had it."""
    age_s: float
    """Seconds since it was in kubelet's ledger no more."""
    reset_methods: tuple[str, ...] | None
    """The methods by which the kernel could reset the device then, in the order in which it tries them; empty if there
    was none, None if unknown. Whether it was reset is not known."""
    enumerated_again: bool
    """Whether the kernel has enumerated the device again since."""


class EgmView(Struct, frozen=True):
    """The memory of a Grace superchip that a virtual machine gets with all of its GPUs."""

    name: str
    """The kernel's name, `egm4`."""
    node: str
    """Its device node on the host; empty if that is missing."""
    gpus: tuple[str, ...]
    """The addresses of its GPUs, sorted."""


class PartitionView(Struct, frozen=True):
    """A partition of the NVLink fabric that has the device."""

    name: str
    """Its number, in decimal digits."""
    gpus: tuple[str, ...]
    """The addresses of its GPUs, sorted."""
    is_active: bool
    """True if the fabric manager's last list has it as active."""
    state: str | None
    """Its PartitionState; None if neither a pod nor a claim has it."""
    problem: str
    """The problem of the last command, as a sentence; empty without one."""


class DeviceView(Struct, frozen=True):
    """One device. If it is gone from the node, only its list entry, owner and history are known."""

    address: str
    id: str
    """Its ID at kubelet."""
    present: bool
    """Whether it is on the node now."""
    vendor: str
    device: str
    class_code: str
    driver: str | None
    iommu_group: int | None
    group: tuple[Member, ...]
    """The members of its IOMMU group, itself included."""
    numa_node: int | None
    model: str | None
    resource: str
    health: str
    cause: str
    """The reason as a word for programs: a `Cause`."""
    reason: str
    owner: str | None
    """The name of the pod or claim that kubelet has given it to: `default/vm-1`."""
    holders: tuple[Holder, ...]
    history: tuple[Change, ...]
    """The changes of its health and reason, oldest first."""
    remedy: str | None
    """The remedy, where the reason does not say it; None if there is none."""
    listed: bool
    """Whether it is in the list that kubelet gets."""
    for_claims: DeviceOfClaimsView | None = None
    """How claims may use it; None while DRA is off, and for a device that is gone."""
    since_s: float | None = None
    """Seconds in this health and cause, as far as the daemon has seen it. This and the ages below are None if they are
    not known."""
    nodes: tuple[str, ...] = ()
    """The paths of its own device nodes on the host: group, cdev."""
    inspected_s: float | None = None
    """Seconds since its last inspection came back."""
    polled_s: float | None = None
    """Seconds since the last poll of its IOMMU group's use came back."""
    calls: tuple[LastCallView, ...] = ()
    """The last Allocate and the last PreStartContainer that this daemon has answered about it."""
    dead: str | None = None
    """The sign that it is dead, as a sentence, also while a pod has it and it is Healthy; None if there is none."""
    releases: tuple[ReleaseView, ...] = ()
    """The last ends of its allocations that this daemon has seen, oldest first."""
    kind: str = "pci-function"
    """The name of its kind (`core/kinds/table.py`). A daemon that does not report it has whole PCI functions only."""
    parent: str | None = None
    """The key of the device that it is a part of, or the name in sysfs of a parent that is no PCI function: `mtty`.
    None if it is whole or gone."""
    profile: str | None = None
    """The name of its vGPU profile, `NVIDIA A40-12Q`; None if it has none."""
    vm: str | None = None
    """The virtual machine that its owner runs: `default/vm-1`; None if none is known."""
    egm: EgmView | None = None
    partitions: tuple[PartitionView, ...] = ()
    """The EGM that it belongs to; None if it is in none."""


class CardView(Struct, frozen=True):
    """A PCI function that has parts, and that no selector chooses: no device, but the parent of some."""

    address: str
    vendor: str
    device: str
    model: str | None
    driver: str | None
    parent: str | None = None
    """Its physical function, if it is a virtual function itself."""


class ResourceView(Struct, frozen=True):
    """The state of one resource at kubelet."""

    name: str
    registered: bool
    problem: str
    """Why it is not registered, as a sentence."""
    listed: int
    """The number of devices in kubelet's list: its `capacity`."""
    healthy: int
    """The number of these that are Healthy: its `allocatable`."""
    allocated: int
    """The number of devices that pods have by kubelet's ledger under this name, or that were just allocated."""

    @property
    def free(self) -> int:
        """Return the scheduler's free count: `allocatable` less `allocated`. It is negative if pods have lost
        devices."""
        return self.healthy - self.allocated


class NodeView(Struct, frozen=True):
    """The state of a node at one moment."""

    role: str
    resources: tuple[ResourceView, ...]
    devices: tuple[DeviceView, ...]
    """The devices, sorted by address."""
    kubelet_problem: str
    """Why there is no kubelet, as a sentence; empty if there is one."""
    ledger_problem: str
    """Why kubelet's ledger could not be read the last time, or that it has not been read yet; empty if it was."""
    uevents_problem: str
    """Why uevents are not received, and what finds changes instead; empty if they are received."""
    claims: ClaimsView | None = None
    """The claims of GPUs; None while DRA is off."""
    domains: DomainsView | None = None
    """The compute domains; None while they are off."""
    ledger_age_s: float | None = None
    """Seconds since the last successful read of kubelet's ledger was requested; None if there was none."""
    offers_problem: str = ""
    """Why these settings offer nothing, as a sentence; empty if they offer anything."""
    pods: tuple[PodView, ...] = ()
    """The pods that have a GPU by kubelet's ledger, may still hold one, or use a claim without one."""
    config_problem: str = ""
    """Why the configuration file is not the one in use, as a sentence; empty if it is, or is not read again."""
    cards: tuple[CardView, ...] = ()
    """The parents of devices that are no devices themselves, sorted by address."""

    @property
    def problems(self) -> tuple[tuple[str, str], ...]:
        """Return each source of the view with its problem, which is empty if there is none."""
        return (
            ("settings", self.offers_problem),
            ("configuration file", self.config_problem),
            ("uevents", self.uevents_problem),
            ("kubelet's ledger", self.ledger_problem),
            ("kubelet", self.kubelet_problem),
        )

    @property
    def drivers(self) -> tuple[ClaimsView, ...]:
        """Return the claims of each driver that is on: of GPUs, then of compute domains."""
        domain_claims = self.domains.claims if self.domains is not None else None
        return tuple(claims for claims in (self.claims, domain_claims) if claims is not None)


class DaemonStatus(Struct, frozen=True):
    """The daemon's answer over its control socket, as JSON. A command of another version reads it where no field has
    changed its type or gone: fields that it does not know are ignored, and missing ones have their default."""

    about: About
    view: NodeView
