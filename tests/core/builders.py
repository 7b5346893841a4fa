"""Short ways to say which function, which state. Shared by the tests of the core."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final, TypeVar

from msgspec.structs import replace

from gpuactors import limits
from gpuactors.core.deviceplugin.listing import comparable
from gpuactors.core.events import Event
from gpuactors.core.events.daemon import Ticked
from gpuactors.core.events.deviceplugin import (
    AllocateAsked,
    PreStartAsked,
    RegisterAnswered,
    SocketBound,
    StreamOpened,
)
from gpuactors.core.events.host import FunctionInspected, GroupsObserved, HostChanged, HostScanned
from gpuactors.core.events.kubelet import LedgerRead, LedgerUnreadable
from gpuactors.core.reports.snapshot import project
from gpuactors.core.state import NodeState
from gpuactors.core.step import initial_state, next_deadline
from gpuactors.core.values.cdi import CdiSpecs
from gpuactors.core.values.effects import Answer, Effect, Log, Reply
from gpuactors.core.values.inventory import Device
from gpuactors.core.values.mediated import MediatedDevice
from gpuactors.core.values.model import (
    CachedAnswer,
    ClaimedDevice,
    DeviceId,
    DeviceKey,
    GroupUse,
    Holder,
    LedgerEntry,
    LedgerFile,
    PciAddress,
    PciFunction,
    PluginState,
    Pod,
    PodClaim,
    ResourceName,
    RunningKubelet,
    Settings,
    Token,
    function_address,
    pci_address,
)
from gpuactors.core.values.selector import parse_selector
from tests.support.in_order import checked_step as step

A, B, C = (pci_address(f"0000:0{n}:00.0") for n in (1, 2, 3))

T = TypeVar("T")

H100 = ResourceName("nvidia.com/GH100_H100_SXM5_80GB")
MODEL: Final = "10de:2330"
"""What a `gpu` is unless said otherwise."""

NO_FILE: Final = LedgerFile(exists=False)

SETTINGS = Settings(
    selectors=(parse_selector("vendor=10de,class=03"), parse_selector("vendor=10de,class=0680")),
    resync_interval_s=300.0,
    pre_start_gate=True,
)


def gpu(
    address: str,
    group: int | None = None,
    *,
    device: str = "2330",
    model: str | None = "GH100 [H100 SXM5 80GB]",
    driver: str | None = "vfio-pci",
    class_code: str = "030200",
    numa_node: int | None = None,
    pcie_root: str | None = "pci0000:00",
    cdev: int | None = None,
    has_node: bool | None = None,
    fault: str | None = None,
) -> PciFunction:
    """A function as an inspection would describe it; bound to vfio-pci with its group node unless said otherwise.
    Without a driver it has that node only if `has_node` says so: an unbind waits for whoever has it open."""
    full = pci_address(address if address.count(":") == 2 else f"0000:{address}")
    number = int(full[5:7], 16) if group is None else group
    bound = driver == "vfio-pci"
    nodes = ["/dev/vfio/vfio"] if driver is not None else []
    if has_node or (bound and has_node is None):
        nodes.append(f"/dev/vfio/{number}")
    if cdev is not None:
        nodes += [f"/dev/vfio/devices/vfio{cdev}", "/dev/iommu"]
    return PciFunction(
        address=full,
        vendor="10de",
        device=device,
        class_code=class_code,
        driver=driver,
        vfio_bound=bound,
        iommu_group=number,
        numa_node=numa_node,
        pcie_root=pcie_root,
        nodes=tuple(nodes),
        model=model,
        fault=fault,
    )


def audio(address: str, group: int, *, driver: str | None = "vfio-pci") -> PciFunction:
    """The audio function of a card."""
    return replace(gpu(address, group, driver=driver), class_code="040300", device="1aef", model="")


def disk(address: str, group: int, *, driver: str | None = "nvme") -> PciFunction:
    """A disk of the host."""
    function = gpu(address, group, driver=driver)
    return replace(function, vendor="144d", device="a808", class_code="010802", model="")


def mediated_device(
    key: DeviceKey,
    group: int,
    parent: PciAddress | None,
    profile: str,
    *,
    type_id: str = "nvidia-593",
    numa_node: int | None = None,
    pcie_root: str = "pci0000:00",
    presence: int = 1,
) -> MediatedDevice:
    """A mediated device, usable as it is. Its place is its parent's: it has none if that is no PCI function."""
    return MediatedDevice(
        key=key,
        parent=parent,
        parent_name=parent or "mtty",
        type_id=type_id,
        type_name=profile,
        driver="nvidia-vgpu-vfio",
        iommu_group=group,
        cdevs=(f"vfio{group}",),
        nodes=("/dev/vfio/vfio", f"/dev/vfio/{group}"),
        numa_node=None if parent is None else numa_node,
        pcie_root=None if parent is None else pcie_root,
        fault=None,
        presence=presence,
    )


