"""Reads of what a host may lack or hide: empty where it is not there or may not be read.

Each raises `HostShortError` for want of descriptors or memory. Must not be used where absent and unreadable differ.

A file of its own: six readers read so.
"""

from __future__ import annotations

import os

from gpuactors.host.faults import raise_if_short
from gpuactors.process.plain_files import read_plain


def names_in(directory: str) -> list[str]:
    """Return the names in a directory, in no order."""
    try:
        return os.listdir(directory)
    except OSError as error:
        raise_if_short(error, directory)
        return []


def text_of(path: str, bytes_max: int) -> str:
    """Read at most `bytes_max` bytes of a regular file."""
    try:
        return read_plain(path, bytes_max).decode(errors="replace")
    except OSError as error:
        raise_if_short(error, path)
        return ""
