"""Build an initramfs in memory: a static busybox, kernel modules with their dependencies, and our own scripts.

Pure Python, no root, no `cpio`, no `depmod`: the archive format is the kernel's "newc"
(Documentation/driver-api/early-userspace/buffer-format.rst). Must not run or download anything.
"""

from __future__ import annotations

import lzma
import re
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Final

from tests.vm.provision import Kernel

BASE_MODULES: Final = ("virtio_pci", "virtio_console", "9pnet_virtio", "9p", "overlay")
"""What every guest needs: the host's root over 9p, a writable layer above it, the port that leads to QMP."""

MOUNT_POINTS: Final = ("proc", "sys", "dev", "tmp", "run", "ro", "rw", "new")


class InitramfsError(Exception):
    """The kernel package lacks something that was asked for."""


class CpioArchive:
    """A growing "newc" archive. Parent directories are added by themselves; `finish` ends it."""

    def __init__(self) -> None:
        self._bytes = bytearray()
        self._inode = 0
        self._directories: set[str] = set()

    def _entry(self, name: str, mode: int, data: bytes = b"", device: tuple[int, int] = (0, 0)) -> None:
        self._inode += 1
        name_bytes = name.encode() + b"\0"
        # ino mode uid gid nlink mtime filesize devmajor devminor rdevmajor rdevminor namesize check
        fields = (self._inode, mode, 0, 0, 1, 0, len(data), 0, 0, *device, len(name_bytes), 0)
        self._bytes += b"070701" + b"".join(b"%08X" % field for field in fields) + name_bytes
        self._pad()
        self._bytes += data
        self._pad()

    def _pad(self) -> None:
        self._bytes += b"\0" * (-len(self._bytes) % 4)

    def directory(self, path: str) -> None:
        """Add a directory and its parents (mode 0755), each once."""
        pure = PurePosixPath(path)
        for parent in (*reversed(pure.parents), pure):
            name = str(parent)
            if name not in (".", "/") and name not in self._directories:
                self._directories.add(name)
                self._entry(name, stat.S_IFDIR | 0o755)

    def file(self, path: str, data: bytes, mode: int = 0o755) -> None:
        """Add a regular file."""
        self.directory(str(PurePosixPath(path).parent))
        self._entry(path, stat.S_IFREG | mode, data)

    def character_device(self, path: str, major: int, minor: int) -> None:
        """Add a character device node, mode 0600."""
        self.directory(str(PurePosixPath(path).parent))
        self._entry(path, stat.S_IFCHR | 0o600, device=(major, minor))

    def finish(self) -> bytes:
        """The whole archive with its trailer."""
        self._entry("TRAILER!!!", 0)
        return bytes(self._bytes)


def build_initramfs(
    kernel: Kernel, busybox: Path, init: bytes, *, modules: Iterable[str], files: Mapping[str, bytes]
) -> bytes:
    """An uncompressed initramfs whose `/init` is `init`.

    `modules` are added to BASE_MODULES, with what they depend on, as `/modules/<name>.ko`; `/modules/order` lists
    them in an order in which plain `insmod` works. `files` are added under their (relative) paths.
    Raises InitramfsError for a module that the kernel has neither built in nor as a file.
    """
    archive = CpioArchive()
    for path in MOUNT_POINTS:
        archive.directory(path)
    archive.character_device("dev/console", 5, 1)
    archive.file("bin/busybox", busybox.read_bytes())
    ordered = _ModuleOrder(kernel)
    for name in (*BASE_MODULES, *modules):
        ordered.require(name)
    for name, data in ordered.loaded.items():
        archive.file(f"modules/{name}.ko", data, 0o644)
    archive.file("modules/order", "".join(f"{name}\n" for name in ordered.loaded).encode(), 0o644)
    for path, data in files.items():
        archive.file(path, data)
    archive.file("init", init)
    return archive.finish()


class _ModuleOrder:
    """Modules with their dependencies, each after what it needs. `loaded` is in that order."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._files = {_module_name(path.name): path for path in kernel.modules.glob("kernel/**/*.ko*")}
        self._built_in = built_in_modules(kernel)
        self._visiting: set[str] = set()
        self.loaded: dict[str, bytes] = {}

    def require(self, name: str) -> None:
        name = _module_name(name)
        if name in self.loaded or name in self._built_in or name in self._visiting:
            return
        if name not in self._files:
            raise InitramfsError(
                f"{self._kernel.package} has no module {name}, neither built in nor as a file"
            )
        self._visiting.add(name)
        data = _module_bytes(self._files[name])
        for needed in _depends(data):
            self.require(needed)
        for wanted in _soft_depends(data):
            # A soft dependency is a wish (modprobe.d(5)): what this kernel does not have is left out.
            if wanted in self._files:
                self.require(wanted)
        self.loaded[name] = data


def built_in_modules(kernel: Kernel) -> frozenset[str]:
    """What could be a module, and is a part of this kernel's image."""
    listed = (kernel.modules / "modules.builtin").read_text(encoding="ascii")
    return frozenset(_module_name(PurePosixPath(line).name) for line in listed.splitlines())


def _module_name(file_name: str) -> str:
    # The kernel takes `-` and `_` for the same in module names; files use either.
    return re.sub(r"\.ko(\.xz)?$", "", file_name).replace("-", "_")


def _module_bytes(path: Path) -> bytes:
    # insmod of busybox hands the bytes to the kernel as they are, and not every kernel decompresses.
    return lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()


def _depends(module: bytes) -> list[str]:
    found = re.search(rb"\0depends=([^\0]*)\0", module)
    return [_module_name(name) for name in found[1].decode().split(",") if name] if found else []


def _soft_depends(module: bytes) -> list[str]:
    wanted: list[str] = []
    for found in re.findall(rb"\0softdep=pre: ([^\0]*)\0", module):
        before_post = found.decode().split("post:")[0]
        wanted += [_module_name(name) for name in before_post.split() if name != "pre:"]
    return wanted
