"""Wheel and sdist as somebody gets them who has no checkout: an environment of its own, which nothing of this one
reaches."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.metadata import Metadata
from trove_classifiers import classifiers

from tests.process.node import open_node
from tests.release.artifacts import build_packages, build_wheel_of
from tests.release.version import CHECKOUT, version
from tests.support.patience import patient

INSTALL_TIMEOUT_S = patient(120.0)
COMMAND_TIMEOUT_S = patient(60.0)


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return build_packages(tmp_path_factory.mktemp("packages"))


def test_the_sdist_makes_the_very_same_wheel(packages: tuple[Path, Path], tmp_path: Path) -> None:
    wheel, sdist = packages
    assert build_wheel_of(sdist, tmp_path).read_bytes() == wheel.read_bytes()


def test_the_wheel_holds_the_program_and_its_licences(packages: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(packages[0]) as archive:
        names = set(archive.namelist())
    information = f"gpuactors-{version()}.dist-info"
    tops = {name.partition("/")[0] for name in names}
    assert tops == {"gpuactors", "gpuactors_simulation", information}
    assert {f"{information}/licenses/LICENSE", "gpuactors/host/data/pci.ids", "gpuactors/py.typed"} <= names
    sources = {str(path.relative_to(CHECKOUT / "src")) for path in (CHECKOUT / "src/gpuactors").rglob("*.py")}
    assert sources <= names


def test_an_index_can_show_what_the_package_is(packages: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(packages[0]) as archive:
        text = archive.read(f"gpuactors-{version()}.dist-info/METADATA")
    found = Metadata.from_email(text)  # raises where a field is not as the specification has it
    assert found.description_content_type == "text/markdown"
    assert found.description is not None
    links = re.findall(r"\]\(([^)]*)\)|<(?:img|a)[^>]*(?:src|href)=\"([^\"]*)", found.description)
    assert [link for pair in links for link in pair if link and not link.startswith("https://")] == []
    assert found.author or found.author_email
    assert found.keywords
    assert set(found.classifiers or ()) <= classifiers
    assert found.license_expression == "Apache-2.0"


def test_the_wheel_runs_where_nothing_else_is(packages: tuple[Path, Path], tmp_path: Path) -> None:
    program = installed(packages[0], tmp_path / "bare")

    def said(*words: str, code: int = 0) -> str:
        # Nothing of this environment: no PYTHONPATH, no VIRTUAL_ENV, no checkout as working directory.
        done = subprocess.run(
            [program, *words], cwd=tmp_path, env={"PATH": os.defpath, "HOME": str(tmp_path)},
            capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False,
        )  # fmt: skip
        assert done.returncode == code, done
        return done.stdout

    assert said("--version").split()[-1] == version()
    assert json.loads(said("simulate", "--scenario", "late-binding", "--json").splitlines()[-1])
    with open_node() as node:
        node.plug(0x23, "2330", driver="vfio-pci")
        assert "0000:23:00.0" in said("inspect", *node.directories)
        assert "no daemon runs" in said("doctor", *node.directories, code=1)


def installed(wheel: Path, directory: Path) -> Path:
    """The program, in an environment with the wheel and what requirements/runtime.txt pins for it, each by its hash."""
    venv.create(directory, symlinks=True)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--python", str(directory)]
    pinned = ["--only-binary", ":all:", "--require-hashes", "-r", str(CHECKOUT / "requirements/runtime.txt")]
    # The resolver takes what is there, and fails where a pin is not what the wheel asks for.
    for what in (pinned, ["--no-index", str(wheel)]):
        subprocess.run([*pip, "install", "--no-compile", *what], timeout=INSTALL_TIMEOUT_S, check=True)
    return directory / "bin" / "gpuactors"