def devices_of(*functions: PciFunction, settings: Settings = SETTINGS) -> tuple[Device, ...]:
    """The devices of a node with these functions, sorted by address."""
    return tuple(Core(*functions, settings=settings).state.index.devices.values())


def ledger_read(
    read: int,
    entries: tuple[LedgerEntry, ...] = (),
    claims: tuple[ClaimedDevice, ...] = (),
    healthy: Mapping[ResourceName, tuple[DeviceId, ...]] | None = None,
    file: LedgerFile | None = NO_FILE,
) -> LedgerRead:
    """A read of a kubelet that has known its pods for long: its list counts alone."""
    kubelet = RunningKubelet("kubelet", limits.LEDGER_SETTLE_S)
    return LedgerRead(read, kubelet, entries, claims, names_end="", healthy=healthy, file=file)


def read_of_young(read: int, file: LedgerFile | None = None) -> LedgerRead:
    """A read of a kubelet that has just started and knows no pod."""
    return LedgerRead(read, RunningKubelet("young", 0.0), (), (), file=file)


def allocate_call(*devices: str, token: int = 1) -> AllocateAsked:
    """Kubelet's Allocate of these devices for one container."""
    return AllocateAsked(Token(token), H100, (tuple(map(DeviceId, devices)),))


def pre_start_call(*devices: str, token: int = 1) -> PreStartAsked:
    """Kubelet's PreStartContainer of these devices."""
    return PreStartAsked(Token(token), H100, tuple(map(DeviceId, devices)))


def node(
    *functions: PciFunction,
    ledger: Mapping[str, str] = MappingProxyType({}),
    others: Mapping[tuple[str, str], str] = MappingProxyType({}),
    enabled: Iterable[str] = (),
) -> Core:
    """A node as a daemon finds it at its start: with these functions, or with two GPUs in groups of their own."""
    core = Core()
    core.ledger, core.others, core.enabled = dict(ledger), dict(others), dict.fromkeys(enabled, 1)
    core.feed(HostScanned(1, functions or (gpu("01:00.0"), gpu("02:00.0"))))
    return core


def only(kind: type[T], answers: Iterable[object]) -> T:
    """The only answer, which is of this kind."""
    (answer,) = answers
    assert isinstance(answer, kind)
    return answer


