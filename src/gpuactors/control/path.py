"""The places of the control socket, and why there can be none in the state directory. A file of its own: commands know
them without the daemon's side (`unix.py`)."""

from __future__ import annotations

import os
import stat
from typing import Final

from gpuactors import limits
from gpuactors.core.values.names import CONTROL_DIRECTORY

SOCKET_NAME: Final = "gpuactors.sock"


def socket_path(state_dir: str) -> str:
    """Return the path of the control socket in this state directory."""
    return os.path.join(state_dir, SOCKET_NAME)


def node_socket_path(device_plugin_dir: str) -> str:
    """Return the path of the control socket that every daemon of this node has, whatever its state directory is.

    In a directory of its own: at its start kubelet removes the sockets that lie directly in its directory of device
    plugins, and no directory (pkg/kubelet/cm/devicemanager/plugin/v1beta1/server.go, cleanup).
    """
    return os.path.join(device_plugin_dir, CONTROL_DIRECTORY, SOCKET_NAME)


def path_problem(state_dir: str) -> str | None:
    """Return why there can be no control socket in `state_dir`, as a sentence; None if there can be one."""
    lost = "; without it inspect and explain read the node themselves"
    path_bytes = len(os.fsencode(socket_path(state_dir)))
    if path_bytes > limits.SOCKET_PATH_MAX_BYTES:
        return (
            f"the path of the control socket in {state_dir} has {path_bytes} bytes; the kernel takes at most "
            f"{limits.SOCKET_PATH_MAX_BYTES}: use a shorter --state-dir{lost}"
        )
    try:
        is_directory = stat.S_ISDIR(os.stat(state_dir).st_mode)
    except FileNotFoundError:
        return (
            f"the state directory {state_dir} does not exist: make it, or name another with --state-dir{lost}"
        )
    except NotADirectoryError:
        is_directory = False
    except OSError as exc:
        return (
            f"the state directory {state_dir} cannot be accessed ({exc.strerror}): give user {os.geteuid()} access, or "
            f"name another with --state-dir{lost}"
        )
    if not is_directory:
        return (
            f"the state directory {state_dir} is not a directory, or lies below a file: remove the file, or name "
            f"another with --state-dir{lost}"
        )
    if not os.access(state_dir, os.W_OK | os.X_OK):
        return (
            f"user {os.geteuid()} may not write to the state directory {state_dir}: give it access, mount it "
            f"writable, or name another with --state-dir{lost}"
        )
    return None
