"""The values that the node's state is made of.

Every value is frozen. Mappings are plain dictionaries that are never changed after they were put into a state: a
transition builds new ones. `inventory.py` and `assessment/` decide what these values mean for kubelet.
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

PciAddress = NewType("PciAddress", str)
"""Domain, bus, device and function as sysfs spells them: `0000:23:00.0`, hex digits in lower case."""

DeviceKey = NewType("DeviceKey", str)
"""Names one device of this node in all that is known and decided of it. Of a whole PCI function its address."""

ResourceName = NewType("ResourceName", str)
"""An extended resource's full name: `nvidia.com/GH100_H100_SXM5_80GB`."""

DeviceId = NewType("DeviceId", str)
"""The ID of a device in kubelet's ledger. Ours is the PCI address."""

Token = NewType("Token", int)
"""Names one gRPC call from the moment it arrives until it is answered."""

_PCI_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[01][0-9a-f]\.[0-7]")


def is_pci_address(text: str) -> bool:
    """Whether `text` is a PCI address as sysfs spells it (drivers/pci/probe.c: `%04x:%02x:%02x.%d`)."""
    return _PCI_ADDRESS.fullmatch(text) is not None


def pci_address(text: str) -> PciAddress:
    """`text` as a PCI address.

    Raises `ValueError` when it is not one (see `is_pci_address`).
    """
    if not is_pci_address(text):
        raise ValueError(f"{text!r} is not a PCI address (expected the form 0000:23:00.0)")
    return PciAddress(text)


device_key: Final[Callable[[PciAddress], DeviceKey]] = DeviceKey
"""The key of the device that the function at an address is, as a whole."""

function_address: Final[Callable[[DeviceKey], PciAddress]] = PciAddress
"""The address of the function that a device is, as a whole; of any other device one that no function has."""


class Health(StrEnum):
    """The two values of health in kubelet's API (k8s.io/kubelet deviceplugin/v1beta1/constants.go)."""

    HEALTHY = "Healthy"
    UNHEALTHY = "Unhealthy"


_NVIDIA: Final = "10de"
_OTHER_BRIDGE: Final = "0680"
"""PCI_CLASS_BRIDGE_OTHER."""


def is_bridge(class_code: str) -> bool:
    """A function of this class is a PCI bridge, or a host bridge as many AMD hosts have in a GPU's group; not an
    NVSwitch. Bridges are never bound to vfio (drivers/vfio/pci/vfio_pci_core.c takes type 0 headers)."""
    return class_code.startswith("06") and not class_code.startswith(_OTHER_BRIDGE)


class PciFunction(Struct, frozen=True, gc=False):
    """One PCI function as one inspection of sysfs and /dev found it."""

    address: PciAddress
    vendor: str
    """Four hex digits, lower case, without `0x`; empty if unreadable."""
    device: str
    class_code: str
    """Six hex digits: base class, sub-class, programming interface."""
    driver: str | None
    """Name of the driver it is bound to."""
    vfio_bound: bool
    """The driver is a vfio driver: by name, or because the kernel made `vfio-dev/` below the function."""
    iommu_group: int | None
    numa_node: int | None
    """None where the kernel has -1: no topology, which is not node 0."""
    pcie_root: str | None
    """Its host bridge: `pci0000:20`."""
    nodes: tuple[str, ...]
    """Device nodes that exist for it, as paths of the host: container, group, cdev, iommufd; of a function without a
    driver only its group's."""
    model: str | None
    """Its name in pci.ids."""
    fault: str | None
    """The parts that could not be read, as a sentence; None if all could."""
    without_iommu: bool = False
    """Its group is one of vfio's no-IOMMU mode, whose node is `/dev/vfio/noiommu-81`."""
    iommufd: bool = False
    """The node has `/dev/iommu`, whatever driver the function is bound to."""
    own_name: ResourceName | None = None
    """The resource that the operator has named for its model, instead of the one of its name in pci.ids."""
    physical: PciAddress | None = None
    """The physical function whose SR-IOV virtual function it is; None: it is a whole function."""
    has_virtual_functions: bool = False
    """Virtual functions of it are there."""
    gpu_uuid: str | None = None
    """Of a GPU that NVIDIA's driver has or had, as that names it: `GPU-…`; None where it is not known."""
    host_nodes: tuple[str, ...] = ()
    """The device nodes by which a container uses it through its host's driver: `/dev/nvidia0`, `/dev/dri/renderD128`.
    Empty on a vfio driver, and where they are not known."""
    has_parts: bool | None = None
    """NVIDIA's driver has divided it into MIG devices; None where that is not known."""
    memory_bytes: int = 0
    """The memory behind its 64-bit BARs, rounded up to a power of two; 0 where it is not known."""
    presence: int = 0
    """The number of its directory in sysfs, which the kernel gives to no other (fs/kernfs, kernfs_ino): another one
    when it was unplugged and plugged in again. 0: not known."""
    other_members: tuple[tuple[str, str], ...] = ()
    """The members of its IOMMU group that are no PCI functions and have a driver: name and driver of each."""
    direct_region: str = ""
    """A region that firmware reserves one to one for a member of its group; empty if there is none: `0xa0 to 0xaf`."""

    @property
    def is_nvswitch(self) -> bool:
        """An NVSwitch, the switch of an HGX board's NVLink fabric."""
        return self.vendor == _NVIDIA and self.class_code.startswith(_OTHER_BRIDGE)

    @property
    def has_node(self) -> bool:
        """A VM could open it: by its group node, or by its cdev (then /dev/iommu must be there as well)."""
        group_node = f"/dev/vfio/{self.iommu_group}"
        return group_node in self.nodes or (
            "/dev/iommu" in self.nodes and any(n.startswith("/dev/vfio/devices/") for n in self.nodes)
        )


