"""Asks nvidia-persistenced to let go of a GPU, or to take it again: it keeps every GPU of NVIDIA's driver open.

ONC RPC over its unix socket (RFC 5531, one record per message), program 35006 version 1, procedure 1: set the
persistence mode of the GPU at domain, bus, slot, function. It is nvidia-persistenced's own protocol, the one that
`nvidia-smi -pm` speaks; with it no program of the host has to be run from this container.
"""

from __future__ import annotations

import errno
import os
import re
import struct
from itertools import count
from typing import Final, Protocol, final

import trio

from gpuactors.core.values.model import PciAddress
from gpuactors.host.root import PERSISTENCED_SOCKET, HostRoot

PERSISTENCED_DEADLINE_S: Final = 5.0
"""Deadline of a request to nvidia-persistenced, in seconds: it opens or closes a GPU, 1 to 3 s without other users."""

_PROGRAM: Final = 35006
_VERSION: Final = 1
_SET_MODE: Final = 1
_CALL: Final = 0
_REPLY: Final = 1
_LAST: Final = 0x8000_0000
"""The record's only fragment (RFC 5531, 11)."""
_REPLY_MAX: Final = 1024
_ERRORS: Final = {
    1: "it is not running",
    2: "it does not know the GPU",
    3: "the driver refused",
    7: "only root may ask",
}
"""The meanings of NvPdStatus, as parts of a sentence."""

_ADDRESS: Final = re.compile(r"([0-9a-f]+):([0-9a-f]+):([0-9a-f]+)\.([0-7])")


class PersistenceError(Exception):
    """nvidia-persistenced did not do it; the text is a part of a sentence."""


class Persistence(Protocol):
    """nvidia-persistenced, if there is one."""

    @property
    def sockets(self) -> tuple[str, ...]:
        """The sockets where it is looked for, by the host's own paths."""

    async def set(self, address: PciAddress, *, on: bool) -> bool:
        """Have it keep the GPU open from now on, or not; return False if there is no nvidia-persistenced. Raises
        `PersistenceError`."""


@final
class Persistenced:
    """Implements `Persistence` by its socket: the host's own, and that in the root of a driver that runs in a
    container, as the GPU Operator's does."""

    def __init__(
        self, root: HostRoot, driver_root: str, *, deadline_s: float = PERSISTENCED_DEADLINE_S
    ) -> None:
        """`driver_root`: by the host's own path."""
        roots = dict.fromkeys(("", driver_root.rstrip("/")))
        self.sockets: Final = tuple(f"{prefix}{PERSISTENCED_SOCKET}" for prefix in roots)
        self._root = root
        self._deadline_s = deadline_s
        self._numbers = count(1)
        self._let_go: dict[PciAddress, str] = {}
        """The socket at which each GPU was let go last; the GPU is given back there."""

    async def set(self, address: PciAddress, *, on: bool) -> bool:
        """Implement `Persistence.set`. Of several, each is asked to let go: which one has the GPU is not seen."""
        last_socket = self._let_go.pop(address, None) if on else None
        is_done, failure = False, None
        for socket in (last_socket,) if last_socket is not None else self.sockets:
            try:
                is_set = await self._set(socket, address, on=on)
            except PersistenceError as error:
                failure = error
                continue
            is_done = is_done or is_set
            if is_set and on:
                return True
            if is_set:
                self._let_go[address] = socket
        if failure is not None and not is_done:
            raise failure
        return is_done

    async def _set(self, socket: str, address: PciAddress, *, on: bool) -> bool:
        """Ask at one socket; see `set`."""
        path = self._root.real(socket)
        with trio.move_on_after(self._deadline_s):
            try:
                stream = await trio.open_unix_socket(path)
            except OSError as error:
                if _is_absent(path, error):
                    return False
                unreachable = f"nvidia-persistenced cannot be reached at {socket} ({error.strerror or error})"
                raise PersistenceError(unreachable) from None
            async with stream:
                await self._ask(stream, address, on=on)
            return True
        raise PersistenceError(f"nvidia-persistenced has not answered within {self._deadline_s:g} s")

    async def _ask(self, stream: trio.SocketStream, address: PciAddress, *, on: bool) -> None:
        """Ask for the mode over an open socket. Raises `PersistenceError`."""
        match = _ADDRESS.fullmatch(address)
        assert match is not None
        number = next(self._numbers)
        device = (int(part, 16) for part in match.groups())
        # No credentials: nvidia-persistenced asks the kernel who we are.
        call = struct.pack(
            ">10I5i", number, _CALL, 2, _PROGRAM, _VERSION, _SET_MODE, 0, 0, 0, 0, *device, int(on)
        )
        try:
            await stream.send_all(struct.pack(">I", _LAST | len(call)) + call)
            reply = await _record(stream)
            head = struct.unpack_from(">5I", reply)
            at = 20 + head[4]
            (accepted,) = struct.unpack_from(">I", reply, at)
            is_done = head[:3] == (number, _REPLY, 0) and accepted == 0
            (status,) = struct.unpack_from(">i", reply, at + 4) if is_done else (0,)
        except (trio.BrokenResourceError, struct.error) as error:
            raise PersistenceError(f"nvidia-persistenced answered no sense ({error})") from None
        if not is_done:
            raise PersistenceError("nvidia-persistenced refused the call")
        if status != 0:
            raise PersistenceError(f"nvidia-persistenced: {_ERRORS.get(status, f'status {status}')}")


def _is_absent(path: str, error: OSError) -> bool:
    """Return whether there is no socket. An error without a number means only that the path is too long for a
    socket."""
    return error.errno == errno.ENOENT or (error.errno is None and not os.path.lexists(path))


async def _record(stream: trio.SocketStream) -> bytes:
    (length,) = struct.unpack(">I", await _exactly(stream, 4))
    return await _exactly(stream, min(length & ~_LAST, _REPLY_MAX))


async def _exactly(stream: trio.SocketStream, length: int) -> bytes:
    received = b""
    while len(received) < length:
        part = await stream.receive_some(length - len(received))
        if not part:
            raise trio.BrokenResourceError("it closed the connection")
        received += part
    return received
