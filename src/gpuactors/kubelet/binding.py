"""Makes a socket below kubelet's directory; a fault becomes the `KubeletError` that an operator reads.

A file of its own: the device plugin and the DRA plugin make their sockets by it.
"""

from __future__ import annotations

import os

from gpuactors.concurrency.latest import LatestReader
from gpuactors.grpc_trio import Bind, BoundListener, Owner, SocketError
from gpuactors.ports.errors import KubeletError
from gpuactors.process.resource_exhaustion import shortage

Hanging = LatestReader[frozenset[Owner]]
"""The owners whose sockets may be replaced although the process lives (see `control.unix`)."""


def bound(bind: Bind, path: str, hanging: Hanging | None) -> BoundListener:
    """Make a socket at `path`. Raises `KubeletError` if it cannot be made."""
    evict = hanging.value if hanging is not None else frozenset[Owner]()
    try:
        return bind(path, evict=evict)
    except (SocketError, OSError) as exc:
        problem = f"the socket {os.path.basename(path)} cannot be made"
        raise KubeletError(short_of(problem, exc) or str(exc)) from exc


def short_of(problem: str, exc: BaseException) -> str | None:
    """Return `problem` with the shortage; None if no shortage is the cause."""
    short = shortage(exc)
    return f"{problem}: {short}" if short is not None else None
