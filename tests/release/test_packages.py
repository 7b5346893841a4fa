"""Wheel and sdist as somebody gets them who has no checkout: an environment of its own, which nothing of this one
reaches."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.metadata import Metadata
from trove_classifiers import classifiers

from gpuactors.cli.completion import VARIABLE
from gpuactors.cli.ending import EX_UNAVAILABLE
from tests.process.node import open_node
from tests.release.artifacts import DISTRIBUTIONS, build_packages, build_wheel_of
from tests.release.version import CHECKOUT, version
from tests.support.patience import patient

INSTALL_TIMEOUT_S = patient(120.0)
COMMAND_TIMEOUT_S = patient(60.0)

DATA = {
    "gpuactors": ("host/data/pci.ids", "host/data/LICENSE.pci.ids"),
    "gpuactors_simulation": ("replay_page/page.html",),
}
"""What else than Python each package has."""


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """Wheel and sdist of each distribution, all in one directory."""
    directory = tmp_path_factory.mktemp("packages")
    return {name: build_packages(name, directory) for name in DISTRIBUTIONS}


@pytest.fixture(params=DISTRIBUTIONS)
def name(request: pytest.FixtureRequest) -> str:
    """Of a distribution, as its files have it, and of the one package in it."""
    found: str = request.param
    return found


def test_the_sdist_makes_the_very_same_wheel(
    packages: dict[str, tuple[Path, Path]], name: str, tmp_path: Path
) -> None:
    wheel, sdist = packages[name]
    assert build_wheel_of(sdist, tmp_path).read_bytes() == wheel.read_bytes()


def test_a_wheel_holds_one_package_and_its_licences(
    packages: dict[str, tuple[Path, Path]], name: str
) -> None:
    information = f"{name}-{version()}.dist-info"
    with zipfile.ZipFile(packages[name][0]) as archive:
        names = {one for one in archive.namelist() if not one.startswith(f"{information}/")}
        licence = archive.read(f"{information}/licenses/LICENSE")
    assert licence == (CHECKOUT / "LICENSE").read_bytes()
    sources = {str(path.relative_to(CHECKOUT / "src")) for path in (CHECKOUT / "src" / name).rglob("*.py")}
    data = {f"{name}/{file}" for file in ("py.typed", *DATA[name])}
    assert names == sources | data


def test_the_distributions_say_the_same_of_the_project() -> None:
    ours, simulation = (
        tomllib.loads((directory / "pyproject.toml").read_text())["project"]
        for directory in DISTRIBUTIONS.values()
    )
    for key in ("version", "authors", "maintainers", "urls", "license", "requires-python"):
        assert ours.get(key) == simulation.get(key), f"project.{key}"
    assert set(simulation["classifiers"]) <= set(ours["classifiers"])


def test_an_index_can_show_what_a_package_is(packages: dict[str, tuple[Path, Path]], name: str) -> None:
    with zipfile.ZipFile(packages[name][0]) as archive:
        text = archive.read(f"{name}-{version()}.dist-info/METADATA")
    found = Metadata.from_email(text)  # raises where a field is not as the specification has it
    assert found.description_content_type == "text/markdown"
    assert found.description is not None
    links = re.findall(r"\]\(([^)]*)\)|<(?:img|a)[^>]*(?:src|href)=\"([^\"]*)", found.description)
    assert [link for pair in links for link in pair if link and not link.startswith("https://")] == []
    assert found.author or found.author_email
    assert found.keywords
    assert set(found.classifiers or ()) <= classifiers
    assert found.license_expression == "Apache-2.0"


def test_the_wheels_run_where_nothing_else_is(packages: dict[str, tuple[Path, Path]], tmp_path: Path) -> None:
    wheel, _ = packages["gpuactors"]
    program = installed(wheel, tmp_path / "bare")

    def said(*words: str, code: int = 0, complete: str = "") -> str:
        # Nothing of this environment: no PYTHONPATH, no VIRTUAL_ENV, no checkout as working directory.
        env = {"PATH": os.defpath, "HOME": str(tmp_path)}
        completing = {VARIABLE: "bash_complete", "COMP_WORDS": complete} if complete else {}
        done = subprocess.run(
            [program, *words], cwd=tmp_path, env=env | completing,
            capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False,
        )  # fmt: skip
        assert done.returncode == code, done
        return done.stdout or done.stderr

    assert said("--version").split()[-1] == version()
    assert said("simulate", code=EX_UNAVAILABLE) == (
        "gpuactors: the package gpuactors-simulation is not installed: "
        f"pip install 'gpuactors[simulation]=={version()}'\n"
    )
    assert said(complete="gpuactors simulate --scenario ").split() == []
    assert "plain,--scenario" in said(complete="gpuactors simulate --s").split()
    # The resolver finds the other wheel by the extra, and the pin in it fits.
    install(tmp_path / "bare", "--no-index", "--find-links", str(wheel.parent), "gpuactors[simulation]")
    assert json.loads(said("simulate", "--scenario", "late-binding", "-o", "json").splitlines()[-1])
    assert "plain,late-binding" in said(complete="gpuactors simulate --scenario ").split()
    with open_node() as node:
        node.plug(0x23, "2330", driver="vfio-pci")
        assert "0000:23:00.0" in said("inspect", *node.directories)
        assert "no daemon runs" in said("doctor", *node.directories, code=1)


def installed(wheel: Path, directory: Path) -> Path:
    """The program, in an environment with the wheel and what requirements/runtime.txt pins for it, each by its hash."""
    venv.create(directory, symlinks=True)
    pinned = str(CHECKOUT / "requirements/runtime.txt")
    install(directory, "--only-binary", ":all:", "--require-hashes", "-r", pinned)
    # The resolver takes what is there, and fails where a pin is not what the wheel asks for.
    install(directory, "--no-index", str(wheel))
    return directory / "bin" / "gpuactors"


def install(environment: Path, *what: str) -> None:
    """Into an environment that has no pip of its own."""
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--quiet",
        "--disable-pip-version-check",
        "--python",
        str(environment),
    ]
    subprocess.run([*pip, "install", "--no-compile", *what], timeout=INSTALL_TIMEOUT_S, check=True)
