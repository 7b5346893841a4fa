"""The values of the node's state.

Every value is frozen. Mappings are plain dictionaries that are never changed once they are in a state: a transition
builds new ones. `inventory.py` and `assessment/` decide what these values mean for kubelet.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Final, NewType

from msgspec import Struct, field

from gpuactors.core.requests import Refresh
from gpuactors.core.values.cause import Cause
from gpuactors.core.values.cdi import NO_SPECS, CdiSpecs
from gpuactors.core.values.quote import quoted_id, quoted_name
from gpuactors.core.values.selector import Selector
from gpuactors.core.values.vgpu import OwnVgpuType, VendorVgpu

PciAddress = NewType("PciAddress", str)
"""A PCI address as sysfs spells it: `0000:23:00.0`, hex digits in lower case."""

DeviceKey = NewType("DeviceKey", str)
"""The key of one device of this node, everywhere. For a whole PCI function, its address."""

InspectedKey = PciAddress | DeviceKey
"""The subject of an inspection: a PCI function by its address, or a mediated device by its key."""

ResourceName = NewType("ResourceName", str)
"""The full name of an extended resource: `nvidia.com/GH100_H100_SXM5_80GB`."""

DeviceId = NewType("DeviceId", str)
"""The ID of a device in kubelet's ledger. gpuactors uses the PCI address."""

Token = NewType("Token", int)
"""The number of one gRPC call, from its arrival until it is answered."""

_PCI_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[01][0-9a-f]\.[0-7]")


def is_pci_address(text: str) -> bool:
    """Return whether `text` is a PCI address as sysfs spells it (drivers/pci/probe.c: `%04x:%02x:%02x.%d`)."""
    return _PCI_ADDRESS.fullmatch(text) is not None


def pci_address(text: str) -> PciAddress:
    """Return `text` as a PCI address. Raises `ValueError` if it is none (`is_pci_address`)."""
    if not is_pci_address(text):
        raise ValueError(f"{text!r} is not a PCI address (expected the form 0000:23:00.0)")
    return PciAddress(text)


device_key: Final[Callable[[PciAddress], DeviceKey]] = DeviceKey
"""Return the key of the device that consists of the whole function at this address."""

function_address: Final[Callable[[DeviceKey], PciAddress]] = PciAddress
"""Return the address of a whole function by its device's key; for any other device an address that no function has."""


class Health(StrEnum):
    """The two values of health in kubelet's API (k8s.io/kubelet deviceplugin/v1beta1/constants.go)."""

    HEALTHY = "Healthy"
    UNHEALTHY = "Unhealthy"


NVIDIA: Final = "10de"
_OTHER_BRIDGE: Final = "0680"
"""PCI_CLASS_BRIDGE_OTHER."""


def is_bridge(class_code: str) -> bool:
    """Return whether functions of this class are PCI bridges, or host bridges, which many AMD hosts have in a GPU's
    group; NVSwitches are not. Bridges are never bound to vfio (drivers/vfio/pci/vfio_pci_core.c takes type 0
    headers)."""
    return class_code.startswith("06") and not class_code.startswith(_OTHER_BRIDGE)


class Sign(StrEnum):
    """A sign that a function is dead."""

    SILENT = "silent"
    """`PciFunction.is_silent`."""
    FATAL = "fatal"
    """`PciFunction.has_fatal_errors`."""
    PORT = "port"
    """`PciFunction.port_fatal_errors` has grown while the function was there."""


