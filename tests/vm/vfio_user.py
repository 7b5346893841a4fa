"""PCI functions with any ids for the guest: a server of the vfio-user protocol behind QEMU's `vfio-user-pci`.

To the guest's kernel they are functions like any others: they can be bound, opened, reset, suspended and pulled out.
But they are inert: their one BAR reads as zeros and forgets what is written, they raise no interrupt and do no DMA. So
a GPU's driver would find nothing, and vfio-pci all that it looks at. Must not know what a scenario does with them.

Theory of operation. QEMU (the client) connects when a function is plugged and disconnects when it is gone; each
connection is a function just switched on. QEMU asks for what VFIO's ioctls would tell it (linux/vfio.h), one command
after the other, and has each access to the configuration space and to the BAR answered here. `Conversation` is the
protocol without a socket, `serving` the sockets without the protocol.

Source: docs/interop/vfio-user.rst of QEMU; PCI Express Base Specification, chapter 7, for the configuration space.
"""

from __future__ import annotations

import errno
import json
import os
import selectors
import socket
import struct
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from enum import IntEnum
from pathlib import Path
from typing import Final, final

from tests.vm.machine import PciFunction, PciIds

HEADER: Final = struct.Struct("<HHIII")
"""Message number, command, size with this header, flags, error."""

REPLY: Final = 0x1
TYPE_BITS: Final = 0xF
NO_REPLY: Final = 0x10
ERROR: Final = 0x20

MESSAGE_MAX_BYTES: Final = 64 * 1024
"""QEMU's largest is an access of 8 bytes; more than this is no message of this protocol."""

DESCRIPTORS_MAX: Final = 8
"""Of one message: memory for DMA, eventfds for interrupts. An inert function uses none; they are closed."""

CONFIG_BYTES: Final = 4096
CONFIG_REGION: Final = 7
REGIONS: Final = 9
"""VFIO_PCI_CONFIG_REGION_INDEX and VFIO_PCI_NUM_REGIONS. Regions 0 to 5 are the BARs."""

BAR_BYTES: Final = 16 * 1024
"""The only BAR, number 0: memory, 32 bit. Small enough for what firmware sets aside behind a port for hot plug."""

INTX: Final = 0
MESSAGE_INTERRUPTS: Final = (1, 2)
INTERRUPTS: Final = 5
"""VFIO_PCI_NUM_IRQS: one INTx, neither MSI nor MSI-X, one each to tell of an error and to ask for the device back."""


class Command(IntEnum):
    """What a client may ask; those that need no answer here are not listed."""

    VERSION = 1
    DMA_MAP = 2
    DMA_UNMAP = 3
    GET_INFO = 4
    GET_REGION_INFO = 5
    GET_IRQ_INFO = 7
    SET_IRQS = 8
    REGION_READ = 9
    REGION_WRITE = 10
    RESET = 13


class ProtocolError(Exception):
    """What came is no vfio-user message; the connection cannot go on."""


class _Refused(Exception):
    """A command that is answered with an errno."""

    def __init__(self, number: int) -> None:
        super().__init__(errno.errorcode[number])
        self.number = number


@final
class ConfigSpace:
    """The configuration space of one function: an endpoint with power management and function level reset."""

    def __init__(self, ids: PciIds) -> None:
        self._power_on = _config_space(ids)
        self._bytes = bytearray(self._power_on)

    def read(self, offset: int, count: int) -> bytes:
        """`count` bytes from `offset`, which are inside."""
        return bytes(self._bytes[offset : offset + count])

    def write(self, offset: int, data: bytes) -> None:
        """Bits that a driver may write change, all others stay."""
        for place, byte in enumerate(data, offset):
            mask = _WRITABLE.get(place, 0)
            self._bytes[place] = self._bytes[place] & ~mask | byte & mask

    def reset(self) -> None:
        """As after power on."""
        self._bytes[:] = self._power_on


_PM_AT: Final = 0x60
_PCIE_AT: Final = 0x68

_WRITABLE: Final = {
    0x04: 0x47, 0x05: 0x05,  # command: I/O, memory, bus master, parity, SERR, INTx off
    0x3C: 0xFF,  # interrupt line
    _PM_AT + 4: 0x03,  # power state
    _PCIE_AT + 8: 0xFF, _PCIE_AT + 9: 0x7F,  # device control, without "initiate FLR", which reads as zero
}  # fmt: skip


