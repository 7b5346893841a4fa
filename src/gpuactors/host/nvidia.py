"""Reads the text of NVIDIA's driver about each GPU: the UUID, by which NVIDIA's device plugin names one to kubelet; the
minor number of its device node, which containers get; and whether it is divided into parts (MIG).

A pod without the host's `/proc` reads its own: what is not of a process is the kernel's, and the same in each.

The text of each is read once for each bind: the driver wakes the GPU for a reader, and takes its own locks
(kernel-open/nvidia/nv-procfs.c, nv_procfs_read_gpu_info). Runs where the inspection of the function runs. Must not
decide whose a GPU is.
"""

from __future__ import annotations

import os
import re
from typing import Final, final

from gpuactors.core.values.model import PciAddress
from gpuactors.host.faults import raise_if_short
from gpuactors.host.root import NVIDIA_CAPABILITIES, NVIDIA_GPUS, HostRoot

DRIVER: Final = "nvidia"

_UUID: Final = re.compile(
    rb"^GPU UUID:[ \t]*(GPU-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})\s*$", re.MULTILINE
)
"""A GPU that was not started since the driver took it has question marks instead of digits."""

_MINOR: Final = re.compile(rb"^Device Minor:[ \t]*([0-9]{1,5})\s*$", re.MULTILINE)

_INFORMATION_BYTES: Final = 4096


@final
class NvidiaGpus:
    """Reads below a host's root; keeps what the driver says of a GPU while its directory is the same one."""

    def __init__(self, root: HostRoot) -> None:
        self._root = root
        self._cached: dict[PciAddress, tuple[int, str, str]] = {}
        """The text's inode, the UUID and the minor number."""

    def uuid(self, address: PciAddress, driver: str | None) -> str | None:
        """Return `GPU-` and the UUID; None if the driver is another one, or does not say it. Raises `HostError` for
        want of descriptors."""
        return self._read(address, driver)[0] or None

    def node(self, address: PciAddress, driver: str | None) -> str | None:
        """Return its device node, `/dev/nvidia0`. None and errors as for `uuid`."""
        minor = self._read(address, driver)[1]
        return f"/dev/nvidia{minor}" if minor else None

    def has_parts(self, address: PciAddress, driver: str | None) -> bool | None:
        """Return whether the GPU is divided into MIG devices. None and errors as for `uuid`."""
        if not (minor := self._read(address, driver)[1]):
            return None
        path = self._real(f"{NVIDIA_CAPABILITIES}/gpu{minor}/mig")
        try:
            return any(name.startswith("gi") for name in os.listdir(path))
        except OSError as error:
            raise_if_short(error, path)
            return None

    def _read(self, address: PciAddress, driver: str | None) -> tuple[str, str]:
        """Return the UUID and the minor number, each empty where it is not known."""
        if driver != DRIVER:
            self._cached.pop(address, None)
            return "", ""
        path = self._real(f"{NVIDIA_GPUS}/{address}/information")
        try:
            inode = os.stat(path).st_ino
            cached = self._cached.get(address)
            if cached is not None and cached[0] == inode:
                return cached[1:]
            with open(path, "rb") as file:
                content = file.read(_INFORMATION_BYTES)
        except OSError as error:
            raise_if_short(error, path)
            return "", ""
        uuid, minor = (m[1].decode() if (m := p.search(content)) is not None else "" for p in (_UUID, _MINOR))
        if uuid:
            self._cached[address] = inode, uuid, minor
        return uuid, minor

    def _real(self, path: str) -> str:
        """Return where this process reads a path below `/proc` that is of no process."""
        return self._root.real(path) if os.path.isdir(self._root.real("/proc")) else path
