"""The file `kubelet_internal_checkpoint` as kubelet 1.36 writes and reads it, checksum included.

Text in, values out, and back. Must not touch a file: `transport.py` knows where it is.

The checksum is FNV-1a (32 bits) of the data as Go's spew prints it with `%#v`, without pointer addresses and with
sorted maps (checkpointmanager/checksum, apiserver/pkg/util/hash). Two files of real nodes are in the tests.

Sources: pkg/kubelet/cm/devicemanager/checkpoint/checkpoint.go and pod_devices.go of kubelet 1.36.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterable, Mapping
from typing import Any, Final

from gpuactors.kubelet.pb.deviceplugin.v1beta1 import ContainerAllocateResponse
from gpuactors_simulation.kubelet.values import Allocated, Checkpoint, LedgerEntry

NODE_WITHOUT_TOPOLOGY: Final = -1
"""The key of devices without NUMA nodes (nodeWithoutTopology)."""

CONTAINER: Final = "compute"
"""The one container of a pod here; virt-launcher's is called so."""

_FNV_OFFSET: Final = 0x811C9DC5
_FNV_PRIME: Final = 0x01000193


class CorruptCheckpointError(Exception):
    """Kubelet cannot read the file; it goes on with an empty ledger and a line in its log."""


def encode(checkpoint: Checkpoint) -> str:
    """Return the file's content. An empty ledger is `null`, as Go writes a slice that was never made."""
    entries = [_entry(uid, resource, entry) for (uid, resource), entry in checkpoint.entries.items()]
    data = {
        "PodDeviceEntries": entries or None,
        "RegisteredDevices": {r: list(devices) for r, devices in sorted(checkpoint.registered.items())},
    }
    return json.dumps({"Data": data, "Checksum": checksum(data)}, separators=(",", ":"))


def decode(text: str) -> Checkpoint:
    """Return the file's contents as values. Raises `CorruptCheckpointError`."""
    try:
        content = json.loads(text)
        data, written = content["Data"], content["Checksum"]
        if checksum(data) != written:
            raise CorruptCheckpointError("checkpoint is corrupted")
        return Checkpoint(
            entries={
                (entry["PodUID"], entry["ResourceName"]): _ledger_entry(entry)
                for entry in data["PodDeviceEntries"] or ()
            },
            registered={r: tuple(devices or ()) for r, devices in data["RegisteredDevices"].items()},
        )
    except (ValueError, LookupError, TypeError, AttributeError, binascii.Error) as exc:
        raise CorruptCheckpointError(f"checkpoint is corrupted: {exc!r}") from exc


def allocated_of(response: ContainerAllocateResponse) -> Allocated:
    """Return a plugin's answer for one container."""
    return Allocated(
        envs=dict(response.envs),
        nodes=tuple(device.host_path for device in response.devices),
        response=bytes(response),
        cdi_ids=tuple(device.name for device in response.cdi_devices),
    )


def by_numa_node(entry: LedgerEntry) -> Mapping[int, list[str]]:
    """Return the devices of an entry by NUMA node; a device with two nodes is there twice (DevicesPerNUMA)."""
    by_node: dict[int, list[str]] = {}
    for device in entry.devices:
        for node in entry.numa_nodes[device] or (NODE_WITHOUT_TOPOLOGY,):
            by_node.setdefault(node, []).append(device)
    return by_node


def _entry(uid: str, resource: str, entry: LedgerEntry) -> dict[str, Any]:
    by_node = {str(node): devices for node, devices in by_numa_node(entry).items()}
    return {
        "PodUID": uid,
        "ContainerName": CONTAINER,
        "ResourceName": resource,
        "DeviceIDs": dict(sorted(by_node.items())),
        "AllocResp": base64.b64encode(entry.response).decode("ascii"),
    }


def _ledger_entry(entry: Mapping[str, Any]) -> LedgerEntry:
    nodes: dict[str, list[int]] = {}
    for node, devices in entry["DeviceIDs"].items():
        for device in devices:
            numa = nodes.setdefault(device, [])
            if int(node) != NODE_WITHOUT_TOPOLOGY:
                numa.append(int(node))
    allocated = allocated_of(ContainerAllocateResponse.parse(base64.b64decode(entry["AllocResp"])))
    return LedgerEntry(
        devices=tuple(sorted(nodes)),
        numa_nodes={device: tuple(sorted(numa)) for device, numa in nodes.items()},
        envs=allocated.envs,
        nodes=allocated.nodes,
        response=allocated.response,
        cdi_ids=allocated.cdi_ids,
    )


# --- the checksum ---------------------------------------------------------------------------------------------


def checksum(data: Mapping[str, Any]) -> int:
    """Kubelet's checksum of the file's `Data`, which is given as JSON has it."""
    digest = _FNV_OFFSET
    for byte in _spew(data).encode():
        digest = (digest ^ byte) * _FNV_PRIME & 0xFFFFFFFF
    return digest


def _spew(data: Mapping[str, Any]) -> str:
    """`checkpointData` as `%#v` of spew prints it. A field's type is named, an element's is not."""
    entries = data["PodDeviceEntries"]
    printed = "<nil>" if entries is None else f"[{' '.join(map(_spew_entry, entries))}]"
    registered = _spew_map(sorted(data["RegisteredDevices"].items()))
    return (
        f"(checkpoint.checkpointData){{PodDeviceEntries:([]checkpoint.PodDevicesEntry){printed} "
        f"RegisteredDevices:(map[string][]string){registered}}}"
    )


def _spew_entry(entry: Mapping[str, Any]) -> str:
    by_node = sorted(entry["DeviceIDs"].items(), key=lambda item: int(item[0]))
    response = " ".join(map(str, base64.b64decode(entry["AllocResp"])))
    return (
        f"{{PodUID:(string){entry['PodUID']} ContainerName:(string){entry['ContainerName']} "
        f"ResourceName:(string){entry['ResourceName']} "
        f"DeviceIDs:(checkpoint.DevicesPerNUMA){_spew_map(by_node)} AllocResp:([]uint8)[{response}]}}"
    )


def _spew_map(items: Iterable[tuple[str, list[str] | None]]) -> str:
    printed = (
        f"{key}:{'<nil>' if values is None else '[' + ' '.join(values) + ']'}" for key, values in items
    )
    return f"map[{' '.join(printed)}]"
