"""One resource's device lists as ListAndWatch's messages; only changed entries are encoded.

Encoding takes some 4 microseconds for a device, in which the daemon does nothing else. A list may have hundreds of
devices (kubelet's ledger decides that), each change makes a new one, and each stream is sent it. Must not decide which
devices are sent.
"""

from __future__ import annotations

from typing import final

from gpuactors.core.values.model import DeviceId, DeviceList, Health
from gpuactors.grpc_trio.protobuf import encode
from gpuactors.kubelet.pb.deviceplugin import v1beta1 as pb

_Fields = tuple[DeviceId, Health, int | None]
"""The advertised fields of a device; there is none for our reason."""


class ListMessage(pb.ListAndWatchResponse):
    """An encoded device list."""

    encoded: bytes

    def __bytes__(self) -> bytes:
        return self.encoded


@final
class ListMessages:
    """The messages of one resource's device lists. Keeps the encoded entries of the last one only."""

    def __init__(self) -> None:
        self._device_list: DeviceList | None = None
        self._message = ListMessage()
        self._devices: dict[_Fields, tuple[pb.Device, bytes]] = {}

    def of(self, device_list: DeviceList) -> ListMessage:
        """The message of a device list: the same object as before where its contents are the same."""
        if device_list is self._device_list:
            return self._message
        entries = [(entry.id, entry.health, entry.numa_node) for entry in device_list]
        if self._device_list is None or entries != list(self._devices):
            # An ID is in a device list once, so no entry takes another's place.
            self._devices = {entry: self._devices.get(entry) or _device(*entry) for entry in entries}
            self._message = ListMessage(devices=[device for device, _ in self._devices.values()])
            self._message.encoded = b"".join(encoded for _, encoded in self._devices.values())
        self._device_list = device_list
        return self._message


def _device(device_id: DeviceId, health: Health, numa_node: int | None) -> tuple[pb.Device, bytes]:
    """A device, and its part of the list in bytes: lists in a row are one list (protobuf.dev, Encoding, "Last One
    Wins"). One without a NUMA node has no topology at all: kubelet would read an empty one as node 0."""
    topology = None if numa_node is None else pb.TopologyInfo(nodes=[pb.NumaNode(id=numa_node)])
    device = pb.Device(id=device_id, health=str(health), topology=topology)
    return device, encode(pb.ListAndWatchResponse(devices=[device]))
