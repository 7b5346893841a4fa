"""gRPC on trio: grpclib's HTTP/2 and gRPC layers without asyncio (why: docs/dev/adr/0001-grpclib-on-trio.md).

`Server`, `TrioService`: serve. `open_channel`, `open_unix_channel`: call. `bind_unix`: make a socket. Handlers raise
`grpclib.GRPCError`; so do calls. Must not know kubelet: what is served and called is in the packages above.
"""

from .client import Channel, open_channel, open_unix_channel
from .server import Server, accept
from .service import TrioService
from .unix import (
    Bind,
    BoundListener,
    ConnectError,
    Dial,
    NotASocketError,
    Owner,
    OwnerOf,
    SocketBindError,
    SocketError,
    SocketFile,
    SocketInUseError,
    SocketPathTooLongError,
    UnixListener,
    bind_unix,
    connect_unix,
    owner_of,
    socket_file,
)

__all__ = [
    "Bind",
    "BoundListener",
    "Channel",
    "ConnectError",
    "Dial",
    "NotASocketError",
    "Owner",
    "OwnerOf",
    "Server",
    "SocketBindError",
    "SocketError",
    "SocketFile",
    "SocketInUseError",
    "SocketPathTooLongError",
    "TrioService",
    "UnixListener",
    "accept",
    "bind_unix",
    "connect_unix",
    "open_channel",
    "open_unix_channel",
    "owner_of",
    "socket_file",
]
