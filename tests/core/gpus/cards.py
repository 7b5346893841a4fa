"""Cards with two parts, of every kind that a device and its parts can be, and a core of a node with such a card."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from msgspec.structs import replace

from gpuactors.core.values.cause import Cause
from gpuactors.core.values.inventory import named
from gpuactors.core.values.mediated import HostPart, functions_of, mediated_of
from gpuactors.core.values.model import DeviceKey, PciAddress, PciFunction, ResourceName, device_key
from gpuactors.core.values.selector import parse_selector
from gpuactors.core.values.vgpu import VendorVgpu
from tests.core.builders import H100, SETTINGS, A, B, C, gpu, mediated_device
from tests.core.gpus.claim_core import ClaimCore, allocated, name
from tests.core.kinds.toy import CARD, RESOURCE, card, half
from tests.support.mdev_files import OTHER_UUID, UUID

SELECTING: Final = replace(SETTINGS, selectors=(*SETTINGS.selectors, parse_selector("vendor=f00d")))
"""What selects all of these cards."""

VFS: Final = ResourceName(f"{H100}_VF")
PROFILE: Final = "NVIDIA H100-4C"
OF_PROFILE: Final = ResourceName("nvidia.com/NVIDIA_H100-4C")
TYPE: Final = 1147


@dataclass(frozen=True)
class Card:
    """A device with two parts, each with the resource that it is listed under."""

    whole: DeviceKey
    parts: tuple[DeviceKey, DeviceKey]
    of_whole: ResourceName
    of_parts: ResourceName
    host: Callable[[str, bool], Sequence[HostPart]]
    """What sysfs shows: with this driver of the whole device, with the parts or without them."""
    driver: str
    """The driver that makes the parts."""
    cause: Cause
    """Why no claim has the whole device while parts are there."""
    part: str
    """What it is to the whole device; the next one: what the whole device is to a part."""
    parent: str
    others: frozenset[DeviceKey] = frozenset()
    """The devices above the whole one, or between it and its parts."""

    @property
    def one(self) -> DeviceKey:
        return self.parts[0]

    def core(self, *, parted: bool) -> ClaimCore:
        core = ClaimCore(settings=SELECTING)
        host = tuple(self.host(self.driver, parted))
        core.functions = {f.address: f for f in functions_of(host)}
        core.mediated = {d.key: d for d in mediated_of(host)}
        core.scanned()
        core.created(allocated(name("whole"), self.whole), allocated(name("one"), self.one))
        return core

    def now(self, core: ClaimCore, driver: str, *, parted: bool) -> None:
        """The parts are made, or have gone."""
        host = tuple(self.host(driver, parted))
        functions, mediated = functions_of(host), mediated_of(host)
        core.removed(*(core.mediated.keys() - {d.key for d in mediated}))
        core.unplugged(*(core.functions.keys() - {f.address for f in functions}))
        core.changed(*functions)
        core.made(*mediated)


def _physical(driver: str, *, parted: bool) -> PciFunction:
    return replace(gpu(A, 1, driver=driver), has_virtual_functions=parted)


def _virtual(address: PciAddress, group: int, driver: str = "vfio-pci") -> PciFunction:
    return replace(gpu(address, group, driver=driver), physical=A)


def _sriov(driver: str, parted: bool) -> Sequence[HostPart]:
    virtual = (_virtual(B, 10), _virtual(C, 11)) if parted else ()
    return (_physical(driver, parted=parted), *virtual)


def _typed(driver: str, parted: bool) -> Sequence[HostPart]:
    vgpu = VendorVgpu(TYPE, ((TYPE, PROFILE),), driver_bind=1)
    virtual = [replace(vf, driver="nvidia", vgpu=vgpu) for vf in (_virtual(B, 10), _virtual(C, 11))]
    return (_physical(driver, parted=parted), *(virtual if parted else ()))


def _mediated(driver: str, parted: bool) -> Sequence[HostPart]:
    parts = (
        (mediated_device(UUID, 70, A, PROFILE), mediated_device(OTHER_UUID, 71, A, PROFILE)) if parted else ()
    )
    return (gpu(A, 1, driver=driver), *parts)


def _mediated_of_virtual(driver: str, parted: bool) -> Sequence[HostPart]:
    """One for each virtual function, as Ampere has them."""
    if not parted:
        return (_physical(driver, parted=False),)
    virtual = (_virtual(B, 10, "nvidia"), _virtual(C, 11, "nvidia"))
    return (
        _physical(driver, parted=True),
        *virtual,
        mediated_device(UUID, 70, B, PROFILE),
        mediated_device(OTHER_UUID, 71, C, PROFILE),
    )


def _virtual_with_mediated(driver: str, parted: bool) -> Sequence[HostPart]:
    parts = (
        (mediated_device(UUID, 70, B, PROFILE), mediated_device(OTHER_UUID, 71, B, PROFILE)) if parted else ()
    )
    return (_physical("xe", parted=True), _virtual(B, 10, driver), *parts)


SRIOV: Final = Card(
    whole=device_key(A),
    parts=(device_key(B), device_key(C)),
    of_whole=H100,
    of_parts=VFS,
    host=_sriov,
    driver="xe",
    cause=Cause.VIRTUAL_FUNCTIONS,
    part="virtual function",
    parent="physical function",
)

VGPUS: Final = Card(
    whole=device_key(A),
    parts=(device_key(B), device_key(C)),
    of_whole=H100,
    of_parts=OF_PROFILE,
    host=_typed,
    driver="nvidia",
    cause=Cause.VIRTUAL_FUNCTIONS,
    part="virtual function",
    parent="physical function",
)

MDEVS: Final = Card(
    whole=device_key(A),
    parts=(UUID, OTHER_UUID),
    of_whole=H100,
    of_parts=OF_PROFILE,
    host=_mediated,
    driver="nvidia",
    cause=Cause.MEDIATED_DEVICES,
    part="part",
    parent="parent",
)

MDEVS_OF_VFS: Final = Card(
    whole=device_key(A),
    parts=(UUID, OTHER_UUID),
    of_whole=H100,
    of_parts=OF_PROFILE,
    host=_mediated_of_virtual,
    driver="nvidia",
    cause=Cause.VIRTUAL_FUNCTIONS,
    part="part",
    parent="parent",
    others=frozenset((device_key(B), device_key(C))),
)
"""The physical function, with what its virtual functions are the parents of."""

VF_WITH_MDEVS: Final = Card(
    whole=device_key(B),
    parts=(UUID, OTHER_UUID),
    of_whole=VFS,
    of_parts=OF_PROFILE,
    host=_virtual_with_mediated,
    driver="i915",
    cause=Cause.MEDIATED_DEVICES,
    part="part",
    parent="parent",
    others=frozenset((device_key(A),)),
)

HALVES: Final = Card(
    whole=device_key(CARD),
    parts=(half(0), half(1)),
    of_whole=named(card(halved=False), ()),
    of_parts=RESOURCE,
    host=lambda driver, parted: (card(driver, halved=parted),),
    driver="toy-halves",
    cause=Cause.MEDIATED_DEVICES,
    part="part",
    parent="parent",
)

CARDS: Final = {
    "virtual functions": SRIOV,
    "vGPUs by vendor VFIO": VGPUS,
    "mediated devices": MDEVS,
    "mediated devices of virtual functions": MDEVS_OF_VFS,
    "mediated devices of one virtual function": VF_WITH_MDEVS,
    "halves": HALVES,
}
