"""This boot of the host: its id and its kernel command line, below the host's root. Must not decide what they mean.

A file of its own: claims need these two facts, and no other fact of the host.
"""

from __future__ import annotations

from gpuactors.core.values.text import encodable
from gpuactors.host.faults import raise_if_short
from gpuactors.host.root import BOOT_ID, COMMAND_LINE, HostRoot
from gpuactors.ports.errors import HostError


def boot_id(root: HostRoot) -> str:
    """Return the id of this boot. Raises `HostError`: without it nobody knows whether the checkpoint is of this
    boot."""
    text = _read(root, BOOT_ID)
    if not text:
        raise HostError(
            f"{root.real(BOOT_ID)} cannot be read: without the id of this boot the checkpoint of the claims cannot be "
            "used; check --host-root and, in a pod, the mount of the host's /proc"
        )
    return text


def command_line(root: HostRoot) -> str:
    """Return the kernel command line; empty if it cannot be read, as it is a hint only."""
    return _read(root, COMMAND_LINE)


def _read(root: HostRoot, path: str) -> str:
    # This process's own /proc has the same of both, in every namespace; a root with another boot's has its own.
    for real in (root.real(path), path):
        try:
            with open(real, "rb") as file:
                return encodable(file.read(65536).decode("utf-8", "surrogateescape").strip())
        except OSError as error:
            raise_if_short(error, real)
    return ""
