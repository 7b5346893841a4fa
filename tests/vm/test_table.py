"""What the last runs left, and the tables that are made of it. No machine is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.markdown import put_into
from tests.vm import results
from tests.vm.kernels import CDEV, KERNELS
from tests.vm.machine import Machine
from tests.vm.matrix import SCENARIOS
from tests.vm.results import Result
from tests.vm.table import BEGIN, DOCUMENT, Row, first_sentence, render, rows_from, unmatched

MACHINE = Machine(ports=())


def rendered(row: Row) -> list[list[str]]:
    """The cells of every line that begins with a bar."""
    lines = [line for line in render([row]).splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").replace("\\|", "/").split("|")] for line in lines]


def test_a_run_without_a_verdict_was_cut_short(tmp_path: Path) -> None:
    assert results.load(tmp_path / "nowhere") is None
    (tmp_path / results.FILE).write_text('{"figures": {"a": 1}, "error": null')
    assert results.load(tmp_path) == Result("failed", why="the run was cut short")


def test_the_host_adds_its_verdict_to_what_the_guest_wrote(tmp_path: Path) -> None:
    (tmp_path / results.FILE).write_text('{"steps": [], "figures": {"a_ms": 1.5}, "error": "OSError: no"}')
    assert results.guests_error(tmp_path) == "OSError: no"
    results.keep(tmp_path, outcome="failed", why="OSError: no", release="6.1.0", scenario_s=3.0)
    result = results.load(tmp_path)
    assert result is not None
    assert (result.outcome, result.why, result.release, result.scenario_s) == (
        "failed",
        "OSError: no",
        "6.1.0",
        3.0,
    )
    assert result.figures == {"a_ms": 1.5}
    assert result.at


def test_verdicts() -> None:
    found = {
        "6.1": Result("passed", release="6.1.0-9", scenario_s=12.4),
        "6.12": Result("failed", why="a | b\n  came", scenario_s=3.0),
        "iommufd": Result("not run", why="it has not been built"),
    }
    head, _, line, *_ = rendered(Row("thing", "Shows it.", MACHINE, found))
    assert head == ["Scenario", "What it shows", "6.1 (6.1.0-9)", "6.12", "iommufd"]
    assert line == [
        "`thing`",
        "Shows it.",
        "passed, 12 s",
        "**failed**, 3 s: a / b came",
        "not run: it has not been built",
    ]


def test_a_kernel_that_lacks_something_is_told_from_one_that_was_not_tried() -> None:
    machine = Machine(ports=(), kernels=("iommufd",), needs=frozenset({CDEV}))
    _, _, line, *_ = rendered(Row("thing", "Shows it.", machine, {}))
    assert line[2:] == ["– (has no cdev)", "– (has no cdev)", "not run"]


def test_figures_by_name_and_by_pattern() -> None:
    figures = {
        "close_to_healthy_ms": 12.0,
        "proc_sigkill_to_healthy_ms": 7,
        "blocked": [],
        "log": ["line"] * 9,
        "words": "x" * 500,
    }
    row = Row("books", "Shows it.", MACHINE, {"6.12": Result("passed", figures=figures)})
    lines = {line[0]: line[1:] for line in rendered(row)}
    assert lines["A holder closes it, to the frame, ms"] == ["–", "7 to 12.0", "–"]
    assert lines["`books.close_to_healthy_ms`"] == ["–", "12.0", "–"]
    assert lines["`books.blocked`"] == ["–", "none", "–"]
    assert len(lines["`books.words`"][1]) < 200
    assert "`books.log`" not in lines
    assert "A holder closes it, to the frame, ms" not in unmatched([row])
    assert "of them EBUSY" in unmatched([row])


@pytest.mark.parametrize(
    ("docstring", "sentence"),
    [
        ("One line. And more.", "One line."),
        ("It goes\n    on: 6.1 is not its end.\n\n    More.", "It goes on: 6.1 is not its end."),
        ("No end", "No end"),
    ],
)
def test_what_a_scenario_shows(docstring: str, sentence: str) -> None:
    assert first_sentence(docstring) == sentence


def test_the_document_has_a_place_for_the_tables() -> None:
    put_into(DOCUMENT.read_text(encoding="utf-8"), BEGIN, "new")


def test_every_scenario_is_a_row_with_a_description(tmp_path: Path) -> None:
    (tmp_path / "scenario_books@6.12").mkdir()
    rows = rows_from(tmp_path)
    assert [f"scenario_{row.name}" for row in rows] == list(SCENARIOS)
    assert all(row.shows.endswith(".") for row in rows), [row.shows for row in rows]
    assert {row.name: set(row.results) for row in rows if row.results} == {"books": {"6.12"}}
    assert set(KERNELS) >= {kernel for row in rows for kernel in row.machine.kernels}
