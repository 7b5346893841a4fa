"""Kubelet's directory of device plugins as a command sees it once: who listens there. For `gpuactors doctor`.

Dials kubelet's own socket and ours, says nothing, and hangs up. Must not dial other plugins', nor judge.
"""

from __future__ import annotations

import os

from msgspec import Struct

from gpuactors.core.values.text import encodable
from gpuactors.grpc_trio import SocketError, owner_of, socket_file
from gpuactors.kubelet.sockets import KUBELET_SOCKET, OURS, is_others
from gpuactors.limits import FOREIGN_SOCKETS_MAX
from gpuactors.ports.errors import KubeletError


class PluginDirectory(Struct, frozen=True):
    """The directory, as one look found it."""

    path: str
    exists: bool
    writable: bool
    """True if this process may write there."""
    kubelet_listens: bool
    """True if a process listens at `kubelet.sock`."""
    ours: tuple[str, ...]
    """Names of gpuactors' sockets that a process listens at."""
    others: tuple[str, ...]
    """Names of other plugins' sockets, at most FOREIGN_SOCKETS_MAX; whether a process listens there is not known."""


def look(path: str) -> PluginDirectory:
    """Look at the directory at `path`. May block. Raises `KubeletError` if it may not be read."""
    try:
        names = sorted(os.listdir(path))
    except (FileNotFoundError, NotADirectoryError):
        return PluginDirectory(path, False, False, False, (), ())
    except OSError as exc:
        raise KubeletError(f"may not read {path} ({exc.strerror}): run this as root") from exc
    others = [name for name in names if is_others(name) and socket_file(os.path.join(path, name)) is not None]
    return PluginDirectory(
        path=path,
        exists=True,
        writable=os.access(path, os.W_OK | os.X_OK),
        kubelet_listens=_is_served(os.path.join(path, KUBELET_SOCKET)),
        ours=tuple(
            encodable(name)
            for name in names
            if name.startswith(OURS) and _is_served(os.path.join(path, name))
        ),
        others=tuple(map(encodable, others[:FOREIGN_SOCKETS_MAX])),
    )


def _is_served(socket: str) -> bool:
    try:
        return owner_of(socket) is not None
    except SocketError as exc:
        raise KubeletError(
            f"may not connect to {socket}, to see whether anybody listens: run this as root"
        ) from exc
