"""File systems that a test mounts, for the kernel's own errors of a full and of a read-only one."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def tmpfs(directory: Path, *, inodes: int = 1000) -> Iterator[None]:
    """A file system of its own at `directory`. Skips the test where mounting is not allowed."""
    mount(f"size=1m,nr_inodes={inodes}", directory, "-t", "tmpfs", "tmpfs")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=True, timeout=10)


def mount(options: str, directory: Path, *words: str) -> None:
    """`mount -o options words directory`; of a directory that is mounted `remount,ro` and such. Skips the test where it
    is not allowed."""
    program = shutil.which("mount") or "mount"
    done = subprocess.run(
        [program, "-o", options, *words, str(directory)], capture_output=True, text=True, timeout=10, check=False
    )  # fmt: skip
    if done.returncode != 0 and os.geteuid() != 0:
        pytest.skip(f"a full and a read-only file system need root to be mounted: {done.stderr.strip()}")
    if done.returncode != 0 and "permission denied" in done.stderr:
        pytest.skip(f"this container may not mount a file system: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
