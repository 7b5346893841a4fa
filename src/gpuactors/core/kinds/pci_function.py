"""Whole PCI functions as devices: GPUs, NVSwitches, and whatever else a selector chooses.

Must not decide who has a device: that is `assessment/holding.py`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from typing import Final
from uuid import NAMESPACE_DNS, uuid5

from gpuactors.core.kinds.container import CONTAINER_NODE, IOMMUFD_NODE, cdi_edits, place_of
from gpuactors.core.kinds.kind import Act, HostFacts, Kind
from gpuactors.core.kinds.viability import not_viable, with_companions
from gpuactors.core.values.cause import Cause
from gpuactors.core.values.claim import AllocatedDevice, AttributeValue, BoundFunction, DeviceEdits
from gpuactors.core.values.inventory import (
    Device,
    KindName,
    described,
    ids_of,
    is_selected,
    may_be_unbinding,
    named,
)
from gpuactors.core.values.memo import memoized_each
from gpuactors.core.values.model import (
    NVIDIA,
    DeviceKey,
    Observed,
    PciFunction,
    ResourceName,
    device_key,
    is_pci_address,
)
from gpuactors.core.values.naming import ENV_PREFIX
from gpuactors.core.values.quote import quoted_id
from gpuactors.core.values.selector import Selector
from gpuactors.core.values.slices import (
    NUMA_NODE,
    PCIE_ROOT,
    STANDARD,
    OfferedDevice,
    known_attributes,
    quantity,
)
from gpuactors.core.values.status import Reason
from gpuactors.core.values.vfio import BackendPolicy, VfioConfig

SWITCH_ON: Final = (
    "switch the IOMMU on in the firmware, and with an Intel CPU on the kernel command line (intel_iommu=on)"
)
"""The remedy where there is no IOMMU."""

PCI_BUS_ID: Final = f"{STANDARD}pciBusID"

_SLICE_NAME: Final = r"(?:gpu|vfio)-([0-9a-f]{4,8})-([0-9a-f]{2})-([01][0-9a-f])-([0-7])"

_FOUR_DIGITS: Final = re.compile(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]")

_VMD_DOMAINS: Final = 0x10000
"""The first PCI domain behind a VMD controller: ACPI's have 16 bits (drivers/pci/controller/vmd.c,
vmd_find_free_domain)."""


def _is_behind_vmd(function: PciFunction) -> bool:
    return int(function.address.partition(":")[0], 16) >= _VMD_DOMAINS


class PciFunctions:
    """The kind of the devices that are whole PCI functions, and what all devices that are PCI functions share."""

    name = KindName("pci-function")
    acts = frozenset({Act.BIND})
    env_prefix: Final = ENV_PREFIX

    def is_key(self, text: str) -> bool:
        return is_pci_address(text)

    def slice_name(self, key: DeviceKey) -> str:
        """Return a name such as `gpu-0000-23-00-0`."""
        return f"gpu-{key.replace(':', '-').replace('.', '-')}"

    def key_of(self, slice_name: str) -> DeviceKey | None:
        """Accept also the name that NVIDIA's driver makes of the address: `vfio-0000-23-00-0`."""
        match = re.fullmatch(_SLICE_NAME, slice_name)
        return None if match is None else DeviceKey("{}:{}:{}.{}".format(*match.groups()))

    def devices(self, facts: HostFacts) -> Iterable[Device]:
        iommufd = has_iommufd(facts)
        whole = (function for function in facts.functions.values() if not function.is_virtual)
        return _whole(
            {f.address: (f, members_of(f, facts), facts.selectors, iommufd) for f in whole}
        ).values()

    def blocker(self, device: Device, use: Observed | None) -> Reason | None:
        function = device.units[0]
        if (blocker := not_whole(function)) is not None:
            return blocker
        if not function.vfio_bound:
            return self.not_backed(device)
        if (blocker := without_group(function)) is not None:
            return blocker
        if (blocker := not_viable(function, function, device.members)) is not None:
            return blocker
        if (blocker := _without_node(function)) is not None:
            return blocker
        if use is not None and use.unseen:
            return Reason(
                Cause.USE_UNREADABLE,
                f"whether IOMMU group {function.iommu_group} is in use cannot be determined: {use.unseen}",
            )
        return None

    def not_backed(self, device: Device) -> Reason:
        function = device.units[0]
        if function.vfio_bound:
            return Reason(
                Cause.NOT_SELECTED, "no selector matches it under this name any more (--select, pci.ids)"
            )
        if (part := not_whole(function)) is not None:
            return part
        if function.driver is None:
            return Reason(Cause.NOT_BOUND, "bound to no driver; bind it to vfio-pci to offer it")
        return Reason(
            Cause.NOT_BOUND,
            f"bound to {quoted_id(function.driver)}, which is no vfio driver; bind it to vfio-pci to offer it",
        )

    def never_given(self, device: Device) -> Reason | None:
        function = device.units[0]
        return without_group(function) or not_whole(function) or with_parts(device)

    def to_bind(self, device: Device) -> tuple[PciFunction, ...]:
        function = device.units[0]
        return with_companions(function, device.members)

    def not_viable(self, device: Device, to_bind: Collection[PciFunction]) -> Reason | None:
        function = device.units[0]
        return not_viable(function, function, device.members, {f.address for f in to_bind})

    def of_the_hosts_fabric(self, device: Device, fabric: str) -> Reason | None:
        """Refuse, as the host's fabric manager knows only the GPUs on the host's driver: after the bind it could not
        name this one, and no other program partitions the fabric for it."""
        function = device.units[0]
        if (
            not fabric
            or function.driver is None
            or function.vfio_bound
            or function.is_nvswitch
            or function.vendor != NVIDIA
        ):
            return None
        return Reason(
            Cause.FABRIC_OF_HOST,
            f"{function.address} is on its host's driver, in an NVLink fabric that the host runs ({fabric}): bind "
            "GPUs, and NVSwitches that are PCI functions, to vfio-pci at boot, or allow it by --nvswitch allow",
        )

    def offer(self, device: Device, *, claimed: bool) -> OfferedDevice:
        function = device.units[0]
        attributes: dict[str, str | int | bool | None] = {
            PCI_BUS_ID: device.key,
            PCIE_ROOT: device.pcie_root,
            NUMA_NODE: device.numa_node,
            # DeviceClasses select GPUs by the type.
            "type": "nvswitch" if function.is_nvswitch else "vfio",
            # As NVIDIA's driver makes it for a device of this type: vfio does not show the GPU's own.
            "uuid": None if function.is_nvswitch else str(uuid5(NAMESPACE_DNS, device.key)),
            "vendorID": f"0x{function.vendor}" if function.vendor else None,
            "deviceID": f"0x{function.device}" if function.device else None,
            "productName": function.model or None,
            "iommuGroup": device.group,
            "iommuFDEnabled": device.iommufd,
        }
        return OfferedDevice(
            name=self.slice_name(device.key),
            attributes=known_attributes(attributes),
            # As NVIDIA's driver: the memory behind the BARs, which is more than the GPU's own.
            capacity={"addressableMemory": quantity(function.memory_bytes)} if function.memory_bytes else {},
            invalid=_invalid(device),
            claimed=claimed,
        )

    def edits(
        self,
        result: AllocatedDevice,
        device: Device | None,
        bound: Sequence[BoundFunction],
        config: VfioConfig,
    ) -> DeviceEdits:
        """Take the nodes from `bound`, as the last act read them. KubeVirt reads the PCI address (pkg/dra/utils.go),
        and is to read where the device is (kubevirt #18817)."""
        key = self.key_of(result.device)
        address: dict[str, AttributeValue] = {PCI_BUS_ID: key} if key is not None else {}
        return DeviceEdits(result, cdi_edits(_nodes_of_claim(bound, config)), address | place_of(device))


