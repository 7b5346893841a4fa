"""Each scenario in `tests/vm/guest/` in a guest of its own. Run by `just vm`; not part of a plain `pytest`."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Final

import pytest

from gpuactors.replay.play import play
from gpuactors.replay.reading import files_to_read
from gpuactors.replay.text import Tally
from tests.vm.boot import BOOTS, run_scenario
from tests.vm.guest.daemon import JOURNAL_SUFFIX
from tests.vm.machine import Machine

SCENARIOS: Final = tuple(
    sorted(path.stem for path in (Path(__file__).parent / "guest").glob("scenario_*.py"))
)

MARGIN_S: Final = 30.0
"""Building the initramfs, starting and reaping QEMU: pytest's own timeout is only there for a harness gone wrong."""


def machine_of(scenario: str) -> Machine:
    """The machine that a scenario declares."""
    machine = importlib.import_module(f"tests.vm.guest.{scenario}").MACHINE
    assert isinstance(machine, Machine)
    return machine


def _parameters() -> list[object]:
    parameters: list[object] = []
    for scenario in SCENARIOS:
        machine = machine_of(scenario)
        limit_s = BOOTS * machine.boot_timeout_s + machine.scenario_timeout_s + MARGIN_S
        parameters.append(pytest.param(scenario, id=scenario, marks=pytest.mark.timeout(limit_s)))
    return parameters


@pytest.mark.parametrize("scenario", _parameters())
def test_scenario(scenario: str) -> None:
    run = run_scenario(scenario, machine_of(scenario))
    print(f"{scenario}: boot {run.boot_s:.1f} s (boots: {run.boots}), scenario {run.scenario_s:.1f} s")
    if not run.passed:
        pytest.fail(run.report(), pytrace=False)
    for journal in sorted(run.artifacts.glob(f"*{JOURNAL_SUFFIX}")):
        replays_to_the_same(journal)


def replays_to_the_same(journal: Path) -> None:
    """What the daemon recorded in the guest, fed to the core out here, comes to the same snapshots and effects."""
    files, damaged = files_to_read(str(journal))
    tally = Tally()
    for moment in (*damaged, *play(files)):
        tally.count(moment)
    print(f"{journal.name}: {tally}")
    assert tally.steps > 0
    assert (tally.differing, tally.gaps, tally.damage) == (0, 0, 0)