class PciFunction(Struct, frozen=True, gc=False):
    """One PCI function as an inspection read it from sysfs and /dev."""

    address: PciAddress
    vendor: str
    """Four hex digits, lower case, without `0x`; empty if unreadable. The same for `device`."""
    device: str
    class_code: str
    """Six hex digits: base class, sub-class, programming interface."""
    driver: str | None
    """The name of the driver that it is bound to; None if it is bound to none."""
    vfio_bound: bool
    """True if the driver is a vfio driver: by name, or because the kernel made `vfio-dev/` below the function."""
    iommu_group: int | None
    numa_node: int | None
    """The NUMA node; None if the kernel has -1: no topology, which is not node 0."""
    pcie_root: str | None
    """The host bridge: `pci0000:20`."""
    nodes: tuple[str, ...]
    """The device nodes that exist for it, as paths of the host: container, group, cdev, iommufd; without a driver only
    its group's."""
    model: str | None
    """The model's name in pci.ids; empty if it has none there. None: it was not looked up, as no selector that was used
    for the inspection chooses the function."""
    fault: str | None
    """The parts that could not be read, as a sentence; None if all could."""
    without_iommu: bool = False
    """True if its group is one of vfio's no-IOMMU mode, with the node `/dev/vfio/noiommu-81`."""
    iommufd: bool = False
    """True if the node has `/dev/iommu`, whatever driver the function is bound to."""
    physical: PciAddress | None = None
    """The physical function of an SR-IOV virtual function; None if it is a whole function."""
    has_virtual_functions: bool = False
    """True if it has active virtual functions."""
    gpu_uuid: str | None = None
    """The UUID that NVIDIA's driver gives or gave to the GPU: `GPU-…`; None if unknown."""
    host_nodes: tuple[str, ...] = ()
    """The device nodes by which a container uses it through its host's driver: `/dev/nvidia0`, `/dev/dri/renderD128`.
    Empty on a vfio driver, and if unknown."""
    former_nodes: tuple[str, ...] = ()
    """Its last `host_nodes`, since it has left its host's driver: nothing removes them, and another GPU may have them
    now. Only the core knows."""
    has_parts: bool | None = None
    """True if NVIDIA's driver has divided it into MIG devices; None if unknown."""
    memory_bytes: int = 0
    """The memory behind its 64-bit BARs, rounded up to a power of two; 0 if unknown."""
    presence: int = 0
    """The inode number of its directory in sysfs, which the kernel never reuses (fs/kernfs, kernfs_ino): it changes
    when the function is unplugged and plugged in again. 0 if unknown."""
    other_members: tuple[tuple[str, str], ...] = ()
    """The members of its IOMMU group that are no PCI functions and have a driver: name and driver of each."""
    direct_region: str = ""
    """A region that firmware reserves one to one for a member of its group, `0xa0 to 0xaf`; empty if there is none."""
    vgpu: VendorVgpu | None = None
    """The vGPU facts of a virtual function on NVIDIA's driver; None for any other function."""
    unlinked: bool = False
    """True if it is an SR-IOV virtual function without a link to its physical one: it was just added, or its removal
    waits for a process that has it open. Always False before Linux 5.13."""
    is_silent: bool = False
    """True if its configuration space reads all ones although it is powered: no function answers."""
    has_fatal_errors: bool = False
    """True if the kernel has counted a fatal PCIe error of it since it was enumerated."""
    reset_methods: tuple[str, ...] | None = None
    """The methods by which the kernel can reset it alone, in the order in which it tries them: `flr`, `bus`. Empty if
    there is none; None if unknown, and on any other driver than a vfio driver."""
    port_fatal_errors: int | None = None
    """The fatal PCIe errors that the root port directly above has received since the boot; None if unknown."""
    sign: Sign | None = None
    """The first sign that it is dead, also where it shows none now; None if it has none. Only the core knows."""

    @property
    def is_virtual(self) -> bool:
        """True for an SR-IOV virtual function."""
        return self.physical is not None or self.unlinked

    @property
    def is_nvswitch(self) -> bool:
        """True for an NVSwitch, the switch of an HGX board's NVLink fabric."""
        return self.vendor == NVIDIA and self.class_code.startswith(_OTHER_BRIDGE)

    @property
    def has_node(self) -> bool:
        """True if a VM could open it: by its group node, or by its cdev with /dev/iommu."""
        group_node = f"/dev/vfio/{self.iommu_group}"
        return group_node in self.nodes or (
            "/dev/iommu" in self.nodes and any(n.startswith("/dev/vfio/devices/") for n in self.nodes)
        )


Functions = Mapping[PciAddress, PciFunction]
"""The functions of the host, by address."""


def by_group(functions: Functions) -> Mapping[int, tuple[PciFunction, ...]]:
    """Return the functions of each IOMMU group, by its number, in their order."""
    members_of: dict[int, list[PciFunction]] = {}
    for function in functions.values():
        if function.iommu_group is not None:
            members_of.setdefault(function.iommu_group, []).append(function)
    return {group: tuple(members) for group, members in members_of.items()}


