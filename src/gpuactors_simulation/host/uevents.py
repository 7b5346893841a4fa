"""The kernel's uevents as the fake node sends them: the value, its wire format, and a sender.

Must not be used to read uevents: `host/uevents.py` has a parser of its own, so that one mistake is not made twice.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Final, final

import trio
from msgspec import Struct

_NO_LISTENER: Final = frozenset({errno.ENOENT, errno.ECONNREFUSED, errno.ECONNRESET, errno.ENOTCONN})
_NO_ROOM: Final = frozenset({errno.EAGAIN, errno.ENOBUFS})


class Uevent(Struct, frozen=True):
    """One uevent, as lib/kobject_uevent.c makes it."""

    action: str
    devpath: str
    """Path below /sys, with its leading slash: `/devices/pci0000:20/0000:23:00.0`."""
    subsystem: str
    properties: tuple[tuple[str, str], ...]
    """Everything after ACTION, DEVPATH and SUBSYSTEM, in the kernel's order; SEQNUM is the last."""

    def encode(self) -> bytes:
        """Return the datagram: `action@devpath`, then KEY=value pairs, each ended by a NUL."""
        pairs = (
            ("ACTION", self.action),
            ("DEVPATH", self.devpath),
            ("SUBSYSTEM", self.subsystem),
            *self.properties,
        )
        lines = (f"{self.action}@{self.devpath}", *(f"{key}={value}" for key, value in pairs))
        return b"".join(line.encode(errors="surrogateescape") + b"\0" for line in lines)

    def __getitem__(self, key: str) -> str:
        """Return the value of one property. Raises `KeyError`."""
        return dict(self.properties)[key]


@final
class UeventSender:
    """Sends uevents to a daemon that was started with `--uevents unix:PATH`.

    Like the kernel, it does not keep what cannot be delivered: without a listener at PATH a message is dropped and
    counted in `dropped`. They differ where the receiver is slow: the kernel drops, and the receiver gets ENOBUFS; here
    `send` drops and only the sender knows, and `send_all` waits for room. A unix datagram queue holds
    net.unix.max_dgram_qlen messages, 10 by default, so a burst wants `send_all`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._socket: socket.socket | None = None
        self.sent = 0
        self.dropped = 0

    def send(self, uevents: Iterable[Uevent]) -> int:
        """Send without waiting; return how many were delivered."""
        delivered = 0
        for uevent in uevents:
            arrived = self._try(uevent.encode()) is None
            delivered += arrived
            self._count(arrived)
        return delivered

    async def send_all(self, uevents: Iterable[Uevent]) -> int:
        """Sends, waiting for room while the receiver lives; returns how many were delivered."""
        delivered = 0
        for uevent in uevents:
            await trio.lowlevel.checkpoint()
            datagram = uevent.encode()
            while (problem := self._try(datagram)) in _NO_ROOM:
                assert self._socket is not None
                await trio.lowlevel.wait_writable(self._socket)
            delivered += problem is None
            self._count(problem is None)
        return delivered

    def close(self) -> None:
        """Close the socket; a later send opens a new one."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def __enter__(self) -> UeventSender:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _count(self, arrived: bool) -> None:
        if arrived:
            self.sent += 1
        else:
            self.dropped += 1

    def _try(self, datagram: bytes) -> int | None:
        """Send one datagram; None, or the errno of a failure that is a listener's absence or slowness."""
        for attempt in (1, 2):
            try:
                if self._socket is None:
                    self._socket = self._connect()
                self._socket.send(datagram)
                return None
            except OSError as error:
                if error.errno in _NO_ROOM:
                    return error.errno
                if error.errno not in _NO_LISTENER:
                    raise
                # The listener that the socket was connected to may have been replaced by another one: connect anew.
                self.close()
                if attempt == 2:
                    return error.errno
        return None

    def _connect(self) -> socket.socket:
        # Connected, because only then does "writable" mean "room in the receiver's queue" (net/unix/af_unix.c,
        # unix_dgram_poll).
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        try:
            connection.connect(str(self._path))
        except BaseException:
            connection.close()
            raise
        return connection
