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
"""Asks for the status of the daemon now: one answer."""

WATCH: Final = "watch"
"""Asks for the status now and after each change, until the daemon hands over or ends. An answer without a status says
that the daemon runs and nothing has changed."""

HAND_OVER: Final = "hand_over"
"""Asks the daemon to end its streams. Answered when kubelet's calls are finished, the streams have ended and the
sockets are removed, this one included."""

UNKNOWN: Final = "unknown_request"
"""The error of a request that this version does not know."""

BUSY: Final = "handing_over"
"""The error of a hand-over while another successor waits for its own: ask again."""

BEGIN: Final = b"{"
END: Final = b"\n"
"""The first and the last byte of each line, which is a JSON object."""

REQUEST_MAX_BYTES: Final = 1024
"""The maximum length of a request. It has some 20 bytes; a later version may add a field."""

ANSWER_MAX_BYTES: Final = 16 * 1024 * 1024
"""The maximum length of an answer, so that a process that is no daemon cannot fill a command's memory. A GPU with a
full history has 3 KB: 250 GPUs have 0.8 MB."""


class Request(Struct, frozen=True):
    """The one line that the client sends."""

    ask: str


class Answer(Struct, frozen=True, omit_defaults=True):
    """A line that the daemon sends."""

    pid: int = 0
    """The daemon's PID in its own PID namespace: in a container not the host's."""
    version: str = ""
    status: msgspec.Raw = msgspec.Raw()
    """A `DaemonStatus` (control/view.py) as JSON; empty if the answer has no status."""
    error: str = ""
    """Why the request failed: UNKNOWN, BUSY, or an error of a later version; empty if it did not."""


def line_of(message: Request | Answer) -> bytes:
    """Encode a message as a line."""
    return msgspec.json.encode(message) + END


def answer_of(line: bytes) -> Answer:
    """Decode an answer. Raises UndecodableError."""
    return decode_json(line, Answer)


def request_of(line: bytes) -> Request:
    """Decode a request. One that cannot be decoded is a request that this version does not know."""
    try:
        return decode_json(line, Request)
    except UndecodableError:
        return Request("")


def is_http2(received: bytes) -> bool:
    """Return whether the peer speaks gRPC, as gpuactors up to 0.1 does: it sends a SETTINGS frame first (RFC 9113, 3.4
    and 4.1)."""
    return received[3:4] == b"\x04" and received[5:9] == bytes(4)