def _invalid(device: Device) -> str:
    """Return why no slice can have the device, as a sentence; empty if one can."""
    if _FOUR_DIGITS.fullmatch(device.key):
        return ""
    return (
        f"{device.key} has a PCI domain of more than four digits (it is behind an Intel VMD controller), "
        "which neither Kubernetes' attribute pciBusID nor KubeVirt knows; switch VMD off for its slot"
    )


_Inputs = tuple[PciFunction, tuple[PciFunction, ...], tuple[Selector, ...], bool]
"""The inputs of such a device: the function, all known functions of its IOMMU group, the operator's selectors, and
`Device.iommufd`."""


@memoized_each
def _whole(inputs: _Inputs) -> Device:
    """Return the device that consists of a whole PCI function."""
    function, members, selectors, iommufd = inputs
    return device_of(
        (function,),
        members,
        selectors,
        kind=PCI_FUNCTION.name,
        resource=named(function, selectors),
        iommufd=iommufd,
    )


def has_iommufd(facts: HostFacts) -> bool:
    """Return the value of `Device.iommufd`."""
    return any(function.iommufd for function in facts.functions.values())


def members_of(function: PciFunction, facts: HostFacts) -> tuple[PciFunction, ...]:
    """Return all known functions of the function's IOMMU group; the function alone if it is in none."""
    return (function,) if function.iommu_group is None else facts.groups[function.iommu_group]