class Seen(Struct, frozen=True, gc=False):
    """The last inspection of a function or mediated device, whether it was found or not."""

    inspection: int
    """The number of the inspection. A result with a smaller number is ignored: it may have been read before."""
    at: float
    """When it came back."""
    changed_at: float
    """When the function at the address, or its absence, was first seen as it is now."""
    has_failed: bool = False
    """Whether the inspection failed as a whole: what is known is from one before it, also the driver."""


class Retry(Struct, frozen=True, gc=False):
    """The repeated inspection of a function whose facts are incomplete."""

    attempt: int
    """The number of repetitions so far."""
    inspection: int
    """The inspection that failed or came back incomplete. The result of an earlier one does not replace it."""


class Inspections(Struct, frozen=True, gc=False):
    """The outstanding inspections of the host. Numbers only grow; one counter serves scans and single inspections."""

    last: int
    """The last issued number."""
    whole: Refresh
    """The full scan."""
    single: Mapping[InspectedKey, Refresh]
    """The inspections of one function or mediated device each that are outstanding, or due as the facts are
    incomplete, or by the clock."""
    scan_failures: int
    retries: Mapping[InspectedKey, Retry]
    """The functions and mediated devices that are inspected again as their facts are incomplete."""

    @property
    def functions(self) -> dict[InspectedKey, int]:
        """The numbers of the outstanding inspections of one function or mediated device each."""
        return {a: r.outstanding for a, r in self.single.items() if r.outstanding is not None}


class AdvertisedDevice(Struct, frozen=True, gc=False):
    """One device in a device list of ListAndWatch, with the reason for its health, for which kubelet has no field."""

    id: DeviceId
    key: DeviceKey
    health: Health
    numa_node: int | None
    reason: str
    cause: Cause
    """The cause of its health, only for the log, `inspect` and the history."""


DeviceList = tuple[AdvertisedDevice, ...]
"""All devices of one resource, sorted by ID. Each device list replaces the one before it in kubelet."""


Difference = tuple[AdvertisedDevice | None, AdvertisedDevice | None]
"""The entry of an ID before and after; None if it is not listed."""


Changes = Mapping[ResourceName, Sequence[Difference]]
"""The changed entries of each list."""


def differences(before: DeviceList, after: DeviceList) -> list[Difference]:
    """Return the entries that differ, in the order of the IDs."""
    if [a.id for a in before] == [a.id for a in after]:
        return [(was, now) for was, now in zip(before, after, strict=True) if was != now]
    old, new = {a.id: a for a in before}, {a.id: a for a in after}
    return [(old.get(i), new.get(i)) for i in sorted(old.keys() | new.keys()) if old.get(i) != new.get(i)]


def is_news_for_kubelet(differing: Iterable[Difference]) -> bool:
    """Return whether kubelet can see a difference: it is not sent reasons, causes and owners. A change of an Unhealthy
    device is news as well, as each sent list replaces kubelet's."""
    return any(
        was is None or now is None or (was.health, was.numa_node) != (now.health, now.numa_node)
        for was, now in differing
    )


def is_other_for_kubelet(before: DeviceList, after: DeviceList) -> bool:
    """Return whether kubelet can see a difference between the two lists."""
    return is_news_for_kubelet(differences(before, after))


def listed_by_key(
    device_lists: Mapping[ResourceName, DeviceList],
) -> dict[tuple[ResourceName, DeviceKey], AdvertisedDevice]:
    """Return the listed entry of each device; that of the first ID if there are several."""
    return {
        (resource, a.key): a for resource, device_list in device_lists.items() for a in reversed(device_list)
    }


class Listing(Struct, frozen=True, gc=False):
    """The comparison of kubelet's own list of a resource with that of gpuactors (`deviceplugin/listing.py`). Times are
    seconds of the core's clock."""

    changed_at: float = -math.inf
    """When the list of gpuactors last changed, in Healthy or Unhealthy devices: each sent list replaces kubelet's."""
    read: int | None = None
    """The read of kubelet's ledger to compare with, requested when kubelet had had the list for long enough."""
    compared_at: float = -math.inf
    """When the last compared read came back."""
    sighted_at: float = -math.inf
    """When a sign of another plugin was last seen: since then kubelet's list may be that plugin's."""
    against: int = 0
    """The number of comparisons in a row that differed."""
    disputed_at: float = -math.inf
    """The time of the first of these."""
    agreed_since: float | None = None
    """The time since which every comparison agreed; None if the last one did not."""
    reclaims: int = 0
    """The number of registrations because of a difference, since the lists agreed for long."""


