"""Mediated devices as devices: vGPUs that the driver of another device has made, each with a UUID and an IOMMU group of
its own. They are usable as they are: none is ever made, removed or changed here.

Must not decide who has a device: that is `assessment/holding.py`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Final, TypeGuard, final

from gpuactors.core.kinds.container import CONTAINER_NODE, cdi_edits, node_order, place_of
from gpuactors.core.kinds.kind import Act, HostFacts, Kind
from gpuactors.core.kinds.presence import made_by_another
from gpuactors.core.values.cause import Cause
from gpuactors.core.values.claim import AllocatedDevice, AttributeValue, BoundFunction, DeviceEdits
from gpuactors.core.values.inventory import Device, KindName, is_selected
from gpuactors.core.values.mediated import MediatedDevice, is_mediated_key
from gpuactors.core.values.memo import memoized_each
from gpuactors.core.values.model import (
    DeviceKey,
    Observed,
    PciFunction,
    ResourceName,
    device_key,
)
from gpuactors.core.values.naming import MEDIATED_ENV_PREFIX, mediated_resource, profile_resource
from gpuactors.core.values.quote import quoted_id
from gpuactors.core.values.selector import Selector, matches_function, matches_type
from gpuactors.core.values.slices import NUMA_NODE, PCIE_ROOT, STANDARD, OfferedDevice, known_attributes
from gpuactors.core.values.status import Reason
from gpuactors.core.values.vfio import VfioConfig

_PREFIX: Final = "mdev-"
_UUID: Final = "mdevUUID"
"""The attribute that KubeVirt reads, before the PCI address (pkg/dra/utils.go); Kubernetes' helper has it with the
standard prefix (1.37)."""

_FOUR_DIGITS: Final = re.compile(r"[0-9a-f]{4}:.*")
_PRINTABLE: Final = re.compile(r"[^\x20-\x7e]+")
_MODEL_CHARS: Final = 128


@final
class MediatedDevices:
    """The kind of the devices that are mediated devices."""

    name: Final = KindName("mediated-device")
    acts: Final = frozenset[Act]()
    env_prefix: Final = MEDIATED_ENV_PREFIX

    def is_key(self, text: str) -> bool:
        return is_mediated_key(text)

    def slice_name(self, key: DeviceKey) -> str:
        """Return a name such as `mdev-83b8f4f2-509f-382f-3c1e-e6bfe0fa1001`."""
        return f"{_PREFIX}{key}"

    def key_of(self, slice_name: str) -> DeviceKey | None:
        key = slice_name.removeprefix(_PREFIX)
        return DeviceKey(key) if key != slice_name and is_mediated_key(key) else None

    def devices(self, facts: HostFacts) -> Iterable[Device]:
        if not facts.mediated:
            return ()
        return _mediated(
            {
                key: (device, tuple(_lineage(device, facts)), facts.selectors)
                for key, device in facts.mediated.items()
            }
        ).values()

    def blocker(self, device: Device, use: Observed | None) -> Reason | None:
        if (blocker := self.never_given(device)) is not None:
            return blocker
        if not device.has_backing:
            return self.not_backed(device)
        if (node := f"/dev/vfio/{device.group}") not in device.nodes or CONTAINER_NODE not in device.nodes:
            missing = node if CONTAINER_NODE in device.nodes else CONTAINER_NODE
            return Reason(
                Cause.NODE_MISSING,
                f"{missing} does not exist; is /dev of the host visible to gpuactors, and the module vfio loaded?",
            )
        if use is not None and use.unseen:
            return Reason(
                Cause.USE_UNREADABLE,
                f"whether IOMMU group {device.group} is in use cannot be determined: {use.unseen}",
            )
        return None

    def not_backed(self, device: Device) -> Reason:
        if device.has_backing:
            return Reason(Cause.NOT_SELECTED, "no selector matches it under this name any more (--select)")
        return _without_parent(device) or Reason(
            Cause.NOT_BOUND,
            "a mediated device on no driver: load the vendor's vfio driver, or remove and make it anew",
        )

    def never_given(self, device: Device) -> Reason | None:
        if (by_another := made_by_another(device.made_by)) is not None:
            return by_another
        if device.group is None:
            return Reason(
                Cause.NO_IOMMU_GROUP, "in no IOMMU group, which its driver makes: see the kernel's log"
            )
        return None

    def to_bind(self, device: Device) -> tuple[PciFunction, ...]:
        return ()

    def not_viable(self, device: Device, to_bind: Collection[PciFunction]) -> Reason | None:
        """Return None: its group has no other member, and no IOMMU behind it."""
        return None

    def of_the_hosts_fabric(self, device: Device, fabric: str) -> Reason | None:
        """Return None: its parent stays on its host's driver."""
        return None

    def offer(self, device: Device, *, claimed: bool) -> OfferedDevice:
        """Name the card's PCI address, NUMA node and root, as NVIDIA's driver does for a vGPU, where it has them: the
        device has none of its own. The card is its parent, or the physical function of that."""
        card = device.units[-1] if device.units else None
        has_address = card is not None and _FOUR_DIGITS.fullmatch(card.address) is not None
        attributes: dict[str, str | int | bool | None] = {
            f"{STANDARD}pciBusID": card.address if card is not None and has_address else None,
            PCIE_ROOT: device.pcie_root,
            NUMA_NODE: device.numa_node,
            "type": "vgpu",
            "vgpuFramework": "mdev",
            "profile": device.model or None,
            "parent": card.address if card is not None else None,
            "vendorID": f"0x{card.vendor}" if card is not None and card.vendor else None,
            "productName": (card.model or None) if card is not None else None,
            "iommuGroup": device.group,
        }
        return OfferedDevice(
            name=self.slice_name(device.key),
            attributes=known_attributes(attributes),
            claimed=claimed,
        )

    def edits(
        self,
        result: AllocatedDevice,
        device: Device | None,
        bound: Sequence[BoundFunction],
        config: VfioConfig,
    ) -> DeviceEdits:
        """Give the nodes of the legacy container, whatever backend the configuration prefers. The metadata have no PCI
        address: the only one is the parent's, and KubeVirt would take it for the device's."""
        nodes = sorted(device.nodes, key=node_order) if device is not None else ()
        edits = cdi_edits([node for node in nodes if config.enable_api_device or node != CONTAINER_NODE])
        key = self.key_of(result.device)
        uuid: dict[str, AttributeValue] = {_UUID: key, f"{STANDARD}{_UUID}": key} if key is not None else {}
        return DeviceEdits(result, edits, uuid | place_of(device))