def _config_space(ids: PciIds) -> bytes:
    config = bytearray(CONFIG_BYTES)
    vendor, device, class_code = int(ids.vendor, 16), int(ids.device, 16), int(ids.class_code, 16)
    # Vendor, device, command, status (has capabilities), then revision in the lowest byte of the class code's word.
    struct.pack_into("<HHHHI", config, 0x00, vendor, device, 0, 0x0010, class_code << 8 | 0xA1)
    struct.pack_into("<HHI", config, 0x2C, vendor, device, 0)  # subsystem; no expansion ROM
    struct.pack_into("<B", config, 0x34, _PM_AT)
    struct.pack_into("<BB", config, 0x3C, 0, 1)  # INTA
    # Power management, version 3: D0 and D3hot; what was configured survives D3hot (no soft reset).
    struct.pack_into("<BBHHH", config, _PM_AT, 0x01, _PCIE_AT, 0x0003, 0x0008, 0)
    # PCI Express, version 2, endpoint: 512 bytes of payload and FLR; 2.5 GT/s, one lane.
    struct.pack_into("<BBHIHHIHH", config, _PCIE_AT, 0x10, 0, 0x0002, 0x10008002, 0, 0, 0x0011, 0, 0x0011)
    return bytes(config)


@final
class Conversation:
    """One connection, without the socket: bytes of the client in, bytes for the client out."""

    def __init__(self, ids: PciIds) -> None:
        self._config = ConfigSpace(ids)
        self._buffer = b""
        self._begun = False

    def feed(self, data: bytes) -> bytes:
        """The replies to every message that `data` completes, in order. Raises ProtocolError."""
        self._buffer += data
        replies = bytearray()
        while len(self._buffer) >= HEADER.size:
            number, command, size, flags, _ = HEADER.unpack_from(self._buffer)
            if not HEADER.size <= size <= MESSAGE_MAX_BYTES or flags & TYPE_BITS:
                raise ProtocolError(f"command {command} with size {size} and flags {flags:#x}")
            if len(self._buffer) < size:
                break
            payload, self._buffer = self._buffer[HEADER.size : size], self._buffer[size:]
            replies += self._reply(number, command, payload, silent=bool(flags & NO_REPLY))
        return bytes(replies)

    def _reply(self, number: int, command: int, payload: bytes, *, silent: bool) -> bytes:
        if not self._begun and command != Command.VERSION:
            raise ProtocolError(f"command {command} before the version was agreed on")
        try:
            answer, flags, error = self._answer(command, payload), REPLY, 0
        except _Refused as refused:
            answer, flags, error = b"", REPLY | ERROR, refused.number
        except struct.error:
            raise ProtocolError(f"command {command} with only {len(payload)} bytes") from None
        if silent:
            return b""
        return HEADER.pack(number, command, HEADER.size + len(answer), flags, error) + answer

    def _answer(self, command: int, payload: bytes) -> bytes:
        match command:
            case Command.VERSION:
                return self._version(payload)
            case Command.DMA_MAP | Command.SET_IRQS:
                return b""
            case Command.DMA_UNMAP:
                return payload[:24]
            case Command.GET_INFO:
                resettable_pci = 0x1 | 0x2
                return struct.pack("<IIII", 16, resettable_pci, REGIONS, INTERRUPTS)
            case Command.GET_REGION_INFO:
                return _region_info(*struct.unpack_from("<8xI", payload))
            case Command.GET_IRQ_INFO:
                return _irq_info(*struct.unpack_from("<8xI", payload))
            case Command.REGION_READ:
                return self._read(payload)
            case Command.REGION_WRITE:
                return self._write(payload)
            case Command.RESET:
                self._config.reset()
                return b""
            case _:
                raise _Refused(errno.ENOTSUP)

    def _version(self, payload: bytes) -> bytes:
        major, _ = struct.unpack_from("<HH", payload)
        if major != 0:
            raise _Refused(errno.EINVAL)
        self._begun = True
        capabilities = {"max_msg_fds": DESCRIPTORS_MAX, "max_data_xfer_size": CONFIG_BYTES}
        return struct.pack("<HH", 0, 0) + json.dumps({"capabilities": capabilities}).encode() + b"\0"

    def _read(self, payload: bytes) -> bytes:
        offset, region, count = _checked_access(payload)
        data = self._config.read(offset, count) if region == CONFIG_REGION else bytes(count)
        return payload[:16] + data

    def _write(self, payload: bytes) -> bytes:
        offset, region, count = _checked_access(payload)
        if len(payload) != 16 + count:
            raise _Refused(errno.EINVAL)
        if region == CONFIG_REGION:
            self._config.write(offset, payload[16:])
        return payload[:16]


