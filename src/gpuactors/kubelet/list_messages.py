"""One resource's device lists as ListAndWatch's messages; only changed entries are encoded.

They are put together from encoded parts: to make a message of each device and encode it takes five times as long, and
the daemon does nothing else then. A list may have thousands of devices (kubelet's ledger decides that), each change
makes a new one, and each stream is sent it. Must not decide which devices are sent.
"""

from __future__ import annotations

from functools import lru_cache
from typing import final

from gpuactors.core.values.model import DeviceId, DeviceList, Health
from gpuactors.grpc_trio.protobuf import encode, part
from gpuactors.kubelet.pb.deviceplugin import v1beta1 as pb

_Fields = tuple[DeviceId, Health, int | None]
"""The advertised fields of a device; the API has none for the reason."""


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
        self._devices: dict[_Fields, bytes] = {}

    def of(self, device_list: DeviceList) -> ListMessage:
        """Return the message of a device list: the same object as before if its contents are the same."""
        if device_list is self._device_list:
            return self._message
        entries = [(entry.id, entry.health, entry.numa_node) for entry in device_list]
        if self._device_list is None or entries != list(self._devices):
            # An ID is in a device list once, so no entry takes another's place.
            self._devices = {entry: self._devices.get(entry) or encoded_device(*entry) for entry in entries}
            self._message = ListMessage()
            self._message.encoded = b"".join(self._devices.values())
        self._device_list = device_list
        return self._message


def encoded_device(device_id: DeviceId, health: Health, numa_node: int | None) -> bytes:
    """Encode a device as its part of the list: lists in a row are one list (protobuf.dev, Encoding, "Last One
    Wins")."""
    return part(1, part(1, device_id.encode()) + _rest(health, numa_node))


@lru_cache
def _rest(health: Health, numa_node: int | None) -> bytes:
    """Encode the fields of a device after its ID, of which a node has few values. A device without a NUMA node has no
    topology: kubelet would read an empty one as node 0."""
    topology = None if numa_node is None else pb.TopologyInfo(nodes=[pb.NumaNode(id=numa_node)])
    return encode(pb.Device(health=str(health), topology=topology))