class Core:
    """A state that events are fed to, one after the other, on a clock of its own.

    The two sides that most tests are not about answer by themselves: kubelet's ledger (`ledger`, by ID; `others`, by
    resource and ID) and the use of the groups (`enabled` and `awake`, by address, `holders` by group). `silent` stops
    them. What a pod has and no selector chooses (`unselected`) is found by an inspection.
    """

    def __init__(
        self,
        *functions: PciFunction,
        settings: Settings = SETTINGS,
        served: Mapping[ResourceName, frozenset[str]] = MappingProxyType({}),
    ) -> None:
        self.at = 100.0
        self.state: NodeState = initial_state(settings, served)
        self.effects: list[Effect] = []
        self.ledger: dict[str, str] = {}
        self.others: dict[tuple[str, str], str] = {}
        self.ledger_problem: str | None = None
        self.claims: dict[str, str] = {}
        self.waiting: tuple[PodClaim, ...] = ()
        self.strangers: tuple[ClaimedDevice, ...] = ()
        """Claims of other drivers that kubelet lists."""
        self.cdi = CdiSpecs()
        """The CDI directory."""
        self.unselected: dict[str, PciFunction] = {}
        self.kubelets: list[str] | None = None
        """What kubelet has as healthy; None while it does not say."""
        self.cached: tuple[CachedAnswer, ...] = ()
        self.file_readable = True
        """Where `ledger_problem` is set; a read that succeeds has the file's answers in any case."""
        self.damaged = ""
        self.enabled: dict[str, int] = {}
        self.awake: set[str] = set()
        self.holders: dict[int, tuple[Holder, ...]] = {}
        self.silent = False
        if functions:
            self.feed(HostScanned(self.state.host.inspections.last - 1, functions))

    def feed(self, *events: Event, after_s: float = 0.0) -> list[Effect]:
        """Feeds the events, `after_s` seconds later; returns what came out."""
        self.at += after_s
        out: list[Effect] = []
        for event in events:
            out += self._step(event)
            while not self.silent and (answer := self._answer()) is not None:
                out += self._step(answer)
        self.effects += out
        return out

    def _step(self, event: Event) -> list[Effect]:
        self.state, effects = step(self.state, event, self.at)
        return effects

    def _answer(self) -> Event | None:
        for meant in self.state.kubelet.resolved.values():
            inspection = self.state.host.inspections.functions.get(function_address(meant.key))
            if meant.inspection_requested and meant.ids is None and inspection is not None:
                found = self.unselected.get(meant.key)
                return FunctionInspected(
                    inspection, function_address(meant.key), (found,) if found is not None else ()
                )
        if (read := self.state.kubelet.ledger.refresh.outstanding) is not None:
            return self.ledger_event(read)
        if (poll := self.state.host.polls.refresh.outstanding) is not None:
            return self.poll_event(poll)
        return None

    def ledger_event(self, read: int) -> Event:
        """What kubelet's ledger says now."""
        file = LedgerFile(cached=self.cached, damaged=self.damaged) if self.file_readable else None
        if self.ledger_problem is not None:
            return LedgerUnreadable(read, self.ledger_problem, file, cdi=self.cdi)
        entries = tuple(
            LedgerEntry(H100, DeviceId(device), Pod("default", pod, ""))
            for device, pod in self.ledger.items()
        ) + tuple(
            LedgerEntry(ResourceName(resource), DeviceId(device), Pod("default", pod, ""))
            for (resource, device), pod in self.others.items()
        )
        claims = tuple(
            ClaimedDevice("gpu.nvidia.com", "node", device, f"default/{claim}", Pod("default", claim, ""))
            for device, claim in self.claims.items()
        )
        claims += self.strangers
        healthy = None if self.kubelets is None else {H100: comparable(self.kubelets)}
        return replace(ledger_read(read, entries, claims, healthy, file), waiting=self.waiting, cdi=self.cdi)

    def poll_event(self, poll: int) -> Event:
        """What a poll of the groups sees now."""
        uses = []
        for target in project(self.state).inspections.poll.targets:
            enabled = {a: self.enabled.get(a, 0) for a in target.functions}
            active = frozenset(a for a, count in enabled.items() if count > 0 or a in self.awake)
            uses.append(GroupUse(target.group, enabled, active, self.holders.get(target.group), None))
        return GroupsObserved(poll, tuple(uses))

    def inspected(self, address: str, *functions: PciFunction) -> FunctionInspected:
        """The outstanding inspection of the address finds these functions."""
        where = pci_address(address)
        return FunctionInspected(self.state.host.inspections.functions[where], where, functions)

    def inspect(self, address: str, *functions: PciFunction) -> list[Effect]:
        """A uevent comes, and the inspection that follows finds these functions."""
        out = self.feed(HostChanged(pci_address(address), None, "change pci"))
        return out + self.feed(self.inspected(address, *functions))

    @property
    def scan(self) -> int:
        """The number of the outstanding scan."""
        return _there(self.state.host.inspections.whole.outstanding)

    @property
    def read(self) -> int:
        """The number of the outstanding read of kubelet's ledger."""
        return _there(self.state.kubelet.ledger.refresh.outstanding)

    @property
    def poll(self) -> int:
        """The number of the outstanding poll."""
        return _there(self.state.host.polls.refresh.outstanding)

    @property
    def plugin(self) -> PluginState:
        """The plugin of the H100s."""
        return self.state.published.plugins[H100]

    def register(self, stream: int = 1) -> list[Effect]:
        """The plugin's socket is bound; kubelet accepts its Register, and opens this stream."""
        self.feed(SocketBound(H100, self.plugin.bind))
        return self.feed(RegisterAnswered(H100, self.plugin.register), StreamOpened(H100, stream))

    def called(self, call: AllocateAsked | PreStartAsked, *group: PciFunction) -> list[Answer]:
        """The answers to a call, after an inspection of the device that finds it first in this group."""
        return self.answers(call) + self.answers(self.inspected(group[0].address, *group))

    def logged(self, name: str) -> list[Log]:
        """All lines of the log with this name."""
        return [e for e in self.effects if isinstance(e, Log) and e.name == name]

    def answers(self, *events: Event, after_s: float = 0.0) -> list[Answer]:
        """As `feed`, returning only the answers to calls."""
        return [e.answer for e in self.feed(*events, after_s=after_s) if isinstance(e, Reply)]

    def pass_time(self, seconds: float) -> list[Effect]:
        """Lets time pass, ticking whenever a deadline comes."""
        end, out = self.at + seconds, []
        while (deadline := next_deadline(self.state)) <= end:
            out += self.feed(Ticked(), after_s=max(0.0, deadline - self.at))
        self.at = end
        return out

    def device_list(self, resource: ResourceName = H100) -> dict[str, str]:
        """ID and health of every device in the resource's list."""
        return {a.id: str(a.health) for a in self.state.published.device_lists[resource]}

    def reason(self, device: str, resource: ResourceName = H100) -> str:
        """The one reason of a device."""
        return next(a.reason for a in self.state.published.device_lists[resource] if a.id == device)


def _there(number: int | None) -> int:
    assert number is not None, "nothing is outstanding"
    return number
