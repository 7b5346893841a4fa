"""Each scenario in `tests/vm/guest/` in a guest of its own, on the kernels where it belongs. Run by `just vm`; not part
of a plain `pytest`."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from gpuactors.replay.play import play
from gpuactors.replay.reading import Damage, files_to_read
from gpuactors.replay.text import Tally
from tests.support.patience import patient
from tests.vm import results
from tests.vm.boot import BOOTS, fresh_artifacts, on_this_host, run_scenario
from tests.vm.commands import ProvisionError
from tests.vm.guest.daemon import JOURNAL_SUFFIX
from tests.vm.kernels import KERNELS, BuiltKernel
from tests.vm.machine import LONGEST_STRETCH
from tests.vm.matrix import Cell, cells, machines
from tests.vm.provision import cached_kernel, qemu_version

MARGIN_S: Final = patient(30.0)
"""Building the initramfs, starting and reaping QEMU: pytest's own timeout is only there for a harness gone wrong."""

IMAGE_S: Final = patient(300.0)
"""Building the image: half a minute on quiet cores, with packages at hand."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "cell" not in metafunc.fixturenames:
        return
    asked = KERNELS if metafunc.config.getoption("--all-kernels") else metafunc.config.getoption("--kernel")
    parameters = []
    for cell in cells(machines(), asked):
        machine = on_this_host(cell.machine)
        life_s = BOOTS * machine.boot_timeout_s + LONGEST_STRETCH * machine.scenario_timeout_s
        limit_s = (cell.machine.power_cuts + 1) * life_s + MARGIN_S + (IMAGE_S if cell.machine.image else 0)
        parameters.append(pytest.param(cell, id=cell.name, marks=pytest.mark.timeout(limit_s)))
    metafunc.parametrize("cell", parameters)


def test_scenario(cell: Cell, request: pytest.FixtureRequest) -> None:
    if cell.kernel not in request.config.getoption("--kernel"):
        skip_without_optional_kernel(cell)
    run = run_scenario(cell)
    print(f"{cell.name}: boot {run.boot_s:.1f} s (boots: {run.boots}), scenario {run.scenario_s:.1f} s")
    journals = sorted(run.artifacts.glob(f"*{JOURNAL_SUFFIX}"))
    unequal = [journal.name for journal in journals if not replays(journal, cuts=cell.machine.power_cuts)]
    why = None
    if not run.passed:
        why = results.guests_error(run.artifacts) or run.ending
    elif unequal:
        why = f"replayed on the host it comes to something else: {', '.join(unequal)}"
    results.keep(
        run.artifacts,
        outcome=results.FAILED if why else results.PASSED,
        why=why,
        release=cached_kernel(cell.kernel).release,
        qemu=qemu_version(),
        boot_s=round(run.boot_s, 1),
        scenario_s=round(run.scenario_s, 1),
    )
    if why:
        pytest.fail(f"{why}\n{run.report()}", pytrace=False)


def skip_without_optional_kernel(cell: Cell) -> None:
    """A kernel that takes minutes to build is not a condition of the suite: without it, its scenarios say so."""
    source = KERNELS[cell.kernel]
    if not isinstance(source, BuiltKernel):
        return
    try:
        cached_kernel(cell.kernel)
    except ProvisionError:
        why = f"kernel {cell.kernel} has not been built, which is optional (`{source.recipe}`, some minutes, once)"
        results.keep(fresh_artifacts(cell), outcome=results.NOT_RUN, why=why)
        pytest.skip(why)


def replays(journal: Path, *, cuts: int) -> bool:
    """Whether what the daemon recorded in the guest, fed to the core out here, comes to the same snapshots and
    effects.

    What was not on the disk when the power was cut is missing at a file's end, or a whole file is; nothing else is.
    """
    files, damaged = files_to_read(str(journal))
    tally = Tally()
    torn: list[Damage] = []
    for moment in (*damaged, *play(files)):
        tally.count(moment)
        if isinstance(moment, Damage):
            torn.append(moment)
            print(moment)
    print(f"{journal.name}: {tally}")
    if not (tally.steps > 0 and tally.differing == 0):
        return False
    if not cuts:
        return (tally.gaps, tally.damage) == (0, 0)
    return all(_is_a_torn_end(damage) for damage in torn)


def _is_a_torn_end(damage: Damage) -> bool:
    """It is said in one line, and nothing of the file follows it."""
    lines = Path(damage.path).read_bytes().splitlines(keepends=True)
    return "\n" not in str(damage) and sum(map(len, lines[damage.line - 1 :])) == damage.bytes_skipped
