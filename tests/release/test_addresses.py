"""One setting for each public address, and no release without it."""

from __future__ import annotations

import shutil
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.release.addresses import (
    CHART,
    DEFINED_IN,
    FOLLOWING,
    PLACEHOLDER,
    chart,
    documents,
    named_in,
    project,
    unset,
    write,
)
from tests.release.version import CHECKOUT

SET = """
[project]
maintainers = [{ name = "Ada" }]
[project.urls]
Source = "https://192.0.2.7/gpu/gpuactors"
Documentation = "https://192.0.2.7/gpu/gpuactors/docs"
"""


def test_every_file_that_names_the_documents_has_the_address_of_pyproject() -> None:
    now = documents(project())
    assert named_in((CHECKOUT / DEFINED_IN).read_text("utf-8")) == now
    for name in FOLLOWING:
        text = (CHECKOUT / name).read_text("utf-8")
        assert now in text, f"{name}: run 'just addresses' and commit the result"
        assert now == PLACEHOLDER or PLACEHOLDER not in text, f"{name}: run 'just addresses'"


def test_the_chart_has_the_addresses_of_pyproject() -> None:
    text = (CHECKOUT / CHART).read_text("utf-8")
    assert text == chart(text, project()), "run 'just addresses' and commit the result"
    of_another = yaml.safe_load(chart(text, tomllib.loads(SET)["project"]))
    assert of_another["home"] == "https://192.0.2.7/gpu/gpuactors/docs"
    assert of_another["sources"] == ["https://192.0.2.7/gpu/gpuactors"]
    assert of_another["maintainers"] == [{"name": "Ada"}]


def test_another_address_is_written_everywhere_and_back(tmp_path: Path) -> None:
    for name in FOLLOWING:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(CHECKOUT / name, tmp_path / name)
    before = documents(project())
    write(tmp_path, "https://192.0.2.7/docs")
    for name in FOLLOWING:
        text = (tmp_path / name).read_text("utf-8")
        assert "https://192.0.2.7/docs" in text
        assert before not in text
    write(tmp_path, before)
    for name in FOLLOWING:
        assert (tmp_path / name).read_text("utf-8") == (CHECKOUT / name).read_text("utf-8")


def test_a_project_that_has_set_everything_lacks_nothing() -> None:
    assert unset(tomllib.loads(SET)["project"]) == []


@pytest.mark.parametrize(
    ("before", "after", "lacks"),
    [
        ('Source = "https://192.0.2.7/gpu/gpuactors"', "", "project.urls.Source"),
        ("192.0.2.7/gpu/gpuactors/docs", "gpuactors.example/docs", "project.urls.Documentation"),
        ("192.0.2.7/gpu/gpuactors/docs", "192.0.2.7/docs/", "project.urls.Documentation"),
        ('https://192.0.2.7/gpu/gpuactors"', 'https://me:secret@192.0.2.7/gpuactors"', "project.urls.Source"),
        ('[{ name = "Ada" }]', "[]", "project.maintainers"),
        ('[{ name = "Ada" }]', '[{ email = "ada@192.0.2.7" }]', "project.maintainers"),
    ],
)
def test_what_a_release_lacks(before: str, after: str, lacks: str) -> None:
    assert before in SET
    (missing,) = unset(tomllib.loads(SET.replace(before, after))["project"])
    assert missing.startswith(lacks)
