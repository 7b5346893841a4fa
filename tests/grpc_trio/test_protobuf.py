"""Decoding and encoding against Google's own implementation: both read what ours reads and sends, as the same."""

from __future__ import annotations

from typing import Any

import betterproto2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuactors.control.pb.control import v1 as control
from gpuactors.grpc_trio.limits import GRPC_REQUEST_FIELDS_MAX
from gpuactors.grpc_trio.protobuf import DECODABLE, decode, encode
from gpuactors.kubelet.pb.deviceplugin import v1beta1 as plugin
from gpuactors.kubelet.pb.dra_health_v1 import v1 as health
from gpuactors.kubelet.pb.dra_v1.k8s.io.kubelet.pkg.apis.dra import v1 as dra
from gpuactors.kubelet.pb.pluginregistration import pluginregistration as registration
from gpuactors.kubelet.pb.podresources import v1 as pods
from gpuactors.kubelet.translate import CALL_IDS_MAX
from tests.support.grpcio_proto import ProtoFile

FILES = {
    plugin: ProtoFile("deviceplugin.proto", "v1beta1"),
    pods: ProtoFile("podresources.proto", "v1"),
    control: ProtoFile("control.proto", "v1"),
    registration: ProtoFile("pluginregistration.proto", "pluginregistration"),
    dra: ProtoFile("dra_v1.proto", "k8s.io.kubelet.pkg.apis.dra.v1"),
    health: ProtoFile("dra_health_v1.proto", "v1"),
}

MESSAGES: list[betterproto2.Message] = [
    plugin.AllocateRequest(
        container_requests=[
            plugin.ContainerAllocateRequest(devices_ids=["0000:01:00.0", "é"]),
            plugin.ContainerAllocateRequest(),
        ]
    ),
    plugin.AllocateResponse(
        container_responses=[
            plugin.ContainerAllocateResponse(
                mounts=[plugin.Mount(container_path="/a", host_path="/b", read_only=True)]
            )
        ]
    ),
    plugin.PreferredAllocationRequest(
        container_requests=[
            plugin.ContainerPreferredAllocationRequest(available_deviceIDs=["a"], allocation_size=-2)
        ]
    ),
    plugin.PreStartContainerRequest(devices_ids=["a", "b"]),
    plugin.ListAndWatchResponse(
        devices=[
            plugin.Device(id="a", health="Healthy", topology=plugin.TopologyInfo(nodes=[plugin.NumaNode(id=-1)]))
        ]
    ),
    pods.ListPodResourcesResponse(
        pod_resources=[
            pods.PodResources(
                name="vm",
                namespace="default",
                containers=[
                    pods.ContainerResources(
                        name="compute",
                        devices=[pods.ContainerDevices(resource_name="a/b", device_ids=["x"])],
                        cpu_ids=[0, 1, 2**62, -1],
                    )
                ],
            )
        ]
    ),
    registration.PluginInfo(type="DRAPlugin", name="a", endpoint="/b", supported_versions=["v1.DRAPlugin", ""]),
    dra.NodePrepareResourcesRequest(claims=[dra.Claim(namespace="n", uid="u", name="c"), dra.Claim()]),
    dra.NodePrepareResourcesResponse(
        claims={
            "u": dra.NodePrepareResourceResponse(
                devices=[
                    dra.Device(request_names=["a"], device_name="gpu", cdi_device_ids=["k/c=d"], share_id=""),
                    dra.Device(pool_name="node"),
                ]
            ),
            "": dra.NodePrepareResourceResponse(error="held"),
        }
    ),
    health.NodeWatchResourcesResponse(
        devices=[
            health.DeviceHealth(
                device=health.DeviceIdentifier(pool_name="node", device_name="gpu"),
                health=health.HealthStatus.UNHEALTHY,
                last_updated_time=-1,
                message="é",
            ),
            health.DeviceHealth(health=health.HealthStatus(77)),
        ]
    ),
    control.ViewResponse(pid=-7, version="1", status=b'{"a": "\xff"}'),
]  # fmt: skip
NAMES = [type(message).__name__ for message in MESSAGES]


def theirs(like: betterproto2.Message) -> Any:
    """Google's class of the same message."""
    name = type(like).__name__
    package = next(module for module in FILES if getattr(module, name, None) is type(like))
    return FILES[package].message(name)


def test_every_type_of_field_that_is_used_can_be_decoded() -> None:
    for module in FILES:
        for message in vars(module).values():
            if isinstance(message, type) and issubclass(message, betterproto2.Message):
                for name, meta in message._betterproto.meta_by_field_name.items():  # type: ignore[arg-type]
                    of_map = () if meta.map_meta is None else [part.proto_type for part in meta.map_meta]
                    assert {meta.proto_type, *of_map} <= DECODABLE, (message, name)
                    assert meta.group is None, "of a oneof one field at most is set: that is not checked"


@pytest.mark.parametrize("message", MESSAGES, ids=NAMES)
def test_what_was_sent_is_what_is_read(message: betterproto2.Message) -> None:
    assert decode(bytes(message), type(message)) == message
    assert decode(theirs(message).FromString(bytes(message)).SerializeToString(), type(message)) == message


@pytest.mark.parametrize("message", MESSAGES, ids=NAMES)
def test_what_is_sent_is_what_betterproto2_would_send(message: betterproto2.Message) -> None:
    assert encode(message) == bytes(message)


