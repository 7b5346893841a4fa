"""A core whose steps are recorded: stories of any length, without a process, for the tests of journal and replay."""

from __future__ import annotations

import random
from functools import cached_property
from pathlib import Path
from typing import Literal

from gpuactors.core.events import Event
from gpuactors.core.events.deviceplugin import (
    AllocateAsked,
    PreStartAsked,
    RegisterAnswered,
    SocketBound,
    StreamEnded,
    StreamOpened,
)
from gpuactors.core.events.host import FunctionInspected, HostChanged
from gpuactors.core.events.kubelet import KubeletAppeared, KubeletGone
from gpuactors.core.reports.snapshot import project
from gpuactors.core.step import step
from gpuactors.core.values.effects import Effect
from gpuactors.core.values.model import DeviceId, Holder, PciFunction, Settings, Token
from gpuactors.observe.journal import JOURNAL_ROUTINE_S, Anchor, Bounds, JournalFiles, Missed, Origin
from gpuactors.ports.node import Step
from tests.core.builders import H100, SETTINGS, Core, gpu

WALL = 1_795_242_000.0
"""2026-11-21 06:20 UTC, when every recording begins."""


class RecordedCore(Core):
    """`Core`, whose steps are kept."""

    def __init__(self, *functions: PciFunction, settings: Settings = SETTINGS) -> None:
        self.steps: list[Step] = []
        super().__init__(*functions, settings=settings)

    def _step(self, event: Event) -> list[Effect]:
        before = self.state
        self.state, effects = step(before, event, self.at)
        self.steps.append(Step(before, event, self.at, effects, project(self.state)))
        return effects

    def kubelet_restarts(self) -> None:
        """A kubelet, or another one, is there and takes every resource."""
        for resource, plugin in self.state.published.plugins.items():
            for stream in plugin.streams:
                self.feed(StreamEnded(resource, stream))
        if self.state.kubelet.socket is not None:
            self.feed(KubeletGone("kubelet.sock does not exist"), after_s=0.01)
        self.feed(KubeletAppeared(f"kubelet at {self.at}"), after_s=1.5)
        for resource in self.state.published.plugins:
            self.feed(SocketBound(resource, self.state.published.plugins[resource].bind), after_s=0.002)
            self.feed(StreamOpened(resource, len(self.steps)), after_s=0.002)
            self.feed(
                RegisterAnswered(resource, self.state.published.plugins[resource].register), after_s=0.001
            )


class RecordedSteps(Core):
    """Mixed into another core, whose steps are kept; each takes 1 ms."""

    @cached_property
    def steps(self) -> list[Step]:
        return []

    def _step(self, event: Event) -> list[Effect]:
        self.at += 0.001
        before = self.state
        self.state, effects = step(before, event, self.at)
        self.steps.append(Step(before, event, self.at, effects, project(self.state)))
        return effects


Held = Literal["idle", "in use", "one held externally"]
"""What a quiet node's GPUs are: free; all of them given to pods that run; free, but for one that an external process
holds."""


class QuietNode(RecordedCore):
    """A node on which nothing new happens. Ticks come a little late and answers take a little, as they do."""

    def __init__(self, held: Held, gpus: int = 8) -> None:
        self._chance = random.Random(0)
        functions = [gpu(f"{0x10 + i:02x}:00.0", numa_node=i % 2) for i in range(gpus)]
        super().__init__(*functions)
        self.at += 500_000.0  # a clock of trio's begins anywhere, and a node is up for weeks
        for i, function in enumerate(functions if held == "in use" else ()):
            self.ledger[function.address], self.enabled[function.address] = f"vm-{i}", 1
        self.kubelet_restarts()
        if held == "one held externally":
            self.enabled[functions[0].address] = 1
        self.pass_time(60.0)

    def _step(self, event: Event) -> list[Effect]:
        self.at += self._chance.uniform(0.0002, 0.003)
        return super()._step(event)

    def journal_of(self, seconds: float, journal: JournalFiles) -> int:
        """Writes what so much time brings, as often as the daemon does; returns how many steps that is."""
        steps = 0
        for _ in range(int(seconds / JOURNAL_ROUTINE_S)):
            self.steps.clear()
            self.pass_time(JOURNAL_ROUTINE_S)
            steps += len(self.steps)
            journal.write(self.steps, Anchor(self.at, WALL))
        return steps


def files(directory: Path, *, run: str = "a", bounds: Bounds | None = None) -> JournalFiles:
    """A journal's files."""
    return JournalFiles(str(directory), Origin("0.1.0", run, "boot", 4711), bounds or Bounds())


def write(directory: Path, *steps: Step | Missed, run: str = "a", bounds: Bounds | None = None) -> list[Path]:
    """Writes the steps as one process would; returns the files."""
    journal = files(directory, run=run, bounds=bounds)
    journal.write(steps, Anchor(100.0, WALL))
    journal.close()
    return sorted(directory.glob("*.jsonl"))


def story(gpus: int = 3, events: int = 60, seed: int = 0) -> RecordedCore:
    """Pods, external processes, unbinds, a kubelet restart and idle time, with `events` steps or a few more."""
    chance = random.Random(seed)
    functions = [gpu(f"{0x10 + i:02x}:00.0", numa_node=i % 2) for i in range(gpus)]
    core = RecordedCore(*functions)
    core.kubelet_restarts()
    token = 0
    while len(core.steps) < events:
        function = chance.choice(functions)
        device, group = DeviceId(function.address), function.iommu_group or 0
        match chance.choice(
            ["idle", "idle", "pod", "pod", "end", "end", "forced", "external", "unbind", "kubelet"]
        ):
            case "pod" if device not in core.ledger:
                token += 1
                core.feed(AllocateAsked(Token(token), H100, ((device,),)))
                _look(core, functions)
                core.ledger[device] = f"vm-{token}"
                core.pass_time(1.0)
                token += 1
                core.feed(PreStartAsked(Token(token), H100, (device,)))
                _look(core, functions)
                core.enabled[device], core.holders[group] = (
                    1,
                    (Holder(4000 + token, "qemu-system-x86", None),),
                )
            case "end" if device in core.ledger:
                core.ledger.pop(device)
                core.enabled.pop(device, None)
                core.holders.pop(group, None)
            case "forced" if device in core.ledger:
                core.ledger.pop(device)  # its process lives on
            case "external" if device not in core.ledger and device not in core.enabled:
                core.enabled[device], core.holders[group] = 1, (Holder(999, "python3", None),)
            case "unbind":
                at = functions.index(function)
                bound = function.driver == "vfio-pci"
                functions[at] = gpu(function.address, group, driver="nvidia" if bound else "vfio-pci")
                core.feed(HostChanged(function.address, None, "unbind pci" if bound else "bind pci"))
                _look(core, functions)
            case "kubelet":
                core.kubelet_restarts()
            case _:
                pass
        core.pass_time(chance.choice([0.2, 2.0, 5.0]))
        if chance.random() < 0.3:  # somebody lets go at last
            for held in [d for d in core.enabled if d not in core.ledger]:
                core.enabled.pop(held)
                core.holders.pop(gpu(held).iommu_group or 0, None)
    return core


def _look(core: RecordedCore, functions: list[PciFunction]) -> None:
    """The inspections that are outstanding return, and time passes until nothing is waited for any more."""
    for address, number in core.state.host.inspections.functions.items():
        there = tuple(f for f in functions if f.address == address)
        core.feed(FunctionInspected(number, address, there), after_s=0.001)
