"""What the scenarios on the real node rest on: what is said without a kit, or without the programs of others."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Final

import pytest

from gpuactors_simulation.kubelet.dra.values import KUBELET_1_37
from tests.deploy.manifests import ROOT
from tests.node import run, versions
from tests.node.books import key_of
from tests.node.lane import Lane, NoProgramsError
from tests.node.planted import BUGS, CHECKOUT
from tests.node.planted_image import PACKAGE, changed_image
from tests.support.markdown import chapter
from tests.vm.commands import ProvisionError


def test_a_device_of_a_slice_is_named_by_its_address_or_uuid() -> None:
    assert key_of("gpu-0000-23-00-0") == "0000:23:00.0"
    assert key_of("mdev-83b8f4f2-509f-382f-3c1e-e6bfe0fa1001") == "83b8f4f2-509f-382f-3c1e-e6bfe0fa1001"
    assert key_of("gpu-vfio-1") == key_of("gpu-1") == ""


def test_the_releases_of_the_programs_are_named(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    lane = Lane(0, tmp_path)
    assert lane.releases() == ""
    for name, release in (
        ("kubelet", "v1.36.2"),
        ("kube-apiserver", "v1.37.0"),
        ("kube-scheduler", "v1.37.0"),
    ):
        program = tmp_path / "bin" / name
        program.write_text(f"#!/bin/sh\necho Kubernetes {release}\n")
        program.chmod(0o755)
    assert lane.releases() == "kubelet v1.36.2; kube-apiserver, kube-scheduler v1.37.0"


@pytest.mark.parametrize("ci", ["true", ""])
@pytest.mark.parametrize(("words", "code"), [((), 69), (("--if-possible",), 0)])
def test_without_a_kit_the_binaries_are_named(
    words: tuple[str, ...],
    code: int,
    ci: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(run.KIT_VARIABLE, str(tmp_path))
    monkeypatch.setenv("CI", ci)
    assert run.main(words) == code
    (said,) = capsys.readouterr().err.splitlines()
    assert str(tmp_path) in said
    assert all(name in said for name in (*run.BINARIES, "bridge", "host-local", "loopback"))


LACKS: Final = "install.sh: /nowhere/kubelet is missing: name its directory in K8S_PROGRAMS"


def kit_that(directory: Path, install: str, domains: str) -> Path:
    """A kit with these two scripts."""
    (directory / "domains").mkdir(parents=True)
    (directory / "install.sh").write_text(install)
    (directory / "domains" / "install.sh").write_text(domains)
    return directory


@pytest.mark.skipif(os.geteuid() != 0, reason="without root that is said first")
@pytest.mark.parametrize("ci", ["true", ""])
@pytest.mark.parametrize(("words", "code"), [((), 69), (("--if-possible",), 0)])
def test_without_kubernetes_programs_the_kit_says_what_to_do(
    words: tuple[str, ...],
    code: int,
    ci: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    kit = kit_that(tmp_path / "kit", f"echo '{LACKS}' >&2; exit 69", "")
    monkeypatch.setenv(run.KIT_VARIABLE, str(kit))
    monkeypatch.setenv("CI", ci)
    # Not those of a run that goes on beside this one.
    monkeypatch.setenv("TEST_NODE_DIRECTORY", str(tmp_path / "node"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert run.main(words) == code
    assert capsys.readouterr().err.splitlines() == [f"./do node: no scenario was played: {LACKS}"]


def test_without_nvidias_programs_the_node_is_there_and_says_what_it_lacks(tmp_path: Path) -> None:
    kit = kit_that(tmp_path / "kit", "mkdir -p $1", f"echo '{LACKS}' >&2; exit 69")
    lane = Lane(0, tmp_path / "node")
    assert lane.install(kit, lane) == LACKS
    assert lane.program.is_file()


def test_a_kit_that_fails_otherwise_is_no_kit_without_programs(tmp_path: Path) -> None:
    kit = kit_that(tmp_path / "kit", "mkdir -p $1", "echo 'no space left' >&2; exit 1")
    lane = Lane(0, tmp_path / "node")
    with pytest.raises(ProvisionError, match="no space left") as caught:
        lane.install(kit, lane)
    assert not isinstance(caught.value, NoProgramsError)


def test_a_release_that_is_not_in_the_table_is_taken_for_the_newest_before_it() -> None:
    assert not versions.differences_of((1, 35)).dra_by_default
    assert versions.differences_of((1, 36)).dra_by_default
    assert versions.differences_of((1, 37)).kubelet == KUBELET_1_37
    assert versions.differences_of((1, 99)) == versions.differences_of(max(versions.TABLE))
    with pytest.raises(LookupError, match=r"1\.34"):
        versions.differences_of((1, 34))


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
    text = chapter((ROOT / "docs" / "reference.md").read_text(encoding="utf-8"), "Compatibility")
    about = text[text.index("### Kubernetes versions") : text.index("### Kernels")]
    cells = [cell for line in about.splitlines() for cell in line.split(" | ") if "**tested**" in cell]
    assert len(cells) >= 8
    for cell in cells:
        named = re.findall(r"\(\.\./tests/node/((?:several/)?test_\w+\.py)\)", cell)
        assert named, cell
        for name in named:
            assert "def test_" in (ROOT / "tests" / "node" / name).read_text(encoding="utf-8"), cell
