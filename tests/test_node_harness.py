"""What the scenarios on the real node rest on: when books are wrong, and what is said without a kit."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.node import run
from tests.node.books import Look, address_of, broken, unsettled
from tests.node.planted import BUGS, CHECKOUT
from tests.node.planted_image import PACKAGE, changed_image

H = "nvidia.com/H100"
A, B = "0000:21:00.0", "0000:22:00.0"

TRUE = Look(
    at=0.0, capacity={H: 2}, allocatable={H: 2}, requests={H: 1}, allocated={H: (("default/vm-1", A),)},
    healthy={H: frozenset({A, B})}, claimed=(), offered=frozenset(), owners={33: frozenset({"pod 1"})},
    usable={A: False, B: True},
)  # fmt: skip
"""Two GPUs, of which a pod has one open."""


def test_true_books_are_not_faulted() -> None:
    assert broken(TRUE) == []
    assert unsettled(TRUE) == []


@pytest.mark.parametrize(
    ("look", "said"),
    [
        (replace(TRUE, allocatable={H: 0}, healthy={H: frozenset()}), f"free {H} is 0 - 1 < 0"),
        (
            replace(TRUE, claimed=(("default/c", A),)),
            f"{A} belongs to ['claim default/c', 'pod default/vm-1']",
        ),
        (
            replace(TRUE, allocated={H: (("default/vm-1", A), ("default/vm-2", A))}),
            f"{A} belongs to ['pod default/vm-1', 'pod default/vm-2']",
        ),
        (
            replace(TRUE, owners={33: frozenset({"pod 1", "process 7"})}),
            "group 33 is open in ['pod 1', 'process 7']",
        ),
        (replace(TRUE, capacity={H: 0}), f"1 of {H} are allocated, and its capacity is 0"),
    ],
    ids=["negative", "claim and pod", "two pods", "two processes", "capacity"],
)
def test_what_can_never_be_true_is_said_at_once(look: Look, said: str) -> None:
    assert said in broken(look)
    assert said in unsettled(look)


@pytest.mark.parametrize(
    ("look", "said"),
    [
        (replace(TRUE, healthy={H: frozenset({B})}), f"{A} of a pod is not in kubelet's list"),
        (replace(TRUE, usable={A: False, B: False}), f"kubelet would give ['{B}'] of {H} to a new pod"),
        (replace(TRUE, claimed=(("default/c", B),)), f"kubelet would give ['{B}'] of {H} to a new pod"),
        (replace(TRUE, requests={H: 2}), f"pods ask for 2 {H}, and have ['{A}']"),
        (replace(TRUE, allocatable={H: 1}), f"the node's status says 1 {H}, kubelet ['{A}', '{B}']"),
        (replace(TRUE, healthy=None), "kubelet does not answer"),
    ],
    ids=["unknown to kubelet", "not usable", "claimed", "not given", "old status", "no kubelet"],
)
def test_what_must_become_true_is_said(look: Look, said: str) -> None:
    assert said in unsettled(look)


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
    compiled = tmp_path / "root" / PACKAGE / "core/__pycache__/step.cpython-311.pyc"
    done = subprocess.run(
        [sys.executable, "-c", f"import runpy; print(runpy.run_path({str(compiled)!r})['SAID'])"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout == "planted\n" or sys.version_info[:2] != (3, 11), done.stderr