def _region_bytes(region: int) -> int:
    return {0: BAR_BYTES, CONFIG_REGION: CONFIG_BYTES}.get(region, 0)


def _checked_access(payload: bytes) -> tuple[int, int, int]:
    offset, region, count = struct.unpack_from("<QII", payload)
    if offset + count > _region_bytes(region):
        raise _Refused(errno.EINVAL)
    return offset, region, count


def _region_info(region: int) -> bytes:
    if region >= REGIONS:
        raise _Refused(errno.EINVAL)
    size = _region_bytes(region)
    readable_writable = 0x1 | 0x2 if size else 0
    return struct.pack("<IIIIQQ", 32, readable_writable, region, 0, size, 0)


def _irq_info(index: int) -> bytes:
    if index >= INTERRUPTS:
        raise _Refused(errno.EINVAL)
    eventfd, maskable, masked_when_raised = 0x1, 0x2, 0x4
    flags = eventfd | maskable | masked_when_raised if index == INTX else eventfd
    return struct.pack("<IIII", 16, flags, index, int(index not in MESSAGE_INTERRUPTS))


# --- sockets ----------------------------------------------------------------------------------------------------


@contextmanager
def serving(functions: Iterable[PciFunction], directory: Path) -> Iterator[list[str]]:
    """Play the functions that have ids, each on its socket in `directory`, in a thread of their own.

    Gives a list of what went wrong, which is empty as long as every client kept to the protocol.
    """
    complaints: list[str] = []
    with ExitStack() as stack:
        selector = stack.enter_context(selectors.DefaultSelector())
        awake, wake = (stack.enter_context(end) for end in socket.socketpair())
        selector.register(awake, selectors.EVENT_READ)
        for function in functions:
            if function.ids is not None:
                listener = stack.enter_context(socket.socket(socket.AF_UNIX))
                listener.bind(str(directory / function.socket_name))
                listener.listen()
                selector.register(listener, selectors.EVENT_READ, function)
        thread = threading.Thread(target=_serve, args=(selector, complaints), name="vfio-user", daemon=True)
        thread.start()
        try:
            yield complaints
        finally:
            wake.send(b"\0")
            thread.join()


def _serve(selector: selectors.BaseSelector, complaints: list[str]) -> None:
    """Until something arrives on the one socket that belongs to nobody."""
    while True:
        for key, _ in selector.select():
            ready = key.fileobj
            assert isinstance(ready, socket.socket)
            match key.data:
                case None:
                    _hang_up(selector)
                    return
                case PciFunction(ids=PciIds() as ids):
                    selector.register(
                        ready.accept()[0], selectors.EVENT_READ, (key.data.id, Conversation(ids))
                    )
                case (str(name), Conversation() as conversation):
                    if not _go_on(ready, name, conversation, complaints):
                        selector.unregister(ready)
                        ready.close()


def _go_on(client: socket.socket, name: str, conversation: Conversation, complaints: list[str]) -> bool:
    """Answer what has come; whether more can come."""
    # A client that was killed resets its connection: an end like any other.
    with suppress(ConnectionError):
        data, descriptors, _, _ = socket.recv_fds(client, MESSAGE_MAX_BYTES, DESCRIPTORS_MAX)
        for descriptor in descriptors:
            os.close(descriptor)
        try:
            client.sendall(conversation.feed(data))
        except ProtocolError as error:
            complaints.append(f"{name}: {error}")
            return False
        return bool(data)
    return False


def _hang_up(selector: selectors.BaseSelector) -> None:
    for key in list(selector.get_map().values()):
        if isinstance(key.data, tuple) and isinstance(key.fileobj, socket.socket):
            key.fileobj.close()
