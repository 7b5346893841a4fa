"""The bounds of gRPC and its sockets: name, unit and the reason for the number.

They are here, and not with all others in `gpuactors/limits.py`, because this package imports no other one of gpuactors.
"""

from __future__ import annotations

from typing import Final

SOCKET_PATH_MAX_BYTES: Final = 107
"""sockaddr_un.sun_path is 108 bytes with its terminating NUL (linux/un.h)."""

MESSAGE_MAX_BYTES: Final = 4 * 1024 * 1024
"""grpc-go's default limit for a received message; kubelet does not raise it."""

GRPC_OUTGOING_HIGH_BYTES: Final = 64 * 1024
"""The number of unsent bytes over which the handlers of a connection wait (asyncio's own default)."""

GRPC_OUTGOING_LOW_BYTES: Final = 16 * 1024
"""The number of unsent bytes at which they go on: one HTTP/2 frame of the default size."""

GRPC_OUTGOING_MAX_BYTES: Final = 1024 * 1024
"""Beyond this the connection is dropped. Handlers stop at the high mark, so only a peer that floods us with PING or
SETTINGS frames and reads no answer (CVE-2019-9512, -9515) gets here."""

GRPC_CONNECTION_WINDOW_BYTES: Final = 1024 * 1024
"""Bytes that a peer may send on one connection before our handlers have read them: sixteen calls' stream
windows (65,535 bytes, HTTP/2's default), so that one call that does not read holds up no other."""

GRPC_CONNECTIONS_MAX: Final = 64
"""Connections to one endpoint. Kubelet has one, and a second for a moment when it re-dials."""

GRPC_HANDSHAKE_DEADLINE_S: Final = 10.0
"""From accept to the peer's HTTP/2 preface and SETTINGS; grpc-go sends both at once."""

GRPC_REQUEST_DEADLINE_S: Final = 10.0
"""From a call's headers to its whole request message (at most MESSAGE_MAX_BYTES over a unix socket: milliseconds). A
peer that stops in the middle must not hold a call for ever."""

GRPC_REQUEST_FIELDS_MAX: Final = 20 * 1024
"""Protobuf fields in one request, nested and unknown ones included: CALL_IDS_MAX IDs of CALL_DEVICES_MAX containers
(`gpuactors/limits.py`), each of which counts as nine. Decoding takes about a microsecond for each, in which the daemon
does nothing else; MESSAGE_MAX_BYTES have room for two million."""

GRPC_CLOSE_S: Final = 0.5
"""The time that a closing connection has to send its last bytes; the peer sees the end either way."""

GRPC_STATUS_TEXT_MAX_CHARS: Final = 2000
"""An error's text travels in a header; grpcio refuses headers beyond 8 KiB (percent-encoding may triple a text)."""

GRPC_ECHO_MAX_CHARS: Final = 253
"""Characters of a refused method's path or header in our answer: any real one whole, and not megabytes back."""

ACCEPT_RETRY_S: Final = 0.1
"""Wait after accept() failed for want of descriptors or memory (trio's own number)."""