def device_of(
    units: tuple[PciFunction, ...],
    members: tuple[PciFunction, ...],
    selectors: Iterable[Selector],
    *,
    kind: KindName,
    resource: ResourceName,
    iommufd: bool,
) -> Device:
    """Return the device that a PCI function is, the first of `units`. The arguments are as in `Device`."""
    function = units[0]
    return Device(
        key=device_key(function.address),
        kind=kind,
        resource=resource,
        model=ids_of(function),
        is_selected=is_selected(selectors, function),
        units=units,
        members=members,
        group=function.iommu_group,
        parent=None if function.physical is None else device_key(function.physical),
        # A group is opened as a whole, with each of its functions on a vfio driver.
        nodes=tuple(dict.fromkeys([n for member in members if member.vfio_bound for n in member.nodes])),
        numa_node=function.numa_node,
        pcie_root=function.pcie_root,
        driver=function.driver,
        has_backing=function.vfio_bound,
        may_be_unbinding=may_be_unbinding(function),
        fault=function.fault,
        iommufd=iommufd,
    )


PCI_FUNCTION: Final[Kind] = PciFunctions()


def not_whole(function: PciFunction) -> Reason | None:
    """Return why it is no whole GPU, whatever driver it is on; None if it is one. A pod that has it keeps it."""
    if function.has_virtual_functions:
        return Reason(
            Cause.VIRTUAL_FUNCTIONS,
            "its virtual functions are active, and they would go with its driver: allocate those instead, or write 0 "
            "to its sriov_numvfs when nobody uses them",
        )
    return None


def with_parts(device: Device) -> Reason | None:
    """Return that devices were made of it which would go with its driver; None if none were."""
    if not device.parts:
        return None
    subject = described(device.key, device.parts[0], is_part=True)
    more = f" and {len(device.parts) - 1} more" if len(device.parts) > 1 else ""
    is_virtual = is_pci_address(device.parts[0])
    return Reason(
        Cause.VIRTUAL_FUNCTIONS if is_virtual else Cause.MEDIATED_DEVICES,
        f"{subject}{more} would go with its driver: remove {'them' if more else 'it'} when nobody uses "
        f"{'them' if more else 'it'}",
    )


def without_group(function: PciFunction) -> Reason | None:
    """Return why it is in no IOMMU group of the hardware, whatever driver it is on; None if it is in one."""
    if function.without_iommu:
        return Reason(
            Cause.NO_IOMMU_MODE,
            f"vfio drives it without an IOMMU (/dev/vfio/noiommu-{function.iommu_group}): a VM's GPU "
            f"could access all of the node's memory, and QEMU refuses it; {SWITCH_ON}, and remove the parameter "
            "enable_unsafe_noiommu_mode of the module vfio",
        )
    if function.iommu_group is None and _is_behind_vmd(function):
        return Reason(
            Cause.BEHIND_VMD,
            "in no IOMMU group: it is behind an Intel VMD controller (its PCI domain is "
            f"{function.address.partition(':')[0]}), whose devices cannot be passed through to VMs; switch VMD off for "
            "its slot in the firmware",
        )
    if function.iommu_group is None:
        return Reason(Cause.NO_IOMMU_GROUP, f"in no IOMMU group; {SWITCH_ON}")
    return None


def _without_node(function: PciFunction) -> Reason | None:
    if function.has_node:
        return None
    if "/dev/vfio/vfio" not in function.nodes:
        return Reason(
            Cause.NODE_MISSING,
            f"neither /dev/vfio/{function.iommu_group} nor /dev/vfio/vfio exists; is /dev of the host visible to "
            "gpuactors, and are the modules vfio and vfio_pci loaded?",
        )
    return Reason(
        Cause.NODE_MISSING,
        f"/dev/vfio/{function.iommu_group} does not exist; is /dev of the host visible to gpuactors, "
        "and the module vfio_pci loaded?",
    )


def _nodes_of_claim(functions: Sequence[BoundFunction], config: VfioConfig) -> tuple[str, ...]:
    """Return the device nodes, of one backend only: a process that opens a group cannot also use iommufd.

    With iommufd each function of the group has a node of its own, and a VM needs all of them; the group's node serves
    all its functions.
    """
    if not functions:
        return ()
    cdevs = [function.cdev for function in functions if function.cdev is not None]
    if config.backend_policy is BackendPolicy.PREFER_IOMMUFD and functions[0].cdev is not None:
        nodes = [f"/dev/vfio/devices/{cdev}" for cdev in cdevs]
        return tuple(nodes) + ((IOMMUFD_NODE,) if config.enable_api_device else ())
    groups = dict.fromkeys(f.iommu_group for f in functions if f.iommu_group is not None)
    nodes = [f"/dev/vfio/{group}" for group in groups]
    return tuple(nodes) + ((CONTAINER_NODE,) if config.enable_api_device else ())
