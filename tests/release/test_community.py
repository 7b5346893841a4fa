"""What a newcomer's tools read: hooks, and the forms of issues."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import yaml

from tests.release.version import CHECKOUT


def loaded(name: str) -> Any:
    return yaml.safe_load((CHECKOUT / name).read_text(encoding="utf-8"))


def test_each_hook_runs_what_is_there() -> None:
    (repository,) = loaded(".pre-commit-config.yaml")["repos"]
    assert repository["repo"] == "local", "nothing is fetched"
    for hook in repository["hooks"]:
        program, *words = hook["entry"].split()
        assert (CHECKOUT / program).exists() or shutil.which(Path(program).name), hook
        for word in words:
            assert not word.startswith("tests/") or (CHECKOUT / word).is_file(), hook


def test_the_workflow_runs_what_everybody_runs() -> None:
    workflow = loaded(".github/workflows/ci.yml")
    (job,) = workflow["jobs"].values()
    assert job["container"]["image"] == "debian:12"
    assert job["timeout-minutes"] > 90, "the limit of .ci/run"
    last = job["steps"][-1]["run"].split()
    assert last == ["bash", ".ci/run"]
    assert (CHECKOUT / last[-1]).is_file()
    assert all(
        "@" not in (of := step.get("uses", "")) or len(of.partition("@")[2]) == 40 for step in job["steps"]
    )


def test_the_forms_of_issues_ask_for_something() -> None:
    for path in (CHECKOUT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"):
        form = loaded(str(path.relative_to(CHECKOUT)))
        if path.name == "config.yml":
            continue
        assert {"name", "description", "body"} <= form.keys(), path
        asked = [part for part in form["body"] if part["type"] != "markdown"]
        assert len({part["id"] for part in asked}) == len(asked)
        assert any(part.get("validations", {}).get("required") for part in asked)
        assert all(part["attributes"]["label"] for part in asked)
