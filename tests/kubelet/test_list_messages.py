"""A list is encoded once for all streams, and of it only what kubelet has not got before."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpuactors.core.values.cause import Cause
from gpuactors.core.values.model import AdvertisedDevice, DeviceId, DeviceKey, DeviceList, Health
from gpuactors.kubelet import list_messages
from gpuactors.kubelet.list_messages import ListMessages
from gpuactors.kubelet.pb.deviceplugin import v1beta1 as pb


def entry(device: str, health: Health = Health.HEALTHY, numa_node: int | None = None) -> AdvertisedDevice:
    return AdvertisedDevice(DeviceId(device), DeviceKey(device), health, numa_node, "free", Cause.FREE)


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The IDs of the devices that were encoded."""
    ids: list[str] = []
    real = list_messages.encoded_device

    def device(device_id: DeviceId, health: Health, numa_node: int | None) -> bytes:
        ids.append(device_id)
        return real(device_id, health, numa_node)

    monkeypatch.setattr(list_messages, "encoded_device", device)
    return ids


LISTS = st.lists(
    st.builds(entry, st.text(max_size=5), st.sampled_from(Health), st.none() | st.integers(0, 300)),
    unique_by=lambda a: a.id,
    max_size=6,
).map(tuple)


@given(st.lists(LISTS, min_size=1, max_size=4))
def test_the_bytes_say_what_the_list_says(lists: list[DeviceList]) -> None:
    messages = ListMessages()
    for device_list in lists:
        message = pb.ListAndWatchResponse.parse(messages.of(device_list).SerializeToString())
        topologies = [device.topology for device in message.devices]
        nodes = [None if t is None else [n.id for n in t.nodes] for t in topologies]
        assert nodes == [None if a.numa_node is None else [a.numa_node] for a in device_list]
        assert [(d.id, d.health) for d in message.devices] == [(a.id, str(a.health)) for a in device_list]


def test_only_what_changed_is_encoded(encoded: list[str]) -> None:
    messages = ListMessages()
    device_list = tuple(entry(f"{n:03}") for n in range(500))
    first = messages.of(device_list)
    assert len(encoded) == 500
    encoded.clear()
    assert messages.of(device_list) is first
    assert messages.of(tuple(replace(a, reason="another") for a in device_list)) is first, (
        "no field has the reason"
    )
    assert encoded == []
    changed = (
        *device_list[:7],
        replace(device_list[7], health=Health.UNHEALTHY),
        *device_list[8:],
        entry("new"),
    )
    assert messages.of(changed) is not first
    assert encoded == ["007", "new"]


def test_nothing_is_kept_of_what_is_not_listed_any_more(encoded: list[str]) -> None:
    messages = ListMessages()
    messages.of((entry("a"), entry("b")))
    messages.of((entry("b"),))
    messages.of((entry("a"), entry("b")))
    assert encoded == ["a", "b", "a"]
