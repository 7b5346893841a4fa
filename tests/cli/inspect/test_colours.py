"""The colours of `inspect` at a terminal: the text is the same, and a colour stands only on what says it in words."""

from __future__ import annotations

import click
import pytest

from gpuactors.cli.inspect.colours import Part, coloured, plain
from gpuactors.cli.inspect.report import as_table, as_wide
from gpuactors.cli.inspect.view import by_running
from gpuactors.core.events.kubelet import KubeletGone
from tests.cli.live.seen import QEMU, WALL, node, running
from tests.core.builders import Core

GREEN, RED, BOLD_RED = "\x1b[32m", "\x1b[31m", "\x1b[31m\x1b[1m"


def troubled() -> Core:
    core = node(range(0x10, 0x14))
    core.enabled["0000:13:00.0"] = 1
    core.holders[0x13] = (QEMU,)
    core.pass_time(60)
    core.feed(KubeletGone("no socket"))
    return core


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_without_the_codes_it_is_the_same_text(columns: int) -> None:
    inspected = by_running(running(troubled()), WALL)
    for table in (as_table, as_wide):
        text = table(inspected, columns, coloured)
        assert click.unstyle(text) == table(inspected, columns, plain)
        assert text != click.unstyle(text)


def test_health_and_problems_have_their_colours() -> None:
    lines = as_table(by_running(running(troubled()), WALL), 100, coloured).splitlines()
    (unhealthy,) = (line for line in lines if "0000:13:00.0" in line)
    assert f"{BOLD_RED}Unhealthy\x1b[0m  " in unhealthy
    assert sum(f"{GREEN}Healthy\x1b[0m" in line for line in lines) == 3
    assert f"{RED}kubelet: no socket\x1b[0m" in lines
    assert any(line.startswith(f"  {RED}4 listed") for line in lines), "not registered"
    assert not any("\x1b" in line for line in lines if "HEALTH" in line), "the names of the columns"


def test_a_cell_keeps_its_width() -> None:
    assert coloured(Part.HEALTH, "Healthy    ") == f"{GREEN}Healthy\x1b[0m    "
    assert coloured(Part.HEALTH, "offered to claims") == f"{GREEN}offered to claims\x1b[0m"
    assert coloured(Part.HEALTH, "not listed") == "not listed"
