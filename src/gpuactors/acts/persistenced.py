"""Asks nvidia-persistenced to let go of a GPU, or to take it again: it keeps every GPU of NVIDIA's driver open.

ONC RPC over its unix socket (RFC 5531, one record per message), program 35006 version 1, procedure 1: set the
persistence mode of the GPU at domain, bus, slot, function. It is nvidia-persistenced's own protocol, the one that
`nvidia-smi -pm` speaks; with it no program of the host has to be run from this container.
"""

from __future__ import annotations

import re
import struct
from itertools import count
from typing import Final, Protocol, final

import trio

from gpuactors import limits
from gpuactors.core.values.model import PciAddress
from gpuactors.host.root import PERSISTENCED_SOCKET, HostRoot

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
"""NvPdStatus."""

_ADDRESS: Final = re.compile(r"([0-9a-f]+):([0-9a-f]+):([0-9a-f]+)\.([0-7])")


class PersistenceError(Exception):
    """nvidia-persistenced did not do it; the text is a part of a sentence."""


class Persistence(Protocol):
    """nvidia-persistenced, if there is one."""

    async def set(self, address: PciAddress, *, on: bool) -> bool:
        """It keeps the GPU open from now on, or not; False if there is no nvidia-persistenced. Raises
        `PersistenceError`."""
        ...


@final
class Persistenced:
    """Implements `Persistence` by the host's socket."""

    def __init__(self, root: HostRoot, *, deadline_s: float = limits.PERSISTENCED_DEADLINE_S) -> None:
        self._path = root.real(PERSISTENCED_SOCKET)
        self._deadline_s = deadline_s
        self._numbers = count(1)

    async def set(self, address: PciAddress, *, on: bool) -> bool:
        """Implement `Persistence.set`."""
        with trio.move_on_after(self._deadline_s):
            try:
                stream = await trio.open_unix_socket(self._path)
            except FileNotFoundError:
                return False
            except OSError as error:
                raise PersistenceError(f"nvidia-persistenced cannot be reached ({error.strerror})") from None
            async with stream:
                await self._ask(stream, address, on=on)
            return True
        raise PersistenceError(f"nvidia-persistenced has not answered within {self._deadline_s:g} s")

    async def _ask(self, stream: trio.SocketStream, address: PciAddress, *, on: bool) -> None:
        """Raises `PersistenceError`."""
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


async def _record(stream: trio.SocketStream) -> bytes:
    (length,) = struct.unpack(">I", await _exactly(stream, 4))
    return await _exactly(stream, min(length & ~_LAST, _REPLY_MAX))


async def _exactly(stream: trio.SocketStream, length: int) -> bytes:
    found = b""
    while len(found) < length:
        part = await stream.receive_some(length - len(found))
        if not part:
            raise trio.BrokenResourceError("it closed the connection")
        found += part
    return found
