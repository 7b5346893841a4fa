"""A GPU as its kind offers it to claims, for tests of what becomes of an offer."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from gpuactors.core.kinds.kind import HostFacts
from gpuactors.core.kinds.pci_function import PCI_FUNCTION
from gpuactors.core.values.slices import OfferedDevice
from tests.core.builders import gpu


def offered_gpu(address: str = "0000:23:00.0", group: int = 51, **facts: Any) -> OfferedDevice:
    """A free GPU on vfio, with these `facts` of its function instead of those of an H100."""
    h100 = gpu("0000:23:00.0", group, numa_node=1, pcie_root="pci0000:20")
    function = replace(h100, address=address, iommufd=True, **facts)
    groups = {} if function.iommu_group is None else {function.iommu_group: (function,)}
    host = HostFacts({function.address: function}, groups, ())
    (device,) = PCI_FUNCTION.devices(host)
    return PCI_FUNCTION.offer(device, claimed=False)
