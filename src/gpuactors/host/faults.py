"""The sentence about a fault in one function's files; a function that is gone, or a shortage, is none. Must read only
whether a directory exists.

A file of its own: every reader of the host words its faults by it.
"""

from __future__ import annotations

import errno
import os
from typing import Final

from gpuactors.core.values.text import encodable
from gpuactors.ports.errors import HostShortError
from gpuactors.process.resource_exhaustion import shortage

GONE: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ENODEV, errno.ENXIO})


def gone(directory: str) -> bool:
    """Return whether it does not exist, as opposed to not accessible."""
    try:
        os.stat(directory)
    except OSError as error:
        return error.errno in GONE
    return False


def fault(address: str, path: str, problem: str) -> str:
    """Return the sentence that the operator reads. `address`: the function; the UUID of a mediated device."""
    check = f" and check it with lspci -vs {address}" if ":" in address else ""
    return encodable(
        f"{path} {problem}: look for {address} in the kernel's log{check}; it is read again automatically"
    )


def raise_if_short(error: OSError, path: str) -> None:
    """Raise `HostShortError` if the error is a shortage, which is no fault of the file."""
    if (problem := shortage(error)) is not None:
        raise HostShortError(f"{path} could not be read: {problem}") from error
