"""How a claim has one device given to its container (`VfioDeviceConfig`).

A file of its own: `gpus/config.py` decodes it, and the kinds of devices follow it.
"""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct


class BackendPolicy(StrEnum):
    """The VFIO interface that a container gets for its devices."""

    LEGACY_ONLY = "LegacyOnly"
    """The node of the IOMMU group, `/dev/vfio/51`."""
    PREFER_IOMMUFD = "PreferIommuFD"
    """The device's own node, `/dev/vfio/devices/vfio3`, where the kernel makes one; else the group's."""


class VfioConfig(Struct, frozen=True, gc=False):
    """How one device is given to its container."""

    backend_policy: BackendPolicy = BackendPolicy.LEGACY_ONLY
    enable_api_device: bool = True
    """With /dev/vfio/vfio or /dev/iommu, the node that belongs to the backend."""
