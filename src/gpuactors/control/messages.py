"""The messages of the control socket: a line of JSON that asks, then lines of JSON that answer.

A daemon hands over to a successor of any other version. So HAND_OVER, `pid` and `error` keep their names and meaning,
and each side passes over fields that it does not know. A command reads the view of its own version; of a daemon of
another one it gets UNKNOWN, or a status that it cannot decode, and says that the versions differ.
"""

from __future__ import annotations

from typing import Final

import msgspec
from msgspec import Struct

from gpuactors.decoding import UndecodableError, decode_json

STATUS: Final = "status"
"""Asks what the daemon knows now: one answer."""

WATCH: Final = "watch"
"""Asks for that now, and again after each change, until the daemon hands over or ends. An answer without a status: it
is there, and nothing has changed."""

HAND_OVER: Final = "hand_over"
"""Asks the daemon to end its streams. Answered when kubelet's calls are finished, the streams have ended and the
sockets are removed, this one included."""

UNKNOWN: Final = "unknown_request"
"""The error of a request that this version does not know."""

BUSY: Final = "handing_over"
"""The error of a hand-over while another successor waits for one: ask again."""

BEGIN: Final = b"{"
END: Final = b"\n"
"""Of each line, which is an object."""

REQUEST_MAX_BYTES: Final = 1024
"""A request has some 20 bytes; a later version's may have a field more."""

ANSWER_MAX_BYTES: Final = 16 * 1024 * 1024
"""An answer has 3 KB for each GPU that was never quiet: 0.8 MB with 250. A process that has the socket and is no daemon
must not fill the memory of a command."""


class Request(Struct, frozen=True):
    """The one line of who connects."""

    ask: str


class Answer(Struct, frozen=True, omit_defaults=True):
    """A line of the daemon."""

    pid: int = 0
    """The daemon's own view of it: in a container another one than on the host."""
    version: str = ""
    status: msgspec.Raw = msgspec.Raw()
    """JSON of `DaemonStatus` (control/view.py), or nothing."""
    error: str = ""
    """Why there is no other answer: UNKNOWN, BUSY, or a later version's."""


def line_of(message: Request | Answer) -> bytes:
    """The message as it is sent."""
    return msgspec.json.encode(message) + END


def answer_of(line: bytes) -> Answer:
    """The answer in a line. Raises UndecodableError."""
    return decode_json(line, Answer)


def request_of(line: bytes) -> Request:
    """The request in a line; one that cannot be read is none that this version knows."""
    try:
        return decode_json(line, Request)
    except UndecodableError:
        return Request("")


def is_http2(received: bytes) -> bool:
    """The peer speaks gRPC, as gpuactors up to 0.1 does: it begins with a frame of SETTINGS (RFC 9113, 3.4 and 4.1)."""
    return received[3:4] == b"\x04" and received[5:9] == bytes(4)
