"""gRPC's length-prefixed messages, with the limits that grpclib does not have.

Both sides use it. Every fault of the other side is a `GRPCError` for that one call; must not touch the connection.
"""

from __future__ import annotations

from typing import Any, Final, TypeVar

from grpclib import GRPCError, Status
from grpclib.encoding.base import CodecBase
from grpclib.protocol import Stream as Http2Stream

from gpuactors.limits import MESSAGE_MAX_BYTES

T = TypeVar("T")

_PREFIX_BYTES: Final = 5  # compressed flag (1), length (4, big endian)


async def read_message(stream: Http2Stream, codec: CodecBase, message_type: type[T]) -> T | None:
    """One message, or None if the peer has ended its side before it.

    Raises GRPCError: UNIMPLEMENTED (compressed), RESOURCE_EXHAUSTED (over MESSAGE_MAX_BYTES; seen from the length
    alone, nothing is collected), INTERNAL (cut short, or not that message).
    """
    prefix = await _read_exactly(stream, _PREFIX_BYTES)
    if not prefix:
        return None
    if prefix[0]:
        raise GRPCError(
            Status.UNIMPLEMENTED, "the message is compressed; only identity encoding is understood"
        )
    size_bytes = int.from_bytes(prefix[1:], "big")
    refuse_oversized(size_bytes)
    payload = await _read_exactly(stream, size_bytes)
    if len(payload) < size_bytes:
        raise _cut_short()
    try:
        check_wire_format(payload)
        message: T = codec.decode(payload, message_type)
    except Exception as error:
        raise GRPCError(Status.INTERNAL, f"the message is not a valid {message_type.__name__}") from error
    return message


def frame_message(codec: CodecBase, message: Any, message_type: Any) -> bytes:
    """Prefix and payload. Raises TypeError (not of that type), GRPCError RESOURCE_EXHAUSTED (too large: the
    receiver, with gRPC's default limit, would refuse it with a text that does not say whose fault it is)."""
    payload = codec.encode(message, message_type)
    refuse_oversized(len(payload))
    return b"\0" + len(payload).to_bytes(4, "big") + payload


def refuse_oversized(size_bytes: int) -> None:
    if size_bytes > MESSAGE_MAX_BYTES:
        raise GRPCError(
            Status.RESOURCE_EXHAUSTED,
            f"a message of {size_bytes} bytes is over the limit of {MESSAGE_MAX_BYTES} bytes",
        )


def check_wire_format(payload: bytes) -> None:
    """Raises ValueError unless the message is a whole sequence of protobuf fields.

    betterproto2 0.10 does not notice: b"\\xff\\xff" becomes an empty message, a string that overruns a shorter one.
    What is inside a submessage is not looked at.
    """
    position = 0
    while position < len(payload):
        tag, position = _varint(payload, position)
        if tag >> 3 == 0:
            raise ValueError("field number 0")
        match tag & 7:
            case 0:
                _value, position = _varint(payload, position)
            case 1:
                position += 8
            case 2:
                size_bytes, position = _varint(payload, position)
                position += size_bytes
            case 5:
                position += 4
            case wire_type:
                raise ValueError(f"wire type {wire_type}")
    if position > len(payload):
        raise ValueError("a field runs over the end")


def _varint(payload: bytes, position: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if position >= len(payload):
            raise ValueError("a number runs over the end")
        byte = payload[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise ValueError("a number of more than 10 bytes")


async def _read_exactly(stream: Http2Stream, size_bytes: int) -> bytes:
    """`size_bytes` bytes, or b"" at the end of the stream."""
    try:
        return await stream.recv_data(size_bytes)
    except AssertionError:  # grpclib's way to say that the stream ended in between
        raise _cut_short() from None


def _cut_short() -> GRPCError:
    return GRPCError(Status.INTERNAL, "the message was cut short: the stream ended inside it")
