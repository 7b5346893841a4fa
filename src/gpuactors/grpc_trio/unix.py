"""Unix sockets by path: bind one without disturbing other processes, dial one without a premature success, carry bytes.

Standard library calls on purpose: trio binds a unix socket in a thread, and its `open_unix_socket` takes EAGAIN (the
listener's backlog is full) for "connecting" and returns a stream that was never connected. Must not know gRPC.
"""

from __future__ import annotations

import errno
import os
import secrets
import socket
import stat
import struct
import time
from abc import abstractmethod
from collections.abc import Collection
from contextlib import suppress
from operator import index
from typing import Final, Protocol, final

import trio
from msgspec import Struct

from .limits import SOCKET_PATH_MAX_BYTES

_BACKLOG: Final = 128
_RECEIVE_BYTES: Final = 64 * 1024
_DIAL_RETRY_S: Final = 0.01  # the listener's backlog was full: it has that long to accept some
_UCRED: Final = struct.Struct("3i")  # struct ucred: pid, uid, gid (unix(7), SO_PEERCRED)


class SocketError(Exception):
    """A unix socket cannot be made or reached; the text is a sentence for the operator, with the path."""


class SocketPathTooLongError(SocketError):
    """Over SOCKET_PATH_MAX_BYTES."""


class SocketInUseError(SocketError):
    """A live process listens on the path. `pid` is 0 if it is in another PID namespace, None if it is unknown."""

    def __init__(self, text: str, *, pid: int | None) -> None:
        super().__init__(text)
        self.pid = pid


class NotASocketError(SocketError):
    """There is something else at the path; it is not touched."""


class SocketBindError(SocketError):
    """The directory does not allow it: missing, read-only, full, no permission."""


class ConnectError(SocketError):
    """No process answers at the path."""


@final
class UnixStream(trio.abc.Stream):
    """One end of a connection; owns the socket. It waits before it reads, and can write without a wait.

    trio's own stream reads first, which fails where a peer waits for us, and passes through the scheduler once more
    after each success.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._stream = trio.SocketStream(trio.socket.from_stdlib_socket(sock))

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """Receive bytes; always give other tasks a turn, so that a peer that sends without end cannot hold them up."""
        size = _RECEIVE_BYTES if max_bytes is None else index(max_bytes)
        if size < 1:
            raise ValueError("max_bytes must be at least 1")
        try:
            while self._socket.fileno() >= 0:
                await trio.lowlevel.wait_readable(self._socket)
                try:
                    return self._socket.recv(size)
                except BlockingIOError:  # it was not: wait again
                    continue
        except OSError as error:
            raise trio.BrokenResourceError(f"socket connection broken: {error}") from error
        await trio.lowlevel.checkpoint()
        raise trio.ClosedResourceError("the socket is closed")

    def send_now(self, data: bytes | bytearray) -> int:
        """Send what the socket takes at once, and return how many bytes. Not while a `send_all` is under way.

        Raises as `send_all`.
        """
        try:
            return self._socket.send(data)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise trio.BrokenResourceError(f"socket connection broken: {error}") from error

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await self._stream.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        await self._stream.wait_send_all_might_not_block()

    async def aclose(self) -> None:
        await self._stream.aclose()


class BoundListener(trio.abc.Listener[trio.abc.Stream]):
    """Listens at a path."""

    @abstractmethod
    def still_there(self) -> bool:
        """Return whether a client that dials the path reaches this listener. Kubelet removes every socket of its
        directory when it starts."""


class UnixListener(BoundListener):
    """A listening socket and its file. Made by `bind_unix`."""

    def __init__(self, path: str, listener: trio.SocketListener, inode_id: tuple[int, int]) -> None:
        self.path: Final = path
        self.inode_id: Final = inode_id
        """Device and inode number of our socket file. Not reused while the socket is open."""
        self._listener = listener
        self._closed = False

    def still_there(self) -> bool:
        """Implement `BoundListener.still_there`: the file at the path is the one that was bound."""
        return not self._closed and _inode_id(self.path) == self.inode_id

    async def accept(self) -> UnixStream:
        accepted = await self._listener.accept()
        return UnixStream(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, 0, accepted.socket.detach()))

    async def aclose(self) -> None:
        """Remove the file, if it is still ours, and then close, so that no client is refused at a path that exists."""
        if self.still_there():
            with suppress(OSError):  # gone meanwhile, or the directory is read-only now: nothing to be done
                os.unlink(self.path)
        self._closed = True  # from here on another process's file may have our inode number
        await self._listener.aclose()


class Owner(Struct, frozen=True):
    """A live process that listens on a socket. `pid` is 0 if it is in another PID namespace, None if it is unknown."""

    pid: int | None


class SocketFile(Struct, frozen=True):
    """The file at a socket's path, whether or not a process listens behind it."""

    identity: str
    """The file's identity, which differs for a new socket even with the same inode."""
    age_s: float
    """Seconds since it was made. After a clock was set back this is too small."""