def test_what_is_optional_is_sent_when_it_is_there() -> None:
    for share_id in (None, "", "a"):
        message = dra.Device(device_name="gpu", share_id=share_id)
        assert encode(message) == bytes(message)
        assert decode(encode(message), dra.Device).share_id == share_id
    for topology in (None, plugin.TopologyInfo()):  # kubelet reads an empty one as node 0
        assert decode(encode(plugin.Device(topology=topology)), plugin.Device).topology == topology


def test_a_message_that_is_encoded_already_is_not_encoded_again() -> None:
    class Encoded(plugin.Device):
        def __bytes__(self) -> bytes:
            return b"\x0a\x01a"

    assert encode(plugin.ListAndWatchResponse(devices=[Encoded()])) == b"\x0a\x03\x0a\x01a"


@pytest.mark.parametrize("number", [1 << 64, -(1 << 63) - 1])
def test_a_number_that_no_field_can_hold_is_not_sent(number: int) -> None:
    with pytest.raises(ValueError, match="more than 64 bits"):
        encode(plugin.NumaNode(id=number))


@pytest.mark.parametrize("message", MESSAGES, ids=NAMES)
@given(data=st.data())
def test_a_damaged_message_is_none_or_the_same_as_theirs(
    message: betterproto2.Message, data: st.DataObject
) -> None:
    damaged = bytearray(bytes(message))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(damaged)))
        what = data.draw(st.binary(max_size=3))
        damaged[at : at + data.draw(st.integers(0, 3))] = what
    _agrees(bytes(damaged), message)


@pytest.mark.parametrize("message", MESSAGES, ids=NAMES)
def test_a_message_that_is_cut_short_anywhere(message: betterproto2.Message) -> None:
    whole = bytes(message)
    for end in range(len(whole)):
        _agrees(whole[:end], message)


@pytest.mark.parametrize("message", MESSAGES, ids=NAMES)
def test_a_message_with_each_byte_changed(message: betterproto2.Message) -> None:
    whole = bytes(message)
    for at in range(len(whole)):
        for value in (0x00, 0x01, 0x7F, 0x80, 0xFF, whole[at] ^ 1, whole[at] ^ 2, whole[at] ^ 8):
            _agrees(whole[:at] + bytes([value]) + whole[at + 1 :], message)


def _agrees(payload: bytes, like: betterproto2.Message) -> None:
    """Ours may refuse more: they drop a field whose wire type is another one's."""
    try:
        ours = decode(payload, type(like))
    except ValueError:
        return
    expected = theirs(like).FromString(payload)
    expected.DiscardUnknownFields()
    assert theirs(like).FromString(encode(ours)) == expected


@pytest.mark.parametrize(
    ("payload", "what"),
    [
        (b"\x0a\x7f", "runs over the end"),
        (b"\x0a\x02\x0a\x0a", "runs over the end"),
        (b"\x0a\x05\x0a\x0aabc", "runs over the end"),
        (b"\x0a\x01\x0a", "runs over the end"),
        (b"\x0a\x02\x08\x05", "field devices_ids has wire type 0, not 2"),
        (b"\x08\x05", "field container_requests has wire type 0, not 2"),
        (b"\x0a\x03\x0a\x01\xff", "utf-8"),
        (b"\x0a\x01\x0b", "wire type 3"),
        (b"\x02\x00", "field number 0"),
        (b"\xff" * 12, "more than 64 bits"),
    ],
)
def test_what_is_wrong_is_said(payload: bytes, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        decode(payload, plugin.AllocateRequest)


def test_numbers_may_come_packed_or_one_by_one() -> None:
    one_by_one = b"".join(b"\x18" + bytes([n]) for n in (1, 2, 3))
    message = pods.ContainerResources(cpu_ids=[1, 2, 3])
    assert decode(bytes(message), pods.ContainerResources) == message
    assert decode(one_by_one, pods.ContainerResources) == message


def test_a_map() -> None:
    """Not among the damaged ones: of an entry with an unknown field Google's keeps nothing."""
    message = plugin.ContainerAllocateResponse(envs={"A": "1", "": "", "B": ""})
    assert decode(bytes(message), plugin.ContainerAllocateResponse) == message
    with pytest.raises(ValueError, match="field value has wire type 0"):
        decode(b"\x0a\x02\x10\x01", plugin.ContainerAllocateResponse)


def test_a_number_is_no_list() -> None:
    with pytest.raises(ValueError, match="allocation_size has wire type 2, not 0"):
        decode(b"\x1a\x01\x05", plugin.ContainerPreferredAllocationRequest)


def test_what_a_newer_peer_says_is_dropped_however_much_it_is() -> None:
    new = b"\x78\x01" * 300_000
    message = MESSAGES[0]
    read = decode(new + bytes(message), type(message))
    assert read == message
    assert bytes(read) == bytes(message)


def test_what_would_take_too_long_is_not_read_to_the_end() -> None:
    for payload in (b"\x78\x01" * 1000, b"\x0a\x00" * 111, bytes(MESSAGES[0]) + b"\x0a\x03\x0a\x01x" * 100):
        with pytest.raises(ValueError, match="more than 500 fields"):
            decode(payload, plugin.AllocateRequest, fields_max=500)
    call = b"".join(b"\x0a" + bytes([16]) + b"\x0a\x00" * 8 for _ in range(1024))
    most = decode(call, plugin.AllocateRequest, fields_max=GRPC_REQUEST_FIELDS_MAX)
    assert sum(len(c.devices_ids) for c in most.container_requests) == CALL_IDS_MAX
