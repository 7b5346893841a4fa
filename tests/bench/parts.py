"""A node whose devices are parts of cards, 32 of each card, beside one with as many whole GPUs: what parts cost.

Start, slices, late creation, Allocate, prepare and the polls of a quiet node, of each kind, of the daemon of this
checkout: with one card that has parts, and with 8.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final

from msgspec.structs import replace

from gpuactors_simulation.host.mediated import MdevType
from gpuactors_simulation.host.tree import HostTree, PciSpec
from gpuactors_simulation.host.uevents import Uevent
from gpuactors_simulation.host.vgpu import VgpuType
from tests.bench import procfs
from tests.bench.call import alone, plugin_of
from tests.bench.claims import ServedNode, claims_node, prepared_and_unprepared
from tests.bench.context import Bench, in_turn
from tests.bench.node import DRIVER, Node, discard, gpu_addresses, plugged

OF_CARD: Final = 32
"""The parts of one card: as many as an L40S or H200 has."""

HOST_DRIVER: Final = "xe"
"""Of cards with virtual functions for vfio-pci: any driver that is no vfio driver and not NVIDIA's, whose virtual
functions are vGPUs."""

_VGPU: Final = VgpuType(1147, "NVIDIA L40S-1Q", 2 * OF_CARD)
"""There is room for one more: NVIDIA's driver names no type of a full card."""
_MDEV: Final = MdevType("nvidia-591", "NVIDIA A10-1Q", OF_CARD)

_BETWEEN_S: Final = 0.05
"""The daemon has written its log line by then."""

Change = Callable[[str], tuple[Uevent, ...]]
"""Of one device, by its key; or of a card. Returns the uevents."""


@dataclass(frozen=True, slots=True)
class Devices:
    """The devices of a node, and how one of them goes and comes."""

    tree: HostTree
    keys: tuple[str, ...]
    what: str
    late: tuple[str, Change, Change] | None
    """The name of the last uevent of one that comes, how it goes, and how it comes; None: no uevent tells of it."""
    card: Change | None = None
    """Makes all parts of a card at once."""
    cards: tuple[str, ...] = ()
    """The physical functions of virtual ones."""


def whole(count: int) -> Devices:
    """As many whole GPUs, each in a group of its own."""
    tree = plugged(count)
    return Devices(tree, gpu_addresses(count), f"{count} whole GPUs", _binds(tree))


def virtual(count: int) -> Devices:
    """As many virtual functions, `OF_CARD` of each card, each in a group of its own."""
    tree, cards, of_card = _cards(count, HOST_DRIVER)

    def make(card: str) -> tuple[Uevent, ...]:
        return tree.virtualize(card, of_card, DRIVER)

    for card in cards:
        make(card)
    what = f"{count} virtual functions, {of_card} of each card"
    return Devices(tree, _parts(tree, cards), what, _binds(tree), make, cards)


def vgpus(count: int) -> Devices:
    """As many vGPUs by vendor VFIO, of one type."""
    tree, cards, of_card = _cards(count, "nvidia")
    for card in cards:
        tree.virtualize(card, of_card, "nvidia")
    keys = _parts(tree, cards)
    for key in keys:
        tree.set_vgpu_type(key, _VGPU.number)
    return Devices(tree, keys, f"{count} vGPUs by vendor VFIO, {of_card} of each card", None)


def mediated(count: int) -> Devices:
    """As many mediated devices, of one type."""
    tree, cards, of_card = _cards(count, "nvidia")
    parents = {}
    for number, card in enumerate(cards):
        devpath = f"/devices/{tree.functions[card].pcie_root}/{card}"
        tree.mediated.register(devpath, (_MDEV,), "nvidia-vgpu-vfio", first_group=number * of_card)
        for part in range(of_card):
            key = str(uuid.UUID(int=number << 32 | part))
            tree.mediated.create(key, card, _MDEV.id)
            parents[key] = card

    def create(key: str) -> tuple[Uevent, ...]:
        return tree.mediated.create(key, parents[key], _MDEV.id)

    late = ("bind mdev", tree.mediated.remove, create)
    return Devices(tree, tuple(parents), f"{count} mediated devices, {of_card} of each card", late)


KINDS: Final = {"whole": whole, "virtual": virtual, "vgpu": vgpus, "mdev": mediated}


def measure(bench: Bench) -> None:
    """Raises `DidNotWork`."""
    for count in bench.counts.gpus[-2:]:
        for name, make in KINDS.items():
            devices = make(count)
            with ExitStack() as stack:
                stack.callback(discard, devices.tree)
                _measure_node(bench, f"{name}.{count}", devices, stack)


def _measure_node(bench: Bench, name: str, devices: Devices, stack: ExitStack) -> None:
    count = len(devices.keys)
    _starts(bench, name, devices)
    served = stack.enter_context(
        claims_node(bench.fresh(), bench.daemons[0], count, tree=devices.tree, addresses=devices.keys)
    )
    _add(bench, f"{name}.slices", f"slices of {devices.what}", "", served.api.slices())
    _prepares(bench, name, devices, served)
    if devices.late is not None:
        _late(bench, name, devices, devices.late, served.node)
    if devices.card is not None:
        _late_cards(bench, name, devices, devices.card, served.node)
    plugin = stack.enter_context(plugin_of(served.node))
    alone(bench, [plugin], count, 1, f"parts.{name.partition('.')[0]}", devices.what)
    _quiet(bench, name, devices, served.node)


