"""The books balance in any history: pods, strangers, forced deletions, restarts of kubelet and of the daemon.

The real daemon and the model of kubelet's device manager run on the mock clock over a fake node whose groups are
really held: by the virtual machines of pods, and by strangers. When it is quiet again the books must say what a naive
reading of the fake node says. Bugs of each kind that the field has seen are planted, and the same check finds them.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import trio
import trio._core._run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from trio.testing import MockClock

from gpuactors import app
from gpuactors.core import allocation, calls, frames, health
from gpuactors.core.effects import Grant
from gpuactors.core.inventory import Device
from gpuactors.core.model import (
    Advertised,
    DeviceId,
    Health,
    NodeState,
    PciAddress,
    ResourceName,
    Settings,
)
from gpuactors.core.selector import parse_selector
from gpuactors.core.standing import Owner, Stand, Standing
from gpuactors.host.pci_ids import PciIds
from gpuactors.host.reader import InlineReader
from gpuactors.host.root import HostRoot
from gpuactors.host.sysfs import SysfsReader
from gpuactors.host.use import InlineUse
from gpuactors.simulation.fake_kubelet import FakeKubelet, open_fake_kubelet
from gpuactors.simulation.host_tree import HostTree, PciSpec
from gpuactors.simulation.in_memory import FaultyReader, MemoryKubelet, MemoryLedger, MemoryUevents
from gpuactors.simulation.kubelet_containers import TreeTenancy
from gpuactors.simulation.kubelet_transport import MemoryTransport
from gpuactors.simulation.kubelet_values import Phase

SELECTORS = (parse_selector("vendor=10de,class=03"),)
SETTINGS = Settings(SELECTORS, resync_interval_s=600.0, pre_start_gate=True)
RESOURCE = "nvidia.com/2330"
SLOTS = 6
STRANGER_PID = 90_000
SETTLE_S = 60.0
"""Longer than every wait that may stand between an event and the books: PreStartContainer's, kubelet's retry after it,
backoffs, the poll, the read of the ledger. Far shorter than the resync interval."""


@dataclass
class World:
    """Everything outside the daemon, and the daemon's own life."""

    tree: HostTree
    uevents: MemoryUevents
    ledger: MemoryLedger
    transport: MemoryTransport
    kubelet: FakeKubelet
    outside: app.Outside
    nursery: trio.Nursery
    daemon: app.Daemon | None = None
    ended: trio.Event = field(default_factory=trio.Event)
    runs: bool = True
    pods: int = 0
    strangers: set[int] = field(default_factory=set)
    """Groups that a stranger holds."""

    async def start_daemon(self) -> None:
        self.ended = trio.Event()
        self.daemon = await self.nursery.start(self._run)

    async def _run(self, *, task_status: trio.TaskStatus[app.Daemon]) -> None:
        try:
            await app.run_daemon(SETTINGS, self.outside, task_status=task_status)
        finally:
            self.ended.set()

    async def stop_daemon(self) -> None:
        assert self.daemon is not None
        self.daemon.stop()
        await self.ended.wait()
        self.daemon = None

    def address(self, slot: int) -> str:
        return f"0000:{slot + 1:02x}:00.0"

    def is_bound(self, slot: int) -> bool:
        return (
            self.address(slot) in self.tree.functions
            and self.tree.driver_of(self.address(slot)) == "vfio-pci"
        )

    def given(self) -> dict[str, str]:
        """Device → pod, as kubelet's ledger has it."""
        return {d: pod for (pod, _), entry in self.kubelet.view.holdings.items() for d in entry.devices}

    def is_quiet(self) -> bool:
        """No pod is between kubelet's choice and its virtual machine's open: a stranger could not be told apart."""
        between = {Phase.ADMITTING, Phase.STARTING, Phase.PENDING}
        return not any(pod.phase in between for pod in self.kubelet.view.pods.values())


@dataclass(frozen=True)
class Op:
    """One kind of event: when it can happen, and what happens."""

    enabled: Callable[[World, int], bool]
    happens: Callable[[World, int], object]


def _pod(size: int) -> Callable[[World, int], None]:
    def happens(world: World, _slot: int) -> None:
        world.pods += 1
        world.kubelet.submit(f"vm-{world.pods}", {RESOURCE: size})

    return happens


