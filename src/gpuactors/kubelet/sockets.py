"""The sockets in kubelet's directory: kubelet's own, and those of other plugins beside it.

They are reported as `ports.node.Sockets`. Must not reach the system except through a `DirectoryIo`: a simulation has
one of its own.
"""

from __future__ import annotations

import math
import os
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager, contextmanager
from typing import Final, Protocol, final

import trio
from inotify_simple import INotify, flags
from msgspec import Struct

from gpuactors import limits
from gpuactors.core.values.names import CONTROL_DIRECTORY
from gpuactors.core.values.text import encodable
from gpuactors.grpc_trio import SocketFile, socket_file
from gpuactors.kubelet.ledger import CHECKPOINT
from gpuactors.ports.errors import KubeletError
from gpuactors.ports.node import Sockets
from gpuactors.process.resource_exhaustion import shortage

KUBELET_SOCKET: Final = "kubelet.sock"
OURS: Final = "gpuactors-"
"""The prefix of the names of our own sockets."""

_CHANGES: Final = (
    flags.CREATE
    | flags.DELETE
    | flags.MOVED_TO
    | flags.MOVED_FROM
    | flags.DELETE_SELF
    | flags.MOVE_SELF
    | flags.ONLYDIR
)
_DIRECTORY_LOST: Final = flags.DELETE_SELF | flags.MOVE_SELF | flags.IGNORED | flags.UNMOUNT


# --- the seam ---------------------------------------------------------------------------------------------


class Change(Struct, frozen=True):
    """Something in a directory appeared or disappeared."""

    name: str
    """Its name; empty for the directory itself."""
    lost: bool = False
    """True if the directory is no longer watched: it was removed, renamed or unmounted."""


class Changes(Protocol):
    """The changes in one directory from now on."""

    async def wait(self) -> None:
        """Wait until there is a change to read."""

    def read(self) -> Sequence[Change]:
        """Return the changes since the last read; perhaps none."""


class Directory(Struct, frozen=True):
    """Which directory a path leads to. `links` is 0 for one that was removed and that a mount still keeps."""

    identity: tuple[int, int]
    links: int


class DirectoryIo(Struct, frozen=True):
    """How kubelet's directory is read: the node's, or a simulation's."""

    watch: Callable[[str], AbstractContextManager[Changes]]
    """Watches a directory. Raises `OSError` when it is entered."""
    directory: Callable[[str], Directory]
    """Returns the directory at a path. Raises `OSError`."""
    names: Callable[[str], AbstractContextManager[Iterable[str]]]
    """The names in a directory. Raises `OSError`, also during the iteration."""
    socket_file: Callable[[str], SocketFile | None]


def directory_of_the_node() -> DirectoryIo:
    """Return the node's, by inotify: the directory is an ordinary one, made by a program and not by the kernel."""
    return DirectoryIo(_inotify, _directory, _names, socket_file)


@final
class _Inotify:
    def __init__(self, inotify: INotify) -> None:
        self._inotify = inotify

    async def wait(self) -> None:
        await trio.lowlevel.wait_readable(self._inotify.fileno())

    def read(self) -> Sequence[Change]:
        return [
            Change(change.name, bool(change.mask & _DIRECTORY_LOST))
            for change in self._inotify.read(timeout=0)
        ]


@contextmanager
def _inotify(path: str) -> Iterator[_Inotify]:
    with INotify(nonblocking=True) as inotify:
        inotify.add_watch(path, _CHANGES)
        yield _Inotify(inotify)


def _directory(path: str) -> Directory:
    status = os.stat(path)
    return Directory((status.st_dev, status.st_ino), status.st_nlink)


@contextmanager
def _names(path: str) -> Iterator[Iterable[str]]:
    with os.scandir(path) as entries:
        yield (entry.name for entry in entries)


# --- the watch --------------------------------------------------------------------------------------------


