"""The CDI directory: others' files, read for the nodes of GPUs that they give to containers."""

from __future__ import annotations

import json
import os
import tracemalloc
from pathlib import Path

import pytest
import trio

from gpuactors import limits
from gpuactors.core.values.cdi import CdiSpec, CdiSpecs
from gpuactors.host.cdi import CdiFiles, spec_of
from gpuactors.host.root import HostRoot

UID = "6b8a2c14-93f0-4f8e-9d3a-0f5f6a1c7e21"
ID = f"k8s.gpu.nvidia.com/claim={UID}-gpu-vfio-1"
THEIRS = f"""\
---
cdiVersion: 0.7.0
containerEdits: {{}}
devices:
- containerEdits:
    deviceNodes:
    - path: /dev/vfio/52
    - path: /dev/vfio/vfio
    env:
    - NVIDIA_VISIBLE_DEVICES=void
  name: {UID}-gpu-vfio-1
kind: k8s.gpu.nvidia.com/claim
"""
"""As NVIDIA's DRA driver writes it."""

OF_A_CONTAINER = f"""\
cdiVersion: 0.7.0
containerEdits:
    deviceNodes:
        - path: /dev/nvidiactl
        - hostPath: /run/nvidia/driver/dev/nvidia3
          path: /dev/nvidia3
        - path: /dev/nvidia-uvm
        - path: /dev/nvidia-caps/nvidia-cap1
        - path: /dev/dri/renderD128
    mounts:
        - containerPath: /usr/lib/libcuda.so.1
          hostPath: /usr/lib/libcuda.so.1
devices:
    - name: {UID}-gpu-3
kind: k8s.gpu.nvidia.com/claim
"""


def test_the_file_of_a_claim_for_a_virtual_machine() -> None:
    found = spec_of(f"/var/run/cdi/k8s.gpu.nvidia.com-claim_{UID}.yaml", THEIRS.encode())
    assert found is not None
    assert (found.devices, found.nodes) == ((ID,), ("/dev/vfio/52",))
    assert (found.claim, found.driver) == (UID, "gpu.nvidia.com")


def test_the_file_of_a_claim_for_a_container() -> None:
    found = spec_of("/var/run/cdi/x.yaml", OF_A_CONTAINER.encode())
    assert found is not None
    assert found.nodes == ("/dev/dri/renderD128", "/dev/nvidia3")
    assert found.claim == UID, "by its devices"


@pytest.mark.parametrize("escaped", [False, True])
def test_json_as_well(escaped: bool) -> None:
    content = {
        "cdiVersion": "0.5.0",
        "kind": "k8s.gpu.example.com/claim",
        "devices": [
            {"name": f"{UID}-a", "containerEdits": {"deviceNodes": [{"path": "/dev/vfio/devices/vfio7"}]}}
        ],
    }
    text = json.dumps(content, indent=2)
    found = spec_of("/x/a.json", (text.replace("/", "\\/") if escaped else text).encode())
    assert found == CdiSpec(
        "/x/a.json", (f"k8s.gpu.example.com/claim={UID}-a",), ("/dev/vfio/devices/vfio7",)
    )


def test_a_file_of_no_claim_is_none() -> None:
    content = "kind: nvidia.com/gpu\ndevices:\n- name: '0'\n- name: all\n"
    found = spec_of("/etc/cdi/nvidia.yaml", content.encode())
    assert found == CdiSpec("/etc/cdi/nvidia.yaml", ("nvidia.com/gpu=0", "nvidia.com/gpu=all"))
    assert found is not None
    assert found.claim == ""


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe\x00",
        b"kind: a/b",
        b"- name: x",
        b"&a [*a, *a]" * 1000,
        b"[" * 100_000,
        b"name: " * 50_000,
    ],
)
def test_whatever_a_file_is_it_costs_only_itself(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "bad.yaml").write_bytes(content)
    (tmp_path / "good.yaml").write_text(THEIRS)
    read = CdiFiles(HostRoot(), str(tmp_path)).read_now()
    assert [spec.devices for spec in read.specs] == [(ID,)]


def test_a_file_of_many_kinds_and_names_costs_no_more_than_its_bytes() -> None:
    """Each kind with each name, 10,000 of both, would be 100 million devices."""
    text = "".join(f"kind: v{n}/c\n" for n in range(10_000)) + "".join(f"name: d{n}\n" for n in range(10_000))
    tracemalloc.start()
    try:
        spec = spec_of("/var/run/cdi/x.yaml", text.encode())
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert spec is not None
    assert len(spec.devices) == 1024
    assert peak < 50 * len(text), "the names that were found, and no product of them"


def test_a_file_that_is_none_is_said(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.yaml")
    (tmp_path / "good.yaml").write_text(THEIRS)
    read = CdiFiles(HostRoot(), str(tmp_path)).read_now()
    assert [spec.nodes for spec in read.specs] == [("/dev/vfio/52",)]
    assert read.problem == f"in {tmp_path} a.yaml (it is a FIFO, and a regular file is needed) cannot be read"


def test_a_directory_that_is_not_there_is_said(tmp_path: Path) -> None:
    missing = tmp_path / "none"
    assert CdiFiles(HostRoot(), str(missing)).read_now() == CdiSpecs(problem=f"{missing} does not exist")


def test_other_files_and_those_being_written_are_left_alone(tmp_path: Path) -> None:
    for name in (".k8s.yaml", "spec.tmp123", "readme"):
        (tmp_path / name).write_text(THEIRS)
    assert CdiFiles(HostRoot(), str(tmp_path)).read_now() == CdiSpecs()


def test_a_file_is_read_again_when_it_is_another(tmp_path: Path) -> None:
    path, files = tmp_path / "a.yaml", CdiFiles(HostRoot(), str(tmp_path))
    path.write_text(THEIRS)
    (first,) = files.read_now().specs
    (again,) = files.read_now().specs
    assert again is first
    new = tmp_path / ".new"
    new.write_text(THEIRS.replace("vfio/52", "vfio/53"))
    new.rename(path)
    (other,) = files.read_now().specs
    assert other.nodes == ("/dev/vfio/53",)
    path.unlink()
    assert files.read_now() == CdiSpecs()


def test_only_so_many_files_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "CDI_SPECS_MAX", 2)
    for i in range(3):
        (tmp_path / f"{i}.yaml").write_text(THEIRS.replace("gpu-vfio-1", f"gpu-vfio-{i}"))
    read = CdiFiles(HostRoot(), str(tmp_path)).read_now()
    assert len(read.specs) == 2
    assert read.problem == f"in {tmp_path} more than 2 files cannot be read"


@pytest.mark.trio
async def test_a_read_is_made_in_a_thread(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(THEIRS)
    with trio.fail_after(30):
        read = await CdiFiles(HostRoot(), str(tmp_path)).read()
    assert read is not None
    assert len(read.specs) == 1


def test_in_a_pod_the_directory_is_below_the_hosts_root(tmp_path: Path) -> None:
    """Its path in a pod that writes no claims' files is another one than on the host, which is said."""
    below = tmp_path / "var/run/cdi"
    below.mkdir(parents=True)
    (below / "a.yaml").write_text(THEIRS)
    (found,) = CdiFiles(HostRoot(str(tmp_path)), "/var/run/cdi").read_now().specs
    assert found.path == "/var/run/cdi/a.yaml"
