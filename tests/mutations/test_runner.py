"""The runner of the planted bugs, on a program of one function: what counts as found, and what as no verdict."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.mutations.__main__ import ALL, ROOT, tried_all
from tests.mutations.mutations import Mutation

SUMS = "tests/test_sums.py"
TREE = {
    "pyproject.toml": "[tool.pytest.ini_options]\n",
    "protos/none.proto": "",
    "src/gpuactors/__init__.py": "",
    "src/gpuactors/daemon/app.py": "",
    "src/gpuactors/sums.py": "def total(numbers):\n    return sum(numbers)\n",
    SUMS: (
        "from gpuactors.sums import total\n"
        "def test_of_two(): assert total([1, 2]) == 3\n"
        "def test_of_none(): assert total([]) == 0\n"
    ),
}
FOUND = Mutation("a sum is one too many", "sums.py", "sum(numbers)\n", "sum(numbers) + 1\n")
UNSEEN = Mutation("it is as long as it is", "sums.py", "sum(numbers)\n", "sum(numbers) or 0\n")
CANNOT_BEGIN = Mutation("it has another name", "sums.py", "def total", "def sum_of")


def test_a_bug_is_found_by_a_test_that_fails_and_by_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in TREE.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    search = ("a search", (sys.executable, "-m", "pytest", "-q", "-x", SUMS), "3")
    assert tried_all((FOUND, UNSEEN, CANNOT_BEGIN), tmp_path, (search,)) == 1
    said = capsys.readouterr().out
    assert re.search(r"^a search +\d+ s  a sum is one too many\n +FAILED .*::test_of_two", said, re.MULTILINE)
    assert re.search(r"^NOT FOUND +\d+ s  it is as long as it is\nNOT FOUND", said, re.MULTILINE)
    assert "NO VERDICT: " in said
    assert "1 of 3 bugs were found" in said


def test_every_bug_fits_the_program_as_it_is() -> None:
    places = {m: (ROOT / "src/gpuactors" / m.file).read_text().count(m.before) for m in ALL}
    invalid = [f"{mutation.file}: {mutation.name}" for mutation, count in places.items() if count != 1]
    assert not invalid, f"the program has changed there: write these bugs anew: {invalid}"
    assert all(mutation.before != mutation.after for mutation in ALL)
    assert len({mutation.name for mutation in ALL}) == len(ALL)


def test_every_test_that_a_bug_names_is_there() -> None:
    missing = []
    for mutation in ALL:
        path, _, test = mutation.test.partition("::")
        if test and f"def {test.partition('[')[0]}(" not in (ROOT / path).read_text():
            missing.append(mutation.test)
    assert not missing
