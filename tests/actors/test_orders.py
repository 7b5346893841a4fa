"""Any order of events, under any schedule: when it is quiet again, what kubelet was told last is the truth.

The real actors, the real core, the real gRPC and the shipped fake kubelet run on the mock clock over a real tree of
files. Hypothesis draws which of the *enabled* events comes next, how long to wait, and the seed of trio's scheduler
(left alone, Hypothesis makes trio's schedule the same for every example). An order that was found is named in
`FOUND` and played again for ever.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import trio
import trio._core._run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from trio.testing import MockClock

from gpuactors import app
from gpuactors.core.model import Settings
from gpuactors.core.selector import parse_selector
from gpuactors.host.pci_ids import PciIds
from gpuactors.host.reader import InlineReader
from gpuactors.host.root import HostRoot
from gpuactors.host.sysfs import SysfsReader
from gpuactors.host.use import InlineUse
from gpuactors.simulation.fake_kubelet import FakeKubelet, open_fake_kubelet
from gpuactors.simulation.host_tree import HostTree, PciSpec
from gpuactors.simulation.in_memory import FaultyReader, MemoryKubelet, MemoryLedger, MemoryUevents
from gpuactors.simulation.kubelet_transport import MemoryTransport
from gpuactors.simulation.uevent_sender import Uevent

SELECTORS = (parse_selector("vendor=10de,class=03"),)
RESYNC_S = 300.0
"""Longer than any order and its settling, so that what the event path missed is not mended by a scan."""
SETTLE_S = 60.0
"""Every wait that may stand between an event and the truth, added up: the longest backoffs, a stream that does not
open, slow looks. Far shorter than the resync interval."""
SLOTS = 5
MODELS = {"2330": "nvidia.com/2330", "20b0": "nvidia.com/20b0", "29ff": "nvidia.com/29ff"}
"""No pci.ids: the resource is named by the hex digits, so that the oracle below needs no naming rule."""


@dataclass
class World:
    """Everything outside the daemon, and the daemon's handles for faults."""

    tree: HostTree
    uevents: MemoryUevents
    reader: FaultyReader
    transport: MemoryTransport
    port: MemoryKubelet
    kubelet: FakeKubelet
    late: list[Uevent] = field(default_factory=list)
    pods: int = 0
    runs: bool = True
    lost: bool = False
    """A change that no uevent told of: only the next full scan can find it."""

    def address(self, slot: int, function: int = 0) -> str:
        return f"0000:{slot + 1:02x}:00.{function}"

    def plugged(self, slot: int, function: int = 0) -> bool:
        return self.address(slot, function) in self.tree.functions

    def driver(self, slot: int, function: int = 0) -> str | None:
        return self.tree.driver_of(self.address(slot, function))

    def told(self) -> dict[str, dict[str, str]]:
        """What kubelet was told last, by resource; an emptied resource is as good as none."""
        told: dict[str, dict[str, str]] = {}
        for row in self.kubelet.view.devices:
            if row.health != "not listed":
                told.setdefault(row.resource, {})[row.id] = row.health
        return told

    def truth(self) -> dict[str, dict[str, str]]:
        """What kubelet should have been told, read off the fake node by the rules in plain words."""
        truth: dict[str, dict[str, str]] = {}
        for address, spec in self.tree.functions.items():
            if spec.class_code != "030200" or self.tree.driver_of(address) != "vfio-pci":
                continue
            assert spec.group is not None
            mates = [self.tree.driver_of(a) for a in self.tree.group_members(spec.group)]
            viable = all(driver in (None, "vfio-pci") for driver in mates)
            truth.setdefault(MODELS[spec.device], {})[address] = "Healthy" if viable else "Unhealthy"
        for (_, resource), entry in self.kubelet.view.holdings.items():
            for device in entry.devices:  # a pod has it: counted once, unless it is really lost
                there = device in truth.get(resource, {})
                truth.setdefault(resource, {})[device] = "Healthy" if there else "Unhealthy"
        return truth


@dataclass(frozen=True)
class Op:
    """One kind of event: when it can happen, and what happens."""

    enabled: Callable[[World, int], bool]
    happens: Callable[[World, int], object]


def _plug(device: str, driver: str | None) -> Callable[[World, int], object]:
    def happens(world: World, slot: int) -> None:
        card = PciSpec(
            address=world.address(slot),
            vendor="10de",
            device=device,
            class_code="030200",
            group=slot + 1,
            driver=driver,
        )
        world.uevents.send(world.tree.plug(card))

    return happens


def _plug_audio(world: World, slot: int) -> None:
    audio = PciSpec(
        address=world.address(slot, 1), vendor="10de", device="1aef", class_code="040300", group=slot + 1
    )
    world.uevents.send(world.tree.plug(audio))


