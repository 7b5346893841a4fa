"""How long kubelet has no stream when a daemon is replaced: by hand-over, and by a cold restart.

From the end of the old daemon's stream to the first frame of the new one's, both as the kubelet stand-in saw them. Real
processes; during a hand-over both live, as during an upgrade with maxSurge.

`python -m tests.bench.hand_over [ROUNDS]` measures this alone.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, final

from gpuactors.simulation.host_tree import HostTree, PciSpec
from tests.bench.figures import Figure, as_text, distribution, machine
from tests.support.kubelet_grpcio import HEALTHY, KubeletStandIn
from tests.support.kubelet_seen import Frame, Registration, StreamEnd

GPUS: Final = 8
WAIT_S: Final = 60.0
ROUNDS: Final = 30


@final
class Upgrades:
    """A node with GPUs on which one daemon after the other runs."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._tree = HostTree(directory / "host")
        for i in range(GPUS):
            self._tree.plug(_gpu(i))
        (directory / "state").mkdir()
        self.kubelet = KubeletStandIn(directory / "kubelet")
        self.kubelet.start()
        self._daemons: list[subprocess.Popen[bytes]] = []

    def close(self) -> None:
        """Ends whatever runs."""
        for daemon in self._daemons:
            daemon.kill()
            daemon.wait()
        self.kubelet.stop()

    def start(self) -> None:
        """Spawns one more daemon and waits until kubelet has its first frame, with every GPU healthy."""
        known = len(self.kubelet.registrations)
        command = [
            sys.executable, "-m", "gpuactors", "run",
            f"--host-root={self._tree.root}", f"--kubelet-dir={self._directory / 'kubelet'}",
            f"--state-dir={self._directory / 'state'}", "--uevents=off",
        ]  # fmt: skip
        environment = {key: value for key, value in os.environ.items() if not key.startswith("GPUACTORS_")}
        with (self._directory / "log").open("ab") as log:
            self._daemons.append(
                subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environment
                )
            )
        self._wait(lambda: self._served_since(known), "the new daemon's first frame")

    def stop_oldest(self) -> None:
        """SIGTERM to the one that runs longest, until it has ended."""
        daemon = self._daemons.pop(0)
        daemon.send_signal(signal.SIGTERM)
        daemon.wait(timeout=WAIT_S)

    def last_gap_ms(self) -> tuple[float, float]:
        """From the last stream's end to the first frame after it; and the first part of that, up to Register, which is
        the daemons': the rest is mostly the kubelet stand-in's."""
        registration = self._registered()[-1]
        end = self._ends(registration.resource)[-1]
        frame = next(f for f in self.kubelet.frames(registration.resource) if f.at_ns > end.at_ns)
        return (frame.at_ns - end.at_ns) / 1e6, (registration.received_ns - end.at_ns) / 1e6

    def ends(self) -> int:
        """How many streams have ended."""
        return len(self._ends(self._registered()[-1].resource))

    def _registered(self) -> tuple[Registration, ...]:
        return self.kubelet.registrations

    def _ends(self, resource: str) -> tuple[StreamEnd, ...]:
        return self.kubelet.stream_ends(resource)

    def _served_since(self, known: int) -> bool:
        new = self._registered()[known:]
        if not new:
            return False
        frames = [f for f in self.kubelet.frames(new[-1].resource) if f.client == new[-1].client]
        return bool(frames) and _healthy(frames[-1]) == GPUS

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        try:
            self.kubelet.wait_for(lambda _: condition(), WAIT_S, what)
        except TimeoutError as error:
            log = (self._directory / "log").read_text(errors="replace").splitlines()[-20:]
            raise TimeoutError("\n".join([str(error), "the end of the daemons' log:", *log])) from error


def measure(directory: Path, rounds: int) -> list[Figure]:
    """`rounds` upgrades by hand-over, then as many cold restarts."""
    gaps: list[float] = []
    own: list[float] = []
    cold: list[float] = []
    node = Upgrades(directory)
    try:
        node.start()
        for _ in range(rounds):
            ended = node.ends()
            node.start()
            if node.ends() != ended + 1:
                raise RuntimeError(f"{node.ends() - ended} streams ended during one hand-over")
            gap, to_register = node.last_gap_ms()
            gaps.append(gap)
            own.append(to_register)
            node.stop_oldest()
        for _ in range(rounds):
            node.stop_oldest()
            node.start()
            cold.append(node.last_gap_ms()[0])
    finally:
        node.close()
    seen = "the old stream's end to the new one's first frame, as kubelet sees them"
    return [
        distribution("hand_over.gap", seen, "ms", gaps),
        distribution("hand_over.to_register", "of that, until the new one's Register arrives", "ms", own),
        distribution("hand_over.cold_restart", f"SIGTERM, then a new process: {seen}", "ms", cold),
    ]


def _healthy(frame: Frame) -> int:
    return sum(device.health == HEALTHY for device in frame.devices)


def _gpu(i: int) -> PciSpec:
    return PciSpec(f"0000:{i + 1:02x}:00.0", "10de", "2330", "030200", i + 1, driver="vfio-pci")


if __name__ == "__main__":
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gph-", dir="/tmp") as name:
        figures = measure(Path(name), int(sys.argv[1]) if len(sys.argv) > 1 else ROUNDS)
    print(as_text(machine(), figures))
    print(f"({time.monotonic() - began:.0f} s)")