@final
class SocketsWatch:
    """The sockets in kubelet's directory. As long as inotify is unavailable (fs.inotify.max_user_instances or
    max_user_watches is used up, or there are no descriptors), the directory is read periodically: another plugin that
    comes and goes in between is not seen then."""

    def __init__(self, directory: str, io: DirectoryIo) -> None:
        self._path = directory
        self._socket = os.path.join(directory, KUBELET_SOCKET)
        self._io = io

    @asynccontextmanager
    async def open(self) -> AsyncIterator[AsyncIterator[Sockets]]:
        """Implement `ports.node.Kubelet.sockets`."""
        watched = self._directory()
        _check_not_removed(watched, self._path)
        with ExitStack() as stack:
            yield self._seen(stack, self._watch(stack), watched)

    def _watch(self, stack: ExitStack) -> Changes | None:
        try:
            return stack.enter_context(self._io.watch(self._path))
        except (FileNotFoundError, NotADirectoryError) as exc:
            raise KubeletError(
                f"waiting for kubelet: the directory {self._path} does not exist; "
                "is kubelet installed, and is --device-plugin-dir its directory?"
            ) from exc
        except PermissionError as exc:
            raise KubeletError(f"may not watch {self._path}: {exc.strerror}; run as root") from exc
        except OSError:
            return None  # inotify's limits are reached

    async def _seen(
        self, stack: ExitStack, changes: Changes | None, watched: Directory | None
    ) -> AsyncIterator[Sockets]:
        """Yield kubelet's own socket at once, the others together and at most once in ODD_SIGHT_S."""
        kubelet: str | None = ""
        others: dict[str, str] = {}
        others_at = -math.inf
        odd = False  # another process's socket may have come and gone since they were read
        while True:
            now, changed = self._identity(self._socket), False
            if (wait_s := others_at + limits.ODD_SIGHT_S - trio.current_time()) <= 0:
                current, others_at, wait_s = self._others(others), trio.current_time(), math.inf
                changed, others, odd = current != others or odd, current, False
            if now != kubelet or changed:
                kubelet = now
                yield Sockets(now, tuple(sorted(others)))
            # inotify reports the directory's removal only when no process has it open, and our own sockets keep it
            # open. It cannot be removed while kubelet.sock is in it, whose removal is reported at once.
            unsure = now is None or changes is None
            with trio.move_on_after(min(wait_s, limits.KUBELET_DIR_RETRY_S if unsure else math.inf)):
                if changes is None:
                    await trio.sleep_forever()
                else:
                    await changes.wait()
            if changes is None:
                changes = self._watch(stack)
            try:
                reported = () if changes is None else changes.read()
            except OSError:  # what was missed is read, and the watch made anew
                changes, reported, odd = None, (), True
            odd = odd or any(change.name and is_others(change.name) for change in reported)
            self._check_still(watched, reported)

    def _check_still(self, watched: Directory | None, reported: Iterable[Change]) -> None:
        """Raise `KubeletError` unless the path leads to the watched directory."""
        directory = self._directory()
        _check_not_removed(directory, self._path)
        if any(change.lost for change in reported) or _identity(directory) != _identity(watched):
            raise KubeletError(f"waiting for kubelet: the directory {self._path} has disappeared")

    def _others(self, before: dict[str, str]) -> dict[str, str]:
        """Return the identity of each socket that is neither kubelet's nor ours. Return `before` for want of
        descriptors: that is no evidence about any socket."""
        identities: dict[str, str] = {}
        try:
            with self._io.names(self._path) as names:
                for name in names:
                    identity = self._identity(os.path.join(self._path, name)) if is_others(name) else None
                    if identity is not None:
                        identities[encodable(name)] = identity
                        if len(identities) == limits.FOREIGN_SOCKETS_MAX:
                            break
        except OSError as exc:
            return before if shortage(exc) is not None else identities
        return identities

    def _directory(self) -> Directory | None:
        try:
            return self._io.directory(self._path)
        except OSError:
            return None

    def _identity(self, path: str) -> str | None:
        """Return which socket it is: a restarted kubelet makes a new one, perhaps with the same inode."""
        file = self._io.socket_file(path)
        return None if file is None else file.identity


def is_others(name: str) -> bool:
    """Return whether a socket of that name in the directory is neither kubelet's nor ours, nor one that is being
    made."""
    reserved = (KUBELET_SOCKET, CHECKPOINT, CONTROL_DIRECTORY)
    return not name.startswith((".", OURS)) and name not in reserved and "/" not in name


def _identity(directory: Directory | None) -> tuple[int, int] | None:
    return None if directory is None else directory.identity


def _check_not_removed(directory: Directory | None, path: str) -> None:
    """Raise `KubeletError` if it was removed: a mount still shows the removed directory, and never a new one of that
    name."""
    if directory is not None and directory.links == 0:
        raise KubeletError(
            f"waiting for kubelet: the directory {path} has been removed from the node, and this "
            "container still has the removed one: delete this pod, its successor gets the one that is there now"
        )