def _running(world: World, _slot: int) -> bool:
    return any(p.phase is Phase.RUNNING for p in world.kubelet.view.pods.values())


def _pick(world: World, slot: int) -> str:
    names = sorted(n for n, p in world.kubelet.view.pods.items() if p.phase is Phase.RUNNING)
    return names[slot % len(names)]


def _lingering(world: World, _slot: int) -> bool:
    return any(pod.name not in world.kubelet.view.pods for pod in world.kubelet.containers)


def _end_lingering(world: World, _slot: int) -> None:
    names = [pod.name for pod in world.kubelet.containers if pod.name not in world.kubelet.view.pods]
    world.kubelet.end_process(names[0])


def _free_for_a_stranger(world: World, slot: int) -> bool:
    return (
        world.is_bound(slot)
        and world.tree.holder_of(slot + 1) is None
        and world.address(slot) not in world.given()
        and world.is_quiet()
    )


def _stranger_comes(world: World, slot: int) -> None:
    world.tree.open_group(slot + 1, STRANGER_PID + slot, "python3")
    world.strangers.add(slot + 1)


def _stranger_goes(world: World, slot: int) -> None:
    world.tree.kill(STRANGER_PID + slot)
    world.strangers.discard(slot + 1)


def _plug(world: World, slot: int) -> None:
    spec = PciSpec(world.address(slot), "10de", "2330", "030200", slot + 1)
    world.uevents.send(world.tree.plug(spec))


async def _kubelet_restarts(world: World, _slot: int) -> None:
    if world.runs:
        await world.kubelet.stop()
    else:
        await world.kubelet.start()
    world.runs = not world.runs


async def _daemon_restarts(world: World, _slot: int) -> None:
    if world.daemon is None:
        await world.start_daemon()
    else:
        await world.stop_daemon()


OPS: dict[str, Op] = {
    "a pod comes": Op(lambda w, _s: w.pods < 12, _pod(1)),
    "a pod for two comes": Op(lambda w, _s: w.pods < 12, _pod(2)),
    "a pod ends": Op(_running, lambda w, s: w.kubelet.delete(_pick(w, s))),
    "a pod ends slowly": Op(_running, lambda w, s: w.kubelet.delete(_pick(w, s), dies_after_s=4.0)),
    "a pod is force-deleted": Op(_running, lambda w, s: w.kubelet.force_delete(_pick(w, s))),
    "a pod is force-deleted and dies late": Op(
        _running, lambda w, s: w.kubelet.force_delete(_pick(w, s), dies_after_s=9.0)
    ),
    "a process that outlived its pod ends": Op(_lingering, _end_lingering),
    "a stranger opens": Op(_free_for_a_stranger, _stranger_comes),
    "a stranger lets go": Op(lambda w, s: s + 1 in w.strangers, _stranger_goes),
    "plug": Op(lambda w, s: w.address(s) not in w.tree.functions, _plug),
    "bind": Op(
        lambda w, s: w.address(s) in w.tree.functions and w.tree.driver_of(w.address(s)) is None,
        lambda w, s: w.uevents.send(w.tree.bind(w.address(s), "vfio-pci")),
    ),
    "unbind": Op(
        lambda w, s: w.is_bound(s) and w.tree.holder_of(s + 1) is None and w.is_quiet(),
        lambda w, s: w.uevents.send(w.tree.unbind(w.address(s))),
    ),
    "overflow": Op(lambda _w, _s: True, lambda w, _s: w.uevents.overflow()),
    "reads of the ledger fail": Op(lambda _w, _s: True, lambda w, _s: setattr(w.ledger, "read_failures", 2)),
    "reads of the ledger take long": Op(lambda _w, _s: True, lambda w, _s: setattr(w.ledger, "slow", 3)),
    "kubelet stops or starts": Op(lambda _w, _s: True, _kubelet_restarts),
    "the daemon stops or starts": Op(lambda _w, _s: True, _daemon_restarts),
}

WAITS_S = (0.0, 0.001, 0.3, 3.0, 11.0)

HISTORIES = int(os.environ.get("HISTORIES", "60"))
"""How many are drawn; `just histories` draws 1,000."""
Step = tuple[str, int, float]


