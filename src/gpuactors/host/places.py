"""Where a GPU is that another program names by its UUID, or by the device node that a container got of it.

Synchronous, and reads only what never blocks: the text that NVIDIA's driver has of each GPU, links and listings.
"""

from __future__ import annotations

import os
from typing import Final, final

from gpuactors.core.values.model import PciAddress, is_pci_address
from gpuactors.host.best_effort import names_in, text_of
from gpuactors.host.faults import raise_if_short
from gpuactors.host.nvidia import DRIVER, NvidiaGpus
from gpuactors.host.root import (
    CDEV_NODES,
    GROUP_NODES,
    IOMMU_GROUPS,
    NVIDIA_GPUS,
    PCI_DEVICES,
    VFIO_DEVICES,
    HostRoot,
)

_DISPLAY: Final = "0x03"
"""The first byte of a GPU's class."""


@final
class Places:
    """The GPUs of this host."""

    def __init__(self, root: HostRoot) -> None:
        self._root = root
        self._nvidia = NvidiaGpus(root)

    def of_uuid(self, uuid: str) -> PciAddress | None:
        """Return the GPU with this UUID; None if none on NVIDIA's driver has it. Raises `HostError` for want of
        descriptors."""
        addresses = (PciAddress(name) for name in self._names(NVIDIA_GPUS) if is_pci_address(name))
        return next((a for a in addresses if self._nvidia.uuid(a, DRIVER) == uuid), None)

    def of_node(self, node: str) -> tuple[PciAddress, ...]:
        """Return the GPUs that a container with this device node has, `/dev/vfio/51` or `/dev/vfio/devices/vfio3`.
        Raises as `of_uuid`."""
        directory, name = os.path.split(node)
        if directory == CDEV_NODES:
            having = self._function_of(name)
        elif directory == GROUP_NODES and name.isdecimal():
            having = self._names(f"{IOMMU_GROUPS}/{name}/devices")
        else:
            return ()
        return tuple(PciAddress(a) for a in having if is_pci_address(a) and self._is_gpu(a))

    def _is_gpu(self, address: str) -> bool:
        return text_of(self._root.real(f"{PCI_DEVICES}/{address}/class"), 4096).startswith(_DISPLAY)

    def _function_of(self, cdev: str) -> list[str]:
        path = self._root.real(f"{VFIO_DEVICES}/{cdev}")
        try:
            target = os.readlink(path)
        except OSError as error:
            raise_if_short(error, path)
            return []
        return target.split("/")[-3:-2]

    def _names(self, path: str) -> list[str]:
        return sorted(names_in(self._root.real(path)))
