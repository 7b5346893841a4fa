"""One object with the whole node: the fake host and its tenants, the fake kubelet, its connections, and the daemons.

The daemons are the real ones (`app.run_daemon`: actors, registry, core, plugin services, gRPC) on memory streams and on
trio's mock clock; there is no thread, no socket and no wall clock. What can happen to the node is in `events.py`, what
must hold is in `check.py`. Here are the parts, and what takes more than one of them: a daemon's life and death, how
uevents come, changes that take time.

Of what the daemon keeps on disk there are its journal, which a killed daemon leaves as a real disk would, and the
resources that it has served, which the next one reads. What there is for claims, where there is, is in `claims.py`.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Final, Literal, final

import trio
from msgspec import Struct
from msgspec.structs import replace

from gpuactors.concurrency.latest import Latest
from gpuactors.core.events.daemon import ConfigUsed
from gpuactors.core.kinds.sets import SetSource
from gpuactors.core.ledger.kubelet_startup import LEDGER_API_AWAY_S
from gpuactors.core.state import NodeState
from gpuactors.core.values.cause import Cause
from gpuactors.core.values.claim_states import ENDED
from gpuactors.core.values.model import DeviceId, Health, PciAddress, ResourceName, Role, Settings
from gpuactors.core.values.own_resources import parse_model_rule
from gpuactors.core.values.selector import Selector, parse_selector
from gpuactors.daemon import app
from gpuactors.daemon.claims import DraOutside
from gpuactors.daemon.domains import DomainsOutside
from gpuactors.grpc_trio import Owner
from gpuactors.host.mdev import PartsReader
from gpuactors.host.pci_ids import PciIds
from gpuactors.host.pod_cgroups import PodCgroups
from gpuactors.host.root import HostRoot
from gpuactors.host.sysfs import SysfsReader
from gpuactors.host.use import Holders
from gpuactors.ports.claims import ClaimsKubelet
from gpuactors.ports.node import DeadSignsFile, SetsReader, Step
from gpuactors_simulation.host.kernel import NVIDIA
from gpuactors_simulation.host.pod_cgroups import CgroupTree
from gpuactors_simulation.host.tree import HostTree, PciSpec
from gpuactors_simulation.host.uevents import Uevent
from gpuactors_simulation.kubelet.containers import TreeTenancy
from gpuactors_simulation.kubelet.fake import FakeKubelet, open_fake_kubelet
from gpuactors_simulation.kubelet.transport import MemoryTransport
from gpuactors_simulation.kubelet.values import Pod
from gpuactors_simulation.other_plugins import OtherPlugin
from tests.histories import vgpus
from tests.histories.administrator import VIRTUAL_FUNCTIONS
from tests.histories.claims import CLAIMS, COMPANION_DRIVER, ClaimsNode
from tests.histories.dead import DEAD, Deaths
from tests.histories.domains import DOMAINS, DomainsNode
from tests.histories.dra_node import DraNode
from tests.histories.egm import EGM, Egms
from tests.histories.fabric import FABRIC, Fabric
from tests.histories.kata import KATA, Kata
from tests.histories.other_driver import OtherDriver
from tests.histories.sets import REQUIRED, SETS, Sets
from tests.histories.starts import Starts
from tests.histories.trace import Trace
from tests.histories.watch import Watch
from tests.memory.control import StateDirectory, memory_control
from tests.memory.faults import Fault, Faults
from tests.memory.host import FaultyReader, FaultyUse, MemoryUevents
from tests.memory.journal import MemoryJournal
from tests.memory.kubelet import memory_claims, memory_kubelet, memory_ledger
from tests.memory.served import MemoryDeadSigns, MemoryServed, MemoryVgpuTypes
from tests.support.inline_host import InlineReader, InlineUse

SELECTORS: Final = (parse_selector("vendor=10de,class=03"),)
OLDER_POD: Final = "older-"
"""The beginning of the names of pods that an older plugin has given a card to."""

RESYNC_S: Final = 300.0
"""Longer than kubelet's view may take to settle, so that a scan does not hide what the event path missed."""

CARDS: Final = 6
"""Places for a card; the first three have one at the beginning."""

MODELS: Final = {"2330": "nvidia.com/2330", "20b0": "nvidia.com/20b0", "29ff": "nvidia.com/29ff"}
"""Without a pci.ids the resource is named by the hex digits, so that no naming rule is needed here."""

RENAMED: Final = {"2330": "nvidia.com/H100", "20b0": "nvidia.com/A100", "29ff": "nvidia.com/29ff"}
"""With the other pci.ids, which names two of the three."""

OWN_NAMES: Final = tuple(parse_model_rule(f"10de:{model}={name}") for model, name in RENAMED.items())
"""The same names as rules of the operator's."""

OTHER_PCI_IDS: Final = "10de  NVIDIA Corporation\n\t20b0  A100\n\t2330  H100\n"

MODEL: Final = "2330"
GPU_CLASS: Final = "030200"

VFIO: Final = "vfio-pci"

PARTS: Final = 1 << 36
"""The bit of a history's seed by which two of its cards can have virtual functions."""

VGPUS: Final = PARTS | 1 << 37
"""The bits of a history's seed by which one of them has mediated devices instead, and the virtual functions of the
other can be vGPUs."""

PARTS_OF_CARD: Final = 2
_PART_DEVICES: Final = {3: "2331", 4: MODEL}
"""The device id of the virtual functions of the cards that can have them, by place: that of NVIDIA's may be the card's
own (`lspci` of an L40S)."""

_PART_GROUPS: Final = 40
PART_RESOURCES: Final = ("nvidia.com/2331", "nvidia.com/2330_VF")
"""The resources of virtual functions: with the ids of their physical one they have a suffix."""

PART_PID: Final = 91_000

PLATFORM_DEVICE: Final = "INTC1055:00"
"""A platform device that may be in a card's group."""

RESERVED: Final = "firmware reserves memory of the group"
PLATFORM_COMES: Final = "a platform device comes into the group"
PLATFORM_IS_BOUND: Final = "the host binds the platform device of the group"
UNTOLD: Final = (RESERVED, PLATFORM_COMES, PLATFORM_IS_BOUND)
"""Kinds of events of a group of which no uevent of PCI tells."""

SECOND: Final = 2
"""Function number of a second card in the same IOMMU group (behind the same bridge, say); 1 is a companion's."""

