"""From a uevent to the list at kubelet, what a list costs by its length, and a storm of uevents without a change.

Floors: the bare plugin, which reads the one function and sends the list, and a bare reader of a socket (`READER`).
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from gpuactors_simulation.host.uevents import Uevent
from tests.bench import procfs
from tests.bench.context import Bench, in_turn, say
from tests.bench.node import WAIT_S, Node

WARM_UP: Final = 5
"""Rounds that are not counted: the start's second scan (after the uevent socket was opened) may still be running."""

PAUSE_S: Final = 0.005
"""Between two uevents. The frame is out before the daemon has written its log line; on a node it is idle by then."""

STORM_GPUS: Final = 8

READER: Final = """
import socket, sys
kind, path, answers = sys.argv[1:]
if kind == "netlink":
    heard = socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, 15)
    heard.bind((0, 0))
    print(heard.getsockname()[0], flush=True)
else:
    heard = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    heard.bind(path)
    print(0, flush=True)
said = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
while True:
    heard.recv(65536)
    said.sendto(b"!", answers)
"""
"""15 is NETLINK_KOBJECT_UEVENT, the kernel's protocol of uevents. It says its address there, its port."""

SOCKETS: Final = {
    "netlink": ("the kernel's socket of uevents (netlink)", socket.AF_NETLINK, 15),
    "unix": ("the unix socket from which the bench's daemons have them", socket.AF_UNIX, 0),
}
"""Those of the bare reader, with family and protocol."""


def measure(bench: Bench) -> None:
    """Raises `DidNotWork`."""
    _reader(bench)
    for gpus in bench.counts.lists:
        with bench.nodes(gpus) as nodes:
            for node, number in in_turn(nodes.values(), WARM_UP + bench.counts.binds):
                _round(bench, node, number - WARM_UP)
    with bench.nodes(STORM_GPUS) as nodes:
        for node, _ in in_turn(nodes.values(), bench.counts.storms):
            _storm(bench, node)


def _round(bench: Bench, node: Node, number: int) -> None:
    gpus = len(node.gpus)
    address = node.gpus[number % gpus]
    before_ns = procfs.processor_ns(node.pid)
    for what, act, wanted in (
        ("unbind", node.tree.unbind, node.frame_without),
        ("bind", node.bind, node.frame_with),
    ):
        uevents, seen = act(address), node.frames_so_far()
        # The tree is as after the whole act, and the last of its uevents is the only one to be sent.
        began_ns = node.send(uevents[-1:])
        took_ms = (wanted(address, after=seen).at_ns - began_ns) / 1e6
        time.sleep(PAUSE_S)
        if number >= 0:
            bench.sheet.add(
                f"event.{what}.{gpus}_gpus", f"uevent `{what} pci` to the list of {gpus} GPUs", "ms",
                node.party.name, took_ms,
            )  # fmt: skip
    if number >= 0:
        spent_us = (procfs.processor_ns(node.pid) - before_ns) / 1e3
        bench.sheet.add(
            f"event.processor.{gpus}_gpus",
            f"processor time of an unbind and a bind, with their lists of {gpus} GPUs",
            "µs",
            node.party.name,
            spent_us,
        )


def _storm(bench: Bench, node: Node) -> None:
    """Uevents of GPUs on which nothing has changed, then a real unbind and bind."""
    events = bench.counts.storm_events
    frames, before_ns, began = node.frames_so_far(), procfs.processor_ns(node.pid), time.monotonic()
    flood(node, events)
    sent_s = time.monotonic() - began
    address = node.gpus[0]
    node.send_patiently(node.tree.unbind(address)[-1:])
    node.frame_without(address, after=frames)
    took_s = time.monotonic() - began
    sent = node.frames_so_far() - frames
    node.send_patiently(node.bind(address)[-1:])
    node.frame_with(address, after=frames + sent)
    spent_ms = (procfs.processor_ns(node.pid) - before_ns) / 1e6
    of = f"a storm of {events:,} uevents without a change"
    for name, what, unit, value in (
        ("taken", f"{of}: until the last is taken", "ms", sent_s * 1e3),
        ("list", f"{of}: until a change after it is in the list", "ms", took_s * 1e3),
        ("processor", f"{of}: processor time", "ms", spent_ms),
        ("lists", f"{of}: lists sent, that with the change included", "", sent),
    ):
        bench.sheet.add(f"event.storm.{name}", what, unit, node.party.name, value)


def flood(node: Node, events: int) -> None:
    """Sends so many uevents that name the node's GPUs in turn and tell of nothing new, as fast as they are taken."""
    kinds = [
        Uevent(
            "change",
            str(node.tree.device_dir(address)).removeprefix(f"{node.tree.root}/sys"),
            "pci",
            (("SEQNUM", "1"),),
        )
        for address in node.gpus
    ]
    node.send_patiently([kinds[i % len(kinds)] for i in range(events)])


def _reader(bench: Bench) -> None:
    uevent = Uevent("bind", "/devices/pci0000:00/0000:00:00.0", "pci", (("SEQNUM", "1"),)).encode()
    for kind, (which, family, protocol) in SOCKETS.items():
        heard = bench.fresh() / "heard"
        with (
            socket.socket(family, socket.SOCK_DGRAM, protocol) as sender,
            _started_reader(kind, heard) as reader,
        ):
            port, answers = reader
            for number in range(WARM_UP + bench.counts.binds):
                began_ns = time.monotonic_ns()
                try:
                    sender.sendto(uevent, (port, 0) if kind == "netlink" else str(heard))
                except PermissionError:
                    say(f"no bare reader of {which}: only CAP_NET_ADMIN may send to it")
                    break
                answers.recv(16)
                took_ms = (time.monotonic_ns() - began_ns) / 1e6
                time.sleep(PAUSE_S)
                if number >= WARM_UP:
                    what = f"a uevent to a process that only reads {which}, and back"
                    bench.sheet.add(f"event.reader.{kind}", what, "ms", "bare reader", took_ms)


@contextmanager
def _started_reader(kind: str, heard: Path) -> Iterator[tuple[int, socket.socket]]:
    """Its port, if it has one, and the socket to which it answers."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as answers:
        answers.bind(str(heard.with_name("answers")))
        answers.settimeout(WAIT_S)
        words = (sys.executable, "-c", READER, kind, str(heard), answers.getsockname())
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                yield int(process.stdout.readline()), answers
            finally:
                process.kill()
