"""Allocate's answer, which is put together from encoded parts, is what betterproto2 would encode."""

from __future__ import annotations

import pytest
from grpclib import GRPCError, Status

from gpuactors import limits
from gpuactors.core.values.effects import Grant, Granted
from gpuactors.grpc_trio.protobuf import decode
from gpuactors.kubelet import translate
from gpuactors.kubelet.pb.deviceplugin import v1beta1 as pb
from gpuactors.kubelet.translate import CALL_IDS_MAX, CALL_TEXT_MAX_CHARS

LONG = ",".join(f"0000:{n:02x}:00.0" for n in range(64))
"""Of a length that takes two bytes, as a text and as a message."""


@pytest.mark.parametrize(
    "containers",
    [
        (),
        (Grant((), ()),),
        (Grant((("GPUS", "0000:01:00.0"),), ("/dev/vfio/vfio", "/dev/vfio/1")),),
        (Grant((("GPUS", LONG), ("ÄPFEL", "ü")), tuple(f"/dev/vfio/{n}" for n in range(300))), Grant((), ())),
    ],
)
def test_the_encoded_answer_is_the_message(containers: tuple[Grant, ...]) -> None:
    message = pb.AllocateResponse(
        container_responses=[
            pb.ContainerAllocateResponse(
                envs=dict(grant.envs),
                devices=[
                    pb.DeviceSpec(container_path=node, host_path=node, permissions="mrw")
                    for node in grant.nodes
                ],
            )
            for grant in containers
        ]
    )
    encoded = bytes(translate.allocate_response(Granted(containers)))
    assert encoded == bytes(message)
    assert decode(encoded, pb.AllocateResponse) == message


ID = "0000:01:00.0"


@pytest.mark.parametrize(
    ("containers", "why"),
    [
        pytest.param([[ID] * (limits.CALL_DEVICES_MAX + 1)], "devices or containers", id="devices"),
        pytest.param([[ID]] * (limits.CALL_DEVICES_MAX + 1), "devices or containers", id="containers"),
        pytest.param([[ID] * limits.CALL_DEVICES_MAX] * 9, "9,216 device IDs", id="IDs"),
        pytest.param([["x" * CALL_TEXT_MAX_CHARS, "y"]], "262,145 characters", id="characters"),
    ],
)
def test_a_call_of_more_than_any_node_has_is_refused(containers: list[list[str]], why: str) -> None:
    """Each ID costs the registry some microseconds, and the journal keeps every call as it came."""
    request = pb.AllocateRequest([pb.ContainerAllocateRequest(ids) for ids in containers])
    with pytest.raises(GRPCError) as found:
        translate.allocate_requests(request)
    assert found.value.status is Status.INVALID_ARGUMENT
    assert why in str(found.value.message)


def test_a_call_of_as_much_as_is_allowed_is_taken() -> None:
    most = [[ID] * limits.CALL_DEVICES_MAX] * (CALL_IDS_MAX // limits.CALL_DEVICES_MAX)
    request = pb.AllocateRequest([pb.ContainerAllocateRequest(ids) for ids in most])
    assert sum(map(len, translate.allocate_requests(request))) == CALL_IDS_MAX
