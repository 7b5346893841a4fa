"""The UUIDs of the GPUs that NVIDIA's driver drives, by which NVIDIA's device plugin names them to kubelet.

Each is read once for each bind: the driver wakes the GPU for a reader, and takes its own locks (kernel-open/nvidia/
nv-procfs.c, nv_procfs_read_gpu_info). Runs where the inspection of the function runs. Must not decide whose a GPU is.
"""

from __future__ import annotations

import os
import re
from typing import Final, final

from gpuactors.core.values.model import PciAddress
from gpuactors.host.faults import raise_if_short
from gpuactors.host.root import NVIDIA_GPUS, HostRoot

DRIVER: Final = "nvidia"

_UUID: Final = re.compile(
    rb"^GPU UUID:[ \t]*(GPU-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})\s*$", re.MULTILINE
)
"""Of a GPU that was not started since the driver took it, there are question marks in the place of the digits."""

_INFORMATION_BYTES: Final = 4096


@final
class GpuUuids:
    """Reads the UUIDs below a host's root; keeps each while the driver's directory of the GPU is the same one."""

    def __init__(self, root: HostRoot) -> None:
        self._root = root
        self._known: dict[PciAddress, tuple[int, str]] = {}

    def of(self, address: PciAddress, driver: str | None) -> str | None:
        """`GPU-` and the UUID; None if the driver is another one, or does not say it. Raises `HostError` for want of
        descriptors."""
        if driver != DRIVER:
            self._known.pop(address, None)
            return None
        path = self._root.real(f"{NVIDIA_GPUS}/{address}/information")
        try:
            inode = os.stat(path).st_ino
            known = self._known.get(address)
            if known is not None and known[0] == inode:
                return known[1]
            with open(path, "rb") as file:
                found = _UUID.search(file.read(_INFORMATION_BYTES))
        except OSError as error:
            raise_if_short(error, path)
            return None
        if found is None:
            return None
        self._known[address] = inode, found[1].decode()
        return found[1].decode()