def play(choose: Callable[[World], Iterator[Step]], seed: int) -> None:
    """Plays one history under one schedule, and checks it."""
    directory = Path(tempfile.mkdtemp(prefix="history-"))
    try:
        trio._core._run._r.seed(seed)
        trio.run(_play, directory, choose, seed, clock=MockClock(autojump_threshold=0))
    finally:
        shutil.rmtree(directory)


async def _play(directory: Path, choose: Callable[[World], Iterator[Step]], seed: int) -> None:
    tree, root = HostTree(directory), HostRoot(str(directory))
    uevents, transport = MemoryUevents(), MemoryTransport()
    ledger = MemoryLedger(transport)
    outside = app.Outside(
        host=FaultyReader(InlineReader(SysfsReader(root, SELECTORS, PciIds(())))),
        use=InlineUse(root, "proc" if seed % 2 else "passive"),
        ledger=ledger,
        open_uevents=uevents.open,
        kubelet=MemoryKubelet(transport),
    )
    tenancy = TreeTenancy(tree, uevents.send)
    async with (
        open_fake_kubelet(transport, seed=seed, tenancy=tenancy) as kubelet,
        trio.open_nursery() as nursery,
    ):
        world = World(tree, uevents, ledger, transport, kubelet, outside, nursery)
        for slot in range(4):
            _plug(world, slot)
            world.uevents.send(tree.bind(world.address(slot), "vfio-pci"))
        await kubelet.start()
        await world.start_daemon()
        await trio.sleep(1)
        for kind, slot, wait_s in choose(world):
            done = OPS[kind].happens(world, slot)
            if done is not None and hasattr(done, "__await__"):
                await done
            await trio.sleep(wait_s)
        await _settle(world)
        check(world)
        await world.stop_daemon()


async def _settle(world: World) -> None:
    if not world.runs:
        await _kubelet_restarts(world, 0)
    if world.daemon is None:
        await world.start_daemon()
    await trio.sleep(SETTLE_S)


def check(world: World) -> None:
    """The books against a naive reading of the fake node."""
    view, given = world.kubelet.view, world.given()
    assert world.kubelet.panics == [], "kubelet crashed: a device vanished during a call"
    assert world.kubelet.double_handouts == [], "a virtual machine met EBUSY on what kubelet gave it"
    _check_no_swap(world)
    figures = view.resources.get(RESOURCE)
    if figures is None:
        assert given == {}
        return
    bound = {world.address(s) for s in range(SLOTS) if world.is_bound(s)}
    held = {world.address(s) for s in range(SLOTS) if world.tree.holder_of(s + 1) is not None}
    openable = bound - held - given.keys()
    lost = given.keys() - bound
    assert figures.capacity >= figures.allocated
    assert figures.free == len(openable) - len(lost), (figures, sorted(openable), sorted(lost), view.devices)
    health_of = {row.id: row.health for row in view.devices if row.resource == RESOURCE}
    for device in openable | (given.keys() & bound):
        assert health_of.get(device) == "Healthy", (device, view.devices)


def _check_no_swap(world: World) -> None:
    """What the containers really got is what kubelet's ledger says that they have."""
    for (pod, resource), entry in world.kubelet.view.holdings.items():
        got = entry.envs[f"PCI_RESOURCE_{resource.upper().replace('/', '_').replace('.', '_')}"].split(",")
        assert sorted(got) == sorted(entry.devices), f"pod {pod} got {got}, kubelet believes {entry.devices}"
        assert {f"/dev/vfio/{int(a[5:7], 16)}" for a in got} <= set(entry.nodes)


def drawn(
    draw_one: Callable[[list[str]], str],
    draw_slot: Callable[[], int],
    draw_wait: Callable[[], float],
    length: int,
) -> Callable[[World], Iterator[Step]]:
    """Chooses each step only when it comes, out of what is enabled then."""

    def choose(world: World) -> Iterator[Step]:
        for _ in range(length):
            slot = draw_slot()
            enabled = sorted(kind for kind, op in OPS.items() if op.enabled(world, slot))
            yield draw_one(enabled), slot, draw_wait()

    return choose


@settings(
    max_examples=HISTORIES,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)