_ADDRESS: Final = re.compile(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")

OTHER_CLIENT: Final = "another client"
"""A process other than kubelet that dials our endpoints."""

EXTERNAL_PID: Final = 90_000
BETWEEN_UEVENTS_S: Final = 0.02
"""Between two uevents of a change that takes its time."""

STEPPED_DOWN: Final = "the daemon ended without being asked to"

HOLDERS: Final[tuple[Holders, ...]] = ("passive", "proc", "open", "proc")
"""By the seed."""

UeventMode = Literal["lost", "doubled", "late", "reversed"]


class DaemonOptions(Struct, frozen=True):
    """The options of a daemon at its start."""

    selectors: tuple[Selector, ...] = SELECTORS
    renamed: bool = False
    """It has the other pci.ids."""
    own_names: bool = False
    """The operator gives the models the names of the other pci.ids."""

    @property
    def names(self) -> Mapping[str, str]:
        """The resource of each model."""
        return RENAMED if self.renamed or self.own_names else MODELS

    @property
    def rules(self) -> tuple[Selector, ...]:
        """The selectors, and the names of models."""
        return (*self.selectors, *(OWN_NAMES if self.own_names else ()))


class ChangingConfig:
    """The configuration file of all daemons, which each reads again."""

    def __init__(self) -> None:
        self._changed = trio.Event()

    def change(self) -> None:
        """Each daemon's next look finds a change."""
        self._changed.set()
        self._changed = trio.Event()

    async def seen_by(self, daemon: RunningDaemon, world: World) -> ConfigUsed:
        """Wait until the daemon's settings are not those of the file. They are from then on."""
        while daemon.options.rules == world.next_options.rules:
            await self._changed.wait()
        daemon.options = world.next_options
        return ConfigUsed((), daemon.options.rules, ())


class SeenConfig:
    """The file as one daemon sees it. Implements `ports.node.ConfigSource`."""

    def __init__(self, config: ChangingConfig, daemon: RunningDaemon, world: World) -> None:
        self._look = partial(config.seen_by, daemon, world)

    async def look(self) -> ConfigUsed:
        """Implement `ports.node.ConfigSource.look`."""
        return await self._look()


@dataclass(eq=False, slots=True)
class RunningDaemon:
    """One process of the daemon."""

    name: str
    options: DaemonOptions
    uevents: MemoryUevents
    journal: MemoryJournal
    state_dir: StateDirectory
    scope: trio.CancelScope = dataclasses.field(default_factory=trio.CancelScope)
    ended: trio.Event = dataclasses.field(default_factory=trio.Event)
    handle: app.Daemon | None = None
    told_to_end: bool = False

    @property
    def is_serving(self) -> bool:
        """It is its turn to serve kubelet."""
        return self.handle is not None and self.handle.state.value.daemon.role is Role.SERVING

    @property
    def is_waiting(self) -> bool:
        """It has not come to serve kubelet yet, and is to."""
        return self.handle is not None and self.handle.state.value.daemon.role is Role.TAKING_OVER

    def stop(self) -> None:
        """SIGTERM."""
        assert self.handle is not None
        self.told_to_end = True
        self.handle.stop()


def states_of(daemons: Iterable[RunningDaemon]) -> Iterator[NodeState]:
    """The state of each of these daemons that has started."""
    return (daemon.handle.state.value for daemon in daemons if daemon.handle is not None)


@asynccontextmanager
async def open_world(root: Path, seed: int, trace: Trace) -> AsyncIterator[World]:
    """A node with three cards on vfio-pci, a kubelet and a daemon that have run for a second.

    `seed` chooses what comes in no fixed order, how the daemon finds the holders of a group (`HOLDERS`), whether the
    kernel has cdevs (if the third bit is set), or else sends no uevent of an unbind that waits (if the fourth one is),
    and whether PreStartContainer is required (not in one of 16). With the bit CLAIMS the daemon serves claims as well:
    there are two cards more, which the boot has put on their host's driver, each with a companion; and in one of four
    the API server drops taints. With the bit ADMINISTERED beside it the node has a second administrator. With the bit
    DOMAINS it has compute domains instead. With the bit PARTS two cards more, on NVIDIA's driver, can have virtual
    functions; those of the second one share an IOMMU group if the fifth bit is set. With the bits VGPUS the first one
    has mediated devices instead, and the virtual functions of the second one can be vGPUs. With the bit SETS a file
    says which cards are sets, and with the bit REQUIRED a container gets nothing else. With the bit FABRIC the fabric
    manager says so, and the daemons activate its partitions. With the bit DEAD cards can die, and each place for one is
    below a root port of its own. With the bit KATA the daemons answer by CDI names. With the bit EGM its first three
    cards are GPUs of Grace superchips.
    """
    tree = HostTree(root, cdev=seed & 4 != 0, waits_silently=seed & 12 == 8)
    transport = MemoryTransport(trace.carried)
    held_back: list[World] = []

    def tell(uevents: Sequence[Uevent]) -> None:
        held_back[0].tell(uevents)

    dra = _dra_node(tree, seed, tell)
    around = dra.surroundings if dra is not None else None
    machines = _Machines(tree, tell, held_back)
    kata = Kata() if seed & KATA else None
    async with (
        open_fake_kubelet(
            transport,
            seed=seed,
            tenancy=machines,
            dra=around,
            cgroups=CgroupTree(root),
            cdi=kata.runtime if kata is not None else None,
        ) as kubelet,
        trio.open_nursery() as nursery,
    ):
        world = World(root, tree, transport, kubelet, nursery, trace, HOLDERS[seed % len(HOLDERS)])
        world.pre_start_gate = seed // 64 % 16 != 5
        held_back.append(world)
        world.has_parts = seed & PARTS != 0
        world.has_vgpus = seed & VGPUS == VGPUS
        world.parts_share_group = seed & 16 != 0
        if seed & (SETS | CLAIMS):
            world.config = ChangingConfig()
        if kata is not None:
            world.has_kata(kata)
        if seed & EGM:
            world.egms = Egms([world.address(slot) for slot in range(CARDS)])
        if seed & SETS:
            cards = map(world.address, range(CARDS))
            world.sets = Sets(cards, lambda address: address in tree.functions, required=seed & REQUIRED != 0)
            world.sets_required = world.sets.required
        if seed & DEAD:
            world.deaths = Deaths(tree)
        if seed & FABRIC:
            addresses = [world.address(slot) for slot in range(CARDS)]
            world.fabric = Fabric(addresses, world.user_of, nursery)
            world.sets_required = seed & REQUIRED != 0
        if not isinstance(dra, ClaimsNode):
            for slot in range(3):
                tree.plug(world.card(slot, MODEL, VFIO))
            for slot in _PART_DEVICES if world.has_parts else ():
                tree.plug(world.card(slot, MODEL, NVIDIA))
            if world.has_vgpus:
                vgpus.offer(tree, world.address(vgpus.PARENT_CARD))
        if dra is not None:
            world.join(dra, prebound_companion=seed & 256 != 0)
        await kubelet.start()
        await world.start_daemon()
        await trio.sleep(1)
        if dra is not None:
            await kubelet.until(lambda view: any(i.connected for i in view.dra.instances))
        yield world
        world.closing = True
        nursery.cancel_scope.cancel()


def _dra_node(tree: HostTree, seed: int, tell: Callable[[Sequence[Uevent]], None]) -> DraNode | None:
    if seed & CLAIMS:
        return ClaimsNode(tree, seed, tell)
    return DomainsNode(tree, seed) if seed & DOMAINS else None


@final
class _Machines:
    """The virtual machines of the pods. When one starts, its nodes must be those of its cards, as far as a daemon could
    know."""

    def __init__(
        self, tree: HostTree, tell: Callable[[Sequence[Uevent]], None], world: Sequence[World]
    ) -> None:
        self._tree = tree
        self._tenancy = TreeTenancy(tree, tell)
        self._world = world

    def start(self, pod: Pod, devices: Sequence[str], nodes: Sequence[str]) -> None:
        """Implement `Tenancy.start`."""
        (world,) = self._world
        cards = [device for device in devices if _ADDRESS.fullmatch(device) or vgpus.is_uuid(device)]
        known = [card for card in cards if world.starts.is_knowable(card)]
        groups = {group for card in known if (group := world.group_of(card)) is not None}
        strange = {f"/dev/vfio/{group}" for group in groups} - {*nodes}
        if nodes and strange and world.can_tell_stale_nodes:
            world.problems.append(
                f"pod {pod.name} was started with {nodes} on {cards}: not {sorted(strange)}"
            )
        wanted = {name for resource, _ in pod.requests if (name := vgpus.RESOURCES.get(resource)) is not None}
        others = {card for card in known if wanted and vgpus.type_of(self._tree, card) not in wanted}
        if nodes and others and world.can_tell_stale_nodes:
            world.problems.append(
                f"pod {pod.name} was started on {sorted(others)}, which is no {sorted(wanted)}"
            )
        self._tenancy.start(pod, devices, nodes)

    def stop(self, pod: Pod) -> None:
        """Implement `Tenancy.stop`."""
        self._tenancy.stop(pod)


@final
class World:
    """Made by `open_world`."""

    def __init__(
        self,
        root: Path,
        tree: HostTree,
        transport: MemoryTransport,
        kubelet: FakeKubelet,
        nursery: trio.Nursery,
        trace: Trace,
        holders: Holders,
    ) -> None:
        self._root = root
        self.tree = tree
        self.transport = transport
        self.kubelet = kubelet
        self.nursery = nursery
        self.trace = trace
        self.holders: Final = holders
        """How the daemon finds the holders of a group. Only with `proc` does it always see a group that is open without
        its device."""
        self.pre_start_gate = True
        self.faults = Faults()
        self.state_dir = StateDirectory(MemoryTransport(trace.carried))
        self.has_other_names = False
        """A daemon has been given other names of models, or the next one will be."""
        """Where the next daemon has its control socket beside the node's."""
        self.served = MemoryServed(self.faults)
        """What a daemon reads again of what was served; in the node's directory beside kubelet's sockets as well."""
        self.vgpu_types = MemoryVgpuTypes(self.faults)
        self.dead_signs: DeadSignsFile = MemoryDeadSigns(self.faults)
        self.daemons: list[RunningDaemon] = []
        """Those whose process lives, oldest first."""
        self.problems: list[str] = []
        """Forbidden acts of a daemon."""
        self.cut_off: list[str] = []
        """Calls that reached a daemon and were never answered."""
        self.starts: Final = Starts(tree)
        self.on_step: Callable[[str, Step], None] = lambda _daemon, _step: None
        """Called with each step of each daemon."""
        self.closing = False
        self.claims: ClaimsNode | None = None
        """None: the daemons serve no claims of GPUs."""
        self.domains: DomainsNode | None = None
        """None: compute domains are off."""
        self.sets: Sets | None = None
        """None: no file says which devices belong together."""
        self.config: ChangingConfig | None = None
        """None: the configuration file never changes."""
        self.fabric: Fabric | None = None
        """None: no partition is activated."""
        self.deaths: Deaths | None = None
        """None: no card dies."""
        self.sets_required = False
        """A container gets exactly one set."""
        self.kata: Kata | None = None
        """None: the daemons answer by device nodes."""
        self.egms: Egms | None = None
        """None: there is none."""
        self.kubelet_runs = True
        self.kubelet_since = -math.inf
        """When kubelet was last started with pods that it had to hear of first."""
        self.counts: Counter[str] = Counter()
        """How often each kind has happened."""
        self.external: dict[int, bool] = {}
        """Cards that an external process has open: True if it has the device open, False if only its group."""
        self.pods = 0
        self.late: list[Uevent] = []
        self.uevent_mode: UeventMode | None = None
        """The treatment of the next uevents."""
        self._lost_api_server_at = math.inf
        self.missed = False
        """A change was without uevent: only the next full scan can find it."""
        self.changing: set[int] = set()
        """Cards with a change under way."""
        self.next_options = DaemonOptions()
        """The options of the next daemon."""
        self.groups: dict[int, int] = {}
        """The IOMMU group of a place for a card, where it is not the first one."""
        self.switched: dict[str, int] = {}
        """Cards whose `enable` was written by hand, and how many daemons had started by then."""
        self.older: dict[tuple[str, str], str] = {}
        """The card of each older ID that was given to pods, by resource and ID. After a reboot it is the card that has
        the group of that number then."""
        self.resolved: dict[tuple[str, str], set[str]] = {}
        """The daemons that have resolved an older ID while its card was in that group: to them it keeps that
        meaning."""
        self.second: OtherPlugin | None = None
        """Another plugin that serves our resource."""
        self.hidden: set[str] = set()
        """Resources of which that plugin ever had the same healthy devices as we: kubelet's list was ours or that
        plugin's."""
        self.monitors = 0
        self.other_driver = OtherDriver()
        self.others = 0
        """How many pods other plugins have had."""
        self.has_parts = False
        """Cards can have virtual functions."""
        self.has_vgpus = False
        """There can be mediated devices, and virtual functions that are vGPUs."""
        self.parts_share_group = False
        self.unlinked: set[str] = set()
        """Virtual functions whose link to their physical one was gone, or went, before every daemon had read it: those
        that were being removed when one started, or were changed as soon as they were made. Nothing says what they
        are."""
        self.part_holders: set[int] = set()
        """Cards of which an external process has a virtual function open."""
        self.broken: dict[tuple[str, str], bytes] = {}
        """Attributes that cannot be read, with their content: by address and name."""
        self.disturbed: set[str] = set()
        """Cards that were ever not as they should be: their pods may have lost them for a while."""
        self.journal_directory = str(root / "state" / "journal")
        self.journal_is_torn = False
        """A daemon was killed or a disk full: something of the journal may be missing."""
        self._started = 0
        self._pods_of_daemons = 1

    # --- claims ---------------------------------------------------------------------------------------------

    @property
    def dra(self) -> DraNode | None:
        """The part of the node for claims; None: the daemons serve none."""
        return self.claims or self.domains

    def join(self, node: DraNode, *, prebound_companion: bool) -> None:
        """The node serves claims: the cards of one with claims of GPUs are plugged, and the cluster's controllers
        run."""
        if isinstance(node, ClaimsNode):
            self.claims = node
            if node.administrator is not None:
                node.administrator.claims_of = self.claims_about
                node.administrator.on_change = self.disturbed.add
            self._plug_claimed(node, prebound_companion=prebound_companion)
        elif isinstance(node, DomainsNode):
            self.domains = node
            self.nursery.start_soon(node.controller.run, self.kubelet)
        self.nursery.start_soon(node.network.run)
        self.nursery.start_soon(self._collect_claims, node)

    def has_kata(self, kata: Kata) -> None:
        """The daemons answer by CDI names. Only the other pci.ids has names that CDI can have."""
        self.kata = kata
        self.pre_start_gate = False
        self.next_options = replace(self.next_options, renamed=True)
        kata.held = lambda: {
            (resource, device)
            for (_, resource), entry in self.kubelet.view.holdings.items()
            for device in entry.devices
        }
        kata.group_of = self.bound_group_of
        kata.others_of = lambda card: self.tree.functions.keys() - {card}
        kata.state_of = self._state_of

    def _state_of(self, name: str) -> NodeState | None:
        daemons = [d for d in self.daemons if d.name == name and d.handle is not None]
        return next(states_of(daemons), None)

    def _plug_claimed(self, claims: ClaimsNode, *, prebound_companion: bool) -> None:
        # Fewer cards where an administrator is: he is to meet the claims.
        first, virtual = (0, 0) if claims.administrator is None else (2, VIRTUAL_FUNCTIONS)
        if self.has_vgpus:
            self._plug_with_parts(claims)
            return
        for slot in range(first, 5):
            driver, companion = (
                ("vfio-pci", prebound_companion and slot == 2) if slot < 3 else ("nvidia", True)
            )
            claims.plug(replace(self.card(slot, MODEL, driver), total_vfs=virtual))
            if companion:
                audio = replace(self.companion(slot), device="22ba", driver=COMPANION_DRIVER)
                claims.plug(audio)

    def _plug_with_parts(self, claims: ClaimsNode) -> None:
        """Two cards on vfio-pci, and those that can have parts on their host's driver."""
        for slot, driver in ((0, VFIO), (1, VFIO), (vgpus.PARENT_CARD, NVIDIA), (vgpus.VGPU_CARD, NVIDIA)):
            claims.plug(self.card(slot, MODEL, driver))
        vgpus.offer(self.tree, self.address(vgpus.PARENT_CARD))

    async def _collect_claims(self, node: DraNode) -> None:
        """The cluster's controller: the claim of a pod goes with it. A claim has its pod's name."""
        async for view in self.kubelet.changes():
            for name in sorted(node.claims.keys() - view.pods.keys()):
                node.delete(name)

    def lose_api_server(self) -> None:
        """The node cannot reach the API server any more: kubelet, and a daemon that serves claims."""
        self._lost_api_server_at = trio.current_time()
        self.kubelet.lose_api_server()
        if self.dra is not None:
            self.dra.api.go_away()

    def find_api_server(self) -> None:
        """It can again."""
        self.kubelet.find_api_server()
        if self.dra is not None:
            self.dra.api.away = False

    def ends_pods_of_file(self) -> bool:
        """The API server has been away for so long that a daemon takes the pods of kubelet's file for ended where
        nothing else shows that they live: none is started after a reboot."""
        away_s = trio.current_time() - self._lost_api_server_at
        return not self.kubelet.has_api_server and away_s >= LEDGER_API_AWAY_S

    # --- cards ----------------------------------------------------------------------------------------------

    def address(self, slot: int, function: int = 0) -> str:
        """The PCI address of a card, or of its companion function."""
        return f"0000:{slot % CARDS + 1:02x}:00.{function}"

    def disk(self, slot: int) -> str:
        """The PCI address of a disk of the host that is behind a card's bridge: in its group, and in another slot."""
        return f"0000:{slot % CARDS + 1:02x}:01.0"

    @property
    def disks(self) -> list[str]:
        """The disks that are there."""
        return [disk for slot in range(CARDS) if (disk := self.disk(slot)) in self.tree.functions]

    def host_uses_group_of(self, address: str) -> bool:
        """Something of the card's group that is not in its slot keeps the group from every virtual machine: a function
        or platform device with a host's driver, or memory that firmware has reserved."""
        spec = self.tree.functions.get(address)
        if spec is None or spec.group is None:
            return False
        slot = [a for a in self.tree.group_members(spec.group) if a.startswith(address[:-1])]
        return not self.tree.is_viable(spec.group, slot)

    def free_groups_of_host(self) -> None:
        """Nothing but its functions is in a card's group, and no memory of it is reserved. No uevent says so."""
        for disk in self.disks:
            self.tell(self.tree.unplug(disk))
        for slot in range(CARDS):
            if (self._root / f"sys/kernel/iommu_groups/{self.group(slot)}").is_dir():
                self.tree.leave_group(self.group(slot), PLATFORM_DEVICE)
                self.tree.reserve(self.group(slot), "")
                self.missed |= any(self.counts[kind] for kind in UNTOLD)

    def group(self, slot: int) -> int:
        """The IOMMU group of a place for a card."""
        return self.groups.get(slot % CARDS, slot % CARDS + 1)

    def card(self, slot: int, device: str, driver: str | None) -> PciSpec:
        """A card to plug in."""
        spec = self._below_port(
            PciSpec(self.address(slot), "10de", device, GPU_CLASS, self.group(slot), driver=driver), slot
        )
        if not self.has_parts or (of_parts := _PART_DEVICES.get(slot % CARDS)) is None:
            return spec
        if self.has_vgpus and slot % CARDS == vgpus.PARENT_CARD:
            return spec
        return replace(
            spec,
            vgpu_types=vgpus.VGPU_TYPES if self.has_vgpus else (),
            total_vfs=PARTS_OF_CARD,
            vf_device=of_parts,
            vf_group=_PART_GROUPS + PARTS_OF_CARD * (slot % CARDS),
            vfs_share_group=self.parts_share_group and of_parts == MODEL,
        )

    def companion(self, slot: int) -> PciSpec:
        """The audio function of a card."""
        spec = PciSpec(self.address(slot, 1), "10de", "1aef", "040300", self.group(slot))
        return self._below_port(spec, slot)

    def _below_port(self, spec: PciSpec, slot: int) -> PciSpec:
        """The function as it is in that place: below a root port, where cards can die."""
        return spec if self.deaths is None else replace(spec, bridges=(f"0000:20:{slot % CARDS + 1:02x}.0",))

    def parts_of(self, slot: int) -> tuple[str, ...]:
        """The addresses of a card's virtual functions."""
        address = self.address(slot)
        return self.tree.virtual_functions(address) if address in self.tree.functions else ()

    def has_parts_now(self, slot: int) -> bool:
        """The card has virtual functions or mediated devices, on a node with vGPUs."""
        address = self.address(slot)
        return self.has_vgpus and bool(self.parts_of(slot) or vgpus.mediated_of(self.tree, address))

    def take_parts_away(self) -> bool:
        """No card has any mediated device or virtual function any more. False if none had."""
        if self.claims is None or not self.has_vgpus:
            return False
        made = [(uuid, self.tree.mediated.remove) for uuid in vgpus.mediated(self.tree)]
        for uuid, remove in made:
            self.tell(remove(uuid))
        card = self.address(vgpus.VGPU_CARD)
        if virtual := self.parts_of(vgpus.VGPU_CARD):
            self.tell(self.tree.virtualize(card, 0))
        return bool(made or virtual)

    def disturb_parts(self, slot: int) -> None:
        """The card and its virtual functions and mediated devices are not as they should be."""
        made = vgpus.mediated_of(self.tree, self.address(slot))
        keys = {self.address(slot), *self.parts_of(slot), *made}
        self.disturbed |= keys
        self.unlinked |= {a for a in self.parts_of(slot) if not self._is_known_as_virtual(a)}
        if self.claims is not None and self.has_vgpus:
            self.claims.moved |= {
                uid for uid, given in self.claims.given.items() if not keys.isdisjoint(given)
            }

    def _is_known_as_virtual(self, address: str) -> bool:
        """Every daemon has read the link to its physical function."""
        return all(
            (function := state.host.functions.get(PciAddress(address))) is not None
            and function.physical is not None
            for state in states_of(self.daemons)
        )

    def can_be_opened(self, address: str) -> bool:
        """SR-IOV does not keep the function from virtual machines: it has no virtual ones, or is one itself whose
        physical one is on its host's driver, which wants no token. A mediated device is whole to that."""
        if address not in self.tree.functions:
            return True
        physical = self.tree.physical_function(address)
        if physical is None:
            return not self.tree.virtual_functions(address)
        return self.tree.driver_of(physical) not in (None, VFIO)

    def is_unlinked(self, address: str) -> bool:
        """It is a virtual function that has no link to its physical one any more."""
        is_virtual = self.tree.physical_function(address) is not None
        return is_virtual and not (self.tree.device_dir(address) / "physfn").is_symlink()

    def can_be_given(self, key: str) -> bool:
        """It is there, and a claim can have it as it is or bound to vfio-pci: nothing of it is a part of another
        owner's."""
        if self.group_of(key) is None or not self.can_be_opened(key):
            return False
        if vgpus.is_uuid(key):
            return self.is_bound(key)
        is_part = self.tree.physical_function(key) is not None
        if is_part and self.tree.driver_of(key) == NVIDIA:
            return self.is_bound(key)
        return not vgpus.mediated_of(self.tree, key)

    def plug_beside(self, slot: int) -> None:
        """A second card comes into a card's group."""
        second = self.address(slot, SECOND)
        spec = PciSpec(second, "10de", MODEL, GPU_CLASS, self.group(slot), driver="vfio-pci")
        self.tell(self.tree.plug(self._below_port(spec, slot)))

    def is_plugged(self, slot: int, function: int = 0) -> bool:
        """The function is there, and nothing is happening to the card."""
        address = self.address(slot, function)
        return (
            slot % CARDS not in self.changing
            and address in self.tree.functions
            and not self.tree.is_waiting(address)
        )

    def driver(self, slot: int, function: int = 0) -> str | None:
        """The function's driver, if it is there and has one."""
        address = self.address(slot, function)
        return self.tree.driver_of(address) if address in self.tree.functions else None

    def group_of(self, key: str) -> int | None:
        """The IOMMU group of a function or mediated device; None if it is in none, or not there."""
        return vgpus.group_of(self.tree, key)

    def bound_group_of(self, key: str) -> int | None:
        """The same of what is on vfio-pci, or a vGPU."""
        return self.group_of(key) if self.is_bound(key) else None

    def is_bound(self, key: str) -> bool:
        """It is on vfio-pci, or a vGPU: that is usable as it is, a mediated device as long as its card has a driver."""
        if vgpus.is_uuid(key):
            return key in vgpus.mediated(self.tree) and (
                self.tree.driver_of(vgpus.parent_of(self.tree, key)) is not None
            )
        is_there = key in self.tree.functions
        return is_there and (self.tree.driver_of(key) == VFIO or vgpus.type_of(self.tree, key) is not None)

    def switch(self, slot: int) -> None:
        """1 is written to `enable` of a card without driver, or 0 if it was 1."""
        address = self.address(slot)
        self.tree.switch(address, on=self.tree.enabled(address) == 0)
        self.switched[address] = self._started

    def is_taken_for_open(self, group: int) -> bool:
        """A daemon has started while a card of the group was without driver and switched on by hand. It cannot be told
        from a card whose unbind waits for its holder."""
        return any(
            self.switched.get(address, self._started) < self._started and self.tree.enabled(address) > 0
            for address in self.tree.group_members(group) & self.tree.functions.keys()
            if self.tree.driver_of(address) is None
        )

    def is_held_unseen(self, key: str) -> bool:
        """A process has a mediated device open, and the daemon cannot see that: sysfs does not show it."""
        group = self.group_of(key) if vgpus.is_uuid(key) else None
        return self.holders == "passive" and group is not None and self.tree.holder_of(group) is not None

    def is_leaving(self, slot: int) -> bool:
        """A daemon has not seen yet that no process has open what was unbound."""
        address = PciAddress(self.address(slot))
        return any(address in state.host.polls.leaving for state in states_of(self.daemons))

    def is_thought_bound(self, slot: int) -> bool:
        """A daemon has not seen yet that the card is unbound; one that has just started has not."""
        if any(daemon.handle is None for daemon in self.daemons):
            return True
        address = PciAddress(self.address(slot))
        functions = (state.host.functions.get(address) for state in states_of(self.daemons))
        return any(function is None or function.vfio_bound for function in functions)

    def is_viable(self, group: int) -> bool:
        """The kernel gives the group to a virtual machine."""
        return self.tree.is_viable(group)

    def is_held(self, slot: int) -> bool:
        """A process has the card's group open."""
        return self.tree.holder_of(self.group(slot)) is not None

    def user_of(self, card: str) -> str:
        """The process of a pod's virtual machine that has the card open; empty without."""
        group = self.group_of(card)
        holder = self.tree.holder_of(group) if group is not None else None
        return f"process {holder}" if holder is not None and holder < EXTERNAL_PID else ""

    def nodes_of(self, cards: Iterable[str | None]) -> set[str]:
        """The device nodes that a container with these cards may have: those of their groups, and the shared ones."""
        found = (self.group_of(card) for card in cards if card is not None)
        groups = {group for group in found if group is not None}
        members = [a for group in groups for a in self.tree.group_members(group) if a in self.tree.functions]
        numbers = {self.tree.vfio_number(a) for a in members} - {None}
        return (
            {"/dev/vfio/vfio", "/dev/iommu"}
            | {f"/dev/vfio/{group}" for group in groups}
            | {f"/dev/vfio/devices/vfio{number}" for number in numbers}
        )

    def has_silent_removal(self) -> bool:
        """The removal of a mediated device waits for its holder, and a kernel that says nothing of it."""
        waits = any(device.waiting is not None for device in self.tree.mediated.devices)
        return self.tree.waits_silently and waits

    def waiting(self) -> list[str]:
        """Functions whose unbind or unplug waits for their holder."""
        return [address for address in self.tree.functions if self.tree.waits_for_holder(address)]

    def given(self) -> dict[str, str]:
        """Card → pod, as kubelet's ledger has it for our resources."""
        return {
            card: pod
            for (pod, resource), entry in self.kubelet.view.holdings.items()
            for device in entry.devices
            if self.is_ours(resource) and (card := self.meaning(resource, device)) is not None
        }

    def owned(self) -> list[set[str]]:
        """The cards of each pod and of each claim."""
        cards: dict[str, set[str]] = {}
        for card, pod in self.given().items():
            cards.setdefault(pod, set()).add(card)
        claims = [set(self.claims.given[uid]) for uid in self.claims.claims.values()] if self.claims else []
        return [*cards.values(), *claims]

    def held(self) -> set[str]:
        """The cards that a process has open."""
        return {self.address(slot) for slot in range(CARDS) if self.is_held(slot)}

    def has_given(self, resource: str, ids: Iterable[str]) -> bool:
        """A pod has one of these IDs: kubelet gives it to no other pod."""
        holdings = self.kubelet.view.holdings.items()
        given = {device for (_, r), entry in holdings if r == resource for device in entry.devices}
        return not given.isdisjoint(ids)

    def claimed(self) -> set[str]:
        """The cards of every claim that the API server or kubelet knows."""
        if self.claims is None:
            return set()
        known = self.kubelet.view.dra.claims
        return self.claims.allocated() | {card for info in known for card in self.claims.given[info.uid]}

    def claims_about(self, address: str) -> set[str]:
        """The UIDs of the claims that kubelet, a daemon or the checkpoint is about, and that have the card of this
        function, or may be getting it."""
        node = self.claims
        if node is None:
            return set()
        known = {info.uid for info in self.kubelet.view.dra.claims}
        known |= {
            uid
            for state in states_of(self.daemons)
            for uid, entry in state.gpus.claims.entries.items()
            if entry.state not in ENDED
        }
        content = node.disk.files.get(node.checkpoint, b"")
        known |= {uid for uid in node.given if uid.encode() in content}
        return {uid for uid in known & node.given.keys() if f"{address[:-1]}0" in node.given[uid]}

    # --- cards that move ------------------------------------------------------------------------------------

    def pull(self, address: str) -> None:
        """A card of a node with claims goes, with its companion. A machine that has it open lets go of it, as QEMU does
        when the kernel asks it to (drivers/vfio/pci/vfio_pci_core.c, vfio_pci_core_request), and runs on."""
        node = self.claims
        assert node is not None
        functions = [spec for a, spec in self.tree.functions.items() if a.startswith(address[:-1])]
        node.moved |= self.claims_about(address)
        self.disturbed.add(address)
        for group in {spec.group for spec in functions} - {None}:
            if group is not None and (holder := self.tree.holder_of(group)) is not None:
                self.tell(self.tree.close_group(group, holder))
        for spec in functions:
            node.kernel.remove(spec.address)
        node.pulled[address] = functions

    def bring_back(self, address: str, group: int) -> None:
        """A card that was pulled is there again, in a group of this number: its override is lost, and the driver that
        knows its id takes it."""
        node = self.claims
        assert node is not None
        self.groups[int(address[5:7], 16) - 1] = group
        for spec in node.pulled.pop(address):
            node.kernel.plug(replace(spec, group=group, driver=node.home[spec.address]))

    def can_be_enumerated(self, slot: int) -> bool:
        """No unbind of the place's functions waits for a process, and none has their group open."""
        return not self.is_held(slot) and not any(map(self.tree.is_waiting, self._functions_at(slot)))

    def enumerate_again(self, slot: int) -> None:
        """The kernel removes the functions of a place for a card, and finds them again."""
        address = self.address(slot)
        if self.claims is not None:
            self.pull(address)
            self.bring_back(address, self.new_group())
            return
        found = [(self.tree.functions[a], self.tree.driver_of(a)) for a in self._functions_at(slot)]
        self.disturbed.update(spec.address for spec, _ in found)
        for spec, _ in found:
            self.tell(self.tree.unplug(spec.address))
        for spec, driver in found:
            self.tell(self.tree.plug(replace(spec, driver=driver)))

    def _functions_at(self, slot: int) -> list[str]:
        return [a for a in self.tree.functions if a.startswith(self.address(slot)[:-1])]

    def dead_places(self) -> list[int]:
        """The places of which a function may be dead."""
        deaths = self.deaths
        return [
            slot
            for slot in range(CARDS)
            if deaths is not None and any(map(deaths.may_be_dead, self._functions_at(slot)))
        ]

    def is_dead(self, card: str) -> bool:
        """The daemon that serves must take it for dead."""
        return self.deaths is not None and self.deaths.is_dead(card, self._serving_name())

    def is_doubtful(self, card: str) -> bool:
        """The daemon that serves may take it for dead, or may not."""
        return self.deaths is not None and self.deaths.is_doubtful(card, self._serving_name())

    def may_be_dead(self, card: str) -> bool:
        """A daemon may take it for dead."""
        return self.deaths is not None and self.deaths.may_be_dead(card)

    def _serving_name(self) -> str:
        return next((daemon.name for daemon in reversed(self.serving) if daemon.is_serving), "")

    # --- names ----------------------------------------------------------------------------------------------

    @property
    def options(self) -> DaemonOptions:
        """The options of the daemon that serves now, or that will."""
        there = [d for d in self.serving if d.is_serving] or self.serving
        return there[-1].options if there else self.next_options

    def resource(self, model: str) -> str:
        """The resource of a model, as the daemon that serves names it."""
        return self.options.names[model]

    def resource_of(self, address: str) -> str:
        """The resource of a function or mediated device, as the daemon that serves names it."""
        if (name := vgpus.type_of(self.tree, address)) is not None:
            return next(resource for resource, of in vgpus.RESOURCES.items() if of == name)
        if self.tree.physical_function(address) is None:
            return self.resource(self.tree.functions[address].device)
        return PART_RESOURCES[list(_PART_DEVICES).index(int(address[5:7], 16) - 1)]

    def is_ours(self, resource: str) -> bool:
        """It is a name that a daemon of gpuactors makes."""
        return resource in {*MODELS.values(), *RENAMED.values(), *PART_RESOURCES, *vgpus.RESOURCES}

    def model(self, key: str) -> str:
        """The model of a function that is there, or the name of the type of a vGPU."""
        return vgpus.type_of(self.tree, key) or self.tree.functions[key].device

    def model_of(self, resource: str) -> str:
        """The model that a resource of gpuactors is made for. Raises `KeyError`."""
        models = {name: model for names in (RENAMED, MODELS) for model, name in names.items()}
        parts = dict(zip(PART_RESOURCES, _PART_DEVICES.values(), strict=True))
        return {**models, **parts, **vgpus.RESOURCES}[resource]

    def meaning(self, resource: str, device: str) -> str | None:
        """The card that an ID in kubelet's ledger means; None if none."""
        is_key = _ADDRESS.fullmatch(device) is not None or vgpus.is_uuid(device)
        return device if is_key else self.older.get((resource, device))

    def reasons(self) -> dict[str, str]:
        """The reason of each Unhealthy device in the lists of the daemon that serves, by device ID."""
        return {
            device.id: device.reason
            for state in states_of(self.daemons)
            if state.daemon.role is Role.SERVING
            for device_list in state.published.device_lists.values()
            for device in device_list
            if device.health is Health.UNHEALTHY
        }

    def causes(self) -> dict[str, Cause]:
        """The cause of each device in the lists of the daemon that serves, by device ID."""
        return {
            device.id: device.cause
            for state in states_of(self.daemons)
            if state.daemon.role is Role.SERVING
            for device_list in state.published.device_lists.values()
            for device in device_list
        }

    # --- older IDs ------------------------------------------------------------------------------------------

    def note_resolved(self) -> None:
        """Records which daemons know what an older ID means. Of two GPUs of that group it may be either, and the one
        that an ended pod has in kubelet's file is taken for the less likely one."""
        for (resource, device), card in self.older.items():
            for daemon in self.daemons:
                if daemon.handle is None:
                    continue
                state = daemon.handle.state.value
                function = state.host.functions.get(PciAddress(card))
                group = function.iommu_group if function is not None else None
                if (
                    str(group) == device
                    and self._is_alone(card)
                    and (ResourceName(resource), DeviceId(device)) in state.kubelet.ledger.entries
                ):
                    self.resolved.setdefault((resource, device), set()).add(daemon.name)

    def _is_alone(self, card: str) -> bool:
        """No other GPU is in the card's group."""
        spec = self.tree.functions.get(card)
        if spec is None or spec.group is None:
            return False
        members = (self.tree.functions[a] for a in self.tree.group_members(spec.group))
        return sum(member.class_code == GPU_CLASS for member in members) == 1

    def is_sure(self, resource: str, device: str) -> bool:
        """The daemon that serves can know which card an older ID means."""
        card = self.older.get((resource, device))
        spec = self.tree.functions.get(card) if card is not None else None
        if spec is None or self.resource(spec.device) != resource or spec.group is None:
            return False
        knows = {d.name for d in self.serving} <= self.resolved.get((resource, device), set())
        return knows or (str(spec.group) == device and len(self.tree.group_members(spec.group)) == 1)

    def end_older(self) -> None:
        """The pods of older plugins are gone."""
        for name in [n for n in self.kubelet.view.pods if n.startswith(OLDER_POD)]:
            self.kubelet.force_delete(name, dies_after_s=0.0)
        self.resolved.clear()

    # --- a reboot -------------------------------------------------------------------------------------------

    def new_group(self) -> int:
        """A number that no IOMMU group here ever had."""
        return max([20, *self.groups.values()]) + 1

    def renumber(self, models: Mapping[str, str] = MappingProxyType({})) -> None:
        """The machine starts again: nothing is open, every function is on the driver that it was on, and each place for
        a card has the group that the next one had. `models` are those of other cards that are there now, by address."""
        before = [self.group(slot) for slot in range(CARDS)]
        self.restore_attributes()
        for card in list(self.external):
            self.tree.kill(EXTERNAL_PID + card)
        self.external.clear()
        for card in self.part_holders:
            self.tree.kill(PART_PID + card)
        self.part_holders.clear()
        self.disturb_parts(vgpus.PARENT_CARD)
        for slot in range(CARDS):
            if self.parts_of(slot):
                self.disturb_parts(slot)
                self.tree.virtualize(self.address(slot), 0)
        if self.dra is not None:
            self.dra.power_cut()
        if self.fabric is not None:
            self.fabric.reboot()
        if self.kata is not None:
            self.kata.power_cut()
        functions = [(a, spec, self._driver_of_boot(a)) for a, spec in self.tree.functions.items()]
        for address, _, _ in functions:
            self.tree.unplug(address)
        self.groups = {slot: before[(slot + 1) % CARDS] for slot in range(CARDS)}
        for address, spec, driver in functions:
            slot = int(address[5:7], 16) - 1
            device = models.get(address, spec.device)
            moved = replace(spec, device=device, group=self.group(slot), driver=driver)
            if self.claims is not None:
                self.claims.kernel.plug(moved)
            else:
                self.tree.plug(moved)
            self.disturbed.add(address)
        parent = self.address(vgpus.PARENT_CARD)
        if self.has_vgpus and parent in self.tree.functions and self.tree.driver_of(parent) == NVIDIA:
            vgpus.offer(self.tree, parent)
        self._renumber_older()
        self.late.clear()
        self.uevent_mode = None
        self.transport.kill(OTHER_CLIENT)

    def _renumber_older(self) -> None:
        """An older ID is the number of a group, and so means the card that has this number now: a pod that keeps the ID
        gets the group's node, and the next daemon lists the card by an ID that kubelet's file names."""
        cards = {str(self.group(slot)): self.address(slot) for slot in range(CARDS)}
        self.older |= {name: cards[name[1]] for name in self.older if name[1] in cards}

    def _driver_of_boot(self, address: str) -> str | None:
        """The driver that the boot gives to a function: with claims the one that it was plugged with, else the one that
        it was on."""
        found = self.tree.driver_of(address)
        return found if self.claims is None else self.claims.home.get(address, found)

    # --- uevents --------------------------------------------------------------------------------------------

    def tell(self, uevents: Sequence[Uevent]) -> None:
        """The kernel sends uevents; `uevent_mode` decides once how they are delivered."""
        if not uevents:
            return
        mode, self.uevent_mode = self.uevent_mode, None
        match mode:
            case None:
                self._deliver(uevents)
            case "lost":
                self.missed = True
            case "doubled":
                self._deliver([u for uevent in uevents for u in (uevent, uevent)])
            case "late":
                self.late.extend(uevents)
            case "reversed":
                self._deliver(list(reversed(uevents)))

    def deliver_late(self) -> None:
        """The late ones come, in the wrong order."""
        late, self.late = self.late, []
        self._deliver(list(reversed(late)))

    def overflow(self) -> None:
        """Every daemon's uevent socket overflows, after which each scans everything."""
        for daemon in self.daemons:
            daemon.uevents.overflow()
        self.missed = False

    def send_raw(self, *datagrams: bytes) -> None:
        """These bytes arrive at every daemon's uevent socket."""
        for daemon in self.daemons:
            daemon.uevents.send_raw(*datagrams)

    def _deliver(self, uevents: Sequence[Uevent]) -> None:
        for daemon in self.daemons:
            daemon.uevents.send(uevents)

    def change_slowly(self, slot: int, steps: Iterable[Uevent]) -> None:
        """A change that takes its time: each uevent is sent while the tree is as it is at that moment."""
        self.changing.add(slot % CARDS)
        self.nursery.start_soon(self._change_slowly, slot % CARDS, steps)

    async def _change_slowly(self, slot: int, steps: Iterable[Uevent]) -> None:
        try:
            for uevent in steps:
                self.tell([uevent])
                await trio.sleep(BETWEEN_UEVENTS_S)
        finally:
            self.changing.discard(slot)

    def end_external(self, card: int) -> None:
        """The external process of a card is killed."""
        del self.external[card]
        self.tell(self.tree.kill(EXTERNAL_PID + card))

    # --- attributes -----------------------------------------------------------------------------------------

    def break_attribute(self, address: str, name: str) -> None:
        """An attribute cannot be read until `restore_attributes`."""
        path = self.tree.device_dir(address) / name
        self.broken[address, name] = path.read_bytes()
        self.tree.make_unreadable(address, name)

    def restore_attributes(self) -> None:
        """Everything can be read again."""
        broken, self.broken = self.broken, {}
        for (address, name), content in broken.items():
            if address in self.tree.functions and (self.tree.device_dir(address) / name).is_dir():
                self.tree.set_attribute(address, name, content)

    # --- daemons --------------------------------------------------------------------------------------------

    @property
    def serving(self) -> list[RunningDaemon]:
        """The daemons that were not asked to end, oldest first."""
        return [daemon for daemon in self.daemons if not daemon.told_to_end]

    async def start_kubelet(self) -> None:
        """Kubelet's process starts."""
        await self.kubelet.start()
        self.kubelet_runs = True
        self.kubelet_since = trio.current_time()

    async def start_daemon(self) -> None:
        """A daemon starts; returns when it runs, which is before its first scan."""
        self._started += 1
        self.unlinked |= {
            a
            for slot in range(CARDS)
            for a in self.parts_of(slot)
            if self.is_unlinked(a) or not self.is_plugged(slot)
        }
        self._pods_of_daemons += bool(self.daemons)  # a container that ended is started again in its pod
        name = f"daemon {self._started}"
        journal = MemoryJournal(self.journal_directory, name, self.faults)
        daemon = RunningDaemon(name, self.next_options, MemoryUevents(self.faults), journal, self.state_dir)
        if not self.daemons:
            self.missed = False  # it scans everything
        self.daemons.append(daemon)
        daemon.handle = await self.nursery.start(self._run, daemon)

    def change_state_directory(self, *, remove: bool) -> None:
        """The next daemon has another one. `remove`: the one before is deleted under the daemons that have it."""
        if remove:
            self.state_dir.remove([daemon.name for daemon in self.daemons])
        self.state_dir = StateDirectory(MemoryTransport(self.trace.carried))

    async def kill_daemon(self, daemon: RunningDaemon, after_ticks: int = 0) -> None:
        """The process ends as by SIGKILL, wherever its tasks are: so many turns of the scheduler from now."""
        daemon.told_to_end = True
        for _ in range(after_ticks):
            await trio.lowlevel.checkpoint()
        self.transport.kill(daemon.name)
        daemon.state_dir.sockets.kill(daemon.name)
        daemon.journal.kill(lost_bytes=13 * (after_ticks % 50))
        self.journal_is_torn = True
        if self.dra is not None:
            self.dra.kill(daemon.name)
        if self.fabric is not None:
            self.fabric.kill(daemon.name)
        daemon.scope.cancel()
        # What its tasks still send while they end is lost.
        if daemon in self.daemons:
            self.daemons.remove(daemon)

    def outside_of(self, daemon: RunningDaemon) -> app.Outside:
        """All that a daemon reaches."""
        host = HostRoot(str(self._root))
        hanging = Latest(frozenset[Owner]())
        names = PciIds(self._pci_ids(renamed=daemon.options.renamed))
        reader = InlineReader(PartsReader(host, SysfsReader(host, daemon.options.rules, names)))
        use = InlineUse(host, self.holders, open_node=self._probe)
        return app.Outside(
            host=FaultyReader(reader, self.faults, str(self._root)),
            use=FaultyUse(use, self.faults),
            ledger=memory_ledger(self.transport, self.faults, daemon.name, PodCgroups(host)),
            cdi=self.kata.reader(self.other_driver) if self.kata is not None else self.other_driver,
            specs=self.kata.directory_of(daemon.name) if self.kata is not None else None,
            open_uevents=daemon.uevents.open,
            kubelet=memory_kubelet(self.transport, self.faults, daemon.name, hanging.subscribe()),
            control=memory_control(daemon.state_dir, hanging, daemon.name, self.faults, self.transport),
            served=self.served,
            vgpu_types=self.vgpu_types,
            dead_signs=self.dead_signs,
            sets=self._sources_of(daemon),
            egms=self.egms.reader_of(daemon.name) if self.egms is not None else None,
            partitions=self._partitions_of(daemon),
            journal=Watch(daemon.journal, self.trace, daemon.name, self.cut_off, self._stepped),
            dra=self._dra_of(daemon, hanging),
            domains=self._domains_of(daemon, hanging),
            config=SeenConfig(self.config, daemon, self) if self.config is not None else None,
        )

    def choose_all(self) -> None:
        """The configuration file chooses every card again."""
        if self.config is not None and self.next_options.selectors is not SELECTORS:
            self.next_options = replace(self.next_options, selectors=SELECTORS)
            self.config.change()

    def _sources_of(self, daemon: RunningDaemon) -> Mapping[SetSource, SetsReader]:
        if self.fabric is not None:
            return {SetSource.FABRIC_MANAGER: self.fabric.manager_of(daemon.name)}
        return self.sets.sources_of(daemon.name) if self.sets is not None else {}

    def _partitions_of(self, daemon: RunningDaemon) -> app.PartitionsOutside | None:
        if self.fabric is None:
            return None
        return app.PartitionsOutside(self.fabric.intents, self.fabric.manager_of(daemon.name))

    def _dra_of(self, daemon: RunningDaemon, hanging: Latest[frozenset[Owner]]) -> DraOutside | None:
        if self.claims is None:
            return None
        return self.claims.outside_of(daemon.name, self._claims_kubelet(self.claims, daemon, hanging))

    def _domains_of(self, daemon: RunningDaemon, hanging: Latest[frozenset[Owner]]) -> DomainsOutside | None:
        if self.domains is None:
            return None
        return self.domains.outside_of(daemon.name, self._claims_kubelet(self.domains, daemon, hanging))

    def _claims_kubelet(
        self, node: DraNode, daemon: RunningDaemon, hanging: Latest[frozenset[Owner]]
    ) -> ClaimsKubelet:
        return memory_claims(
            self.transport,
            node.driver,
            lambda name, error: self.problems.append(f"{name} of {daemon.name} failed: {error!r}"),
            instance=f"pod-{self._pods_of_daemons}",
            faults=self.faults,
            owner=daemon.name,
            hanging=hanging.subscribe(),
        )

    def _stepped(self, daemon: str, step: Step) -> None:
        self.starts.stepped(daemon, step)
        if self.kata is not None:
            self.kata.stepped(daemon, step)
        if self.egms is not None:
            self.egms.stepped(daemon, step)
        self.on_step(daemon, step)

    def _pci_ids(self, *, renamed: bool) -> Path:
        path = self._root / ("other.pci.ids" if renamed else "no.pci.ids")
        path.write_text(OTHER_PCI_IDS if renamed else "", encoding="utf-8")
        return path

    def _probe(self, path: str) -> None:
        """The daemon opens a group as a probe, which must never hinder a pod. Raises `OSError`."""
        group = int(Path(path).name)
        # What a second plugin allocates is not opened, and the daemon reads of it later.
        given = {d for (_, r), e in self.kubelet.view.holdings.items() if self.is_ours(r) for d in e.devices}
        if self.counts["a second plugin takes our resource"] == 0 and not given.isdisjoint(
            self.tree.group_members(group)
        ):
            self.problems.append(f"the daemon opened /dev/vfio/{group} as a probe while a pod has it")
        self.tree.open_node(path)

    async def _run(self, daemon: RunningDaemon, *, task_status: trio.TaskStatus[app.Daemon]) -> None:
        settings = Settings(
            daemon.options.rules,
            RESYNC_S,
            self.pre_start_gate,
            hand_over=True,
            sets_required=self.sets_required,
            activates_partitions=self.fabric is not None,
            allocates_by_cdi=self.kata is not None,
            waits_in_allocate=self.kata is not None,
        )
        try:
            with daemon.scope:
                await app.run_daemon(
                    settings,
                    self.outside_of(daemon),
                    log_line=lambda line: self.trace.logged(daemon.name, line),
                    task_status=task_status,
                )
        except Exception as error:
            self.problems.append(f"{daemon.name} died: {innermost(error)!r}")
        finally:
            if not (daemon.told_to_end or self.closing):
                self.problems.append(STEPPED_DOWN)
            if daemon in self.daemons:
                self.daemons.remove(daemon)
            daemon.ended.set()

    @property
    def can_tell_stale_nodes(self) -> bool:
        """A daemon is called before a container starts, and can read in kubelet's file what the container would get."""
        blinded = ("the ledger file is damaged", "a second plugin takes our resource")
        return self.pre_start_gate and not any(self.counts[kind] for kind in blinded)

    def order(self, fault: Fault, times: int = 1) -> None:
        """A fault strikes at its next occasions."""
        if fault is Fault.DISK_FULL:
            self.journal_is_torn = True
        self.faults.order(fault, times)
        for daemon in self.daemons:  # for the watcher that is now
            daemon.uevents.wake()

    def in_background(self, task: Callable[[], Awaitable[None]]) -> None:
        """A task that ends by itself, beside the history."""
        self.nursery.start_soon(task)


def innermost(error: BaseException) -> BaseException:
    """The first exception that is in a group of groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