Functions = Mapping[PciAddress, PciFunction]
"""The functions of the host, by address."""


def by_group(functions: Functions) -> Mapping[int, tuple[PciFunction, ...]]:
    """The functions of each IOMMU group, by its number, in their order."""
    found: dict[int, list[PciFunction]] = {}
    for function in functions.values():
        if function.iommu_group is not None:
            found.setdefault(function.iommu_group, []).append(function)
    return {group: tuple(members) for group, members in found.items()}


class Seen(Struct, frozen=True, gc=False):
    """The last inspection of an address, whether it found a function or none.

    The result of an inspection with a smaller number changes nothing: it may have read before this one was
    requested."""

    inspection: int
    at: float
    """When it came back."""
    changed_at: float
    """When an inspection first found what is known of the address."""


class Retry(Struct, frozen=True, gc=False):
    """A function whose facts are incomplete is inspected again: how often that was done."""

    attempt: int
    inspection: int
    """The inspection that failed or came back incomplete. One that was requested before it does not replace it."""


class Inspections(Struct, frozen=True, gc=False):
    """The outstanding inspections of the host. Numbers only grow; one counter serves scans and single inspections."""

    last: int
    """The last issued number."""
    whole: Refresh
    """The full scan."""
    single: Mapping[PciAddress, Refresh]
    """The inspections of one function each that are outstanding, or due as the function's facts are incomplete."""
    scan_failures: int
    retries: Mapping[PciAddress, Retry]
    """Functions that are inspected again as their facts are incomplete."""

    @property
    def functions(self) -> dict[PciAddress, int]:
        """Numbers of the outstanding inspections of one function each."""
        return {a: r.outstanding for a, r in self.single.items() if r.outstanding is not None}


class AdvertisedDevice(Struct, frozen=True, gc=False):
    """One device in a device list of ListAndWatch, with the one reason for its health (kubelet has no field for it)."""

    id: DeviceId
    key: DeviceKey
    health: Health
    numa_node: int | None
    reason: str
    cause: Cause
    """Only for the log, `inspect` and the history."""


DeviceList = tuple[AdvertisedDevice, ...]
"""All devices of one resource, sorted by ID. Each device list replaces the one before it in kubelet."""


Difference = tuple[AdvertisedDevice | None, AdvertisedDevice | None]
"""The entry of an ID before and after, each None where it is not listed."""


Changes = Mapping[ResourceName, Sequence[Difference]]
"""The entries of each list that differ from those of the list before."""


