"""The core's values as messages of the device plugin API, and back. No other module knows both."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Final, TypeVar

from grpclib import GRPCError, Status

from gpuactors import limits
from gpuactors.core.events.deviceplugin import PreferenceRequest
from gpuactors.core.values.effects import Answer, Grant, Granted, Preferred, Ready, Refused
from gpuactors.core.values.model import DeviceId
from gpuactors.grpc_trio.protobuf import part
from gpuactors.kubelet.pb.deviceplugin import v1beta1 as pb

CALL_IDS_MAX: Final = 8192
"""Limit on the device IDs in one device plugin call, all containers together. Kubelet asks for one container at a time,
and names every available device of the resource: 16 on the largest node. So many cost the registry some 20 ms."""

CALL_TEXT_MAX_CHARS: Final = 256 * 1024
"""Limit on the characters of all device IDs in one call: CALL_IDS_MAX of more than twice the length of a PCI address.
The journal keeps every call as it came."""

T = TypeVar("T")


def allocate_requests(request: pb.AllocateRequest) -> tuple[tuple[DeviceId, ...], ...]:
    """Return one tuple of device IDs per container. Raises `GRPCError` if there are more than any node has."""
    requests = tuple(_ids(c.devices_ids) for c in _bounded(request.container_requests))
    _refuse_too_many(requests)
    return requests


def preference_requests(request: pb.PreferredAllocationRequest) -> tuple[PreferenceRequest, ...]:
    """Return one preference request per container. Raises as `allocate_requests`."""
    requests = tuple(
        PreferenceRequest(
            available=_ids(c.available_deviceIDs),
            must_include=_ids(c.must_include_deviceIDs),
            size=c.allocation_size,
        )
        for c in _bounded(request.container_requests)
    )
    _refuse_too_many([ids for r in requests for ids in (r.available, r.must_include)])
    return requests


def pre_start_devices(request: pb.PreStartContainerRequest) -> tuple[DeviceId, ...]:
    """Return the device IDs of the container. Raises as `allocate_requests`."""
    ids = _ids(request.devices_ids)
    _refuse_too_many([ids])
    return ids


def _ids(ids: Sequence[str]) -> tuple[DeviceId, ...]:
    return tuple(map(DeviceId, _bounded(ids)))


def _bounded(items: Sequence[T]) -> Sequence[T]:
    """Return the devices or containers. Raises `GRPCError` INVALID_ARGUMENT where there are more than any node has."""
    if len(items) > limits.CALL_DEVICES_MAX:
        raise GRPCError(
            Status.INVALID_ARGUMENT,
            f"{len(items)} devices or containers in one call: no node has more than {limits.CALL_DEVICES_MAX}",
        )
    return items


def _refuse_too_many(requests: Sequence[Sequence[DeviceId]]) -> None:
    """Raise `GRPCError` INVALID_ARGUMENT where all containers together name more than any node has."""
    count, chars = sum(map(len, requests)), sum(len(i) for ids in requests for i in ids)
    if count > CALL_IDS_MAX or chars > CALL_TEXT_MAX_CHARS:
        raise GRPCError(
            Status.INVALID_ARGUMENT,
            f"{count:,} device IDs of {chars:,} characters in one call: at most {CALL_IDS_MAX:,} of "
            f"{CALL_TEXT_MAX_CHARS:,} characters are answered",
        )


class AllocateMessage(pb.AllocateResponse):
    """An encoded answer."""

    encoded: bytes

    def __bytes__(self) -> bytes:
        return self.encoded


def allocate_response(answer: Answer) -> AllocateMessage:
    """Encode Allocate's answer. Raises `GRPCError` for a refusal.

    It is put together from encoded parts: 5 µs for eight devices, and 48 by messages for all their nodes.
    """
    if not isinstance(answer, Granted):
        raise refusal(answer)
    message = AllocateMessage()
    message.encoded = b"".join([part(1, _container(grant)) for grant in answer.containers])
    return message


def _container(grant: Grant) -> bytes:
    envs = [part(1, part(1, name.encode()) + part(2, value.encode())) for name, value in grant.envs]
    ids = [part(5, part(1, cdi_id.encode())) for cdi_id in grant.cdi_ids]
    return b"".join([*envs, *map(_encoded_node, grant.nodes), *ids])


@lru_cache(maxsize=limits.CALL_DEVICES_MAX)
def _encoded_node(node: str) -> bytes:
    """Encode a device node as its part of a container's answer: repeated fields in a row are one list (protobuf.dev,
    Encoding, "Last One Wins")."""
    spec = pb.DeviceSpec(container_path=node, host_path=node, permissions="mrw")
    return bytes(pb.ContainerAllocateResponse(devices=[spec]))


def preferred_response(answer: Answer) -> pb.PreferredAllocationResponse:
    """Make GetPreferredAllocation's answer. Raises `GRPCError` if there is none."""
    if not isinstance(answer, Preferred):
        raise refusal(answer)
    return pb.PreferredAllocationResponse(
        container_responses=[
            pb.ContainerPreferredAllocationResponse(device_i_ds=list(ids)) for ids in answer.containers
        ]
    )


def pre_start_response(answer: Answer) -> pb.PreStartContainerResponse:
    """Make PreStartContainer's answer. Raises `GRPCError` for a refusal."""
    if not isinstance(answer, Ready):
        raise refusal(answer)
    return pb.PreStartContainerResponse()


def refusal(answer: Answer) -> GRPCError:
    """Return a refusal as a gRPC error: the status by name, the reason as its message."""
    if not isinstance(answer, Refused):
        raise TypeError(f"the core answered another question: {answer!r}")
    return GRPCError(Status[answer.status.value], answer.reason)
