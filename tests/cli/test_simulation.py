"""The commands where the simulation is not installed, or is that of another version. That an installation without it
behaves so is tested in tests/release/test_packages.py."""

from __future__ import annotations

import sys

import click
import pytest
from click.testing import CliRunner, Result

import gpuactors_simulation
from gpuactors import VERSION
from gpuactors.cli import completion
from gpuactors.cli.commands import cli
from gpuactors.cli.ending import EX_UNAVAILABLE


@pytest.fixture(params=["absent", "other version"])
def there(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What the sentence says of the package."""
    if request.param == "absent":
        monkeypatch.setitem(sys.modules, "gpuactors_simulation", None)
        return "is not installed"
    monkeypatch.setattr(gpuactors_simulation, "VERSION", "0.0.1")
    return "is installed in version 0.0.1"


def invoked(*words: str) -> Result:
    return CliRunner().invoke(cli, words)


@pytest.mark.parametrize(
    "words", [("simulate",), ("simulate", "--list"), ("replay", ".", "--html", "page.html")], ids=" ".join
)
def test_a_command_that_needs_it_says_in_one_line_what_to_install(there: str, words: tuple[str, ...]) -> None:
    done = invoked(*words)
    assert done.exit_code == EX_UNAVAILABLE
    assert done.stdout == ""
    assert done.stderr == (
        f"gpuactors: the package gpuactors-simulation {there}: "
        f"pip install 'gpuactors[simulation]=={VERSION}'\n"
    )


def test_the_help_is_there_all_the_same_and_no_scenario_is_offered(there: str) -> None:
    assert "gpuactors[simulation]" in invoked("simulate", "--help").stdout
    context = click.Context(cli.commands["simulate"])
    assert completion.scenarios(context, context.command.params[0], "") == []
