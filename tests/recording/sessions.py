"""What is recorded: real commands against the real daemon, on a fake node."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.process.daemon import clean_environment, eventually, gpuactors
from tests.process.node import H100, Node, address, open_node
from tests.recording.cast import Act, Cast

SLOTS: Final = (0x19, 0x3B, 0x4C, 0x5D, 0x9B, 0xBB)
"""Of the GPUs that a virtual machine can open; one more has a companion on a driver of the host."""

NODE: Final = "node-1"


@dataclass(frozen=True, slots=True)
class Running:
    """A node with its daemon, and the environment by which a command finds it."""

    node: Node
    env: dict[str, str]

    def until(self, slot: int, explained: str) -> None:
        """Waits until `explain` says this of a GPU."""
        eventually(lambda: explained in gpuactors("explain", address(slot), env=self.env).stdout, explained)

    def run(self, pod: str, slot: int) -> None:
        """A virtual machine starts with this GPU."""
        self.node.kubelet.allocate(H100, [address(slot)], pod=pod)
        self.node.tree.open_group(slot, 4000 + slot)

    def run_and_know(self, pod: str, slot: int) -> None:
        """The same, until the daemon knows the pod and the process."""
        self.run(pod, slot)
        self.until(slot, f"default/{pod}")
        self.until(slot, f"process {4000 + slot}")


@contextmanager
def running(slots: Sequence[int], beside: Callable[[Node], object] = lambda node: None) -> Iterator[Running]:
    """A node with these GPUs on vfio-pci, and what `beside` plugs in."""
    with open_node() as node:
        for slot in slots:
            node.plug(slot, "2330", driver="vfio-pci", numa_node=0 if slot < 0x80 else 1)
        beside(node)
        env = {
            "GPUACTORS_HOST_ROOT": str(node.tree.root),
            "GPUACTORS_KUBELET_DIR": str(node.kubelet_dir),
            "GPUACTORS_DEVICE_PLUGIN_DIR": str(node.kubelet.socket_dir),
            "GPUACTORS_STATE_DIR": str(node.directory / "s"),
        }
        with node.daemon("--holders=proc", f"--node-name={NODE}"):
            eventually(lambda: len(node.device_lists().get(H100, {})) >= len(slots), "the list")
            yield Running(node, env)


def incident() -> Cast:
    """A pod is deleted by force, and its QEMU lives on: the live screen from then until QEMU ends."""
    cast = Cast("gpuactors inspect --watch: a virtual machine outlives its pod", rows=22)
    with running(SLOTS[:4]) as it:
        for pod, slot in (("vm-1", 0x19), ("vm-2", 0x3B)):
            it.run_and_know(pod, slot)
        it.node.kubelet.force_delete("vm-2")
        it.until(0x3B, "is still held")

        def starts() -> bytes:
            it.run("vm-3", 0x4C)
            return b""

        def ends() -> bytes:
            it.node.tree.close_group(0x3B, 4000 + 0x3B)
            return b""

        acts = (
            Act(2.0, lambda: b"\x1b[B"),
            Act(3.0, lambda: b"\r"),
            Act(7.0, lambda: b"\x1b"),
            Act(8.2, starts),
            Act(10.2, ends),
        )
        cast.watch(["gpuactors", "inspect", "--watch"], _environment(it.env), acts, seconds=13.0)
    return cast


def _with_a_companion(node: Node) -> None:
    """One more GPU, whose audio function is on a driver of the host."""
    node.plug(0xCB, "2330", driver="vfio-pci", numa_node=1)
    node.plug(0xCB, "22bb", driver="snd_hda_intel", function=1, class_code="040300")


@contextmanager
def node_in_trouble() -> Iterator[dict[str, str]]:
    """The environment of a command on a node with virtual machines, a stranger, a pod that was deleted by force and a
    group that is not viable."""
    with running(SLOTS, _with_a_companion) as it:
        for pod, slot in (("vm-1", 0x19), ("vm-2", 0x3B)):
            it.run_and_know(pod, slot)
        it.node.kubelet.force_delete("vm-2")
        it.until(0x3B, "is still held")
        it.node.tree.open_group(0x4C, 7331, "python3")
        it.until(0x4C, "Unhealthy")
        yield it.env


def diagnosis(env: dict[str, str]) -> Cast:
    """What an operator sees of that node, with the directories of a real one."""
    names = {
        env["GPUACTORS_KUBELET_DIR"]: "/var/lib/kubelet",
        env["GPUACTORS_STATE_DIR"]: "/var/lib/gpuactors",
    }
    cast = Cast("gpuactors inspect, explain and doctor", names=names)
    for words, code in (
        ("gpuactors inspect", 0),
        ("gpuactors explain 4c:00.0", 0),
        ("gpuactors explain 3b:00.0", 0),
        ("gpuactors doctor", 1),
    ):
        cast.type(words)
        _run(cast, words, env, within_s=60, code=code)
    return cast


def replay_page(env: dict[str, str], page: Path) -> None:
    """The page of that node's journal."""
    _run(Cast(""), f"gpuactors replay {env['GPUACTORS_STATE_DIR']} --html {page}", env, within_s=60)


def _run(cast: Cast, words: str, env: dict[str, str], *, within_s: float, code: int = 0) -> None:
    cast.run(shlex.split(words), _environment(env), within_s=within_s, code=code)


def _environment(env: dict[str, str]) -> dict[str, str]:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return clean_environment({**env, "PATH": path})
