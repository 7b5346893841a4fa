"""A host's sysfs as a mounted file system whose control files act: a write to `bind` is a write to the kernel.

FUSE shows the plain files of a `HostTree`, and hands each write to its `FakeKernel`. A write fails with the kernel's
own error, and sleeps where the kernel's writer would sleep. `enable` and `power/runtime_status` follow the processes
that have a device open. Must not decide anything about devices.
"""

from __future__ import annotations

import ctypes.util
import errno
import os
import stat
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, final

from gpuactors_simulation.host.kernel import FakeKernel, SleepsError

os.environ.setdefault("FUSE_LIBRARY_PATH", ctypes.util.find_library("fuse3") or "libfuse3.so.3")
import mfusepy  # it loads the library when it is imported

from tests.support.patience import patient

CONTROLS: Final = frozenset({"bind", "unbind", "driver_override", "drivers_probe"})
"""The files whose writes act."""

_POLL_S: Final = 0.02
"""Between two looks of a writer that sleeps."""

_MOUNT_S: Final = patient(10.0)

_ATTRIBUTES: Final = (
    "st_atime",
    "st_ctime",
    "st_gid",
    "st_mode",
    "st_mtime",
    "st_nlink",
    "st_size",
    "st_uid",
    "st_ino",
)


class _Sysfs(mfusepy.Operations):  # type: ignore[misc]
    """`tree.root/sys`, with control files. mfusepy calls from several threads."""

    use_ns = True

    def __init__(self, kernel: FakeKernel, lock: threading.RLock) -> None:
        self._kernel = kernel
        self._lock = lock
        self._root = f"{kernel.tree.root}/sys"
        self.closing = threading.Event()

    def _real(self, path: str) -> str:
        return self._root + path

    # --- what is there ----------------------------------------------------------------------------------------------

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        status = os.lstat(self._real(path))
        found: dict[str, Any] = {name: getattr(status, name) for name in _ATTRIBUTES}
        for name in ("st_atime", "st_ctime", "st_mtime"):
            found[name] = int(found[name] * 1e9)
        if stat.S_ISREG(status.st_mode):
            # As sysfs has it: one page whatever the content; only root writes to what acts.
            found["st_size"] = 4096
            name = path.rpartition("/")[2]
            found["st_mode"] = stat.S_IFREG | (0o200 if name in ("bind", "unbind") else 0o644)
        return found

    def readdir(self, path: str, fh: int) -> Iterator[str]:
        yield from (".", "..", *os.listdir(self._real(path)))

    def readlink(self, path: str) -> str:
        return os.readlink(self._real(path))

    def access(self, path: str, amode: int) -> int:
        os.lstat(self._real(path))
        return 0

    def statfs(self, path: str) -> Mapping[str, int]:
        return {"f_bsize": 4096, "f_namemax": 255}

    # --- files ------------------------------------------------------------------------------------------------------

    def open(self, path: str, flags: int) -> int:
        os.lstat(self._real(path))
        return 0

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        with self._lock:
            content = self._content(path)
        return content[offset : offset + size]

    def _content(self, path: str) -> bytes:
        tree = self._kernel.tree
        address = next((part for part in reversed(path.split("/")) if part in tree.functions), None)
        if address is not None and tree.vfio_number(address) is not None:
            if path.endswith(f"/{address}/enable"):
                return b"1\n" if tree.is_open(address) else b"0\n"
            if path.endswith(f"/{address}/power/runtime_status"):
                return b"active\n" if tree.is_open(address) else b"suspended\n"
        with open(self._real(path), "rb") as file:
            return file.read()

    def truncate(self, path: str, length: int, fh: Any = None) -> int:
        """open(2) with O_TRUNC, which sysfs ignores."""
        return 0

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        name = path.rpartition("/")[2]
        if name not in CONTROLS:
            raise mfusepy.FuseOSError(errno.EACCES)
        real = self._real(path)
        try:
            with self._lock:
                self._kernel.write(real, data.decode(), self._kernel.take(real))
        except SleepsError as sleeping:
            self._sleep(sleeping.address)
        except OSError as error:
            raise mfusepy.FuseOSError(error.errno or errno.EIO) from error
        return len(data)

    def _sleep(self, address: str) -> None:
        """The writer sleeps in the kernel until the function's holder lets go."""
        while not self.closing.is_set():
            with self._lock:
                self._kernel.wake()
                if not self._kernel.sleeps(address):
                    late = self._kernel.late_error(address)
                    break
            time.sleep(_POLL_S)
        else:
            raise mfusepy.FuseOSError(errno.ENODEV)
        if late is not None:
            raise mfusepy.FuseOSError(late.errno or errno.EIO)


@final
class SysfsMount:
    """The mounted file system, served by a thread of this process for as long as the context is open."""

    def __init__(self, kernel: FakeKernel, lock: threading.RLock) -> None:
        self._operations = _Sysfs(kernel, lock)

    @contextmanager
    def mounted(self, at: Path) -> Iterator[None]:
        """Mounts it at an empty directory. Raises TimeoutError where FUSE does not answer."""
        at.mkdir(parents=True, exist_ok=True)
        thread = threading.Thread(target=self._serve, args=(str(at),), name="sysfs", daemon=True)
        thread.start()
        end = time.monotonic() + _MOUNT_S
        while not os.path.ismount(at):
            if time.monotonic() > end or not thread.is_alive():
                raise TimeoutError(f"FUSE did not mount a file system at {at}")
            time.sleep(_POLL_S)
        try:
            yield
        finally:
            self._operations.closing.set()
            with suppress(FileNotFoundError):
                _unmount(at)
            thread.join(timeout=_MOUNT_S)

    def _serve(self, at: str) -> None:
        mfusepy.FUSE(
            self._operations, at, foreground=True, allow_other=True, fsname="sysfs-of-the-fake-host",
            attr_timeout=0, entry_timeout=0, negative_timeout=0,
            # Neither the kernel's page cache nor the size in `getattr` may stand between a reader and the file.
            direct_io=True,
        )  # fmt: skip


def _unmount(at: Path) -> None:
    """Lazily: a container may still have a bind mount of it."""
    libc = ctypes.CDLL(None, use_errno=True)
    detach = 2  # MNT_DETACH, linux/fs.h
    if libc.umount2(os.fsencode(at), detach) != 0:
        raise OSError(ctypes.get_errno(), f"{at} cannot be unmounted")