def differences(before: DeviceList, after: DeviceList) -> list[Difference]:
    """The entries that differ, in the order of the IDs."""
    if [a.id for a in before] == [a.id for a in after]:
        return [(was, now) for was, now in zip(before, after, strict=True) if was != now]
    old, new = {a.id: a for a in before}, {a.id: a for a in after}
    return [(old.get(i), new.get(i)) for i in sorted(old.keys() | new.keys()) if old.get(i) != new.get(i)]


def is_news_for_kubelet(found: Iterable[Difference]) -> bool:
    """Kubelet is sent something else by one of these: nothing of a reason, a cause or an owner is sent. Even if no
    Healthy device changed: each list that is sent replaces kubelet's."""
    return any(
        was is None or now is None or (was.health, was.numa_node) != (now.health, now.numa_node)
        for was, now in found
    )


def is_other_for_kubelet(before: DeviceList, after: DeviceList) -> bool:
    """What kubelet is sent of the two differs."""
    return is_news_for_kubelet(differences(before, after))


def listed_by_key(
    device_lists: Mapping[ResourceName, DeviceList],
) -> dict[tuple[ResourceName, DeviceKey], AdvertisedDevice]:
    """The listed entry of each device; by the first ID if there are several."""
    return {
        (resource, a.key): a for resource, device_list in device_lists.items() for a in reversed(device_list)
    }


class Listing(Struct, frozen=True, gc=False):
    """Kubelet's own list of a resource against ours; see `deviceplugin/listing.py`. Times are seconds of the core's
    clock."""

    changed_at: float = -math.inf
    """When what we list changed, Unhealthy or not: each list that is sent replaces kubelet's."""
    read: int | None = None
    """The read of kubelet's ledger that was requested when kubelet had had our list for long enough."""
    compared_at: float = -math.inf
    """When such a read came back."""
    sighted_at: float = -math.inf
    """When something odd was last seen beside it, so that kubelet's list may be another plugin's since."""
    against: int = 0
    """The number of them in a row that were against us."""
    disputed_at: float = -math.inf
    """The time of the first of those."""
    agreed_since: float | None = None
    """The time since which each of them agreed with our list; None if the last one did not."""
    reclaims: int = 0
    """How often we have registered again for that since the lists agreed for long."""


class PluginState(Struct, frozen=True, gc=False):
    """The registration of one resource with kubelet. Registered means: one open ListAndWatch stream.

    `bind` and `register` count orders to the plugin actor: a larger number means "do it (again)"; answers carry the
    number they answer, so that a late answer to an old order changes nothing.
    """

    bind: int
    bound: bool
    bind_failures: int
    register: int
    registering: bool
    """A Register call is out."""
    register_failures: int
    accepted: bool
    """Register was answered without an error and kubelet has not dropped us since."""
    renew: bool
    """The order is to end the old endpoint's streams and make a new endpoint, even if its socket is still there."""
    streams: frozenset[int]
    """Every open ListAndWatch stream, of any reader."""
    kubelet_stream: int | None
    """The one that opened first since Register was called: kubelet's. Its end is the end of the registration."""
    stream_opened_at: float
    retry_at: float | None
    """When to do the missing step (bind, register) if nothing happens before."""
    problem: str | None
    """Why it is not registered, as a sentence."""
    empty_since: float | None
    listing: Listing = Listing()


class Pod(Struct, frozen=True, gc=False):
    """A pod, as kubelet names it. From the checkpoint file only the UID is known, from PodResources only the name."""

    namespace: str
    name: str
    uid: str

    def __str__(self) -> str:
        if not self.name:
            return f"with UID {quoted_id(self.uid)}"
        return f"{quoted_name(self.namespace)}/{quoted_name(self.name)}"


class LedgerEntry(Struct, frozen=True, gc=False):
    """One device that kubelet has given to a pod, by the ID that kubelet knows it by."""

    resource: ResourceName
    device: DeviceId
    pod: Pod


class CachedAnswer(Struct, frozen=True, gc=False):
    """The answer of Allocate for one device of a pod, as kubelet keeps it in its ledger file: each container that
    kubelet makes gets it, also after a restart of the node, when Allocate is not called again."""

    resource: ResourceName
    device: DeviceId
    nodes: tuple[str, ...]
    """Device nodes below /dev/vfio that the container gets, as paths of the host, sorted."""


