"""Removes a directory in which others may have made whatever they like: of any depth, of any size, with links and with
mounts.

By descriptors, and never by a path of more than one name, so that a link which somebody makes meanwhile is not
followed. What nests is moved up into the directory that is being removed: two descriptors are enough for any depth, and
what an earlier try has left is no deeper. Mounts are refused (EBUSY): what is mounted is not ours.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from typing import Final, final

_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def remove_tree(path: str, entries_max: int) -> None:
    """Remove a directory with all that is in it, or a link of that name itself. Raises `FileNotFoundError` if it was
    gone, and another `OSError`, with the path of what is left, if it cannot be removed: also after `entries_max` files
    and directories (ENOTEMPTY), so that a next try goes on from there."""
    above, name = os.path.split(path)
    with _opened(above or ".", None) as parent:
        if not stat.S_ISDIR(os.lstat(name, dir_fd=parent).st_mode):
            os.unlink(name, dir_fd=parent)
            return
        with _opened(name, parent) as top:
            if _mount_of(top) != _mount_of(parent):
                raise OSError(errno.EBUSY, "something is mounted on it", path)
            _Removal(top, path, entries_max).run()
        os.rmdir(name, dir_fd=parent)


@final
class _Removal:
    """One removal of what is in a directory, `top`."""

    def __init__(self, top: int, path: str, entries_max: int) -> None:
        self._top = top
        self._path = path
        self._entries_max = entries_max
        self._removed = 0
        self._directories: list[str] = []
        """The names in `top` that are still to be removed."""
        token = os.urandom(8).hex()
        self._names = (f".{token}-{number}" for number in count())

    def run(self) -> None:
        self._empty(self._top)
        while self._directories:
            name = self._directories.pop()
            with _opened(name, self._top) as inner:
                self._empty(inner)
            os.rmdir(name, dir_fd=self._top)

    def _empty(self, directory: int) -> None:
        """Remove the files in a directory, and queue its directories."""
        with os.scandir(directory) as entries:
            names = [entry.name for entry, _ in zip(entries, range(self._entries_max + 1), strict=False)]
        for name in names:
            self._removed += 1
            if self._removed > self._entries_max:
                much = f"{self._entries_max} files and directories were removed, and there are more"
                raise OSError(errno.ENOTEMPTY, much, self._path)
            with suppress(FileNotFoundError):
                self._take(name, directory)

    def _take(self, name: str, directory: int) -> None:
        try:
            try:
                os.unlink(name, dir_fd=directory)
            except IsADirectoryError:  # unlink(2) on Linux; of a link to a directory it removes the link
                moved = next(self._names)
                os.rename(name, moved, src_dir_fd=directory, dst_dir_fd=self._top)  # EBUSY: a mount
                self._directories.append(moved)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise OSError(error.errno, error.strerror, f"{self._path}/…/{name}") from None


@contextmanager
def _opened(name: str, parent: int | None) -> Iterator[int]:
    descriptor = os.open(
        name, _DIRECTORY if parent is not None else _DIRECTORY & ~os.O_NOFOLLOW, dir_fd=parent
    )
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _mount_of(descriptor: int) -> bytes:
    """Return the line of the mount that it is in. A bind mount of the same file system has the same device number."""
    with open(f"/proc/self/fdinfo/{descriptor}", "rb") as file:
        return next(line for line in file if line.startswith(b"mnt_id:"))
