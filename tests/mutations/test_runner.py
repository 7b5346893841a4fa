"""The runner of the planted bugs, on a program of one function: what counts as found, and what as no verdict."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.mutations.__main__ import ALL, ROOT, RunnerError, tried_all
from tests.mutations.mutations import Mutation

SUMS = "tests/test_sums.py"
TREE = {
    "pyproject.toml": "[tool.pytest.ini_options]\n",
    "protos/none.proto": "",
    "src/gpuactors/__init__.py": "",
    "src/gpuactors/daemon/app.py": "from gpuactors.sums import total\n",
    "src/gpuactors/sums.py": "def total(numbers):\n    return sum(numbers)\n",
    SUMS: (
        "from gpuactors.sums import total\n"
        "def test_of_two(): assert total([1, 2]) == 3\n"
        "def test_of_none(): assert total([]) == 0\n"
        "def test_that_fails_in_the_copy(): open('README.md')\n"
    ),
    "tests/test_another_module.py": "from gpuactors.sums import total\ndef test_it(): pass\n",
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "tree"
    for name, text in TREE.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def bug(*tests: str, after: str = "    return sum(numbers) + 1\n") -> Mutation:
    return Mutation("a sum is one too many", "sums.py", "    return sum(numbers)\n", after, tests=tests)


def tried(tree: Path, *bugs: Mutation) -> int:
    return tried_all(bugs, tree, histories=0, seed="0", named_only=True)


def test_a_bug_is_found_by_a_named_test_that_passes_without_it(
    tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tried(tree, bug(f"{SUMS}::test_of_two")) == 0
    said = capsys.readouterr().out
    assert "1 named tests pass without a bug" in said
    assert re.search(
        r"^named tests +\d+ s  a sum is one too many\n +FAILED .*::test_of_two ", said, re.MULTILINE
    )


def test_a_bug_that_its_named_test_passes_over_is_not_found(
    tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = bug(f"{SUMS}::test_of_none")
    unseen = bug(f"{SUMS}::test_of_none", after="    return sum(numbers) + len(numbers)\n")
    assert tried(tree, found, unseen) == 1
    assert "1 of 2 bugs were found" in capsys.readouterr().out


def test_a_named_test_that_fails_without_a_bug_is_an_error_and_no_find(
    tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RunnerError, match=r"FAILED .*test_that_fails_in_the_copy"):
        tried(tree, bug(f"{SUMS}::test_of_two"), bug(f"{SUMS}::test_that_fails_in_the_copy"))
    assert "named tests  " not in capsys.readouterr().out


@pytest.mark.parametrize("named", [f"{SUMS}::test_of_no_name", "tests/test_no_file.py"])
def test_a_named_test_that_is_not_there_is_an_error_and_no_find(tree: Path, named: str) -> None:
    with pytest.raises(RunnerError, match=named):
        tried(tree, bug(named))


def test_a_bug_by_which_the_tests_cannot_begin_is_not_found_by_them(
    tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tree / "src/gpuactors/daemon/app.py").write_text("")
    (tree / SUMS).write_text(TREE[SUMS].replace("README.md", "pyproject.toml"))
    renamed = Mutation("it has another name", "sums.py", "def total", "def sum_of", tests=(SUMS,))
    assert tried(tree, renamed, bug(f"{SUMS}::test_of_none")) == 1
    said = capsys.readouterr().out
    assert "NO VERDICT" in said
    assert "1 of 2 bugs were found" in said


def test_every_bug_fits_the_program_as_it_is_and_names_tests_that_there_are() -> None:
    places = {m: (ROOT / "src/gpuactors" / m.file).read_text().count(m.before) for m in ALL}
    unfit = [f"{mutation.file}: {mutation.name}" for mutation, count in places.items() if count != 1]
    assert not unfit, f"the program has changed there: write these bugs anew: {unfit}"
    for mutation in ALL:
        assert mutation.before != mutation.after, mutation.name
        for test in mutation.tests:
            path, _, name = test.partition("::")
            assert f"def {name.partition('[')[0]}" in (ROOT / path).read_text(), f"{mutation.name}: {test}"
    assert len({mutation.name for mutation in ALL}) == len(ALL)
