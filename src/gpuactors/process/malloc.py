"""How this process manages its memory: the C library's allocator, and Python's collector of cycles.

The allocator gives memory back at once, instead of keeping what a large message once took.

A message of kubelet's may have 4 MiB, its ledger file 16 MiB, and each is decoded in one of several threads. By default
glibc keeps an arena per thread and raises its own thresholds to the largest block it has ever freed (malloc/malloc.c,
M_MMAP_THRESHOLD and M_TRIM_THRESHOLD "dynamic"), so that the process stays at its peak size.

A file of its own: `gpuactors run` calls it once, before the process has threads; nothing else needs it.
"""

from __future__ import annotations

import ctypes
import gc
from typing import Final

_TRIM_THRESHOLD: Final = (-1, 128 * 1024)
_MMAP_THRESHOLD: Final = (-3, 128 * 1024)
_ARENAS: Final = (-8, 2)
"""The parameters of mallopt(3) as malloc.h numbers them, with glibc's own defaults in bytes: setting one stops its
growth. Two arenas: one for the event loop and one for all threads."""


def give_back() -> bool:
    """Set it for this process, before it has threads; return False where the C library has no mallopt (musl)."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    wanted = (_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENAS)
    return all(mallopt(parameter, value) == 1 for parameter, value in wanted)


def keep_the_start() -> None:
    """Start the collector, which `__main__` has kept off, and exclude the objects made until now (modules, classes,
    tables) from its passes: they stay as long as the process. Scanning these 50,000 objects takes 20 to 40 ms, in which
    the daemon answers no call. So they are not scanned for garbage now either: some 2,000 of them are."""
    gc.freeze()
    gc.enable()
