"""Another DRA driver in a small world: a claim that it has prepared, and what kubelet and the CDI directory say of it.

The name of its device says nothing of where that is: its CDI file does, by the node of the IOMMU group.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from gpuactors.core.values.cdi import CdiSpec, CdiSpecs
from gpuactors.core.values.model import ClaimedDevice, Pod

POD: Final = Pod("default", "others", "")
_DRIVER: Final = "gpu.vendor.example"
_UID: Final = "00000001-93f0-4f8e-9d3a-0f5f6a1c7e21"
_CDI_ID: Final = f"k8s.{_DRIVER}/claim={_UID}-vgpu-1"
_CLAIMED: Final = ClaimedDevice(_DRIVER, "node-1", "vgpu-1", "default/others-claim", POD, _UID, (_CDI_ID,))


class OthersClaim(Struct, frozen=True):
    """The claim, from its prepare to its unprepare."""

    group: int
    """The IOMMU group of its GPU when it was prepared, which its containers have whatever is in that group now."""
    is_listed: bool = True
    """Kubelet knows its pod. Deleted by force, that is gone before the unprepare."""
    has_file: bool = True
    """Its CDI file is there. Somebody may remove it."""


def listed(claim: OthersClaim | None) -> tuple[ClaimedDevice, ...]:
    """What kubelet lists of it."""
    return (_CLAIMED,) if claim is not None and claim.is_listed else ()


def files(claim: OthersClaim | None) -> CdiSpecs:
    """The CDI directory, without the files of gpuactors."""
    if claim is None or not claim.has_file:
        return CdiSpecs()
    path = f"/var/run/cdi/k8s.{_DRIVER}-claim_{_UID}.yaml"
    return CdiSpecs((CdiSpec(path, (_CDI_ID,), (f"/dev/vfio/{claim.group}",)),))