def _bind(driver: str, function: int = 0) -> Callable[[World, int], object]:
    return lambda w, s: w.uevents.send(w.tree.bind(w.address(s, function), driver))


def _admit(world: World, slot: int) -> None:
    world.pods += 1
    resource = list(MODELS.values())[slot % len(MODELS)]
    world.kubelet.submit(f"pod-{world.pods}", {resource: 1})


def _end_pod(world: World, slot: int) -> None:
    names = sorted(world.kubelet.view.pods)
    world.kubelet.delete(names[slot % len(names)])


def _unbind_unheard(world: World, slot: int) -> None:
    world.tree.unbind(world.address(slot))
    world.lost = True


def _deliver_late(world: World, _slot: int) -> None:
    world.uevents.send(list(reversed(world.late)))
    world.late.clear()


def _cut(world: World, slot: int) -> None:
    resource = list(MODELS.values())[slot % len(MODELS)]
    world.transport.cut(f"gpuactors-{resource.replace('/', '_')}.sock")


def _set_next(name: str, times: int) -> Callable[[World, int], object]:
    def happens(world: World, _slot: int) -> None:
        setattr(world.port if name == "bind_failures" else world.reader, name, times)

    return happens


def _free_slot(world: World, slot: int) -> bool:
    return not world.plugged(slot)


def _bindable(world: World, slot: int) -> bool:
    return world.plugged(slot) and world.driver(slot) is None


def _bound(world: World, slot: int) -> bool:
    return world.plugged(slot) and world.driver(slot) is not None


def _always(_world: World, _slot: int) -> bool:
    return True


async def _stop_kubelet(world: World, _slot: int) -> None:
    await world.kubelet.stop()
    world.runs = False


async def _start_kubelet(world: World, _slot: int) -> None:
    await world.kubelet.start()
    world.runs = True


OPS: dict[str, Op] = {
    "plug, no driver": Op(_free_slot, _plug("2330", None)),
    "plug, id known to vfio-pci": Op(_free_slot, _plug("2330", "vfio-pci")),
    "plug another model": Op(_free_slot, _plug("20b0", "vfio-pci")),
    "plug a never-seen model": Op(_free_slot, _plug("29ff", "vfio-pci")),
    "plug a companion": Op(lambda w, s: w.plugged(s) and not w.plugged(s, 1), _plug_audio),
    "bind to vfio-pci": Op(_bindable, _bind("vfio-pci")),
    "bind to nvidia": Op(_bindable, _bind("nvidia")),
    "bind the companion to a host driver": Op(
        lambda w, s: w.plugged(s, 1) and w.driver(s, 1) is None, _bind("snd_hda_intel", 1)
    ),
    "unbind the companion": Op(
        lambda w, s: w.plugged(s, 1) and w.driver(s, 1) is not None,
        lambda w, s: w.uevents.send(w.tree.unbind(w.address(s, 1))),
    ),
    "unbind": Op(_bound, lambda w, s: w.uevents.send(w.tree.unbind(w.address(s)))),
    "unbind, uevents lost": Op(_bound, _unbind_unheard),
    "bind, uevents late and reversed": Op(
        _bindable, lambda w, s: w.late.extend(w.tree.bind(w.address(s), "vfio-pci"))
    ),
    "unplug": Op(
        lambda w, s: w.plugged(s) and not w.plugged(s, 1),
        lambda w, s: w.uevents.send(w.tree.unplug(w.address(s))),
    ),
    "unplug the companion": Op(
        lambda w, s: w.plugged(s, 1), lambda w, s: w.uevents.send(w.tree.unplug(w.address(s, 1)))
    ),
    "late uevents come": Op(lambda w, _s: bool(w.late), _deliver_late),
    "overflow": Op(_always, lambda w, _s: w.uevents.overflow()),
    "garbage on the uevent socket": Op(
        _always, lambda w, _s: w.uevents.send_raw(b"", b"\xff\x00@", b"bind@/devices/x\0SUBSYSTEM=pci\0")
    ),
    "the uevent watcher crashes": Op(_always, lambda w, _s: w.uevents.crash_reader()),
    "looks and scans take long": Op(_always, _set_next("slow", 4)),
    "looks fail": Op(_always, _set_next("look_failures", 2)),
    "scans fail": Op(_always, _set_next("scan_failures", 2)),
    "sockets cannot be made": Op(_always, _set_next("bind_failures", 2)),
    "stream lost": Op(lambda w, _s: w.runs, _cut),
    "kubelet stops": Op(lambda w, _s: w.runs, _stop_kubelet),
    "kubelet starts": Op(lambda w, _s: not w.runs, _start_kubelet),
    "a pod comes": Op(_always, _admit),
    "a pod ends": Op(lambda w, _s: bool(w.kubelet.view.pods), _end_pod),
}
"""Every kind of event, by the name under which a found order is written down."""

