"""Whether sockets answer: they are dialled as kubelet does, up to the HTTP/2 handshake. For the liveness probe our own,
and before a daemon serves those of a daemon that it cannot ask to hand over.

A socket's file can be there while nobody serves it: the process hangs, or another one's file has taken its place.

A file of its own: the device plugin and the DRA plugin check their sockets by it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

import trio

from gpuactors import limits
from gpuactors.core.values.text import encodable
from gpuactors.grpc_trio import Dial, SocketError, connect_unix, open_unix_channel
from gpuactors.kubelet.sockets import OURS


async def unreachable(paths: Iterable[str], dial: Dial = connect_unix) -> tuple[str, ...]:
    """Dial all sockets at once; return those that do not answer within DIAL_OWN_S, each as a sentence, sorted."""
    return tuple(sorted(problem for problem in (await _problems(paths, dial)).values() if problem))


async def served_endpoints(directory: str) -> tuple[str, ...]:
    """Return the names of gpuactors' sockets in kubelet's directory of device plugins at which a server answers,
    sorted; none if the directory may not be read. A process that listens and is no server is none."""
    try:
        paths = [os.path.join(directory, name) for name in os.listdir(directory) if name.startswith(OURS)]
    except OSError:
        return ()
    problems = await _problems(paths, connect_unix)
    return tuple(sorted(encodable(os.path.basename(path)) for path in paths if not problems[path]))


async def _problems(paths: Iterable[str], dial: Dial) -> dict[str, str]:
    """Return why each socket does not answer; empty where it does."""
    problems: dict[str, str] = {}

    async def ask(path: str) -> None:
        try:
            async with open_unix_channel(path, connect_deadline_s=limits.DIAL_OWN_S, dial=dial):
                problems[path] = ""
        except (SocketError, OSError) as exc:
            problems[path] = encodable(str(exc))

    async with trio.open_nursery() as nursery:
        for path in paths:
            nursery.start_soon(ask, path)
    return problems
