"""The CDI files of the device plugin: which are to be there, and whether a runtime could resolve a device by them.

With `--allocate-as cdi` Allocate answers by CDI names. Each file is the list of its resource: every listed device by
the ID that kubelet has for it, with its nodes as they are now. A device is Healthy only while the file that is on disk
has it so. One that a pod has stays in the file until the pod has ended, also when it is gone, unless its node belongs
to another device now.

Must not decide what is listed (`device_lists.py`), and writes nothing (`acts/spec_files.py`).
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from gpuactors.core.events.deviceplugin import SpecsWritten
from gpuactors.core.kinds.container import CONTAINER_NODE, one_backend
from gpuactors.core.state import NodeState
from gpuactors.core.values.cause import Cause
from gpuactors.core.values.cdi import CdiSpecs
from gpuactors.core.values.device_spec import (
    DeviceSpec,
    DeviceSpecs,
    SpecsWanted,
    cdi_id,
    is_kind,
    resource_of,
)
from gpuactors.core.values.inventory import Device
from gpuactors.core.values.memo import memoized
from gpuactors.core.values.model import DeviceId, DeviceKey, DeviceList, ResourceName, Role, device_key
from gpuactors.core.values.quote import quoted_name
from gpuactors.core.values.status import Reason

_NONE: DeviceSpec = {}


def specs_of(state: NodeState, device_lists: Mapping[ResourceName, DeviceList]) -> DeviceSpecs | None:
    """Return the CDI files for these lists, the same object as before if none changed; None where there are none to
    keep."""
    if not state.daemon.settings.allocates_by_cdi or not state.daemon.settings.device_plugin:
        return None
    before = state.published.specs or {}
    present = {key: one_backend(d.nodes) for key, d in state.index.devices.items() if d.has_backing}
    behind = _devices_behind(state)
    specs = {
        resource: spec
        for resource, device_list in device_lists.items()
        if is_kind(resource) and (spec := _spec(device_list, present, behind, before.get(resource, _NONE)))
    }
    return before if specs == before and state.published.specs is not None else specs


def _spec(
    device_list: DeviceList,
    present: Mapping[DeviceKey, tuple[str, ...]],
    behind: Mapping[str, set[DeviceKey]],
    before: DeviceSpec,
) -> DeviceSpec:
    """Return the file of a resource; empty if it would have no device, which no CDI file may be."""
    spec = dict[DeviceId, tuple[str, ...]]()
    for entry in device_list:
        nodes = present.get(entry.key)
        if nodes is None:
            kept = before.get(entry.id, ())
            nodes = () if any(behind.get(node, set()) - {entry.key} for node in kept) else kept
        if nodes:
            spec[entry.id] = nodes
    return spec


def _devices_behind(state: NodeState) -> Mapping[str, set[DeviceKey]]:
    """Return the functions and mediated devices behind each device node that is not the container's."""
    nodes = {device_key(address): function.nodes for address, function in state.host.functions.items()}
    behind: dict[str, set[DeviceKey]] = {}
    for key, of_one in {**nodes, **{k: m.nodes for k, m in state.host.mediated.items()}}.items():
        for node in of_one:
            if node != CONTAINER_NODE:
                behind.setdefault(node, set()).add(key)
    return behind


def wanted(state: NodeState) -> SpecsWanted | None:
    """Return the files to write, or to look for before this daemon serves; None before the first device list, and once
    it has handed over."""
    role, specs = state.daemon.role, state.published.specs
    return None if specs is None or role is Role.HANDED_OVER else SpecsWanted(specs, role is Role.SERVING)


def are_known(state: NodeState) -> bool:
    """Return whether it is known which files are there, if any are to be. A daemon that takes over without that would
    list every GPU as Unhealthy until its first write, also one that a pod has been given a moment before."""
    return state.published.specs is None or state.published.specs_are_known


def still_written(state: NodeState, specs: DeviceSpecs | None) -> DeviceSpecs:
    """Return what is on disk, less what these files have not: a write without it may be under way, so that a device
    that comes back is not offered before it is written again."""
    before = state.published.written
    if specs is None or specs is state.published.specs:
        return before
    return _in_both(before, specs)


def _in_both(written: DeviceSpecs, specs: DeviceSpecs) -> DeviceSpecs:
    return {
        resource: {i: nodes for i, nodes in spec.items() if specs.get(resource, _NONE).get(i) == nodes}
        for resource, spec in written.items()
    }


def written(state: NodeState, event: SpecsWritten) -> NodeState:
    """Note which files are there, as far as they are wanted still."""
    on_disk = _in_both(event.specs, state.published.specs or {})
    published = replace(state.published, written=on_disk, unwritten=event.unwritten, specs_are_known=True)
    return replace(state, published=published)


def inputs(state: NodeState) -> tuple[object, ...]:
    """Return what the answers of `lacking` follow from beside the devices, for a comparison."""
    if not state.daemon.settings.allocates_by_cdi:
        return ()
    return state.published.written, state.published.unwritten, state.kubelet.ledger.cdi


def lacking(state: NodeState, resource: ResourceName, device_id: DeviceId, device: Device) -> Reason | None:
    """Return why no runtime could resolve the device by the CDI files; None if one could, or need not."""
    if not state.daemon.settings.allocates_by_cdi:
        return None
    if not is_kind(resource):
        return Reason(Cause.CDI_NAME_INVALID, _invalid(resource, device))
    if (path := _others_files(state.kubelet.ledger.cdi).get(cdi_id(resource, device_id))) is not None:
        message = (
            f"{quoted_name(path)} of another program defines {cdi_id(resource, device_id)} as well, so that no runtime "
            "resolves it: remove that file, or end the plugin that writes it"
        )
        return Reason(Cause.CDI_NAME_TAKEN, message)
    on_disk = state.published.written.get(resource, _NONE).get(device_id)
    if on_disk == one_backend(device.nodes):
        return None
    problem = state.published.unwritten.get(resource, "")
    message = f"its CDI file is not written{f': {problem}' if problem else ' yet'}"
    return Reason(Cause.CDI_FILE_UNWRITTEN, message)


def _invalid(resource: ResourceName, device: Device) -> str:
    domain, _, name = resource.partition("/")
    domain = domain if domain[:1].isalpha() else "example.com"
    other = f"{domain}/{name if name[:1].isalpha() else f'GPU_{name}'}"
    is_pci = ":" in device.model
    remedy = f"--resource-name {device.model}={other}" if is_pci else "--vgpu-type"
    return (
        f"{resource} is no CDI kind, whose vendor and class begin with a letter, so that no runtime resolves its "
        f"devices: give the model another name by {remedy}"
    )


@memoized
def _others_files(specs: CdiSpecs) -> Mapping[str, str]:
    """Return the CDI ids that files of other programs define, with the path of one."""
    others = [spec for spec in specs.specs if resource_of(spec.path.rpartition("/")[2]) is None]
    return {device: spec.path for spec in others for device in spec.devices}