class PodLife(StrEnum):
    """What the kernel shows of a pod by its cgroup. Kubelet makes it when the pod is admitted, so when all its
    containers have their devices (pkg/kubelet/kubelet.go, SyncPod), and removes it when the pod has ended and its
    volumes are unmounted (SyncTerminatedPod)."""

    ABSENT = "absent"
    """It has none: it has ended, or is not admitted yet."""
    STARTING = "starting"
    """Nothing has run in it."""
    RUNNING = "running"
    """A process is in it."""
    STOPPED = "stopped"
    """Every process that ran in it has ended."""


class SeenPods(Struct, frozen=True, gc=False):
    """What one look at the cgroups of the node's pods has shown."""

    lives: Mapping[str, PodLife] = {}
    """By UID, of the pods that were looked for; empty where the node shows no pod's cgroup."""
    came: int = 0
    """How many pods of any kind have been seen to come since the daemon began to look."""


NO_PODS: Final = SeenPods()
"""Of a node that shows no pod's cgroup."""


class LedgerFile(Struct, frozen=True, gc=False):
    """The contents of kubelet's ledger file at one read; the defaults are those of a missing file."""

    entries: tuple[LedgerEntry, ...] = ()
    cached: tuple[CachedAnswer, ...] = ()
    """The answers to Allocate."""
    damaged: str = ""
    """The answers to Allocate that could not be read and were left out, as a sentence; empty if none."""
    exists: bool = True
    """Kubelet writes it with the first allocation."""


class RunningKubelet(Struct, frozen=True, gc=False):
    """The kubelet that answered List."""

    socket: str
    """The identity of its PodResources socket; empty if that was gone when List was answered."""
    age_s: float
    """How long before the read its socket was made; no more than LEDGER_SETTLE_S is given, as it is old then, and an
    unchanged ledger is to be an unchanged event, which costs the journal nothing."""


class ClaimedDevice(Struct, frozen=True, gc=False):
    """One device of a DRA claim that a running pod has, as PodResources lists it."""

    driver: str
    pool: str
    device: str
    """The device's name in its ResourceSlice: `gpu-0000-23-00-0`."""
    claim: str
    """Namespace and name of the claim; empty of one that only its CDI file names, which then is the device."""
    pod: Pod | None
    """None: a claim of our own, which is known before kubelet names its pods; or one that only its file names."""
    uid: str = ""
    """The claim's UID, by the CDI id of the device; empty where that has none."""
    cdi_ids: tuple[str, ...] = ()
    """Of the device: what the container runtime looks for in the CDI directory."""

    @property
    def name(self) -> tuple[str, str]:
        """The driver and the claim."""
        return self.driver, self.claim

    @property
    def called(self) -> str:
        """The claim in a sentence; of one that only its CDI file names, the UID and the file."""
        if self.claim:
            return quoted_name(self.claim)
        return f"with UID {quoted_name(self.uid)}, by {quoted_name(self.device)}"


class PodAnswer(Struct, frozen=True, gc=False):
    """The answer of PodResources Get for one pod. One that kubelet does not know, as it was deleted or (from 1.36 on)
    has ended, has nothing."""

    pod: Pod
    """Its name only."""
    devices: tuple[tuple[ResourceName, DeviceId], ...] = ()
    claims: tuple[ClaimedDevice, ...] = ()


class PodClaim(Struct, frozen=True, gc=False):
    """A DRA claim that a pod uses, as PodResources lists it."""

    claim: str
    """Namespace and name of the claim."""
    pod: Pod


AdminAccess = tuple[tuple[str, str], DeviceKey]
"""A claim that has a device with admin access only, as `ClaimedDevice.name`, and the device: it owns nothing."""


class LedgerSource(StrEnum):
    """Where the entries of the ledger are from, as the log has it, and so how sure they are."""

    LIST = "PodResources"
    """Kubelet's list, which names every pod."""
    FILE = "kubelet_internal_checkpoint"
    """No kubelet runs."""
    NO_FILE = "kubelet_internal_checkpoint (missing: kubelet has allocated nothing yet)"
    """No kubelet runs, and there is none."""
    LIST_AND_FILE = "PodResources and kubelet_internal_checkpoint"
    """Kubelet has just started and may not know every pod; its file names more than it does."""
    LIST_AND_KNOWN = (
        "PodResources and what was known before (kubelet has just started, and kubelet_internal_checkpoint cannot be "
        "read)"
    )
    """Pods that got a device since the last read are missing."""

    @property
    def is_settling(self) -> bool:
        """Kubelet may list more of these soon, or show that they have ended."""
        return self in (LedgerSource.LIST_AND_FILE, LedgerSource.LIST_AND_KNOWN)

    @property
    def is_whole(self) -> bool:
        """No pod is missing."""
        return self is not LedgerSource.LIST_AND_KNOWN


