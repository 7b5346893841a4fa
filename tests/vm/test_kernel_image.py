"""The ELF file of a bzImage, made by the rules of the kernel's boot protocol."""

from __future__ import annotations

import lzma
import struct
from pathlib import Path

import pytest

from tests.vm.kernel_image import write_unpacked

KERNEL = b"\x7fELF" + bytes(5000)
SETUP_SECTORS = 3


def bzimage(payload: bytes) -> bytes:
    header = bytearray((SETUP_SECTORS + 1) * 512)
    header[0x1F1] = SETUP_SECTORS
    header[0x202:0x206] = b"HdrS"
    code = b"code that unpacks"
    struct.pack_into("<II", header, 0x248, len(code), len(payload))
    return bytes(header) + code + payload + b"what follows"


@pytest.mark.parametrize(
    ("config", "image", "there"),
    [
        ("CONFIG_PVH=y", bzimage(lzma.compress(KERNEL) + struct.pack("<I", len(KERNEL))), True),
        ("# CONFIG_PVH is not set", bzimage(lzma.compress(KERNEL)), False),
        ("CONFIG_PVH=y", bzimage(b"\x28\xb5\x2f\xfd as zstd begins"), False),
        ("CONFIG_PVH=y", b"no image of a kernel".ljust(4096), False),
    ],
    ids=["xz", "without PVH", "zstd", "no image"],
)
def test_the_kernel_in_an_image_is_found_where_it_can_be_started(
    config: str, image: bytes, there: bool, tmp_path: Path
) -> None:
    (tmp_path / "vmlinuz").write_bytes(image)
    (tmp_path / "config").write_text(f"CONFIG_X86=y\n{config}\n")
    unpacked = tmp_path / "vmlinux"
    assert write_unpacked(tmp_path / "vmlinuz", tmp_path / "config", unpacked) is there
    assert (unpacked.read_bytes() if there else None) == (KERNEL if there else None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config", *["vmlinux"] * there, "vmlinuz"]