class Bind(Protocol):
    """See `bind_unix`."""

    def __call__(self, path: str, *, mode: int = ..., evict: Collection[Owner] = ...) -> BoundListener: ...


class Dial(Protocol):
    """See `connect_unix`."""

    async def __call__(self, path: str, *, deadline_s: float) -> trio.abc.Stream: ...


class OwnerOf(Protocol):
    """See `owner_of`."""

    def __call__(self, path: str) -> Owner | None: ...


def socket_file(path: str) -> SocketFile | None:
    """Return the socket file at `path`; None if there is none, or it cannot be accessed."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    if not stat.S_ISSOCK(status.st_mode):
        return None
    return SocketFile(f"{status.st_dev}:{status.st_ino}:{status.st_mtime_ns}", time.time() - status.st_mtime)


def owner_of(path: str) -> Owner | None:
    """Return the process that listens at `path`; None if there is none, or no file. Dials it, without waiting.

    Raises SocketBindError if this process may not dial it.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except (ConnectionRefusedError, FileNotFoundError, NotADirectoryError):
            return None
        except PermissionError as error:
            raise SocketBindError(
                f"{path} belongs to another user and this process may not connect to it ({error.strerror}): "
                "remove it, or run with the permission to"
            ) from error
        except OSError:  # EAGAIN: its backlog is full; EPROTOTYPE: not a stream socket. Alive either way.
            return Owner(None)
        pid, _uid, _gid = _UCRED.unpack(probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
        return Owner(pid)


def bind_unix(path: str, *, mode: int = 0o660, evict: Collection[Owner] = ()) -> UnixListener:
    """Listen at `path`, atomically: the socket is made and listens under a hidden name, and is then renamed.

    So no client that dials `path` is ever refused, and a stale socket file (no process listens) is replaced without a
    moment of absence. (A path so near the limit that no hidden name fits is bound directly.) `mode`: permission bits of
    the file. `evict`: owners whose socket is replaced although they run, because they are known to hang; clients that
    have dialled them stay connected to them. Raises SocketError, as its subclasses say.
    """
    _check_length(path)
    _check_vacant(path, evict)
    try:
        sock, inode_id = _bind_renamed(path, mode)
    except OSError as error:
        raise _bind_error(path, error) from error
    return UnixListener(path, trio.SocketListener(trio.socket.from_stdlib_socket(sock)), inode_id)


async def connect_unix(path: str, *, deadline_s: float) -> UnixStream:
    """Dial `path` until `deadline_s` on trio's clock. Raises ConnectError, SocketPathTooLongError."""
    _check_length(path)
    while True:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            sock.connect(path)
        except BlockingIOError:  # on AF_UNIX: the backlog is full, and no connection is under way
            sock.close()
        except OSError as error:
            sock.close()
            raise _connect_error(path, error) from error
        else:
            return UnixStream(sock)
        if trio.current_time() + _DIAL_RETRY_S > deadline_s:
            raise ConnectError(
                f"no process accepts connections at {path}: the queue of its listener is full; is that process hanging?"
            )
        await trio.sleep(_DIAL_RETRY_S)


# --- bind -------------------------------------------------------------------------------------------------


def _check_length(path: str) -> None:
    length_bytes = len(os.fsencode(path))
    if length_bytes > SOCKET_PATH_MAX_BYTES:
        raise SocketPathTooLongError(
            f"the socket path {path} has {length_bytes} bytes; the kernel takes at most {SOCKET_PATH_MAX_BYTES}: "
            "use a shorter directory"
        )


def _check_vacant(path: str, evict: Collection[Owner]) -> None:
    """Raise SocketError unless `path` is free: no file, or a socket without a process or of one to be evicted."""
    try:
        status = os.lstat(path)
    except OSError:
        return  # nothing there; or the directory is at fault, which bind() will report
    if not stat.S_ISSOCK(status.st_mode):
        raise NotASocketError(
            f"{path} exists and is not a socket; it is not touched: remove it, or choose another socket directory"
        )
    owner = owner_of(path)
    if owner is not None and owner not in evict:
        raise _in_use(path, owner.pid)


def _in_use(path: str, pid: int | None) -> SocketInUseError:
    match pid:
        case None:
            listener = "another process"
        case 0:
            listener = "a process in another PID namespace (another pod?)"
        case _:
            listener = f"process {pid}"
    return SocketInUseError(
        f"{listener} listens on {path}; two plugins cannot share it: stop that one first, "
        "or give one of them another socket directory",
        pid=pid,
    )


def _bind_renamed(path: str, mode: int) -> tuple[socket.socket, tuple[int, int]]:
    hidden = _hidden_name(path)
    if hidden is None:
        with suppress(FileNotFoundError):
            os.unlink(path)  # stale: _check_vacant has seen to it
    name = hidden or path
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(name)
        try:
            os.chmod(name, mode)
            sock.listen(_BACKLOG)
            inode_id = _inode_id(name)
            if inode_id is None:
                raise FileNotFoundError(errno.ENOENT, "the socket was removed while it was being made", name)
            if hidden is not None:
                os.rename(hidden, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(name)
            raise
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock, inode_id


def _hidden_name(path: str) -> str | None:
    """Return a name beside `path` that fits, or None. The dot: kubelet's plugin watcher ignores hidden files."""
    directory, base = os.path.split(path)
    token = secrets.token_hex(3)
    for name in (f".{base}.{token}", f".{token}"):
        hidden = os.path.join(directory, name)
        if len(os.fsencode(hidden)) <= SOCKET_PATH_MAX_BYTES:
            return hidden
    return None


def _inode_id(path: str) -> tuple[int, int] | None:
    try:
        status = os.lstat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _bind_error(path: str, error: OSError) -> SocketBindError:
    directory = os.path.dirname(path) or "."
    match error.errno:
        case errno.ENOENT:
            text = f"the directory {directory} does not exist: mount it, or name the right one"
        case errno.ENOTDIR:
            text = f"{directory} is not a directory: name the right one"
        case errno.EROFS:
            text = f"{directory} is on a read-only file system: mount it writable"
        case errno.EACCES | errno.EPERM:
            text = (
                f"user {os.geteuid()} may not write to {directory}: give it write access, or run as its owner"
            )
        case errno.ENOSPC | errno.EDQUOT:
            text = f"the file system of {directory} is full (space or inodes): make room"
        case _:
            text = f"{os.strerror(error.errno or 0)}: look at {directory}"
    return SocketBindError(f"cannot make the socket {path}: {text}")


def _connect_error(path: str, error: OSError) -> ConnectError:
    match error.errno:
        case errno.ENOENT:
            text = "there is no such file: is the process that serves it running?"
        case errno.ECONNREFUSED:
            text = "no process listens on it: the process that made it has ended or has not got that far"
        case errno.EACCES | errno.EPERM:
            text = f"user {os.geteuid()} may not write to it: run as its owner or group"
        case _:
            text = os.strerror(error.errno or 0)
    return ConnectError(f"cannot connect to {path}: {text}")