def _cards(count: int, driver: str) -> tuple[HostTree, tuple[str, ...], int]:
    """A host with cards for so many parts, the cards' addresses, and the parts of each."""
    of_card = min(OF_CARD, count)
    tree = plugged(0)
    cards = tuple(f"0000:{number:02x}:00.0" for number in range(count // of_card))
    for number, card in enumerate(cards):
        spec = PciSpec(card, "10de", "2330", "030200", 1000 + number, 0, "pci0000:00", driver)
        types = (_VGPU,) if driver == "nvidia" else ()
        tree.plug(
            replace(spec, total_vfs=of_card, vf_device="2331", vf_group=number * of_card, vgpu_types=types)
        )
    return tree, cards, of_card


def _parts(tree: HostTree, cards: Iterable[str]) -> tuple[str, ...]:
    return tuple(part for card in cards for part in tree.virtual_functions(card))


def _binds(tree: HostTree) -> tuple[str, Change, Change]:
    return "bind pci", tree.unbind, lambda address: tree.bind(address, DRIVER)


def _add(bench: Bench, name: str, what: str, unit: str, *values: float) -> None:
    bench.sheet.add(f"parts.{name}", what, unit, bench.daemons[0].name, *values)


def _starts(bench: Bench, name: str, devices: Devices) -> None:
    node = Node(
        bench.fresh(),
        bench.daemons[0],
        gpus=len(devices.keys),
        tree=devices.tree,
        addresses=devices.keys,
    )
    with node:
        for number in range(max(2, bench.counts.starts // 2)):
            known = len(node.kubelet.registrations)
            began_ns = node.start()
            _, frame = node.settle(known)
            spent_ns = procfs.processor_ns(node.pid)
            node.stop()
            if number:  # the first one fills the caches
                took_ms = (frame.at_ns - began_ns) / 1e6
                _add(bench, f"{name}.first_list", f"exec to first list; {devices.what}", "ms", took_ms)
                what = f"processor time until the first list; {devices.what}"
                _add(bench, f"{name}.start.processor", what, "ms", spent_ns / 1e6)


def _prepares(bench: Bench, name: str, devices: Devices, served: ServedNode) -> None:
    for number in range(bench.counts.claims // 2 + 1):
        key = devices.keys[number % len(devices.keys)]
        times_ms = prepared_and_unprepared(served, f"claim-{number}", key)
        for call, took_ms in times_ms.items():
            if number:
                what = f"{call} of a claim of one pre-bound device; {devices.what}"
                _add(bench, f"{name}.{call}", what, "ms", took_ms)


def _late(bench: Bench, name: str, devices: Devices, late: tuple[str, Change, Change], node: Node) -> None:
    """One device comes late, and only the last of its uevents is sent."""
    last, go, come = late
    for key, number in in_turn(devices.keys[:: len(devices.keys) // 4], 1 + bench.counts.binds // 8):
        node.send(go(key)[-1:])
        node.frame_without(key, after=node.frames_so_far() - 1)
        time.sleep(_BETWEEN_S)
        uevents, seen = come(key), node.frames_so_far()
        began_ns = node.send(uevents[-1:])
        took_ms = (node.frame_with(key, after=seen).at_ns - began_ns) / 1e6
        time.sleep(_BETWEEN_S)
        if number:
            _add(bench, f"{name}.late", f"uevent `{last}` to the list; {devices.what}", "ms", took_ms)


def _late_cards(bench: Bench, name: str, devices: Devices, make: Change, node: Node) -> None:
    """All virtual functions of a card at once, of which the kernel sends five uevents each."""
    for card in devices.cards[:4]:
        theirs = node.tree.virtual_functions(card)
        node.send_patiently(node.tree.virtualize(card, 0))
        node.frame_without(theirs[-1], after=node.frames_so_far() - 1)
        time.sleep(_BETWEEN_S)
        uevents, seen = make(card), node.frames_so_far()
        began_ns = time.monotonic_ns()
        node.send_patiently(uevents)
        frames = [node.frame_with(key, after=seen).at_ns for key in theirs]
        what = f"first uevent of SR-IOV to the list with all of a card; {devices.what}"
        _add(bench, f"{name}.card", what, "ms", (max(frames) - began_ns) / 1e6)


def _quiet(bench: Bench, name: str, devices: Devices, node: Node) -> None:
    """A quiet node: its periodic reads, the types of vGPUs among them."""
    time.sleep(bench.counts.quiet_s)
    seconds = bench.counts.idle_s / 2
    before_ns = procfs.processor_ns(node.pid)
    time.sleep(seconds)
    spent_ms = (procfs.processor_ns(node.pid) - before_ns) / 1e6
    what = f"processor time of a second in which nothing happens; {devices.what}"
    _add(bench, f"{name}.quiet", what, "ms", spent_ms / seconds)
