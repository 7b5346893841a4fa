"""Files at paths that others can reach: read without waiting for anybody, and replaced where they are regular files.

A FIFO at such a path blocks whoever opens it, a device may act on it, and a link at the name of a temporary file makes
root write where it points to. All errors are `OSError` whose `strerror` fits a sentence. Must not know what the files
say.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import time
from contextlib import ExitStack, suppress
from typing import BinaryIO, Final

_LEFT_S: Final = 60.0
"""The age from which a temporary file was left by a killed process, 60 s: writing one takes milliseconds, and a few
seconds on a disk that is busy."""


class NotPlainError(OSError):
    """There is something at the path that is no regular file; it was not opened, read or replaced."""


_KINDS: Final = (
    (stat.S_ISLNK, "a link"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISDIR, "a directory"),
)


def read_plain(path: str | os.PathLike[str], bytes_max: int) -> bytes:
    """Read at most `bytes_max` bytes of a regular file; links to it are followed. Raises `OSError`, at once, and
    `NotPlainError` for anything that is no file."""
    with open_plain(path) as file:
        # As many bytes are allocated. A file of the kernel's own has no size.
        return file.read(min(bytes_max, os.fstat(file.fileno()).st_size) or bytes_max)


def open_plain(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a regular file, to read it in pieces. Raises as `read_plain`."""
    if "\0" in os.fspath(path):
        raise NotPlainError(errno.EINVAL, "the path has a NUL in it", os.fspath(path))
    _refuse(os.stat(path).st_mode, path)  # before it is opened: that alone makes some devices act
    with ExitStack() as opened:
        file = opened.enter_context(open(path, "rb", opener=_without_waiting))
        _refuse(os.fstat(file.fileno()).st_mode, path)
        opened.pop_all()
        return file


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)


def replace_plain(path: str | os.PathLike[str], content: bytes, mode: int) -> None:
    """Replace the regular file at `path`, or make one. Raises as `replace_own`, and `NotPlainError` for anything else,
    as /dev/stdout: it is somebody's, and a link may lead anywhere."""
    with suppress(FileNotFoundError):
        _refuse(os.lstat(path).st_mode, path)
    replace_own(path, content, mode)


def replace_own(path: str | os.PathLike[str], content: bytes, mode: int, *, durable: bool = False) -> None:
    """Replace what is at `path`, where nobody else has anything: it is whole at any moment, and a link is replaced
    itself. `durable`: sync the content first. Remove what a killed process has left. Raises `OSError`; the old file is
    there then."""
    directory, name = os.path.split(path)
    new = os.path.join(directory, f".{name}.{os.urandom(8).hex()}.new")

    def opener(path: str, flags: int) -> int:
        return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, mode)

    try:
        with open(new, "xb", opener=opener) as file:
            os.fchmod(file.fileno(), mode)  # whatever the umask is
            file.write(content)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(new, path)
    except OSError:
        with suppress(OSError):
            os.unlink(new)
        raise
    with suppress(OSError):
        _remove_left(directory or ".", name)


def _remove_left(directory: str, name: str) -> None:
    """Remove old temporary files: another process, as a daemon that hands over, may be writing a new one."""
    is_left = re.compile(rf"\.{re.escape(name)}\.[0-9a-f]{{16}}\.new").fullmatch
    before = time.time() - _LEFT_S
    for path in [os.path.join(directory, other) for other in os.listdir(directory) if is_left(other)]:
        status = os.lstat(path)
        if stat.S_ISREG(status.st_mode) and status.st_mtime < before:
            os.unlink(path)


def _refuse(mode: int, path: str | os.PathLike[str]) -> None:
    if stat.S_ISREG(mode):
        return
    kind = next((name for is_one, name in _KINDS if is_one(mode)), "no file")
    raise NotPlainError(errno.EINVAL, f"it is {kind}, and a regular file is needed", os.fspath(path))
