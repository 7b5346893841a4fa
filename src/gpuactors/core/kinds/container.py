"""The container of a device of any kind: the order of its nodes, the edits of its CDI file, and the place of the device
as attributes of its metadata.

Must not decide which nodes these are: that is the kind's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Final

from msgspec.structs import replace

from gpuactors import limits
from gpuactors.core.values.cdi import device_nodes
from gpuactors.core.values.claim import AttributeValue, DeviceEdits, Json
from gpuactors.core.values.inventory import Device
from gpuactors.core.values.slices import NUMA_NODE, PCIE_ROOT

CONTAINER_NODE: Final = "/dev/vfio/vfio"
IOMMUFD_NODE: Final = "/dev/iommu"
"""The API devices of the two backends, as paths of the container. `host/root.py` has the paths of the host."""

_CDEVS: Final = "/dev/vfio/devices/"

_EGMS: Final = "/dev/egm"

_NO_CUDA: Final = "NVIDIA_VISIBLE_DEVICES=void"
"""The variable without which NVIDIA's container runtime adds all GPUs of the host driver to a container."""


# A host has a few paths for each device, and each call needs them.
@lru_cache(maxsize=limits.CALL_DEVICES_MAX)
def node_order(path: str) -> tuple[int, int, str]:
    """Return the sort key of a node: container, groups, cdevs, iommufd, EGMs; each by number."""
    number = int("".join(c for c in path if c.isdigit()) or 0)
    if path == CONTAINER_NODE:
        return (0, 0, path)
    if path.startswith(_CDEVS):
        return (2, number, path)
    if path == IOMMUFD_NODE:
        return (3, 0, path)
    return (4 if path.startswith(_EGMS) else 1, number, path)


def cdi_edits(nodes: Sequence[str]) -> Json:
    """Return the edits of a device in the CDI file of its claim, with these device nodes."""
    edits: dict[str, Json] = {"env": (_NO_CUDA,)}
    if nodes:
        edits["deviceNodes"] = device_nodes(nodes)
    return edits


def with_nodes(edits: DeviceEdits, nodes: Sequence[str]) -> DeviceEdits:
    """Return the edits of a device with more device nodes behind its own."""
    own = edits.edits
    assert isinstance(own, Mapping)
    before = own.get("deviceNodes", ())
    assert isinstance(before, tuple)
    return replace(edits, edits={**own, "deviceNodes": (*before, *device_nodes(nodes))})


def one_backend(nodes: Iterable[str]) -> tuple[str, ...]:
    """Return the nodes of one backend, in their order: the container and the groups, else the cdevs. A process that
    opens a group cannot also use iommufd, and Kata passes `/dev/iommu` on to the guest (kata-containers #12246)."""
    in_order = sorted(set(nodes), key=node_order)
    cdevs = [node for node in in_order if node.startswith(_CDEVS)]
    legacy = [node for node in in_order if node not in cdevs and node != IOMMUFD_NODE]
    return tuple(legacy if any(node != CONTAINER_NODE for node in legacy) else cdevs)


def place_of(device: Device | None) -> dict[str, AttributeValue]:
    """Return where the device is, as attributes of its metadata: its NUMA node and its PCIe root, if they are known."""
    where = {NUMA_NODE: device.numa_node, PCIE_ROOT: device.pcie_root} if device is not None else {}
    return {name: value for name, value in where.items() if value is not None}
