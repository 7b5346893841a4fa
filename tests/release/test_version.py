"""One version, and all that name it agree."""

from __future__ import annotations

import re

import pytest
import yaml

from tests.release.version import CHECKOUT, version

NAMED: dict[str, str] = {
    "CHANGELOG.md": r"^## \[(\d[^\]]*)\] - \d{4}-\d\d-\d\d$",
    "README.md": r"^\*\*Status: (\d[\w.]*),",
    "pyproject.toml": r"\"gpuactors-simulation==([^\"]*)\"",
    "src/gpuactors_simulation/pyproject.toml": r"^version = \"([^\"]*)\"$|\"gpuactors==([^\"]*)\"",
    "src/gpuactors_simulation/__init__.py": r"^VERSION: Final = \"([^\"]*)\"$",
    "src/gpuactors/__init__.py": r"^VERSION: Final = \"([^\"]*)\"$",
    "deploy/Containerfile": r"gpuactors:(\d[\w.]*)|image\.version=\"([^\"]*)\"",
    "docs/install.md": r"gpuactors:(\d[\w.]*)",
    "deploy/README.md": r"gpuactors:(\d[\w.]*)",
    "deploy/base/daemonset.yaml": r"image: \"gpuactors:([^\"]*)\"",
    "deploy/monitoring/kustomization.yaml": r"app.kubernetes.io/version: (\S*)",
    "deploy/overlays/example/kustomization.yaml": r"newTag: (\S*)",
}
"""Where else a version stands, and how it is found there; the newest stands first."""


@pytest.mark.parametrize("name", NAMED)
def test_every_version_is_that_of_pyproject(name: str) -> None:
    found = re.findall(NAMED[name], (CHECKOUT / name).read_text(encoding="utf-8"), re.MULTILINE)
    versions = ["".join(groups) if isinstance(groups, tuple) else groups for groups in found]
    assert versions, f"{name} names no version any more"
    assert set(versions[:1] if name == "CHANGELOG.md" else versions) == {version()}


def test_the_chart_has_the_version_of_the_program_that_it_installs() -> None:
    chart = yaml.safe_load((CHECKOUT / "deploy/chart/gpuactors/Chart.yaml").read_text(encoding="utf-8"))
    assert (chart["version"], chart["appVersion"]) == (version(), version())
