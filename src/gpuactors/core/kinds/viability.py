"""Which functions of an IOMMU group belong to a GPU, and whether the kernel gives the group to a virtual machine.

The kernel's rule is about the group as a whole: one member that the host uses keeps it from every virtual machine
(drivers/iommu/iommu.c, iommu_group_claim_dma_owner; before Linux 5.19 drivers/vfio/vfio.c, vfio_dev_viable, which
ignores PCI bridges). The same function decides for both APIs, and for the act of a claim.

Must not decide who has the group: that is `assessment/holding.py`.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import Final, Protocol, TypeVar

from gpuactors.core.values.cause import Cause
from gpuactors.core.values.model import PciAddress, is_bridge
from gpuactors.core.values.quote import quoted_id
from gpuactors.core.values.status import Reason

_WITHOUT_DMA: Final = frozenset({"pci-stub", "pcieport"})
"""The drivers of the host that do not keep a group from user space: they set `driver_managed_dma` and do no DMA
(drivers/pci/pci-stub.c, drivers/pci/pcie/portdrv.c). The others that set it are vfio drivers."""

_OWN_GROUP: Final = "give the GPU an IOMMU group of its own, by another slot or by ACS in the firmware"


class Member(Protocol):
    """A PCI function of an IOMMU group, as a scan or an act reads it."""

    @property
    def address(self) -> PciAddress: ...
    @property
    def vendor(self) -> str: ...
    @property
    def class_code(self) -> str: ...
    @property
    def driver(self) -> str | None: ...
    @property
    def vfio_bound(self) -> bool: ...
    @property
    def is_virtual(self) -> bool: ...
    @property
    def has_virtual_functions(self) -> bool: ...


_Member = TypeVar("_Member", bound=Member)


class GroupFacts(Protocol):
    """The facts about an IOMMU group beside its PCI functions, as in `PciFunction`."""

    @property
    def iommu_group(self) -> int | None: ...
    @property
    def other_members(self) -> Sequence[tuple[str, str]]: ...
    @property
    def direct_region(self) -> str: ...


def slot_of(address: PciAddress) -> str:
    """Return domain, bus and device: `0000:23:00`."""
    return address.rpartition(".")[0]


def is_companion(gpu: Member, other: Member) -> bool:
    """Return whether the other function of the group belongs to the GPU: it is in the GPU's slot, and of its vendor.

    The slot of a processor with graphics also has the host's USB controllers and its security processor, and the slot
    of a server's management controller has its graphics: those are of another vendor than the graphics. SR-IOV virtual
    functions may be in one slot with each other and with their physical function: each is given away alone.
    """
    return (
        other.address != gpu.address
        and not gpu.is_virtual
        and not other.is_virtual
        and not other.has_virtual_functions
        and slot_of(other.address) == slot_of(gpu.address)
        and other.vendor == gpu.vendor != ""
        and not is_bridge(other.class_code)
    )


def with_companions(gpu: _Member, group: Iterable[_Member]) -> tuple[_Member, ...]:
    """Return the functions that a claim may bind: the GPU and the companions that a virtual machine gets with it, in
    the order of `group`. A companion on `pci-stub` stays there."""
    return tuple(
        member
        for member in group
        if member.address == gpu.address or (is_companion(gpu, member) and member.driver not in _WITHOUT_DMA)
    )


def is_in_the_way(member: Member) -> bool:
    """Return whether the member's driver keeps its group from every virtual machine."""
    return member.driver is not None and not member.vfio_bound and member.driver not in _WITHOUT_DMA


def not_viable(
    gpu: Member, facts: GroupFacts, group: Iterable[Member], to_bind: Container[PciAddress] = ()
) -> Reason | None:
    """Return why the kernel gives the GPU's group to no virtual machine; None if it gives it to one. `to_bind` has the
    functions that a claim binds to vfio first."""
    if facts.direct_region:
        return Reason(
            Cause.RESERVED_REGION,
            f"IOMMU group {facts.iommu_group} has memory that the firmware reserves one to one "
            f"({facts.direct_region}, `direct` in reserved_regions), so the kernel gives it to no virtual machine: "
            "switch off in the firmware what reserves it, or update the firmware",
        )
    for name, driver in facts.other_members:
        if not driver.startswith("vfio"):  # vfio-platform, vfio-amba, vfio-fsl-mc
            return _not_viable(
                facts,
                f"{quoted_id(name)}, which is no PCI function, is bound to {quoted_id(driver)}: {_OWN_GROUP}",
            )
    for member in group:
        if not is_in_the_way(member) or member.address in to_bind:
            continue
        bound = f"{member.address} is bound to {quoted_id(member.driver or '')}"
        if member.address == gpu.address or is_companion(gpu, member):
            return _not_viable(facts, f"{bound}; bind it to vfio-pci or to no driver")
        return _not_viable(
            facts, f"{bound} and is no part of the GPU, so gpuactors leaves it to the host: {_OWN_GROUP}"
        )
    return None


def _not_viable(facts: GroupFacts, why: str) -> Reason:
    return Reason(Cause.GROUP_NOT_VIABLE, f"IOMMU group {facts.iommu_group} is not viable: {why}")