def _lineage(device: MediatedDevice, facts: HostFacts) -> Iterator[PciFunction]:
    """Yield the function that it is a part of, and the physical function of that, as far as they are known."""
    parent = facts.functions.get(device.parent) if device.parent is not None else None
    if parent is None:
        return
    yield parent
    physical = facts.functions.get(parent.physical) if parent.physical is not None else None
    if physical is not None:
        yield physical


def _drives(parent: PciFunction | None) -> TypeGuard[PciFunction]:
    """Return whether the parent is on a driver of the host: with another one its devices are gone."""
    return parent is not None and parent.driver is not None and not parent.vfio_bound


def _without_parent(device: Device) -> Reason | None:
    """Return why its parent can no longer drive it; None if it can, or is no PCI function."""
    parent = next(iter(device.units), None)
    if device.parent is None or _drives(parent):
        return None
    if parent is None:
        return Reason(Cause.GONE, f"its parent {device.parent} cannot be found")
    on = f"on {quoted_id(parent.driver)}" if parent.driver is not None else "bound to no driver"
    return Reason(
        Cause.NOT_BOUND,
        f"its parent {device.parent} is {on}; bind that to the driver that makes such devices",
    )


_Inputs = tuple[MediatedDevice, tuple[PciFunction, ...], tuple[Selector, ...]]
"""The inputs of such a device: its facts, the functions that it is a part of, its parent first, and the operator's
selectors."""


