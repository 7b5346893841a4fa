"""Which scenario runs on which kernel: the cells of a matrix, from what the scenarios declare. Must not run any."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Final

from tests.vm.kernels import KERNELS
from tests.vm.machine import Machine

SCENARIOS: Final = tuple(
    sorted(path.stem for path in (Path(__file__).parent / "guest").glob("scenario_*.py"))
)
"""Module names, found by their beginning."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One scenario on one kernel."""

    scenario: str
    kernel: str
    machine: Machine

    @property
    def name(self) -> str:
        """What a test is called: `scenario_binding[6.1]`."""
        return f"{self.scenario}[{self.kernel}]"

    @property
    def directory(self) -> str:
        """Where its artifacts are, below `boot.logs_dir()`."""
        return f"{self.scenario}@{self.kernel}"


def scenario_module(scenario: str) -> ModuleType:
    """The scenario itself, with its `MACHINE`."""
    return importlib.import_module(f"tests.vm.guest.{scenario}")


def machines() -> dict[str, Machine]:
    """The machine that each scenario declares."""
    return {scenario: scenario_module(scenario).MACHINE for scenario in SCENARIOS}


def cells(machines: Mapping[str, Machine], kernels: Iterable[str] = ()) -> tuple[Cell, ...]:
    """What to run: every scenario on each of `kernels` that has what it needs. Without `kernels` the default suite:
    each scenario on those that it names itself."""
    asked = tuple(kernels)
    return tuple(
        Cell(scenario, kernel, machine)
        for scenario, machine in machines.items()
        for kernel in KERNELS
        if (kernel in asked if asked else kernel in machine.kernels) and not machine.lacks(kernel)
    )