class KubeletStartup(Struct, frozen=True, gc=False):
    """The state of the kubelet that answered List last, while it may not know its pods; see
    `ledger/kubelet_startup.py`."""

    socket: str | None = None
    """See `RunningKubelet.socket`; None before the first answer."""
    listed: frozenset[tuple[ResourceName, DeviceId]] = frozenset()
    """Everything listed since the first answer; empty from `settled_at` on."""
    settled_at: float = math.inf
    """The time from which only its list is used, in seconds of the core's clock; infinite until it has been seen to
    know its pods."""
    called_at: float = math.inf
    """When it was first seen to ask for a claim; infinite before."""
    since: float = -math.inf
    """When its first answer came."""


class Asking(Struct, frozen=True, gc=False):
    """What kubelet is asked with a read of its ledger, and when it last listed its pods. To ask for List is not
    harmless, see `host/asking.py`."""

    lists: bool = True
    """The outstanding read asks for List."""
    pods: tuple[Pod, ...] = ()
    """The pods that the outstanding read asks for (Get)."""
    last_pod: tuple[str, str] = ("", "")
    """The last one that was asked for by the clock, by namespace and name: the next ones follow it."""
    wanted: bool = False
    """A List is wanted as soon as it may be asked for."""
    listed: int = 0
    """The number of the last read with kubelet's list, or without a kubelet, that has come back; 0 before the first."""
    done: int = 0
    """The same, with any result."""
    came: int = 0
    """`SeenPods.came` with the last List."""
    listed_at: float = -math.inf
    """When the last List was requested, in seconds of the core's clock, whether it has come back or not."""
    gap_s: float = math.inf
    """The time between the last two."""
    has_get: bool = True
    """This kubelet answers Get, as far as is known (on by default from Kubernetes 1.34 on)."""


class Books(Struct, frozen=True, gc=False):
    """What kubelet's ledger file says, and what is seen of its pods without a question; see `ledger/books.py`."""

    uids: Mapping[tuple[ResourceName, DeviceId], str]
    """The pod of each entry, by its UID."""
    ended: frozenset[LedgerEntry]
    """Entries that kubelet has not written away yet and does not list any more: their pods have ended."""
    lives: Mapping[str, PodLife]
    """By UID, of the pods that the file names; empty where the node shows no pod's cgroup."""
    seen: frozenset[str]
    """The UIDs of those whose cgroup has been seen."""
    absent_since: Mapping[str, float]
    """When the others were first found without one."""
    confirmed: frozenset[tuple[ResourceName, DeviceId]]
    """Devices that a pod has by an answer to Get of the last read."""
    granted: Mapping[tuple[ResourceName, DeviceId], float]
    """When Allocate was last answered for a device, while that matters."""
    came: int = 0
    """As of the last look."""
    looked_at: float = -math.inf
    """When the read that shows `lives` was requested: no later change is in them."""


NO_BOOKS: Final = Books({}, frozenset(), {}, frozenset(), {}, frozenset(), {})
"""Before the first read."""


