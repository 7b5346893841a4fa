"""A kernel's image as the ELF file that its bzImage has compressed within.

Unpacking xz takes emulation 4 s of the 8 until the kernel's first word, at each boot, and the host one second, once.
QEMU starts the ELF file where the kernel has the PVH entry (Documentation/arch/x86/boot.rst, hw/i386/x86-common.c).
Must not know where kernels come from or are kept.
"""

from __future__ import annotations

import lzma
import os
import struct
from pathlib import Path
from typing import Final

_SETUP_SECTORS: Final = 0x1F1
_MAGIC: Final = (0x202, b"HdrS")
_PAYLOAD: Final = 0x248
"""Offset and length of the compressed kernel, two 32-bit numbers; since boot protocol 2.08."""

_SECTOR: Final = 512
_XZ: Final = b"\xfd7zXZ\x00"
_PVH: Final = "CONFIG_PVH=y"


def write_unpacked(image: Path, config: Path, unpacked: Path) -> bool:
    """Writes the ELF file; whether there is one: not of a kernel without PVH, and not where the compression is another
    than xz, as Python 3.11 has no zstd (which emulation unpacks in about a second)."""
    if not config.is_file() or _PVH not in config.read_text(encoding="ascii").splitlines():
        return False
    packed = _payload(image.read_bytes())
    if not packed.startswith(_XZ):
        return False
    # The size of the ELF file follows the stream.
    kernel = lzma.LZMADecompressor(lzma.FORMAT_XZ).decompress(packed)
    # The rename is last: a file under its final name is complete.
    scratch = unpacked.with_name(f".{unpacked.name}.{os.getpid()}")
    scratch.write_bytes(kernel)
    scratch.rename(unpacked)
    return True


def _payload(image: bytes) -> bytes:
    at, magic = _MAGIC
    if image[at : at + len(magic)] != magic:
        return b""
    start, length = struct.unpack_from("<II", image, _PAYLOAD)
    begin = ((image[_SETUP_SECTORS] or 4) + 1) * _SECTOR + start
    return image[begin : begin + length]
