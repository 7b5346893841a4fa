"""EGMs in a tree, in both shapes that kernels have: a file with the GPUs, or a link for each."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from enum import Enum
from pathlib import Path


class Shape(Enum):
    """How the kernel lists the GPUs of an EGM."""

    LIST = "NVIDIA's kernels"
    LINKS = "proposed for Linux"


def make_egm(root: Path, name: str, gpus: Iterable[str], shape: Shape = Shape.LIST) -> None:
    """Make an EGM with these GPUs, or make it have them, and its device node: a plain file."""
    directory = root / "sys/devices/virtual/egm" / name
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "egm_size").write_text("0x7700000000\n")
    match shape:
        case Shape.LIST:
            (directory / "gpu_devices").write_text("".join(f"{gpu}\n" for gpu in gpus))
        case Shape.LINKS:
            for gpu in gpus:
                if not (directory / gpu).is_symlink():
                    (directory / gpu).symlink_to(f"../../../pci0000:00/{gpu}")
    link = root / "sys/class/egm" / name
    link.parent.mkdir(parents=True, exist_ok=True)
    if not link.is_symlink():
        link.symlink_to(f"../../devices/virtual/egm/{name}")
    node = root / "dev" / name
    node.parent.mkdir(parents=True, exist_ok=True)
    node.touch()


def remove_egm(root: Path, name: str) -> None:
    """Remove an EGM and its device node."""
    (root / "sys/class/egm" / name).unlink()
    shutil.rmtree(root / "sys/devices/virtual/egm" / name)
    (root / "dev" / name).unlink()