@given(st.data(), st.integers(0, 2**32 - 1))
@pytest.mark.timeout(600)
def test_the_books_balance_in_any_history(data: st.DataObject, seed: int) -> None:
    choose = drawn(
        lambda enabled: enabled[data.draw(st.integers(0, 9999)) % len(enabled)],
        lambda: data.draw(st.integers(0, SLOTS - 1)),
        lambda: data.draw(st.sampled_from(WAITS_S)),
        data.draw(st.integers(1, 14)),
    )
    play(choose, seed)


def by_seed(seed: int) -> Callable[[World], Iterator[Step]]:
    """A history without Hypothesis, for the bugs below and for a look at one by hand."""
    rng = random.Random(seed)
    return drawn(rng.choice, lambda: rng.randrange(SLOTS), lambda: rng.choice(WAITS_S), rng.randint(1, 14))


# --- a test of the test: the field's own bugs, planted -------------------------------------------------------


def _drop_what_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork v2: busy GPUs are left out of the list."""
    listed = frames._listed

    def is_busy(state: NodeState, address: PciAddress) -> bool:
        fact = state.facts.get(address)
        group = fact.function.iommu_group if fact is not None and fact.function is not None else None
        use = state.polls.groups.get(group) if group is not None else None
        return use is not None and use.in_use

    def without_busy(
        state: NodeState, owned: Mapping[PciAddress, Owner]
    ) -> dict[ResourceName, dict[DeviceId, Advertised]]:
        return {
            resource: {i: a for i, a in devices.items() if not is_busy(state, a.address)}
            for resource, devices in listed(state, owned).items()
        }

    monkeypatch.setattr(frames, "_listed", without_busy)
    monkeypatch.setattr(frames, "_check", lambda _state: None)


def _mark_what_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork v2b: busy GPUs are Unhealthy, whoever holds them."""
    verdict = health.verdict

    def busy_is_unhealthy(device: Device, stand: Stand, before: Advertised | None) -> tuple[Health, str]:
        if stand.standing is Standing.ALLOCATED:
            return Health.UNHEALTHY, "busy"
        return verdict(device, stand, before)

    monkeypatch.setattr(frames, "verdict", busy_is_unhealthy)
    monkeypatch.setattr(frames, "_check", lambda _state: None)


def _swap_what_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fork of today: Allocate gives another GPU than the one that kubelet asked for."""
    grant = allocation.grant

    def swapped(resource: ResourceName, devices: Sequence[Device]) -> Grant:
        return grant(resource, [others.get(d.function.address, d) for d in devices])

    others: dict[str, Device] = {}
    known = calls.devices_by_id

    def remember(state: NodeState, resource: ResourceName) -> dict[DeviceId, Device]:
        found = known(state, resource)
        devices = sorted(found.values(), key=lambda d: d.function.address)
        others.update({a.function.address: b for a, b in zip(devices, reversed(devices), strict=True)})
        return found

    monkeypatch.setattr(calls, "devices_by_id", remember)
    monkeypatch.setattr(calls, "grant", swapped)


@pytest.mark.parametrize("plant", [_drop_what_is_busy, _mark_what_is_busy, _swap_what_is_busy])
def test_a_planted_bug_of_the_field_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(20):
        play(by_seed(seed), seed)  # sound without the bug
    plant(monkeypatch)
    assert any(_fails(seed) for seed in range(100)), "a hundred histories did not find the planted bug"


def _fails(seed: int) -> bool:
    """A history ends in a failed check; any other exception is passed on."""
    failed = False
    try:
        play(by_seed(seed), seed)
    except* AssertionError:
        failed = True
    return failed


FOUND: dict[str, list[Step]] = {
    "forced deletion, then the next pod": [
        ("a pod for two comes", 0, 0.3),
        ("a pod for two comes", 0, 0.3),
        ("a pod is force-deleted and dies late", 0, 0.0),
        ("a pod for two comes", 0, 0.3),
    ],
    "a stranger while the daemon is away": [
        ("the daemon stops or starts", 0, 0.3),
        ("a stranger opens", 1, 0.3),
        ("a pod comes", 0, 0.0),
        ("the daemon stops or starts", 0, 3.0),
        ("a stranger lets go", 1, 0.0),
    ],
}
"""Histories that must never fail again, by what they are about."""


@pytest.mark.parametrize("name", sorted(FOUND))
def test_a_found_history_stays_found(name: str) -> None:
    for seed in range(10):
        play(lambda _world: iter(FOUND[name]), seed)