class PluginState(Struct, frozen=True, gc=False):
    """The registration of one resource with kubelet. Registered means: one open ListAndWatch stream.

    `bind` and `register` count orders to the plugin actor: a larger number means "do it (again)". An answer has the
    number of its order, so that a late answer to an old order changes nothing.
    """

    bind: int
    bound: bool
    bind_failures: int
    register: int
    registering: bool
    """True while a Register call is outstanding."""
    register_failures: int
    accepted: bool
    """True if Register succeeded and kubelet has not dropped the registration since."""
    renew: bool
    """True if the order is to end the old endpoint's streams and make a new endpoint, even if its socket exists."""
    streams: frozenset[int]
    """Every open ListAndWatch stream, of any reader."""
    kubelet_stream: int | None
    """Kubelet's stream, the first that opened since Register was called. Its end ends the registration."""
    stream_opened_at: float
    retry_at: float | None
    """When the missing step (bind, register) is due; None if none is."""
    problem: str | None
    """Why it is not registered, as a sentence."""
    empty_since: float | None
    listing: Listing = Listing()


class Pod(Struct, frozen=True, gc=False):
    """A pod, as kubelet names it: its file has only the UID, PodResources only the name."""

    namespace: str
    name: str
    uid: str

    def __str__(self) -> str:
        if not self.name:
            return f"with UID {quoted_id(self.uid)}"
        return f"{quoted_name(self.namespace)}/{quoted_name(self.name)}"


class LedgerEntry(Struct, frozen=True, gc=False):
    """One device that kubelet has given to a pod, by kubelet's ID."""

    resource: ResourceName
    device: DeviceId
    pod: Pod


class CachedAnswer(Struct, frozen=True, gc=False):
    """The answer of Allocate for one device of a pod, as kubelet keeps it in its ledger file. Each container that
    kubelet makes gets it, also after a restart of the node, when Allocate is not called again."""

    resource: ResourceName
    device: DeviceId
    nodes: tuple[str, ...]
    """The device nodes below /dev/vfio that the container gets, as paths of the host, sorted."""


class PodLife(StrEnum):
    """The life of a pod, by its cgroup. Kubelet makes the cgroup when the pod is admitted, so when all its containers
    have their devices (pkg/kubelet/kubelet.go, SyncPod), and removes it when the pod has ended and its volumes are
    unmounted (SyncTerminatedPod)."""

    ABSENT = "absent"
    """The pod has no cgroup: it has ended, or is not admitted yet."""
    STARTING = "starting"
    """No process has run in the cgroup."""
    RUNNING = "running"
    """A process is in the cgroup."""
    STOPPED = "stopped"
    """Every process that ran in the cgroup has ended."""


class SeenPods(Struct, frozen=True, gc=False):
    """The result of one read of the cgroups of the node's pods."""

    lives: Mapping[str, PodLife] = {}
    """The lives of the requested pods, by UID; empty if pods' cgroups cannot be seen."""
    came: int = 0
    """The number of pods of any kind whose cgroup has appeared since the daemon's first read."""


NO_PODS: Final = SeenPods()
"""The result if pods' cgroups cannot be seen."""


class LedgerFile(Struct, frozen=True, gc=False):
    """The contents of kubelet's ledger file at one read; the defaults are those of a missing file."""

    entries: tuple[LedgerEntry, ...] = ()
    cached: tuple[CachedAnswer, ...] = ()
    """The answers to Allocate."""
    damaged: str = ""
    """The answers to Allocate that could not be read and were left out, as a sentence; empty if none."""
    exists: bool = True
    """True if the file exists: kubelet writes it at the first allocation."""


class RunningKubelet(Struct, frozen=True, gc=False):
    """The kubelet that answered List."""

    socket: str
    """The identity of its PodResources socket; empty if that was gone when List was answered."""
    age_s: float
    """The age of its socket at the read, at most LEDGER_SETTLE_S: an unchanged ledger should be an unchanged event,
    which costs the journal nothing."""


