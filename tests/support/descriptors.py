"""What this process has open."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def open_files(below: Path) -> list[str]:
    """The files below a directory that this process has open; of one that is unlinked the kernel says so."""
    found = []
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # closed meanwhile
            found.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return sorted(path for path in found if path.startswith(f"{below.resolve()}/"))
