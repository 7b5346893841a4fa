"""The configuration of one device of a claim (`VfioDeviceConfig`).

A file of its own: `gpus/config.py` decodes it, and the kinds of devices apply it.
"""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct


class BackendPolicy(StrEnum):
    """The VFIO interface that a container gets for its devices."""

    LEGACY_ONLY = "LegacyOnly"
    """The node of the IOMMU group: `/dev/vfio/51`."""
    PREFER_IOMMUFD = "PreferIommuFD"
    """The device's own node, `/dev/vfio/devices/vfio3`, if the kernel makes one; else the group's."""


class VfioConfig(Struct, frozen=True, gc=False):
    """The device nodes that the container of a claim gets for one device."""

    backend_policy: BackendPolicy = BackendPolicy.LEGACY_ONLY
    enable_api_device: bool = True
    """True if the container also gets the backend's API device: /dev/vfio/vfio or /dev/iommu."""
