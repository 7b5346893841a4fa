"""gRPC's length-prefixed messages, with the limits that grpclib does not have.

Both sides use it. Every fault of the other side is a `GRPCError` for that one call; must not touch the connection.
"""

from __future__ import annotations

import math
from typing import Any, Final

from grpclib import GRPCError, Status
from grpclib.protocol import Stream as Http2Stream

from .limits import MESSAGE_MAX_BYTES
from .protobuf import M, TooManyFieldsError, decode, encode

_PREFIX_BYTES: Final = 5  # compressed flag (1), length (4, big endian)


async def read_message(
    stream: Http2Stream, message_type: type[M], *, fields_max: float = math.inf
) -> M | None:
    """Read one message; None if the peer has ended its side before it.

    Raises GRPCError as `read_payload`; RESOURCE_EXHAUSTED (more than `fields_max` fields), INTERNAL (not that message).
    """
    payload = await read_payload(stream)
    if payload is None:
        return None
    try:
        return decode(payload, message_type, fields_max=fields_max)
    except TooManyFieldsError as error:
        raise GRPCError(Status.RESOURCE_EXHAUSTED, f"a {message_type.__name__} of {error}") from error
    except ValueError as error:
        raise not_valid(message_type.__name__, error) from error


def not_valid(message: str, error: ValueError) -> GRPCError:
    """Return the error for bytes that are not a message of the named type."""
    return GRPCError(Status.INTERNAL, f"the message is not a valid {message}: {error}")


async def read_payload(stream: Http2Stream) -> bytes | None:
    """Read one encoded message; None if the peer has ended its side before it.

    Raises GRPCError: UNIMPLEMENTED (compressed), RESOURCE_EXHAUSTED (over MESSAGE_MAX_BYTES, seen from the length,
    nothing is collected), INTERNAL (cut short).
    """
    prefix = await stream.recv_data(_PREFIX_BYTES)
    if not prefix:
        return None
    if len(prefix) < _PREFIX_BYTES:
        raise _cut_short()
    if prefix[0]:
        raise GRPCError(
            Status.UNIMPLEMENTED, "the message is compressed; only identity encoding is understood"
        )
    size_bytes = int.from_bytes(prefix[1:], "big")
    refuse_oversized(size_bytes)
    payload = await stream.recv_data(size_bytes)
    if len(payload) < size_bytes:
        raise _cut_short()
    return payload


def frame_message(message: Any, message_type: type[Any]) -> bytes:
    """Encode a message, with its prefix. Raises TypeError (not of that type), GRPCError RESOURCE_EXHAUSTED (too large:
    the receiver would refuse it with a text that does not name the side at fault)."""
    if not isinstance(message, message_type):
        raise TypeError(f"the message is a {type(message).__name__}, not a {message_type.__name__}")
    payload = encode(message)
    refuse_oversized(len(payload))
    return b"\0" + len(payload).to_bytes(4, "big") + payload


def refuse_oversized(size_bytes: int) -> None:
    if size_bytes > MESSAGE_MAX_BYTES:
        raise GRPCError(
            Status.RESOURCE_EXHAUSTED,
            f"a message of {size_bytes} bytes is over the limit of {MESSAGE_MAX_BYTES} bytes",
        )


def _cut_short() -> GRPCError:
    return GRPCError(Status.INTERNAL, "the message was cut short: the stream ended inside it")
