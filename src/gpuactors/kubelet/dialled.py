"""Whether our own sockets answer: they are dialled as kubelet does, up to the HTTP/2 handshake. For the liveness probe.

A socket's file can be there while nobody serves it: the process hangs, or another one's file has taken its place.

A file of its own: the device plugin and the DRA plugin check their sockets by it.
"""

from __future__ import annotations

from collections.abc import Iterable

import trio

from gpuactors import limits
from gpuactors.core.values.text import encodable
from gpuactors.grpc_trio import Dial, SocketError, connect_unix, open_unix_channel


async def unreachable(paths: Iterable[str], dial: Dial = connect_unix) -> tuple[str, ...]:
    """Those that do not answer within DIAL_OWN_S, each as a sentence, sorted. All are dialled at once."""
    found: list[str] = []

    async def ask(path: str) -> None:
        try:
            async with open_unix_channel(path, connect_deadline_s=limits.DIAL_OWN_S, dial=dial):
                pass
        except SocketError as exc:
            found.append(encodable(str(exc)))

    async with trio.open_nursery() as nursery:
        for path in paths:
            nursery.start_soon(ask, path)
    return tuple(sorted(found))