WAITS_S = (0.0, 0.0, 0.0, 0.001, 0.3, 7.0)

Step = tuple[str, int, float]
"""Kind of event, slot, and how long to wait after it (seconds of the mock clock)."""


def play(choose: Callable[[World], Iterator[Step]], seed: int) -> None:
    """Plays one order under one schedule, and checks it."""
    directory = Path(tempfile.mkdtemp(prefix="order-"))
    try:
        trio._core._run._r.seed(seed)
        trio.run(_play, directory, choose, seed, clock=MockClock(autojump_threshold=0))
    finally:
        shutil.rmtree(directory)


async def _play(directory: Path, choose: Callable[[World], Iterator[Step]], seed: int) -> None:
    tree = HostTree(directory)
    root = HostRoot(str(directory))
    reader = FaultyReader(InlineReader(SysfsReader(root, SELECTORS, PciIds(()))))
    uevents, transport = MemoryUevents(), MemoryTransport()
    port = MemoryKubelet(transport)
    async with open_fake_kubelet(transport, seed=seed) as kubelet, trio.open_nursery() as nursery:
        world = World(tree, uevents, reader, transport, port, kubelet)
        await kubelet.start()
        _plug("2330", "vfio-pci")(world, 0)
        outside = app.Outside(
            host=reader,
            use=InlineUse(root, "passive"),
            ledger=MemoryLedger(transport),
            open_uevents=uevents.open,
            kubelet=port,
        )
        daemon = await nursery.start(app.run_daemon, Settings(SELECTORS, RESYNC_S, True), outside)
        for kind, slot, wait_s in choose(world):
            done = OPS[kind].happens(world, slot)
            if done is not None and hasattr(done, "__await__"):
                await done
            await trio.sleep(wait_s)
        await _settle_and_check(world)
        daemon.stop()
    # The nursery has ended by itself: the daemon stopped within its bound.


async def _settle_and_check(world: World) -> None:
    if not world.runs:
        await _start_kubelet(world, 0)
    _deliver_late(world, 0)
    if world.lost:
        await trio.sleep(RESYNC_S)
    await trio.sleep(SETTLE_S)
    assert world.told() == world.truth()
    assert world.kubelet.panics == [], "kubelet crashed: a device vanished during a call"
    for resource, figures in world.kubelet.view.resources.items():
        assert figures.capacity >= 0, resource


@st.composite
def orders(draw: st.DrawFn) -> Callable[[World], Iterator[Step]]:
    """Draws each step only when it comes, out of what is enabled then."""
    length = draw(st.integers(1, 12))

    def choose(world: World) -> Iterator[Step]:
        for _ in range(length):
            slot = draw(st.integers(0, SLOTS - 1))
            enabled = sorted(kind for kind, op in OPS.items() if op.enabled(world, slot))
            yield enabled[draw(st.integers(0, 9999)) % len(enabled)], slot, draw(st.sampled_from(WAITS_S))

    return choose


@settings(
    max_examples=500, deadline=None, database=None, suppress_health_check=list(HealthCheck), print_blob=True
)
@given(st.data(), st.integers(0, 2**32 - 1))
def test_any_order_under_any_schedule_ends_in_the_truth(data: st.DataObject, seed: int) -> None:
    play(data.draw(orders()), seed)


FOUND: dict[str, list[Step]] = {
    "late binding": [("plug, no driver", 1, 0.0), ("bind to vfio-pci", 1, 0.0)],
    "new model while kubelet restarts": [
        ("kubelet stops", 0, 0.0),
        ("plug a never-seen model", 1, 0.3),
        ("kubelet starts", 0, 0.0),
    ],
    "a new card while looks fail": [("looks fail", 0, 0.0), ("plug a never-seen model", 1, 0.0)],
    "a card swapped for another model under a call": [
        ("looks and scans take long", 0, 0.0),
        ("a pod comes", 0, 0.001),
        ("unplug", 0, 0.0),
        ("plug another model", 0, 0.0),
    ],
    "unbind that nobody hears of": [("unbind, uevents lost", 0, 0.0)],
}
"""Orders that must never fail again, by what they are about."""


@pytest.mark.parametrize("name", sorted(FOUND))
def test_a_found_order_stays_found(name: str) -> None:
    for seed in range(20):
        play(lambda _world: iter(FOUND[name]), seed)
