"""A disk in memory that can be stopped at any operation and can lose its power (`acts.disk.Disk`).

It has two truths: what a process sees, and what is on the platter. A content goes there by `sync`, a name
(made, renamed, removed) by `sync_directory`; whatever else goes there, in whatever order, is up to the disk, that is to
`keep` of `power_cut`. A file whose name is on the platter and whose content is not is empty, as on ext4 without fsync.
"""

from __future__ import annotations

import errno
import os
import posixpath
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import final

from gpuactors.acts.disk import HeldDirectory


class StoppedError(BaseException):
    """The process is killed before this operation. No `except Exception` of the daemon's catches it."""


@dataclass(slots=True, eq=False)
class _File:
    content: bytes = b""
    durable: bytes = b""


@final
@dataclass(frozen=True, slots=True)
class _Held:
    """Implements `HeldDirectory`."""

    made: Counter[str]
    there: set[str]
    number: int

    def is_at(self, path: str) -> bool:
        """Implement `HeldDirectory.is_at`."""
        return path in self.there and self.made[path] == self.number


@final
class FakeDisk:
    """Implements `acts.disk.Disk`. Everything below `in_memory` is a tmpfs: gone after a power cut."""

    def __init__(self, *, in_memory: Collection[str] = ("/run", "/var/run")) -> None:
        self._in_memory = tuple(in_memory)
        self._files: dict[str, _File] = {}
        self._durable: dict[str, _File] = {}
        self._directories = {"/"}
        self._durable_directories = {"/"}
        self._made = Counter[str]()
        """How often each directory was made."""
        self.operations: list[str] = []
        """The operations on files, in order; reads are not counted."""
        self.stop_at: int | None = None
        """The index in `operations` at which the process is killed, instead of the operation."""
        self.torn = False
        """A write at which the process is killed has written half of its content."""
        self.failures: dict[int, int] = {}
        """The errno with which the operation of this index fails."""
        self.full = False
        """No file and no directory can be made or grow."""
        self.keeps = ""
        """No file in this directory can be removed or replaced; empty: all can."""

    # --- what happens to it -------------------------------------------------------------------------------------------

    def power_cut(self, keep: Callable[[str], bool] = lambda what: False) -> None:
        """Lose what was not synced, but for what `keep` says: it is called for each changed name with its path, and for
        each unsynced content with `content of PATH`."""
        directories = {"/"}
        for directory in sorted(self._directories | self._durable_directories):
            there, durable = directory in self._directories, directory in self._durable_directories
            stays = (there if there == durable or keep(directory) else durable) and not self._is_in_memory(
                directory
            )
            if stays and posixpath.dirname(directory) in directories:
                directories.add(directory)
        files: dict[str, _File] = {}
        for name in sorted(self._files.keys() | self._durable.keys()):
            now, on_platter = self._files.get(name), self._durable.get(name)
            file = now if now is on_platter or keep(name) else on_platter
            if file is not None and posixpath.dirname(name) in directories:
                files[name] = file
        for name, file in files.items():
            if file.content != file.durable and not keep(f"content of {name}"):
                file.content = file.durable
            file.durable = file.content
        self._files, self._durable = files, dict(files)
        self._directories, self._durable_directories = directories, set(directories)
        self.stop_at = None

    def restart(self) -> None:
        """The process is killed and a new one starts; the disk keeps its power, and so loses nothing."""
        self.stop_at = None

    def count(self, operation: str) -> None:
        """An operation is about to be done; others than the disk's own (a write to sysfs) may be counted with them.
        Raises `StoppedError`, and `OSError` if it is to fail."""
        number = len(self.operations)
        if self.stop_at is not None and number >= self.stop_at:
            raise StoppedError(operation)
        self.operations.append(operation)
        if number in self.failures:
            raise _error(self.failures[number], operation)

    # --- what is there ------------------------------------------------------------------------------------------------

    @property
    def files(self) -> dict[str, bytes]:
        """All files and their contents, as a process sees them."""
        return {path: self._files[path].content for path in sorted(self._files)}

    def put(self, path: str, content: bytes) -> None:
        """A file is there, and durable, without an operation."""
        for directory in _above(path):
            self._made[directory] += directory not in self._directories
            self._directories.add(directory)
            self._durable_directories.add(directory)
        self._files[path] = self._durable[path] = _File(content, content)

    def lose(self, path: str) -> None:
        """A file is gone, and durably, without an operation."""
        self._files.pop(path, None)
        self._durable.pop(path, None)

    def lose_directory(self, path: str) -> None:
        """A directory is gone, durably, with all that is in it, without an operation."""
        for name in [n for n in self._files.keys() | self._durable.keys() if n.startswith(f"{path}/")]:
            self.lose(name)
        for directories in (self._directories, self._durable_directories):
            directories -= {d for d in directories if d == path or d.startswith(f"{path}/")}

    def inode(self, path: str) -> int:
        """The identity of a file, which changes only when another one replaces it."""
        return id(self._files[path])

    # --- acts.disk.Disk -----------------------------------------------------------------------------------------------

    def read(self, path: str, bytes_max: int) -> bytes:
        """Implement `Disk.read`."""
        return self._find(path).content[: bytes_max + 1]

    def names(self, directory: str) -> tuple[str, ...]:
        """Implement `Disk.names`."""
        self._need_directory(directory)
        entries = self._files.keys() | (self._directories - {"/"})
        return tuple(sorted(posixpath.basename(e) for e in entries if posixpath.dirname(e) == directory))

    def make_directory(self, path: str) -> None:
        """Implement `Disk.make_directory`."""
        self.count(f"mkdir {path}")
        self._need_room(path)
        self._need_directory(posixpath.dirname(path))
        if path in self._directories or path in self._files:
            raise _error(errno.EEXIST, path)
        self._directories.add(path)
        self._made[path] += 1

    def hold(self, directory: str) -> HeldDirectory:
        """Implement `Disk.hold`."""
        self._need_directory(directory)
        return _Held(self._made, self._directories, self._made[directory])

    def remove_directory(self, path: str) -> None:
        """Implement `Disk.remove_directory`."""
        self.count(f"rmdir {path}")
        if self.names(path):
            raise _error(errno.ENOTEMPTY, path)
        self._directories.discard(path)

    def remove_tree(self, path: str, entries_max: int) -> None:
        """Implement `Disk.remove_tree`."""
        self._need_directory(path)
        inside = [e for e in self._files.keys() | self._directories if e.startswith(f"{path}/")]
        for number, entry in enumerate(
            sorted(inside, reverse=True)
        ):  # what is in a directory comes before it
            if number == entries_max:
                raise _error(errno.ENOTEMPTY, path)
            (self.remove_directory if entry in self._directories else self.unlink)(entry)
        self.remove_directory(path)

    def write(self, path: str, content: bytes) -> None:
        """Implement `Disk.write`."""
        try:
            self.count(f"write {path}")
        except StoppedError:
            if self.torn:
                self._write(path, content[: len(content) // 2])
            raise
        if self.full:
            self._write(path, b"")
        self._need_room(path)
        self._write(path, content)

    def _write(self, path: str, content: bytes) -> None:
        self._need_directory(posixpath.dirname(path))
        self._files.setdefault(path, _File()).content = content

    def sync(self, path: str) -> None:
        """Implement `Disk.sync`."""
        self.count(f"fsync {path}")
        file = self._find(path)
        file.durable = file.content

    def rename(self, old: str, new: str) -> None:
        """Implement `Disk.rename`."""
        self.count(f"rename {old} {new}")
        self._need_leave(new)
        file = self._find(old)
        self._need_directory(posixpath.dirname(new))
        del self._files[old]
        self._files[new] = file

    def unlink(self, path: str) -> None:
        """Implement `Disk.unlink`."""
        self.count(f"unlink {path}")
        if path in self._directories:
            raise _error(errno.EISDIR, path)
        self._find(path)
        self._need_leave(path)
        del self._files[path]

    def sync_directory(self, path: str) -> None:
        """Implement `Disk.sync_directory`."""
        self.count(f"fsync {path}/")
        self._need_directory(path)
        for name in self._files.keys() | self._durable.keys():
            if posixpath.dirname(name) == path:
                self._settle(name)
        inside = {d for d in self._directories | self._durable_directories if posixpath.dirname(d) == path}
        self._durable_directories -= inside - self._directories
        self._durable_directories |= inside & self._directories

    def _settle(self, name: str) -> None:
        if name in self._files:
            self._durable[name] = self._files[name]
        else:
            del self._durable[name]

    def _find(self, path: str) -> _File:
        if path not in self._files:
            raise _error(errno.EISDIR if path in self._directories else errno.ENOENT, path)
        return self._files[path]

    def _need_room(self, path: str) -> None:
        if self.full:
            raise _error(errno.ENOSPC, path)

    def _need_leave(self, path: str) -> None:
        if posixpath.dirname(path) == self.keeps and path in self._files:
            raise _error(errno.EPERM, path)

    def _need_directory(self, path: str) -> None:
        if path not in self._directories:
            raise _error(errno.ENOENT, path)

    def _is_in_memory(self, path: str) -> bool:
        return any(path == m or path.startswith(f"{m}/") for m in self._in_memory)


def _above(path: str) -> list[str]:
    found = []
    while (path := posixpath.dirname(path)) != "/":
        found.append(path)
    return found


def _error(number: int, path: str) -> OSError:
    return OSError(number, os.strerror(number), path)
