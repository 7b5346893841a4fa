"""A node whose devices are virtual functions, 32 of each card, beside one with as many whole GPUs: what parts cost.

Start, slices, late creation, Allocate, prepare and the polls of a quiet node, of the daemon of this checkout.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final

from msgspec.structs import replace

from gpuactors_simulation.host.tree import HostTree, PciSpec
from tests.bench import procfs
from tests.bench.call import alone, plugin_of
from tests.bench.claims import ServedNode, claims_node, prepared_and_unprepared
from tests.bench.context import Bench, in_turn
from tests.bench.node import DRIVER, Node, discard, gpu_addresses, plugged

OF_CARD: Final = 32
"""The virtual functions of one card: as many as an L40S or H200 has."""

HOST_DRIVER: Final = "xe"
"""Of the cards: any driver that is no vfio driver and not NVIDIA's, whose virtual functions are vGPUs."""

_BETWEEN_S: Final = 0.05
"""The daemon has written its log line by then."""


@dataclass(frozen=True, slots=True)
class Devices:
    """The devices of a node."""

    tree: HostTree
    addresses: tuple[str, ...]
    what: str
    cards: tuple[str, ...] = ()
    """The physical functions of virtual ones."""


def whole(count: int) -> Devices:
    """As many whole GPUs, each in a group of its own."""
    return Devices(plugged(count), gpu_addresses(count), f"{count} whole GPUs")


def virtual(count: int) -> Devices:
    """As many virtual functions, `OF_CARD` of each card, each in a group of its own."""
    of_card = min(OF_CARD, count)
    tree = plugged(0)
    cards = tuple(f"0000:{number:02x}:00.0" for number in range(count // of_card))
    for number, card in enumerate(cards):
        spec = PciSpec(card, "10de", "2330", "030200", 1000 + number, 0, "pci0000:00", HOST_DRIVER)
        tree.plug(replace(spec, total_vfs=of_card, vf_device="2331", vf_group=number * of_card))
        tree.virtualize(card, of_card, DRIVER)
    addresses = tuple(virtual for card in cards for virtual in tree.virtual_functions(card))
    return Devices(tree, addresses, f"{count} virtual functions, {of_card} of each card", cards)


def measure(bench: Bench) -> None:
    """Raises `DidNotWork`."""
    count = bench.counts.gpus[-1]
    for name, devices in {"whole": whole(count), "virtual": virtual(count)}.items():
        with ExitStack() as stack:
            stack.callback(discard, devices.tree)
            _starts(bench, name, devices)
            served = stack.enter_context(
                claims_node(
                    bench.fresh(),
                    bench.daemons[0],
                    count,
                    tree=devices.tree,
                    addresses=devices.addresses,
                )
            )
            _add(bench, f"{name}.slices", f"slices of {devices.what}", "", served.api.slices())
            _prepares(bench, name, devices, served)
            _late(bench, name, devices, served.node)
            plugin = stack.enter_context(plugin_of(served.node))
            alone(bench, [plugin], count, 1, f"parts.{name}")
            _quiet(bench, name, devices, served.node)


def _add(bench: Bench, name: str, what: str, unit: str, *values: float) -> None:
    bench.sheet.add(f"parts.{name}", what, unit, bench.daemons[0].name, *values)


def _starts(bench: Bench, name: str, devices: Devices) -> None:
    node = Node(
        bench.fresh(),
        bench.daemons[0],
        gpus=len(devices.addresses),
        tree=devices.tree,
        addresses=devices.addresses,
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
        address = devices.addresses[number % len(devices.addresses)]
        times_ms = prepared_and_unprepared(served, f"claim-{number}", address)
        for call, took_ms in times_ms.items():
            if number:
                what = f"{call} of a claim of one pre-bound device; {devices.what}"
                _add(bench, f"{name}.{call}", what, "ms", took_ms)


def _late(bench: Bench, name: str, devices: Devices, node: Node) -> None:
    """One device comes late; and all virtual functions of a card at once, of which the kernel sends five uevents each.
    Only the last uevent is sent of one device, and all of a card."""
    for address, number in in_turn(
        devices.addresses[:: len(devices.addresses) // 4], 1 + bench.counts.binds // 8
    ):
        node.send(node.tree.unbind(address)[-1:])
        node.frame_without(address, after=node.frames_so_far() - 1)
        time.sleep(_BETWEEN_S)
        uevents, seen = node.bind(address), node.frames_so_far()
        began_ns = node.send(uevents[-1:])
        took_ms = (node.frame_with(address, after=seen).at_ns - began_ns) / 1e6
        time.sleep(_BETWEEN_S)
        if number:
            _add(bench, f"{name}.late", f"uevent `bind pci` to the list; {devices.what}", "ms", took_ms)
    for card in devices.cards[:4]:
        theirs = node.tree.virtual_functions(card)
        node.send_patiently(node.tree.virtualize(card, 0))
        node.frame_without(theirs[-1], after=node.frames_so_far() - 1)
        time.sleep(_BETWEEN_S)
        uevents, seen = node.tree.virtualize(card, len(theirs), DRIVER), node.frames_so_far()
        began_ns = time.monotonic_ns()
        node.send_patiently(uevents)
        frames = [node.frame_with(address, after=seen).at_ns for address in theirs]
        what = f"first uevent of SR-IOV to the list with all of a card; {devices.what}"
        _add(bench, f"{name}.card", what, "ms", (max(frames) - began_ns) / 1e6)


def _quiet(bench: Bench, name: str, devices: Devices, node: Node) -> None:
    """A quiet node: its periodic reads, of which none is of one device."""
    time.sleep(bench.counts.quiet_s)
    before_ns = procfs.processor_ns(node.pid)
    time.sleep(bench.counts.idle_s)
    spent_ms = (procfs.processor_ns(node.pid) - before_ns) / 1e6
    what = f"processor time of a second in which nothing happens; {devices.what}"
    _add(bench, f"{name}.quiet", what, "ms", spent_ms / bench.counts.idle_s)