class ClaimedDevice(Struct, frozen=True, gc=False):
    """One device of a DRA claim that a running pod has, as PodResources lists it."""

    driver: str
    pool: str
    device: str
    """The device's name in its ResourceSlice: `gpu-0000-23-00-0`."""
    claim: str
    """The namespace and name of the claim; empty if only its CDI file names it: `device` is that file then."""
    pod: Pod | None
    """The pod; None for a claim of gpuactors, which is known before kubelet lists its pods, and for one that only its
    file names."""
    uid: str = ""
    """The claim's UID, by the CDI id of the device; empty if the id has none."""
    cdi_ids: tuple[str, ...] = ()
    """The CDI ids of the device, which the container runtime looks up in the CDI directory."""

    @property
    def name(self) -> tuple[str, str]:
        """The names of the driver and of the claim."""
        return self.driver, self.claim

    @property
    def called(self) -> str:
        """The claim in a sentence: its name, or UID and file if only its CDI file names it."""
        if self.claim:
            return quoted_name(self.claim)
        return f"with UID {quoted_name(self.uid)}, by {quoted_name(self.device)}"


class PodAnswer(Struct, frozen=True, gc=False):
    """The answer of PodResources Get for one pod; empty for a pod that kubelet does not know, as it was deleted or
    (from 1.36 on) has ended."""

    pod: Pod
    """The pod, without its UID."""
    devices: tuple[tuple[ResourceName, DeviceId], ...] = ()
    claims: tuple[ClaimedDevice, ...] = ()


class PodClaim(Struct, frozen=True, gc=False):
    """A DRA claim that a pod uses, as PodResources lists it."""

    claim: str
    """The namespace and name of the claim."""
    pod: Pod


AdminAccess = tuple[tuple[str, str], DeviceKey]
"""A claim with admin access to a device, as `ClaimedDevice.name`, and the device, which it does not own."""


class LedgerSource(StrEnum):
    """The source of the ledger's entries, in the words of the log."""

    LIST = "PodResources"
    """Kubelet's list, which names every pod."""
    FILE = "kubelet_internal_checkpoint"
    """No kubelet runs."""
    NO_FILE = "kubelet_internal_checkpoint (missing: kubelet has allocated nothing yet)"
    """No kubelet runs, and there is no file."""
    LIST_AND_FILE = "PodResources and kubelet_internal_checkpoint"
    """Kubelet has just started and may not know every pod; its file may name more."""
    LIST_AND_KNOWN = (
        "PodResources and what was known before (kubelet has just started, and kubelet_internal_checkpoint cannot be "
        "read)"
    )
    """Pods that got a device since the last read are missing."""

    @property
    def is_settling(self) -> bool:
        """True if kubelet may soon list more of these pods, or show that they have ended."""
        return self in (LedgerSource.LIST_AND_FILE, LedgerSource.LIST_AND_KNOWN)

    @property
    def is_whole(self) -> bool:
        """True if no pod is missing."""
        return self is not LedgerSource.LIST_AND_KNOWN


class KubeletStartup(Struct, frozen=True, gc=False):
    """The state of the kubelet that answered List last, while it may not know its pods; see
    `ledger/kubelet_startup.py`."""

    socket: str | None = None
    """The same as `RunningKubelet.socket`; None before the first answer."""
    listed: frozenset[tuple[ResourceName, DeviceId]] = frozenset()
    """The devices listed since the first answer; empty from `settled_at` on."""
    settled_at: float = math.inf
    """The time from which only kubelet's list is used, in seconds of the core's clock; infinite until kubelet is known
    to know its pods."""
    called_at: float = math.inf
    """When kubelet first asked for a claim; infinite before."""
    since: float = -math.inf
    """When kubelet's first answer came."""


