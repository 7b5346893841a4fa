"""The public addresses of the project, and its maintainers. They are set in pyproject.toml (`project.urls`,
`project.maintainers`), and that of the simulation has the same; `just addresses` writes the address of the documents
into the files of deploy/ that lead there, and all of them into the chart.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from tests.release.version import CHECKOUT

PLACEHOLDER: Final = "https://gpuactors.example/docs"
"""Where the documents are while pyproject.toml does not say it."""

DEFINED_IN: Final = "deploy/chart/gpuactors/templates/_helpers.tpl"
FOLLOWING: Final = (
    DEFINED_IN,
    "deploy/monitoring/dashboard.json",
    "deploy/monitoring/rules.yaml",
    "deploy/monitoring/rules_test.yaml",
    "docs/troubleshoot.md",
)
"""The files that name the address of the documents."""

CHART: Final = "deploy/chart/gpuactors/Chart.yaml"
_BELOW: Final = "# Below: by `just addresses`, from pyproject.toml.\n"

_DEFINED: Final = re.compile(r'define "gpuactors.documents" -}}\n(\S+)\n')


def project(checkout: Path = CHECKOUT) -> Mapping[str, Any]:
    """The table `project` of pyproject.toml."""
    found: Mapping[str, Any] = tomllib.loads((checkout / "pyproject.toml").read_text("utf-8"))["project"]
    return found


def documents(project: Mapping[str, Any]) -> str:
    """Where docs/ is read, without a slash at the end."""
    found: str = project.get("urls", {}).get("Documentation", PLACEHOLDER)
    return found


def chart(text: str, project: Mapping[str, Any]) -> str:
    """The text of Chart.yaml with the addresses of this project."""
    urls = project.get("urls", {})
    home = documents(project)
    found = {
        "home": home,
        "sources": [urls.get("Source", home.removesuffix("/docs"))],
        "maintainers": [{"name": one["name"]} for one in project.get("maintainers") or project["authors"]],
    }
    before, mark, _ = text.partition(_BELOW)
    assert mark, f"{CHART} has no line {_BELOW!r}"
    return before + mark + yaml.safe_dump(found, sort_keys=False)


def unset(project: Mapping[str, Any]) -> list[str]:
    """What a release needs of pyproject.toml and does not find there, each with its meaning."""
    urls, maintainers = project.get("urls", {}), project.get("maintainers", ())
    is_set = {
        "project.urls.Source (where the repository is public)": _is_address(urls.get("Source", "")),
        "project.urls.Documentation (where docs/ is read)": _is_address(urls.get("Documentation", "")),
        "project.maintainers (their names)": any(one.get("name") for one in maintainers),
    }
    return [what for what, there in is_set.items() if not there]


def _is_address(url: str) -> bool:
    """Not of the domains that RFC 2606 reserves, to which a placeholder leads."""
    found = re.fullmatch(r"https://([^/\s@]+)(/[^\s/]+)*", url)
    return found is not None and found[1].rpartition(".")[2] not in ("example", "invalid", "test")


def written(text: str, before: str, now: str) -> str:
    """The text of a file with the address `before` of the documents changed."""
    return re.sub(rf"{re.escape(before)}(?=[/`\"\n])", lambda _: now, text)


def named_in(template: str) -> str:
    """The address that the chart's template defines, and so every file has now."""
    found = _DEFINED.search(template)
    assert found is not None, f"{DEFINED_IN} does not define gpuactors.documents"
    return found[1]


def write(checkout: Path, now: str) -> str:
    """Have every file name the address `now`; the one that they had."""
    before = named_in((checkout / DEFINED_IN).read_text("utf-8"))
    for name in FOLLOWING:
        path = checkout / name
        path.write_text(written(path.read_text("utf-8"), before, now), "utf-8")
    return before


def main() -> int:
    """Command line of `just addresses`."""
    now = documents(project())
    print(f"{write(CHECKOUT, now)} -> {now} in {', '.join(FOLLOWING)}")
    path = CHECKOUT / CHART
    path.write_text(chart(path.read_text("utf-8"), project()), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
