"""What is recorded: real commands against the real daemon, on a fake node."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tests.process.daemon import clean_environment, eventually, gpuactors
from tests.process.node import H100, address, open_node
from tests.recording.cast import Cast

SLOTS: Final = (0x19, 0x3B, 0x4C, 0x5D, 0x9B, 0xBB)
"""Of the GPUs that a virtual machine can open; one more has a companion on a driver of the host."""

NODE: Final = "node-1"


def incident() -> Cast:
    """The incident of the field, played by `gpuactors simulate`."""
    cast = Cast("gpuactors simulate --scenario incident")
    cast.type("gpuactors simulate --scenario incident")
    # Faster than for a reader at the terminal, who may read on; the film can be stopped.
    _run(cast, "gpuactors simulate --scenario incident --speed 3", {}, within_s=180)
    return cast


@contextmanager
def node_in_trouble() -> Iterator[dict[str, str]]:
    """The environment of a command on a node with virtual machines, a stranger, a pod that was deleted by force and a
    group that is not viable."""
    with open_node() as node:
        for slot in SLOTS:
            node.plug(slot, "2330", driver="vfio-pci", numa_node=0 if slot < 0x80 else 1)
        node.plug(0xCB, "2330", driver="vfio-pci", numa_node=1)
        node.plug(0xCB, "22bb", driver="snd_hda_intel", function=1, class_code="040300")
        env = {
            "GPUACTORS_HOST_ROOT": str(node.tree.root),
            "GPUACTORS_KUBELET_DIR": str(node.kubelet_dir),
            "GPUACTORS_DEVICE_PLUGIN_DIR": str(node.kubelet.socket_dir),
            "GPUACTORS_STATE_DIR": str(node.directory / "s"),
        }

        def until(address: str, explained: str) -> None:
            eventually(lambda: explained in gpuactors("explain", address, env=env).stdout, explained)

        with node.daemon("--holders=proc", f"--node-name={NODE}"):
            eventually(lambda: len(node.device_lists().get(H100, {})) == len(SLOTS) + 1, "the list")
            for pod, slot in (("vm-1", 0x19), ("vm-2", 0x3B)):
                node.kubelet.allocate(H100, [address(slot)], pod=pod)
                node.tree.open_group(slot, 4000 + slot)
                until(address(slot), f"default/{pod}")
                until(address(slot), f"process {4000 + slot}")
            node.kubelet.force_delete("vm-2")
            until(address(0x3B), "is still held")
            node.tree.open_group(0x4C, 7331, "python3")
            until(address(0x4C), "Unhealthy")
            yield env


def diagnosis(env: dict[str, str]) -> Cast:
    """What an operator sees of that node."""
    cast = Cast("gpuactors inspect, explain and doctor")
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
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    cast.run(shlex.split(words), clean_environment({**env, "PATH": path}), within_s=within_s, code=code)
