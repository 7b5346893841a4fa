"""The operations on files of which everything durable is made, as a seam: the simulation counts them, stops at any one
of them, and loses what was not synced. Nothing in here writes to sysfs.

A file is made durable in this order: a temporary file beside it, fsync, rename, fsync of the directory. Without the
first fsync a power cut can leave an empty file under the new name, without the second one the old file (man 2 fsync).
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from typing import Final, Protocol, final

from gpuactors.acts import tree
from gpuactors.core.values.claim import Json
from gpuactors.process.plain_files import NotPlainError, read_plain

_MODE: Final = 0o644
_DIRECTORY_MODE: Final = 0o755


class HeldDirectory(Protocol):
    """A directory that is held: another one that is made in its place is told from it."""

    def is_at(self, path: str) -> bool:
        """Return whether this is still the directory of that name."""


class Disk(Protocol):
    """Operations on files, each as one system call would do it (more or less). All raise `OSError`."""

    def read(self, path: str, bytes_max: int) -> bytes:
        """Read the file's content; of a larger file `bytes_max` + 1 bytes. Raises `NotPlainError` for what is no
        file."""

    def names(self, directory: str) -> tuple[str, ...]:
        """Return the names in a directory, sorted."""

    def make_directory(self, path: str) -> None:
        """Make a directory. Raises `FileExistsError`."""

    def hold(self, directory: str) -> HeldDirectory:
        """Hold a directory as long as the result is kept."""

    def remove_directory(self, path: str) -> None:
        """Remove an empty directory."""

    def remove_tree(self, path: str, entries_max: int) -> None:
        """Remove a directory with all that is in it, as `acts.tree.remove_tree`: at most so many entries in one call.
        Raises `FileNotFoundError` if it was gone."""

    def write(self, path: str, content: bytes) -> None:
        """Make the file, or give the existing one (the same inode) another content."""

    def sync(self, path: str) -> None:
        """Sync the file's content to the disk."""

    def rename(self, old: str, new: str) -> None:
        """Rename a file, as rename(2): a file called `new` is replaced."""

    def unlink(self, path: str) -> None:
        """Remove a name of a file."""

    def sync_directory(self, path: str) -> None:
        """Sync the names in a directory to the disk."""


@final
class _OpenDirectory:
    """Implements `HeldDirectory`. Its number, by which it is compared, is its own while it is open; most file systems
    would give it to the next directory that is made."""

    def __init__(self, path: str) -> None:
        self._descriptor = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        # At the interpreter's end the names of modules may be gone before.
        if hasattr(self, "_descriptor"):  # else it could not be opened
            close(self._descriptor)

    def is_at(self, path: str) -> bool:
        try:
            return os.path.samestat(os.fstat(self._descriptor), os.stat(path))
        except FileNotFoundError:
            return False


@final
class RealDisk:
    """The node's disk. Implements `Disk`."""

    def read(self, path: str, bytes_max: int) -> bytes:
        return read_plain(path, bytes_max + 1)

    def names(self, directory: str) -> tuple[str, ...]:
        return tuple(sorted(os.listdir(directory)))

    def make_directory(self, path: str) -> None:
        os.mkdir(path, _DIRECTORY_MODE)

    def hold(self, directory: str) -> HeldDirectory:
        return _OpenDirectory(directory)

    def remove_directory(self, path: str) -> None:
        os.rmdir(path)

    def remove_tree(self, path: str, entries_max: int) -> None:
        tree.remove_tree(path, entries_max)

    def write(self, path: str, content: bytes) -> None:
        """Implement `Disk.write`. Not O_TRUNC: of a file that a container reads no moment is empty. What else has the
        name, a FIFO or a link, makes room: the name is ours."""
        with suppress(FileNotFoundError):
            mode = os.lstat(path).st_mode
            if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
                os.unlink(path)
        descriptor = os.open(
            path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, _MODE
        )
        try:
            rest = memoryview(content)
            while rest:
                rest = rest[os.write(descriptor, rest) :]
            os.ftruncate(descriptor, len(content))
        finally:
            os.close(descriptor)

    def sync(self, path: str) -> None:
        """Implement `Disk.sync`. By a descriptor of its own: fsync(2) is of the file, whoever wrote it."""
        _sync(path, os.O_RDONLY)

    def rename(self, old: str, new: str) -> None:
        os.rename(old, new)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def sync_directory(self, path: str) -> None:
        _sync(path, os.O_RDONLY | os.O_DIRECTORY)


