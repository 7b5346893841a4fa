"""A fake node before the doctor: a host tree, and grpcio's stand-in for kubelet on real sockets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from gpuactors.cli.doctor.checks import examine
from gpuactors.cli.doctor.facts import Facts
from gpuactors.cli.doctor.finding import Check, Finding, Level
from gpuactors.cli.doctor.run import Examined, examined
from gpuactors.cli.progress import Progress
from gpuactors.config import resolve
from gpuactors.host.root import module_parameter
from tests.process.node import Node, address, open_node
from tests.support.written_terminal import WrittenTerminal

GPU, COMPANION, SECOND = address(0x23), address(0x23, 1), address(0x24)


@dataclass
class Patient:
    """The node, and what the doctor is told of it."""

    node: Node
    flags: dict[str, object] = field(default_factory=dict)
    terminal: WrittenTerminal = field(default_factory=WrittenTerminal)
    """Where the doctor says what it waits for."""

    def put(self, path: str, text: str) -> Path:
        """A file of the host."""
        file = self.node.tree.root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return file

    def gpu(self, slot: int = 0x23, driver: str | None = "vfio-pci") -> None:
        """A GPU is plugged in."""
        self.node.plug(slot, "2330", driver=driver)

    def companion(self, driver: str | None) -> None:
        """The audio function beside the first GPU, in its group."""
        self.node.plug(0x23, "1aef", function=1, class_code="040300", driver=driver)

    def words(self) -> Mapping[str, object]:
        """The flags of the command."""
        directory = self.node.directory
        return {
            "host_root": str(self.node.tree.root),
            "kubelet_dir": str(self.node.kubelet_dir),
            "device_plugin_dir": str(self.node.kubelet.socket_dir),
            "state_dir": str(directory / "s"),
            "pci_ids": str(directory / "pci.ids"),
            "node_name": "node-1",
            **self.flags,
        }

    def examined(self, *, pre: bool) -> Examined:
        """What the doctor finds."""
        return examined(resolve(self.words(), {}), pre=pre, progress=Progress(self.terminal))


@contextmanager
def open_patient(*, cdev: bool = False, started: bool = True) -> Iterator[Patient]:
    """A node without a GPU, whose vfio-pci is loaded; `started`: its kubelet runs."""
    with open_node(cdev=cdev, started=started) as node:
        patient = Patient(node)
        patient.put(module_parameter("vfio_pci", "disable_idle_d3"), "N\n")
        patient.put("/proc/cmdline", "quiet intel_iommu=on\n")
        patient.put("/sys/class/iommu/dmar0/name", "")
        (node.tree.root / "sys/bus/pci/drivers/vfio-pci").mkdir(parents=True)
        yield patient


def findings(found: Examined) -> list[Finding]:
    return [finding for group in found.groups for finding in group.findings]


def wrong(found: Examined | Facts) -> list[Finding]:
    """All that is no PASS."""
    groups = examine(found) if isinstance(found, Facts) else found.groups
    return [f for group in groups for f in group.findings if f.level is not Level.PASS]


@dataclass(frozen=True)
class Seed:
    """One thing that is wrong, and the one finding that it is to lead to."""

    name: str
    plant: Callable[[Patient], None]
    check: Check
    level: Level
    message: str
    """A part of it."""
    remedy: str
    cause: str | None = None
    devices: tuple[str, ...] = ()

    def assert_found(self, found: list[Finding]) -> None:
        """It is among them, with all its parts."""
        fitting = [f for f in found if (f.check, f.level, f.cause) == (self.check, self.level, self.cause)]
        fitting = [f for f in fitting if self.message in f.message]
        assert len(fitting) == 1, (self.name, found)
        assert self.remedy in fitting[0].remedy, (self.name, fitting[0].remedy)
        assert fitting[0].devices == self.devices