class Ledger(Struct, frozen=True, gc=False):
    """Kubelet's ledger: which pod has which device. Numbers come from the same counter as inspections."""

    refresh: Refresh
    read: int
    """The number of the read that these entries are from; 0 before the first one since this daemon serves."""
    entries: Mapping[tuple[ResourceName, DeviceId], Pod]
    claims: Mapping[DeviceKey, tuple[ClaimedDevice, ...]]
    problem: str | None
    """Why the last read failed, as a sentence; the entries are the last known ones then."""
    tried: bool
    """A first read has come back, with any result."""
    names_owners: bool = False
    """Kubelet's list or its file has been read once, or no kubelet ran: until then a pod may have any device."""
    asked_at: float = -math.inf
    """When the last read was requested, the outstanding one if there is one."""
    read_at: float = -math.inf
    """When the read of these entries was requested: no later change is in them."""
    done: int = 0
    """The number of the last read that came back, with any result."""
    cached: Mapping[tuple[ResourceName, DeviceId], tuple[str, ...]] = field(default_factory=dict)
    """By kubelet's ID: the nodes of `CachedAnswer`."""
    damaged: str = ""
    """See `LedgerFile.damaged`."""
    source: LedgerSource = LedgerSource.LIST
    """Of `entries`; without meaning before the first read."""
    young: KubeletStartup = KubeletStartup()
    claimed: frozenset[tuple[str, str]] = frozenset()
    """Every claim that kubelet lists for a pod, by the DRA driver whose devices it has: `(driver, namespace/name)`."""
    unplaced: frozenset[ClaimedDevice] = frozenset()
    """Of these claims the devices whose names are no PCI addresses: channels, and GPUs by the names that another driver
    gives them."""
    cdi: CdiSpecs = NO_SPECS
    """The files of the CDI directory. One that is gone stays while kubelet lists a device of it."""
    without_gpu: frozenset[PodClaim] = frozenset()
    """Of these claims, and of those of which kubelet lists no device yet, the pods."""
    asking: Asking = Asking()
    books: Books = NO_BOOKS


class Holder(Struct, frozen=True, gc=False):
    """A process that holds a vfio group or device open."""

    pid: int
    command: str
    pod_uid: str | None
    """From its cgroup; None if it is in no pod."""

    def __str__(self) -> str:
        where = f" of the pod with UID {self.pod_uid}" if self.pod_uid else ""
        return f"process {self.pid} ({quoted_id(self.command)}){where}"


class GroupUse(Struct, frozen=True, gc=False):
    """The result of one poll for one IOMMU group, without opening anything (unless an open was allowed)."""

    group: int
    enabled: Mapping[PciAddress, int]
    """`enable` of each function of the target: 0 when free, 1 while a device descriptor is open
    (drivers/pci/pci.c, pci_enable_device). A function that could not be read is not in here."""
    active: frozenset[PciAddress]
    """Functions whose `power/runtime_status` is `active`."""
    holders: tuple[Holder, ...] | None
    """The processes that have it open, by /proc/*/fd; None where that was not read."""
    open_refused: bool | None
    """The group was opened as a probe: True if that failed with EBUSY; None where it was not tried."""
    unseen: str = ""
    """Why `enabled` lacks a function that exists, as a sentence: the unreadable file, and the remedy."""


class Observed(Struct, frozen=True, gc=False):
    """The known use of a group. It stays the same object until a poll sees something else; when that was is in
    `Polls.seen`."""

    in_use: bool
    since: int
    """The number of the poll that first saw this use of it, or first saw it free again. Other holders are another
    use."""
    evidence: str
    """How it is in use: `held by process 4711 (qemu-system-x86)`, `in use (enable of 0000:23:00.0 is 1)`."""
    holders: tuple[Holder, ...]
    open: frozenset[PciAddress] = frozenset()
    """Its functions that were open as devices. An unbind waits for these, and not for a process that has only the group
    open."""
    idle_functions: frozenset[PciAddress] = frozenset()
    """Its functions that were suspended when it was last free; the use is not over before they are again."""
    closing_at: float | None = None
    """Since when only that shows that it is in use."""
    unseen: str = ""
    """Why its use cannot be determined, as a sentence; the last known use applies."""


class LastPoll(Struct, frozen=True, gc=False):
    """The last poll that a group was in the result of."""

    poll: int
    at: float
    """When it came back."""


