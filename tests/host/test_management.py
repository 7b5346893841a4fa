"""The CDI device that gives a compute domain's daemon what comes from the host."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from gpuactors.host.management import KNOWN, ManagementDevice

SPEC = {
    "cdiVersion": "0.5.0",
    "kind": "management.nvidia.com/gpu",
    "devices": [{"name": "all", "containerEdits": {}}],
}
YAML = """\
---
cdiVersion: 0.5.0
containerEdits:
  env:
  - NVIDIA_VISIBLE_DEVICES=void
devices:
- containerEdits:
    deviceNodes:
    - path: /dev/nvidia0
  name: all
kind: {kind}
"""


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("management.nvidia.com-gpu.yaml", YAML.format(kind="management.nvidia.com/gpu"), KNOWN[0]),
        ("any.yml", YAML.format(kind='"k8s.compute-domain.nvidia.com/device"'), KNOWN[1]),
        ("any.json", json.dumps(SPEC, indent=2), KNOWN[0]),
        ("any.json", json.dumps(SPEC), KNOWN[0]),
        ("any.yaml", YAML.format(kind="nvidia.com/gpu"), ""),
        ("any.yaml", YAML.format(kind="management.nvidia.com/gpu").replace("name: all", "name: '0'"), ""),
        ("any.txt", YAML.format(kind="management.nvidia.com/gpu"), ""),
        (".any.yaml", YAML.format(kind="management.nvidia.com/gpu"), ""),
    ],
)
def test_it_is_found_among_the_files_of_the_cdi_directory(
    tmp_path: Path, name: str, text: str, found: str
) -> None:
    (tmp_path / name).write_text(text)
    device, why = ManagementDevice("auto", str(tmp_path)).find()
    assert device == found
    assert bool(why) is not bool(found)


def test_where_it_is_missing_it_is_said_what_to_do(tmp_path: Path) -> None:
    for directory in (tmp_path, tmp_path / "none"):
        device, why = ManagementDevice("auto", str(directory)).find()
        assert device == ""
        assert "nvidia-ctk cdi generate --mode=management" in why


def test_an_operator_names_another_one_or_wants_none(tmp_path: Path) -> None:
    assert ManagementDevice("example.com/imex=all", str(tmp_path)).find() == ("example.com/imex=all", "")
    assert ManagementDevice("none", str(tmp_path)).find() == ("", "")


def test_what_cannot_be_read_is_left_out_and_a_fifo_holds_nobody_up(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.json")
    (tmp_path / "b.json").mkdir()
    (tmp_path / "c.json").symlink_to(tmp_path / "nowhere")
    (tmp_path / "d.json").write_bytes(b"\xff\xfe")
    (tmp_path / "e.yaml").write_text(YAML.format(kind="management.nvidia.com/gpu"))
    assert ManagementDevice("auto", str(tmp_path)).find() == (KNOWN[0], "")