def _sync(path: str, flags: int) -> None:
    descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some filesystems have nothing to sync (man 2 fsync: EINVAL).
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(descriptor)


# --- what is made of them ---------------------------------------------------------------------------------------------


def replace(disk: Disk, path: str, content: bytes) -> None:
    """Replace the file at `path`: at each moment, and after a power cut at any, the old or the new one is there, whole.
    Raises `OSError`; the old file is there then."""
    replace_unsynced(disk, path, content)
    disk.sync_directory(os.path.dirname(path))


def replace_unsynced(disk: Disk, path: str, content: bytes) -> None:
    """Do as `replace`, but until the directory is synced a power cut may leave either file."""
    temporary = temporary_of(path)
    disk.write(temporary, content)
    disk.sync(temporary)
    disk.rename(temporary, path)


def put_unsynced(disk: Disk, path: str, content: bytes, bytes_max: int) -> None:
    """Do as `replace_unsynced` if the file differs: CDI's readers read the directory anew at each change."""
    if content_of(disk, path, bytes_max) != content:
        replace_unsynced(disk, path, content)


def content_of(disk: Disk, path: str, bytes_max: int) -> bytes | None:
    """Read a file; None also if it is no file: a FIFO is replaced as if nothing were there, and a directory refuses
    that. Raises `OSError`."""
    try:
        return disk.read(path, bytes_max)
    except (FileNotFoundError, NotPlainError):
        return None


def json_text(content: Json) -> bytes:
    """Return the text of a CDI file."""
    return json.dumps(content, indent=1).encode() + b"\n"


def temporary_of(path: str) -> str:
    """Return a hidden name: readers of a CDI directory take every `*.json` in it."""
    directory, name = os.path.split(path)
    return os.path.join(directory, f".{name}.new")


def is_temporary(name: str) -> bool:
    """Return whether it is the name of a temporary file of `replace`."""
    return name.startswith(".") and name.endswith(".new")


@final
class KeptDirectory:
    """A directory that is made, and made durable, when it is first needed, and again when it is missing, or is another
    one: somebody may have removed it and made it anew, and whether that one is durable is not known."""

    def __init__(self, disk: Disk, path: str) -> None:
        self._disk = disk
        self._path = path
        self._durable: HeldDirectory | None = None

    def ensure(self) -> None:
        """Implement `ensure_directory`, without a sync of what this process has synced."""
        if self._durable is None or not self._durable.is_at(self._path):
            ensure_directory(self._disk, self._path)
            self._durable = self._disk.hold(self._path)


def ensure_directory(disk: Disk, path: str) -> None:
    """Make a directory and its missing parents, durably. Raises `OSError`."""
    above = os.path.dirname(path)
    if not _is_directory(disk, path):
        if not _is_directory(disk, above):
            ensure_directory(disk, above)
        with suppress(FileExistsError):
            disk.make_directory(path)
    # Also of one that is there: a process that was killed may have made it and not synced it.
    disk.sync_directory(above)


def _is_directory(disk: Disk, path: str) -> bool:
    try:
        disk.names(path)
    except FileNotFoundError:
        return False
    return True


def unlink_if_there(disk: Disk, path: str) -> bool:
    """Remove a file; return False if it was gone. Raises `OSError` for other reasons."""
    try:
        disk.unlink(path)
    except FileNotFoundError:
        return False
    return True
