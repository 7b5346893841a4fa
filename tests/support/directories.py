"""Directories in which the daemon works while a test removes them."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path


def remove(directory: Path) -> None:
    """Removes the directory with all that is in it, as often as the daemon makes a new file meanwhile.

    `shutil.rmtree` lists a directory once: a socket that the daemon binds after that makes it fail with ENOTEMPTY,
    and a file that the daemon has removed by then with ENOENT.
    """
    while directory.exists():
        try:
            shutil.rmtree(directory)
            break
        except OSError as problem:
            if problem.errno not in (errno.ENOTEMPTY, errno.ENOENT):
                raise