@memoized_each
def _mediated(inputs: _Inputs) -> Device:
    """Return the device that is a mediated device."""
    mediated, lineage, selectors = inputs
    parent = lineage[0] if lineage else None
    return Device(
        key=mediated.key,
        kind=MEDIATED_DEVICE.name,
        resource=_own_resource(selectors, mediated, lineage) or _named(mediated, parent),
        # As the state directory keeps it (`control/served.py`).
        model=_PRINTABLE.sub("?", mediated.type_name)[:_MODEL_CHARS],
        is_selected=_is_known(mediated, parent) and _is_selected(selectors, mediated, lineage),
        units=lineage,
        members=(),
        group=mediated.iommu_group,
        parent=None if mediated.parent is None else device_key(mediated.parent),
        nodes=mediated.nodes,
        numa_node=mediated.numa_node,
        pcie_root=mediated.pcie_root,
        driver=parent.driver if parent is not None else mediated.driver,
        has_backing=mediated.driver is not None and (mediated.parent is None or _drives(parent)),
        may_be_unbinding=False,
        fault=mediated.fault,
        iommufd=False,
        made_by=mediated.made_by,
    )


MEDIATED_DEVICE: Final[Kind] = MediatedDevices()


def _own_resource(
    selectors: Iterable[Selector], mediated: MediatedDevice, lineage: Sequence[PciFunction]
) -> ResourceName | None:
    """Return the resource of the operator's first rule that names its type; None if none does. A rule without `mdev`
    names functions."""
    type_id, type_name = mediated.type_id or "", mediated.type_name
    for s in selectors:
        if s.resource is None or s.mdev is None:
            continue
        if matches_type(s, type_id, type_name) and _is_of_function(s, lineage):
            return ResourceName(s.resource)
    return None


def _named(mediated: MediatedDevice, parent: PciFunction | None) -> ResourceName:
    """Return the resource of its type: in the domain of its parent's vendor, or in that of the driver that made it if
    the parent is no PCI function."""
    if mediated.parent is None:
        return mediated_resource(mediated.type_id or "", mediated.type_name)
    return profile_resource(parent.vendor if parent is not None else "", mediated.type_name)


def _is_known(mediated: MediatedDevice, parent: PciFunction | None) -> bool:
    """Return whether its resource is known: its type, and its parent's vendor."""
    return bool(mediated.type_name) and (
        mediated.parent is None or (parent is not None and parent.vendor != "")
    )


def _is_selected(
    selectors: Iterable[Selector], mediated: MediatedDevice, lineage: Sequence[PciFunction]
) -> bool:
    """Return whether the operator's selectors choose it: by its parent, by the physical function of that, or by its
    type."""
    type_id, type_name = mediated.type_id or "", mediated.type_name
    by_type = [s for s in selectors if s.mdev is not None and matches_type(s, type_id, type_name)]
    of_it = [s for s in by_type if _is_of_function(s, lineage)]
    by_function = [s for s in selectors if s.mdev is None]
    if any(s.exclude for s in of_it) or any(
        s.exclude and _is_of_function(s, lineage) for s in by_function if lineage
    ):
        return False
    return bool(of_it) or any(is_selected(by_function, function) for function in lineage)


def _is_of_function(selector: Selector, lineage: Sequence[PciFunction]) -> bool:
    """Return whether one of the functions meets what the selector says of functions, if anything."""
    if selector.vendor is selector.device is selector.class_prefix is selector.address is None:
        return True
    return any(
        matches_function(
            selector, vendor=f.vendor, device=f.device, class_code=f.class_code, address=f.address
        )
        for f in lineage
    )
