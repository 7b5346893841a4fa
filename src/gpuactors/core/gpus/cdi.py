"""The content of the files for a claim of GPUs: the nodes of each device, of the requested backend, and its attributes.

Values only; `claims/files.py` makes the files of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from msgspec import Struct, field

from gpuactors.core.claims.metadata import PCI_BUS_ID, Attribute
from gpuactors.core.gpus.config import BackendPolicy, VfioConfig
from gpuactors.core.kinds.table import key_of
from gpuactors.core.values.claim import AllocatedDevice, BoundFunction, Json

_NO_CUDA: Final = "NVIDIA_VISIBLE_DEVICES=void"
"""NVIDIA's container runtime adds all GPUs of the host driver to a container that does not say this."""

_PERMISSIONS: Final = "mrw"

CONTAINER_NODE: Final = "/dev/vfio/vfio"
IOMMUFD_NODE: Final = "/dev/iommu"
"""The API devices of the two backends, as paths of the container. `host/root.py` has those of the host."""


class ClaimDevice(Struct, frozen=True, gc=False):
    """A device of a claim, as it is when its files are written."""

    result: AllocatedDevice
    functions: tuple[BoundFunction, ...]
    """The device itself, then its companions on vfio, read anew after the bind. Empty: the container gets no node (a
    claim with admin access, while another claim or pod has the device)."""
    config: VfioConfig = field(default_factory=VfioConfig)

    @property
    def edits(self) -> Json:
        """The changes to the container."""
        found: dict[str, Json] = {"env": (_NO_CUDA,)}
        if paths := nodes(self):
            found["deviceNodes"] = tuple({"path": path, "permissions": _PERMISSIONS} for path in paths)
        return found

    @property
    def attributes(self) -> Mapping[str, Attribute]:
        """KubeVirt takes the PCI address (pkg/dra/utils.go)."""
        address = key_of(self.result.device)
        return {PCI_BUS_ID: address} if address is not None else {}


def nodes(device: ClaimDevice) -> tuple[str, ...]:
    """The device nodes, of one backend only: a process that opens a group cannot use iommufd beside it.

    With iommufd each function of the group has a node of its own, and a VM needs all of them; the group's node serves
    all its functions.
    """
    functions = device.functions
    if not functions:
        return ()
    cdevs = [function.cdev for function in functions if function.cdev is not None]
    if device.config.backend_policy is BackendPolicy.PREFER_IOMMUFD and functions[0].cdev is not None:
        found = [f"/dev/vfio/devices/{cdev}" for cdev in cdevs]
        return tuple(found) + ((IOMMUFD_NODE,) if device.config.enable_api_device else ())
    groups = dict.fromkeys(f.iommu_group for f in functions if f.iommu_group is not None)
    found = [f"/dev/vfio/{group}" for group in groups]
    return tuple(found) + ((CONTAINER_NODE,) if device.config.enable_api_device else ())