class Asking(Struct, frozen=True, gc=False):
    """The questions to kubelet with a read of its ledger, and its last list of pods. A List is not harmless, see
    `host/asking.py`."""

    lists: bool = True
    """True if the outstanding read asks for List."""
    pods: tuple[Pod, ...] = ()
    """The pods that the outstanding read asks for (Get)."""
    last_pod: tuple[str, str] = ("", "")
    """The last pod that was asked for by the clock, by namespace and name: the next ones follow it."""
    wanted: bool = False
    """True if a List is wanted as soon as it may be asked for."""
    listed: int = 0
    """The number of the last returned read with kubelet's list, or without a kubelet; 0 before the first."""
    done: int = 0
    """The number of the last such read that returned with any result."""
    came: int = 0
    """`SeenPods.came` at the last List."""
    listed_at: float = -math.inf
    """When the last List was requested, answered or not, in seconds of the core's clock."""
    gap_s: float = math.inf
    """The time between the last two Lists."""
    has_get: bool = True
    """False if this kubelet is known not to answer Get (on by default from Kubernetes 1.34 on)."""


class Books(Struct, frozen=True, gc=False):
    """The content of kubelet's ledger file, and the lives of its pods, both read without asking kubelet; see
    `ledger/books.py`."""

    uids: Mapping[tuple[ResourceName, DeviceId], str]
    """The UID of each entry's pod."""
    ended: frozenset[LedgerEntry]
    """The entries of ended pods: kubelet does not list them any more, but has not removed them from its file yet."""
    lives: Mapping[str, PodLife]
    """The lives of the pods in the file, by UID; empty if pods' cgroups cannot be seen."""
    seen: frozenset[str]
    """The UIDs of the pods whose cgroup has been seen."""
    absent_since: Mapping[str, float]
    """When each of the other pods was first seen without a cgroup."""
    confirmed: frozenset[tuple[ResourceName, DeviceId]]
    """The devices that a pod has by an answer to Get of the last read."""
    granted: Mapping[tuple[ResourceName, DeviceId], float]
    """When Allocate was last answered for a device, while that matters."""
    came: int = 0
    """`SeenPods.came` at the last read."""
    looked_at: float = -math.inf
    """When the read of `lives` was requested: no later change is in them."""


NO_BOOKS: Final = Books({}, frozenset(), {}, frozenset(), {}, frozenset(), {})
"""The books before the first read."""


class Ledger(Struct, frozen=True, gc=False):
    """Kubelet's ledger: which pod has which device. Numbers come from the same counter as inspections."""

    refresh: Refresh
    read: int
    """The number of the read of these entries; 0 before the first one since this daemon serves."""
    entries: Mapping[tuple[ResourceName, DeviceId], Pod]
    claims: Mapping[DeviceKey, tuple[ClaimedDevice, ...]]
    problem: str | None
    """Why the last read failed, as a sentence; the entries are the last known ones then."""
    tried: bool
    """True once a read has come back, with any result."""
    names_owners: bool = False
    """True once kubelet's list or its file has been read, or no kubelet ran: before, a pod may have any device."""
    asked_at: float = -math.inf
    """When the last read was requested, also one that is outstanding."""
    read_at: float = -math.inf
    """When the read of these entries was requested: no later change is in them."""
    done: int = 0
    """The number of the last read that came back, with any result."""
    cached: Mapping[tuple[ResourceName, DeviceId], tuple[str, ...]] = field(default_factory=dict)
    """The nodes of each `CachedAnswer`, by kubelet's ID."""
    damaged: str = ""
    """The same as `LedgerFile.damaged`."""
    source: LedgerSource = LedgerSource.LIST
    """The source of `entries`; without meaning before the first read."""
    young: KubeletStartup = KubeletStartup()
    claimed: frozenset[tuple[str, str]] = frozenset()
    """Every claim that kubelet lists for a pod, by the DRA driver whose devices it has: `(driver, namespace/name)`."""
    unplaced: frozenset[ClaimedDevice] = frozenset()
    """The devices of listed claims whose names are no PCI addresses: channels, and GPUs by the names of another
    driver."""
    cdi: CdiSpecs = NO_SPECS
    """The files of the CDI directory. A removed file stays while kubelet lists a device of it."""
    without_gpu: frozenset[PodClaim] = frozenset()
    """The pods of these claims, and of claims of which kubelet lists no device yet."""
    asking: Asking = Asking()
    books: Books = NO_BOOKS