class Polls(Struct, frozen=True, gc=False):
    """The kernel's side: which groups are in use. Numbers come from the same counter as inspections.

    A poll is due when every group is to be polled: never while such a poll is outstanding, or wanted after the
    outstanding one.
    """

    refresh: Refresh
    groups: Mapping[int, Observed]
    """Both the mapping and each use stay the same object until a poll sees something else."""
    seen: Mapping[int, LastPoll]
    """Of each of these groups."""
    baselines: Mapping[PciAddress, int]
    """`enable` of a function when it was known to be free, where that is not 0 (an operator can write to it). Removed
    when the function goes, or its binding changes."""
    done: int
    """The number of the last poll of every group that came back; 0 before the first one."""
    of: frozenset[int] | None = None
    """The groups that the outstanding poll is of; None: every one that matters."""
    again_of: frozenset[int] | None = None
    """As `of`, of the one that is wanted after it."""
    fast_until: float = 0.0
    """Until when groups are polled for a release every POLL_FAST_S. Extended by every change of holders."""
    leaving: frozenset[PciAddress] = frozenset()
    """Functions that were on a vfio driver, are on none now, and may still be waited for by their unbind."""
    doubtful: frozenset[PciAddress] = frozenset()
    """Functions whose binding has changed since the outstanding poll was requested."""

    def is_to_see(self, group: int | None) -> bool:
        """A poll of that group is outstanding, or wanted after the outstanding one."""
        asked = self.refresh.outstanding is not None and (self.of is None or group in self.of)
        return asked or (self.refresh.again and (self.again_of is None or group in self.again_of))


class Orphan(Struct, frozen=True, gc=False):
    """A device that left kubelet's ledger with the read `read`; its group may still be held by the former pod."""

    pod: Pod
    read: int
    use: int | None = None
    """`Observed.since` of the group's use that was seen while kubelet listed the pod; None if none was."""


class Resolved(Struct, frozen=True, gc=False):
    """The device of an ID that is named by kubelet's ledger, or by an allocation of gpuactors. The meaning stays as
    long as the ID is named, even if the device moves: a GPU may come back in another IOMMU group."""

    key: DeviceKey
    ids: str | None = None
    """For one of our devices: vendor and device (`10de:2330`) as first seen there since the ID was given; if no such
    model was ever called by the resource's name, one that was. None: not seen yet; empty: no function was there at the
    first inspection."""
    inspection_requested: bool = False
    """It was not in the scan, which reads only the selected functions, and an inspection of it has been requested."""


class Role(StrEnum):
    """The role of one of two daemons on a node: during an upgrade the new one asks the old one to hand over."""

    TAKING_OVER = "taking over"
    """Getting ready, or asking the running daemon to end its streams."""
    SERVING = "serving"
    HANDED_OVER = "handed over"
    """A successor serves; this process only waits for its end."""


class Transition(Struct, frozen=True, gc=False):
    """One change of a device's health or reason."""

    at: float
    health: Health | None
    """None when it left the list."""
    reason: str
    cause: Cause


class CallKind(StrEnum):
    """The rpc of a waiting call."""

    ALLOCATE = "Allocate"
    PRE_START = "PreStartContainer"


class LastCall(Struct, frozen=True, gc=False):
    """The last answered call of its kind about a device."""

    kind: CallKind
    at: float
    refused: str = ""
    """Why it was refused, as a sentence; empty: it was granted."""
    causes: tuple[Cause, ...] = ()


class Call(Struct, frozen=True, gc=False):
    """A call that waits for fresh inspections of its devices before it can be answered."""

    kind: CallKind
    resource: ResourceName
    requests: tuple[tuple[DeviceId, ...], ...]
    """One entry per container."""
    seen: Mapping[DeviceKey, tuple[PciFunction, ...]]
    """The units of each device (`Device.units`) as they were known when the call came."""
    since: int
    """The last number that had been issued when the call came: only later inspections and polls are used."""
    deadline: float
    came_at: float = -math.inf
    """A read of the ledger that was requested LEDGER_FRESH_S before this counts like a later one."""
    doubted: int | None = None
    """It would be refused by the reads of the ledger up to this number: only a later one, which asks kubelet for the
    owners of its devices, is used."""


class Settings(Struct, frozen=True, gc=False):
    """The settings that the core needs."""

    selectors: tuple[Selector, ...]
    resync_interval_s: float
    pre_start_gate: bool
    hand_over: bool = False
    """Whether a running daemon is asked to hand over before this one serves."""
    device_plugin: bool = True
    """Whether the devices are offered by the device plugin API."""
    strict: bool = True
    """Whether a broken rule of `device_lists` ends the process, as it does in tests and simulation. In production it is
    logged as an error, and the offending entry is set aside."""
