"""What the scenarios on the real node rest on: what is said without a kit."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from tests.deploy.manifests import ROOT
from tests.node import run
from tests.node.books import address_of
from tests.node.planted import BUGS, CHECKOUT
from tests.node.planted_image import PACKAGE, changed_image


def test_a_device_of_a_slice_is_named_by_its_address() -> None:
    assert address_of("gpu-0000-23-00-0") == "0000:23:00.0"


@pytest.mark.parametrize(("ci", "code"), [("true", 69), ("", 0)])
def test_without_a_kit_the_binaries_are_named(
    ci: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(run.KIT_VARIABLE, str(tmp_path))
    monkeypatch.setenv("CI", ci)
    assert run.main([]) == code
    (said,) = capsys.readouterr().err.splitlines()
    assert str(tmp_path) in said
    assert all(name in said for name in (*run.BINARIES, "bridge", "host-local", "loopback"))


@pytest.mark.parametrize("bug", BUGS, ids=[bug.name for bug in BUGS])
def test_a_bug_to_plant_fits_its_file_and_its_scenario_exists(bug: object) -> None:
    from tests.node.planted import Planted

    assert isinstance(bug, Planted)
    text = (CHECKOUT / bug.file).read_text(encoding="utf-8")
    assert not bug.before or text.count(bug.before) == 1
    file, option, word = bug.scenario.split()
    assert option == "-k"
    assert f"def test_{word}" in (CHECKOUT / file).read_text(encoding="utf-8")


def test_a_planted_image_has_the_changed_module(tmp_path: Path) -> None:
    layout = tmp_path / "layout"
    blobs = layout / "blobs" / "sha256"
    blobs.mkdir(parents=True)
    for name, content in (
        ("config", {"rootfs": {"diff_ids": []}, "history": []}),
        ("manifest", {"config": {"digest": "sha256:config", "size": 1}, "layers": []}),
    ):
        (blobs / name).write_text(json.dumps(content))
    (layout / "index.json").write_text(json.dumps({"manifests": [{"digest": "sha256:manifest", "size": 1}]}))
    changed_image(layout, tmp_path / "changed", "core/step.py", "SAID = 'planted'\n")
    index = json.loads((tmp_path / "changed/index.json").read_text())
    blob = tmp_path / "changed/blobs/sha256"
    manifest = json.loads((blob / index["manifests"][0]["digest"][7:]).read_text())
    shutil.unpack_archive(blob / manifest["layers"][0]["digest"][7:], tmp_path / "root", "gztar")
    core = tmp_path / "root" / PACKAGE / "core"
    assert (core / "step.py").read_text() == "SAID = 'planted'\n"
    assert [path.name for path in core.rglob(".wh.*")] == [".wh.step.cpython-313.pyc"]


def test_of_kubernetes_the_documents_call_tested_what_a_scenario_tests() -> None:
    """Each such line of the first two tables names the scenario's file, which exists and has scenarios."""
    text = (ROOT / "docs" / "compatibility.md").read_text(encoding="utf-8")
    about = text[text.index("## Kubernetes") : text.index("## Kernels")]
    cells = [cell for line in about.splitlines() for cell in line.split(" | ") if "**tested**" in cell]
    assert len(cells) >= 8
    for cell in cells:
        named = re.findall(r"\(\.\./tests/node/(test_\w+\.py)\)", cell)
        assert named, cell
        for name in named:
            assert "def test_" in (ROOT / "tests" / "node" / name).read_text(encoding="utf-8"), cell