class Holder(Struct, frozen=True, gc=False):
    """A process that holds a vfio group or device open."""

    pid: int
    command: str
    pod_uid: str | None
    """The UID of its pod, from its cgroup; None if it is in no pod."""

    def __str__(self) -> str:
        where = f" of the pod with UID {self.pod_uid}" if self.pod_uid else ""
        return f"process {self.pid} ({quoted_id(self.command)}){where}"


class GroupUse(Struct, frozen=True, gc=False):
    """The result of one poll for one IOMMU group, without opening anything (unless an open was allowed)."""

    group: int
    enabled: Mapping[PciAddress, int]
    """`enable` of each readable function of the group: 0 when free, 1 while a device descriptor is open
    (drivers/pci/pci.c, pci_enable_device)."""
    active: frozenset[PciAddress]
    """The functions whose `power/runtime_status` is `active`."""
    holders: tuple[Holder, ...] | None
    """The processes that have it open, by /proc/*/fd; None if that was not read."""
    open_refused: bool | None
    """True if opening the group as a probe failed with EBUSY; None if it was not tried."""
    unseen: str = ""
    """Why `enabled` lacks a function that exists, as a sentence: the unreadable file, and the remedy."""


class Observed(Struct, frozen=True, gc=False):
    """The known use of a group. It stays the same object until a poll sees another use; `Polls.seen` has the last
    poll."""

    in_use: bool
    since: int
    """The number of the poll that first saw this use, or first saw the group free again. Other holders are another
    use."""
    evidence: str
    """How it is in use, empty if it is not: `held by process 4711 (qemu-system-x86)`, `in use (enable of 0000:23:00.0
    is 1)`."""
    holders: tuple[Holder, ...]
    open: frozenset[PciAddress] = frozenset()
    """The functions that were open as devices. An unbind waits for these, and not for a process that has only the group
    open."""
    idle_functions: frozenset[PciAddress] = frozenset()
    """The functions that were suspended when the group was last free; the use is not over before they are suspended
    again."""
    closing_at: float | None = None
    """Since when a function that is not suspended yet is the only evidence of the use; None while there is other
    evidence."""
    unseen: str = ""
    """Why its use cannot be determined, as a sentence; the last known use applies."""


class LastPoll(Struct, frozen=True, gc=False):
    """The last poll with a result for a group."""

    poll: int
    at: float
    """When it came back."""


class Polls(Struct, frozen=True, gc=False):
    """The use of the groups in the kernel, by polls. Their numbers come from the same counter as inspections."""

    refresh: Refresh
    """The outstanding poll. Due by the clock is always a poll of every group, and none is while such a poll is
    outstanding, or wanted after the outstanding one."""
    groups: Mapping[int, Observed]
    """The use of each group. The mapping and each use stay the same object until a poll sees another use."""
    seen: Mapping[int, LastPoll]
    """The last poll of each of these groups."""
    baselines: Mapping[PciAddress, int]
    """`enable` of a function when it was known to be free, if that is not 0 (an operator can write to it). Removed when
    the function goes, or its binding changes."""
    done: int
    """The number of the last poll of every group that came back; 0 before the first one."""
    asked_groups: frozenset[int] | None = None
    """The groups of the outstanding poll; None for every group in `Index.polled`."""
    again_groups: frozenset[int] | None = None
    """The groups of the poll that is wanted after it; None for every group in `Index.polled`."""
    fast_until: float = 0.0
    """Until when groups are polled for a release every POLL_FAST_S. Extended by every change of holders."""
    leaving: frozenset[PciAddress] = frozenset()
    """The functions that were on a vfio driver, are on none now, and whose unbind may still wait for a process."""
    doubtful: frozenset[PciAddress] = frozenset()
    """The functions whose binding has changed since the outstanding poll was requested."""

    def is_to_see(self, group: int | None) -> bool:
        """Return whether a poll of that group is outstanding, or wanted after the outstanding one."""
        asked, again = self.asked_groups, self.again_groups
        if self.refresh.outstanding is not None and (asked is None or group in asked):
            return True
        return self.refresh.again and (again is None or group in again)


class Orphan(Struct, frozen=True, gc=False):
    """A device whose pod has left kubelet's ledger, and may still hold its group."""

    pod: Pod
    read: int
    """The number of the read of the ledger that lacked the pod."""
    use: int | None = None
    """`Observed.since` of the group's use that was seen while kubelet listed the pod; None if none was."""


