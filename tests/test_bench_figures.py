"""What the bench makes of its samples: spreads, ratios, and the tables of docs/dev/performance.md."""

from __future__ import annotations

import re
import tomllib
from importlib import metadata

import pytest

from tests.bench import start
from tests.bench.figures import Sheet, Spread, as_markdown, as_text
from tests.bench.parties import ROOT
from tests.bench.table import BEGIN, END, written


def sheet() -> Sheet:
    """Two daemons and a floor; then a floor alone."""
    made = Sheet(["new", "old"])
    for party, samples in (("old", (4.0, 6.0)), ("floor", (1.0, 3.0)), ("new", (3.0, 3.0))):
        made.add("call.one", "a call", "ms", party, *samples)
    made.add("start.floors", "a statement", "ms", "import trio", 100.0)
    return made


def test_a_spread_has_the_nearest_ranks() -> None:
    found = Spread.of([float(n) for n in range(200, 0, -1)])
    assert (found.n, found.median, found.p25, found.p75, found.p99) == (200, 100.5, 50.0, 150.0, 198.0)
    assert (found.min, found.max) == (1.0, 200.0)
    with pytest.raises(ValueError, match="nothing was measured"):
        Spread.of([])


def test_the_first_daemon_is_compared_with_the_others_and_each_with_the_floor() -> None:
    rows = sheet().document({})["rows"]
    assert list(rows[0]["values"]) == ["new", "old", "floor"]
    assert rows[0]["ratios"] == {"new / floor": 1.5, "new / old": 0.6, "old / floor": 2.5}
    assert rows[1]["ratios"] == {}


def test_text_and_page_name_every_party() -> None:
    document = sheet().document({"cores": 2})
    assert "1.50 x floor, 0.60 x old" in as_text(document)
    page = written(f"before\n{BEGIN}gone\n{END}after\n", document)
    assert page.startswith(f"before\n{BEGIN}\nMeasured on: cores 2.\n")
    assert page.endswith(f"{END}after\n")
    assert "gone" not in page
    assert "| a call, ms | 2 | 5.00 | **3.00** | 3.00 | floor 2.00 | 1.5 |" in as_markdown(document)
    assert "| a statement, ms | 1 |  |  |  | `import trio` 100 |  |" in page
    with pytest.raises(ValueError, match="figures"):
        written("a page without markers", document)


def test_each_dependency_whose_import_is_measured_is_a_requirement() -> None:
    """A run ends where one cannot be imported. urwid is imported on a terminal alone."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = {re.match(r"[\w-]+", line)[0] for line in project["dependencies"]}  # type: ignore[index]
    of_module = metadata.packages_distributions()
    measured = {name for module in start.DEPENDENCIES for name in of_module[module.partition(".")[0]]}
    measured = {name.lower().replace("_", "-") for name in measured}
    assert measured == required - {"urwid"}
