"""Sockets that an instance of our driver left when it was killed with its pod: kubelet dials those in its registry for
ever.

Their names have the pod's UID, so no later instance makes a socket in their place. Removed is only what has the name
of an instance of this driver, is a socket, and refuses a connection: nobody listens there. One that answers, whatever
it answers, is left.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Final

from gpuactors.grpc_trio import SocketBindError, owner_of, socket_file

_POD_UID: Final = r"(?:[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|[0-9a-f]{32})"
"""The UID of a pod of the API server, or of a static one. Another driver's name may begin with ours; none ends with a
UID."""


def remove_dead(registry: str, plugin_dir: str, driver: str) -> tuple[str, ...]:
    """Remove the dead registration sockets of this driver, then the dead sockets of its API; return the paths. Leave
    what cannot be looked at or removed."""
    named = (
        (registry, rf"{re.escape(driver)}-{_POD_UID}-reg\.sock"),
        (plugin_dir, rf"dra-{_POD_UID}\.sock"),
    )
    return tuple(p for directory, name in named for p in _paths(directory, name) if _removed(p))


def _paths(directory: str, name: str) -> Iterator[str]:
    try:
        names = sorted(os.listdir(directory))
    except OSError:
        return
    yield from (os.path.join(directory, n) for n in names if re.fullmatch(name, n))


def _removed(path: str) -> bool:
    before = socket_file(path)
    try:
        if before is None or owner_of(path) is not None:
            return False
        if (now := socket_file(path)) is None or now.identity != before.identity:  # made anew meanwhile
            return False
        os.unlink(path)
    except (SocketBindError, OSError):
        return False
    return True
