"""The kernels that a scenario can run on, by the names that scenarios, `--kernel` and the artifacts use.

Values only: `provision.py` fetches them, `build_kernel.py` builds the one that Debian does not have.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

CDEV: Final = "cdev"
"""CONFIG_IOMMUFD and CONFIG_VFIO_DEVICE_CDEV: `/dev/iommu` and `/dev/vfio/devices/vfioN`."""

SRIOV: Final = "SR-IOV"
"""CONFIG_PCI_IOV, and the modules `igb`, `igbvf` and `pci-pf-stub`."""

BUILT_MODULES: Final = "modules that are built"
"""`mtty` and `vgpu_standin` of `build_modules.py`."""


@dataclass(frozen=True, slots=True)
class DebianKernel:
    """What `meta` depends on in the machine's own suite, or in that suite's backports: a package whose name begins with
    `package_prefix`. The `-cloud` kernels will not do: they lack 9p."""

    package_prefix: str
    backports: bool = False
    meta: str = "linux-image-amd64"
    has: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class BuiltKernel:
    """Built from Debian's `source` package of the backports; `recipe` is the command that does it."""

    source: str
    recipe: str
    has: frozenset[str]


KernelSource = DebianKernel | BuiltKernel

KERNELS: Final[Mapping[str, KernelSource]] = MappingProxyType(
    {
        "6.1": DebianKernel("linux-image-6.1.", has=frozenset({SRIOV, BUILT_MODULES})),
        "6.12": DebianKernel("linux-image-6.12.", backports=True, has=frozenset({SRIOV})),
        "iommufd": BuiltKernel("linux-source-6.12", "just vm-iommufd-kernel", frozenset({CDEV})),
    }
)
"""In the order in which the table shows them. `has` is what scenarios may need and not every kernel has."""

DEFAULT_KERNEL: Final = "6.1"
"""Where the default suite runs: Debian 12's own."""

NOT_BY_DEFAULT: Final[tuple[str, ...]] = ()
"""Of a scenario that is no part of the default suite: its subject is a figure, or kubelet, and not the kernel."""
