"""What NVIDIA's driver says of its GPUs, once for each bind."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from gpuactors.core.values.model import PciAddress
from gpuactors.host import nvidia
from gpuactors.host.nvidia import NvidiaGpus
from gpuactors.host.root import HostRoot
from gpuactors_simulation.host.kernel import FakeKernel
from gpuactors_simulation.host.tree import HostTree, PciSpec

GPU = PciAddress("0000:23:00.0")
UUID = "GPU-6b8a2c14-93f0-4f8e-9d3a-0f5f6a1c7e21"
RECORDED = (
    "Model: \t\t NVIDIA H200\nIRQ:   \t\t 41\nGPU UUID: \t {uuid}\nVideo BIOS: \t 96.00.a5.00.1a\nBus Type: \t PCIe\n"
    "DMA Size: \t 52 bits\nDMA Mask: \t 0xfffffffffffff\nBus Location: \t {address}\nDevice Minor: \t 0\n"
    "GPU Firmware: \t 580.159.04\nGPU Excluded:\t No\n"
)
"""Of an H200 under the open kernel module 580.159.04, but for the UUID and the address."""


def information(root: Path, uuid: str = UUID) -> Path:
    path = root / f"proc/driver/nvidia/gpus/{GPU}/information"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(RECORDED.format(address=GPU, uuid=uuid))
    return path


def test_it_is_read_once_as_long_as_the_driver_has_the_gpu(tmp_path: Path) -> None:
    path, uuids = information(tmp_path), NvidiaGpus(HostRoot(str(tmp_path)))
    assert uuids.uuid(GPU, "nvidia") == UUID
    inode = path.stat().st_ino
    path.write_text("a read would wake the GPU")
    assert path.stat().st_ino == inode
    assert uuids.uuid(GPU, "nvidia") == UUID


def test_another_gpu_at_the_address_is_read_anew(tmp_path: Path) -> None:
    path, uuids = information(tmp_path), NvidiaGpus(HostRoot(str(tmp_path)))
    uuids.uuid(GPU, "nvidia")
    os.rename(path, path.with_name("kept"))  # so that its inode is not given again
    information(tmp_path, UUID.replace("6b8a", "0000"))
    assert uuids.uuid(GPU, "nvidia") == UUID.replace("6b8a", "0000")


def test_after_a_time_on_another_driver_it_is_read_anew(tmp_path: Path) -> None:
    path, uuids = information(tmp_path), NvidiaGpus(HostRoot(str(tmp_path)))
    uuids.uuid(GPU, "nvidia")
    assert uuids.uuid(GPU, "vfio-pci") is None
    path.write_text(path.read_text().replace("6b8a", "0000"))
    assert uuids.uuid(GPU, "nvidia") == UUID.replace("6b8a", "0000")


def test_without_the_hosts_proc_its_own_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pod of the device plugin has only its own, and needs the UUID: a container may have the GPU."""
    own, host = tmp_path / "own", tmp_path / "host"
    information(own)
    monkeypatch.setattr(nvidia, "NVIDIA_GPUS", f"{own}/proc/driver/nvidia/gpus")
    assert NvidiaGpus(HostRoot(str(host))).uuid(GPU, "nvidia") == UUID
    (host / "proc").mkdir(parents=True)
    assert NvidiaGpus(HostRoot(str(host))).uuid(GPU, "nvidia") is None


@pytest.mark.parametrize("said", ["GPU-????????-????-????-????-????????????", "", "GPU-6b8a", f"{UUID}0"])
def test_what_the_driver_does_not_know_yet_is_asked_again(tmp_path: Path, said: str) -> None:
    information(tmp_path, said)
    uuids = NvidiaGpus(HostRoot(str(tmp_path)))
    assert uuids.uuid(GPU, "nvidia") is None
    information(tmp_path)
    assert uuids.uuid(GPU, "nvidia") == UUID


def test_a_file_that_is_not_there_or_is_none_is_no_error(tmp_path: Path) -> None:
    uuids = NvidiaGpus(HostRoot(str(tmp_path)))
    assert uuids.uuid(GPU, "nvidia") is None
    information(tmp_path).unlink()
    (tmp_path / f"proc/driver/nvidia/gpus/{GPU}/information").mkdir()
    assert uuids.uuid(GPU, "nvidia") is None


def test_the_fake_driver_writes_what_a_real_one_does(tmp_path: Path) -> None:
    FakeKernel(HostTree(tmp_path)).plug(PciSpec(GPU, "10de", "2335", "030200", group=1, driver="nvidia"))
    written = (tmp_path / f"proc/driver/nvidia/gpus/{GPU}/information").read_text()
    assert re.sub(r"GPU-\S+", "UUID", written) == RECORDED.format(address=GPU, uuid="UUID")


def test_its_device_node_is_by_the_minor_number(tmp_path: Path) -> None:
    information(tmp_path, "GPU-????????-????-????-????-????????????")
    gpus = NvidiaGpus(HostRoot(str(tmp_path)))
    assert gpus.node(GPU, "nvidia") == "/dev/nvidia0"
    assert gpus.node(GPU, "vfio-pci") is None


def test_it_is_divided_if_the_driver_has_a_capability_of_a_part(tmp_path: Path) -> None:
    information(tmp_path)
    gpus = NvidiaGpus(HostRoot(str(tmp_path)))
    assert gpus.has_parts(GPU, "nvidia") is None, "an older driver has no capabilities"
    mig = tmp_path / "proc/driver/nvidia/capabilities/gpu0/mig"
    mig.mkdir(parents=True)
    (mig / "config").touch()
    assert gpus.has_parts(GPU, "nvidia") is False
    (mig / "gi3").mkdir()
    assert gpus.has_parts(GPU, "nvidia") is True
    assert gpus.has_parts(GPU, "vfio-pci") is None
