"""The host's facts for passing devices through, apart from the devices: IOMMU, modules, nodes.

For `gpuactors doctor`. Synchronous, and read once; it may block. Must not open a device node, load a module or judge.
"""

from __future__ import annotations

import os
import re
import stat
from typing import Final

from msgspec import Struct

from gpuactors.core.values.text import encodable
from gpuactors.host import modules
from gpuactors.host.boot import command_line
from gpuactors.host.faults import GONE, raise_if_short
from gpuactors.host.root import (
    CDEV_NODES,
    CONTAINER_NODE,
    GROUP_NODES,
    IOMMU_GROUPS,
    IOMMUFD_NODE,
    IOMMUS,
    HostRoot,
    cdev_node,
    module_parameter,
)
from gpuactors.ports.errors import HostError

_GROUP: Final = re.compile(r"(noiommu-)?[0-9]+")
_ON: Final = "Y"
"""The kernel's text for a parameter that is on (kernel/params.c, param_get_bool)."""


class DeviceNode(Struct, frozen=True):
    """A device node that exists."""

    path: str
    """The host's own path: `/dev/vfio/51`."""
    mode: int
    """The permission bits: 0o600."""


class VfioHost(Struct, frozen=True):
    """The host as one reading found it."""

    groups: int
    """The number of IOMMU groups."""
    iommus: tuple[str, ...]
    """The IOMMUs that the kernel drives, by its own names; empty also where it does not list them."""
    command_line: str
    """The kernel command line; empty if it cannot be read."""
    loaded: bool
    """True if the driver vfio-pci is registered with the PCI bus."""
    installed: bool | None
    """True if the running kernel has the module; None where its modules are not visible, as in a pod."""
    disable_idle_d3: bool | None
    """The parameter of vfio-pci; None while it is not loaded."""
    unsafe_noiommu: bool | None
    """The parameter `enable_unsafe_noiommu_mode` of vfio; None while it is not loaded, or was built without it."""
    container: DeviceNode | None
    """The node `/dev/vfio/vfio`; None if it is missing."""
    iommufd: DeviceNode | None
    """The node `/dev/iommu`; None if it is missing."""
    group_nodes: tuple[DeviceNode, ...]
    cdevs: tuple[DeviceNode, ...]


def read(root: HostRoot) -> VfioHost:
    """Read the host below `root`. Raises `HostError` for what is there and cannot be read."""
    return VfioHost(
        groups=len(_names(root, IOMMU_GROUPS)),
        iommus=_names(root, IOMMUS),
        command_line=command_line(root),
        loaded=modules.loaded(root, modules.DEFAULT) is not None,
        installed=modules.is_installed(root, "vfio_pci"),
        disable_idle_d3=_switch(root, module_parameter("vfio_pci", "disable_idle_d3")),
        unsafe_noiommu=_switch(root, module_parameter("vfio", "enable_unsafe_noiommu_mode")),
        container=_node(root, CONTAINER_NODE),
        iommufd=_node(root, IOMMUFD_NODE),
        group_nodes=_nodes(
            root, [f"{GROUP_NODES}/{n}" for n in _names(root, GROUP_NODES) if _GROUP.fullmatch(n)]
        ),
        cdevs=_nodes(root, [cdev_node(name) for name in _names(root, CDEV_NODES)]),
    )


def _names(root: HostRoot, directory: str) -> tuple[str, ...]:
    """Return the names in a directory, sorted; none if it is not there."""
    path = root.real(directory)
    try:
        return tuple(sorted(map(encodable, os.listdir(path))))
    except OSError as error:
        if error.errno in GONE:
            return ()
        raise _unreadable(path, error) from error


def _switch(root: HostRoot, parameter: str) -> bool | None:
    """Return a parameter that is on or off; None if it is not there."""
    path = root.real(parameter)
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read(16).strip() == _ON
    except OSError as error:
        if error.errno in GONE:
            return None
        raise _unreadable(path, error) from error


def _nodes(root: HostRoot, paths: list[str]) -> tuple[DeviceNode, ...]:
    return tuple(node for path in paths if (node := _node(root, path)) is not None)


def _node(root: HostRoot, path: str) -> DeviceNode | None:
    real = root.real(path)
    try:
        return DeviceNode(path, stat.S_IMODE(os.stat(real).st_mode))
    except OSError as error:
        if error.errno in GONE:
            return None
        raise _unreadable(real, error) from error


def _unreadable(path: str, error: OSError) -> HostError:
    raise_if_short(error, path)
    return HostError(f"{path} cannot be read ({error.strerror}): run this as root")
