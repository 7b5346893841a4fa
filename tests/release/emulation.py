"""Another architecture's programs on this machine, for an image of it: the kernel starts them by QEMU's user emulation.

Needs root. Of Debian's package qemu-user-static one program is taken; the package is not installed. The kernel is told
of it for as long as a build takes.
"""

from __future__ import annotations

import platform
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tests.vm.commands import ProvisionError, apt_get, run

ARCHITECTURES: Final = {"x86_64": "amd64", "aarch64": "arm64"}
"""Debian's and OCI's name of each, by that of the kernel."""

_BINFMT: Final = Path("/proc/sys/fs/binfmt_misc")
_MACHINES: Final = {"amd64": ("x86_64", 0x3E), "arm64": ("aarch64", 0xB7)}
"""QEMU's name, and e_machine of an ELF file (elf.h)."""


def own_architecture() -> str:
    """That of this machine."""
    return ARCHITECTURES[platform.machine()]


@contextmanager
def running(architecture: str) -> Iterator[None]:
    """While it lasts, programs of this architecture run here, also in a chroot. Raises ProvisionError."""
    if architecture == own_architecture():
        yield
        return
    entry = _BINFMT / f"qemu-{_MACHINES[architecture][0]}"
    if mounted := not (_BINFMT / "register").exists():
        run(("mount", "-t", "binfmt_misc", "binfmt_misc", str(_BINFMT)))
    try:
        if entry.exists():  # the machine's own
            yield
            return
        with tempfile.TemporaryDirectory(prefix="gpuactors-qemu-") as name:
            emulator = _emulator(architecture, Path(name))
            (_BINFMT / "register").write_bytes(registration(entry.name, architecture, emulator))
            try:
                yield
            finally:
                entry.write_text("-1")
    finally:
        if mounted:
            run(("umount", str(_BINFMT)))


def registration(name: str, architecture: str, emulator: Path) -> bytes:
    """A line for binfmt_misc (Documentation/admin-guide/binfmt-misc.rst): a little-endian 64-bit ELF file of this
    architecture. `F`: the kernel opens the emulator now, so that a chroot need not have it."""
    _, machine = _MACHINES[architecture]
    magic = b"\x7fELF\x02\x01\x01" + bytes(9) + b"\x02\x00" + bytes((machine, 0))
    # Any ABI; an executable, or one that is loaded at any address.
    mask = b"\xff" * 7 + b"\x00" + b"\xff" * 8 + b"\xfe\xff" + b"\xff\xff"

    def escaped(part: bytes) -> str:
        return "".join(f"\\x{byte:02x}" for byte in part)

    return f":{name}:M::{escaped(magic)}:{escaped(mask)}:{emulator}:F".encode("ascii")


def _emulator(architecture: str, directory: Path) -> Path:
    program = directory / "usr" / "bin" / f"qemu-{_MACHINES[architecture][0]}-static"
    try:
        apt_get("download", "qemu-user-static", cwd=directory)
    except ProvisionError:  # a list so old that the mirror no longer has what it names
        apt_get("update")
        apt_get("download", "qemu-user-static", cwd=directory)
    (package,) = directory.glob("*.deb")
    archive = directory / "files.tar"
    run(("sh", "-c", 'dpkg-deb --fsys-tarfile "$0" > "$1"', str(package), str(archive)))
    run(("tar", "-xf", str(archive), "-C", str(directory), f"./{program.relative_to(directory)}"))
    return program