class Resolved(Struct, frozen=True, gc=False):
    """The device that an ID in kubelet's ledger, or in an allocation of gpuactors, means. The meaning stays as long as
    the ID is in use, even if the device moves: a GPU may come back in another IOMMU group."""

    key: DeviceKey
    ids: str | None = None
    """The model of a device of gpuactors, as vendor and device (`10de:2330`): the first one seen there since the
    allocation; if no such model ever had the resource's name, one that had. None before the first inspection; empty if
    that found no function."""
    inspection_requested: bool = False
    """True if an inspection was requested, as the scan, which reads only selected functions, had not shown it."""
    others: tuple[DeviceKey, ...] = ()
    """The other devices that the ID may mean as well: an older plugin's group number means one of the group."""


class Role(StrEnum):
    """The role of one of two daemons on a node: during an upgrade the new one asks the old one to hand over."""

    TAKING_OVER = "taking over"
    """The daemon is starting, or asks the running one to end its streams."""
    SERVING = "serving"
    HANDED_OVER = "handed over"
    """A successor serves; this process only waits for its end."""


class Transition(Struct, frozen=True, gc=False):
    """One change of a device's health or reason."""

    at: float
    health: Health | None
    """The health; None if the device left the list."""
    reason: str
    cause: Cause


class CallKind(StrEnum):
    """The rpc of a waiting call."""

    ALLOCATE = "Allocate"
    PRE_START = "PreStartContainer"


class Release(Struct, frozen=True, gc=False):
    """The end of a device's allocation, and what was known of it then."""

    tenant: str
    """The name of the pod or claim that had it: `default/vm-1`."""
    at: float
    """When it was in kubelet's ledger no more. Its process may have ended later."""
    presence: int
    """The same as `PciFunction.presence`; 0 if unknown."""
    reset_methods: tuple[str, ...] | None
    """The same as `PciFunction.reset_methods`."""


class LastCall(Struct, frozen=True, gc=False):
    """The last answered call of its kind about a device."""

    kind: CallKind
    at: float
    refused: str = ""
    """Why it was refused, as a sentence; empty if it was granted."""
    causes: tuple[Cause, ...] = ()


class Call(Struct, frozen=True, gc=False):
    """A call that waits for fresh inspections of its devices before it can be answered."""

    kind: CallKind
    resource: ResourceName
    requests: tuple[tuple[DeviceId, ...], ...]
    """The requested IDs of each container."""
    seen: Mapping[DeviceKey, tuple[PciFunction, ...]]
    """The units of each device (`Device.units`), as known when the call came."""
    since: int
    """The last number issued when the call came: only later inspections and polls are used."""
    deadline: float
    came_at: float = -math.inf
    """When the call came. A read of the ledger that was requested up to LEDGER_FRESH_S before is used like a later
    one."""
    doubted: int | None = None
    """The number up to which reads of the ledger would refuse the call: only a later read, which asks kubelet for the
    owners of its devices, is used. None without such a refusal."""


class Settings(Struct, frozen=True, gc=False):
    """The settings that the core needs."""

    selectors: tuple[Selector, ...]
    resync_interval_s: float
    pre_start_gate: bool
    hand_over: bool = False
    """True if a running daemon is asked to hand over before this one serves."""
    device_plugin: bool = True
    """True if the devices are offered by the device plugin API."""
    strict: bool = True
    """True if a broken rule of `device_lists` ends the process, as in tests and simulation. In production it is logged
    as an error, and the offending entry is set aside."""
    vgpu_types: tuple[OwnVgpuType, ...] = ()
    """The operator's names of vGPU types."""
    allocates_by_cdi: bool = False
    """True if Allocate answers by CDI names, whose files the daemon writes (`deviceplugin/specs.py`)."""
    waits_in_allocate: bool = False
    """True if Allocate waits until no process has the devices open, as the virtual machine starts before
    PreStartContainer; `pre_start_gate` is False then."""
    sets_required: bool = False
    """True if devices that are no set are refused; False if a set is only preferred."""
    activates_partitions: bool = False
    """True if the partitions of the NVLink fabric are activated for those who get their devices."""
