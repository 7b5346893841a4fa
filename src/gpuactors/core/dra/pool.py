"""The pool that is to be published: which devices are in it, with which attributes and taints, in which slices.

The order of slices by name and of devices in a slice is the scheduler's preference, so it follows from the PCI
addresses alone. A device's name does as well: it survives a restart, and a hot-plug of another one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from gpuactors import limits
from gpuactors.core.dra.slices import (
    Attribute,
    Offer,
    OfferedDevice,
    ServerKeepsTaints,
    SliceDevice,
    SliceSpec,
    Taint,
)
from gpuactors.core.model import PciAddress

STANDARD = "resource.kubernetes.io/"
"""The prefix of the attributes that Kubernetes defines (k8s.io/dynamic-resource-allocation/deviceattribute)."""

_PCI_BUS_ID = re.compile(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]")
_NOT_OF_A_LABEL = re.compile(r"[^A-Za-z0-9_.-]")


@dataclass(frozen=True, slots=True)
class Pool:
    """The wanted content of all slices of one driver on this node; its generation is `slice_writes.py`'s."""

    driver: str
    node: str
    slices: tuple[tuple[SliceDevice, ...], ...]
    """At least one; the only one may be empty."""
    withdrawn: tuple[str, ...] = ()
    left_out: Mapping[PciAddress, str] = field(default_factory=dict)

    @property
    def devices(self) -> tuple[SliceDevice, ...]:
        """The devices of all slices."""
        return tuple(device for devices in self.slices for device in devices)


def wanted_pool(offer: Offer, keeps: ServerKeepsTaints) -> Pool:
    """The pool that offers what may be given to claims.

    A blocked device gets a taint where the server keeps taints. Elsewhere it is withdrawn, unless a live claim has it;
    so while it is not known, no device is offered that must not be taken.
    """
    devices: list[SliceDevice] = []
    withdrawn: list[str] = []
    left_out: dict[PciAddress, str] = {}
    for offered in sorted(offer.devices, key=lambda device: device.address):
        if _PCI_BUS_ID.fullmatch(offered.address) is None:
            left_out[offered.address] = (
                f"{offered.address} has a PCI domain of more than four digits (it is behind an Intel VMD controller), "
                "which neither Kubernetes' attribute pciBusID nor KubeVirt knows; switch VMD off for its slot"
            )
        elif offered.blocked is None or keeps is ServerKeepsTaints.YES:
            devices.append(_device(offered, offer.driver, tainted=True))
        elif offered.claimed:
            devices.append(_device(offered, offer.driver, tainted=False))
        else:
            withdrawn.append(device_name(offered.address))
    return Pool(offer.driver, offer.node, _split(devices), tuple(withdrawn), left_out)


def device_name(address: PciAddress) -> str:
    """The device's name in its slice, a DNS label: `gpu-0000-23-00-0`."""
    return f"gpu-{address.replace(':', '-').replace('.', '-')}"


def probe_spec(driver: str, node: str) -> SliceSpec:
    """A slice with one tainted device. Created in a dry run, it shows whether the server keeps taints."""
    taint = Taint(f"{driver}/unhealthy", "Probe")
    device = SliceDevice("probe", {"type": Attribute("string", "vfio")}, (taint,))
    return SliceSpec(driver, node, node, 1, 1, (device,))


def has_taints(spec: SliceSpec) -> bool:
    """Whether any device of the slice has a taint."""
    return any(device.taints for device in spec.devices)


def _split(devices: Sequence[SliceDevice]) -> tuple[tuple[SliceDevice, ...], ...]:
    tainted = any(device.taints for device in devices)
    size = limits.SLICE_TAINTED_DEVICES_MAX if tainted else limits.SLICE_DEVICES_MAX
    return tuple(tuple(devices[at : at + size]) for at in range(0, len(devices), size)) or ((),)


def _device(offered: OfferedDevice, driver: str, *, tainted: bool) -> SliceDevice:
    device = SliceDevice(device_name(offered.address), _attributes(offered))
    if offered.blocked is None or not tainted:
        return device
    taint = Taint(f"{driver}/{offered.blocked.kind}", _label_value(offered.blocked.cause))
    return replace(device, taints=(taint,))


def _attributes(offered: OfferedDevice) -> dict[str, Attribute]:
    """Scalars only (lists need a gate), at most SLICE_ATTRIBUTES_MAX; one that is not known is absent."""
    found: dict[str, str | int | bool | None] = {
        f"{STANDARD}pciBusID": offered.address,
        f"{STANDARD}pcieRoot": offered.pcie_root,
        f"{STANDARD}numaNode": offered.numa_node,
        # A DeviceClass selects GPUs by it.
        "type": "nvswitch" if offered.is_nvswitch else "vfio",
        "uuid": offered.uuid,
        "vendorID": f"0x{offered.vendor}" if offered.vendor else None,
        "deviceID": f"0x{offered.device}" if offered.device else None,
        "productName": offered.model,
        "iommuGroup": offered.iommu_group,
        "iommuFDEnabled": offered.iommufd,
    }
    return {name: _attribute(value) for name, value in found.items() if value is not None}


def _attribute(value: str | int | bool) -> Attribute:
    match value:
        case bool():
            return Attribute("bool", value)
        case int():
            return Attribute("int", value)
        case str():
            # The server counts bytes; a character that would be cut in half is left out.
            short = value.encode()[: limits.SLICE_STRING_MAX_BYTES].decode(errors="ignore")
            return Attribute("string", short)


def _label_value(text: str) -> str:
    """`text` as a taint's value, which has the rules of a label's."""
    plain = _NOT_OF_A_LABEL.sub("-", text).strip("_.-")
    return plain[: limits.TAINT_VALUE_MAX_CHARS].rstrip("_.-")
