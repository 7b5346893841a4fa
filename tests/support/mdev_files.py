"""Mediated devices in a tree of ordinary files, as the kernel shows them (drivers/vfio/mdev)."""

from __future__ import annotations

import shutil
from pathlib import Path

from gpuactors.core.values.model import DeviceKey

UUID = DeviceKey("83b8f4f2-509f-382f-3c1e-e6bfe0fa1001")
OTHER_UUID = DeviceKey("83b8f4f2-509f-382f-3c1e-e6bfe0fa1002")


def make_type(parent: Path, type_id: str = "nvidia-593", name: str | None = "NVIDIA A10-24Q\n") -> Path:
    """A type that the parent, a directory below `sys/devices`, can have devices of."""
    directory = parent / "mdev_supported_types" / type_id
    directory.mkdir(parents=True, exist_ok=True)
    if name is not None:
        (directory / "name").write_text(name)
    return directory


def make_device(
    root: Path,
    parent: Path,
    key: str = UUID,
    *,
    type_id: str | None = "nvidia-593",
    group: int | None = 70,
    driver: str | None = "nvidia-vgpu-vfio",
    cdev: int | None = 3,
    node: bool = True,
) -> Path:
    """A mediated device of the parent; `type_id` None before the kernel has made its link."""
    directory = parent / key
    directory.mkdir(parents=True)
    bus = root / "sys/bus/mdev/devices"
    bus.mkdir(parents=True, exist_ok=True)
    (bus / key).symlink_to(Path("../../../devices") / directory.relative_to(root / "sys/devices"))
    if group is not None:
        (directory / "iommu_group").symlink_to(f"../../../kernel/iommu_groups/{group}")
    if driver is not None:
        (directory / "driver").symlink_to(f"../../../bus/mdev/drivers/{driver}")
    if cdev is not None:
        (directory / f"vfio-dev/vfio{cdev}").mkdir(parents=True)
    if type_id is not None:
        link_type(directory, type_id)
    if node and group is not None:
        (root / "dev/vfio").mkdir(parents=True, exist_ok=True)
        (root / f"dev/vfio/{group}").touch()
    return directory


def link_type(directory: Path, type_id: str) -> None:
    """The last step of the kernel, after the last uevent."""
    (directory / "mdev_type").symlink_to(f"../mdev_supported_types/{type_id}")


def remove_device(root: Path, directory: Path, group: int | None = 70) -> None:
    """What a write to `remove` does."""
    (root / "sys/bus/mdev/devices" / directory.name).unlink()
    shutil.rmtree(directory)
    if group is not None:
        (root / f"dev/vfio/{group}").unlink(missing_ok=True)
