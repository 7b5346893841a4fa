"""Allocate's answer, which is put together from encoded parts, is what betterproto2 would encode."""

from __future__ import annotations

import pytest

from gpuactors.core.values.effects import Grant, Granted
from gpuactors.grpc_trio.protobuf import decode
from gpuactors.kubelet import translate
from gpuactors.kubelet.pb.deviceplugin import v1beta1 as pb

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
