"""Does the vfio-user server say what QEMU's docs/interop/vfio-user.rst and linux/vfio.h demand? The client here
is ours; that QEMU and a kernel are content, the scenarios show."""

from __future__ import annotations

import array
import errno
import json
import os
import socket
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from tests.vm.machine import VFIO_USER, PciFunction, PciIds
from tests.vm.vfio_user import BAR_BYTES, CONFIG_BYTES, CONFIG_REGION, Conversation, ProtocolError, serving

H100: Final = PciIds("10de", "2330", "030200")
AUDIO: Final = PciIds("10de", "22ba", "040300")

VERSION, DMA_MAP, DMA_UNMAP, GET_INFO, REGION_INFO, IO_FDS, IRQ_INFO, SET_IRQS, READ, WRITE = range(1, 11)
RESET: Final = 13

HELLO: Final = struct.pack("<HH", 0, 1) + json.dumps({"capabilities": {"max_msg_fds": 8}}).encode() + b"\0"

TIMEOUT_S: Final = 10.0


def message(command: int, payload: bytes = b"", *, number: int = 7, flags: int = 0) -> bytes:
    """A message with its header, as the specification draws it."""
    return struct.pack("<HHIII", number, command, 16 + len(payload), flags, 0) + payload


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply, taken apart."""

    number: int
    command: int
    flags: int
    error: int
    payload: bytes

    @classmethod
    def split(cls, data: bytes) -> list[Reply]:
        """Every reply in `data`, which must hold nothing else."""
        replies = []
        while data:
            number, command, size, flags, error = struct.unpack_from("<HHIII", data)
            assert 16 <= size <= len(data)
            replies.append(cls(number, command, flags, error, data[16:size]))
            data = data[size:]
        return replies


@dataclass(slots=True)
class Client:
    """A client that has agreed on a version and asks one thing after the other."""

    conversation: Conversation

    @classmethod
    def of(cls, ids: PciIds) -> Client:
        client = cls(Conversation(ids))
        client.ask(VERSION, HELLO)
        return client

    def ask(self, command: int, payload: bytes = b"") -> bytes:
        """The answer's payload; the answer must be one, and no error."""
        (reply,) = Reply.split(self.conversation.feed(message(command, payload)))
        assert (reply.number, reply.command, reply.flags, reply.error) == (7, command, 0x1, 0)
        return reply.payload

    def refused(self, command: int, payload: bytes = b"") -> int:
        """The errno of a command that is answered with an error."""
        (reply,) = Reply.split(self.conversation.feed(message(command, payload)))
        assert (reply.number, reply.command, reply.flags, reply.payload) == (7, command, 0x21, b"")
        return reply.error

    def read(self, region: int, offset: int, count: int) -> bytes:
        answer = self.ask(READ, struct.pack("<QII", offset, region, count))
        assert answer[:16] == struct.pack("<QII", offset, region, count)
        return answer[16:]

    def write(self, region: int, offset: int, data: bytes) -> None:
        place = struct.pack("<QII", offset, region, len(data))
        assert self.ask(WRITE, place + data) == place

    def config(self, offset: int, count: int) -> int:
        return int.from_bytes(self.read(CONFIG_REGION, offset, count), "little")


def test_the_version_is_agreed_on_first() -> None:
    answer = Conversation(H100).feed(message(VERSION, HELLO))
    (reply,) = Reply.split(answer)
    assert reply.payload[:4] == struct.pack("<HH", 0, 0)
    assert reply.payload.endswith(b"\0")
    assert json.loads(reply.payload[4:-1])["capabilities"]["max_msg_fds"] == 8


@pytest.mark.parametrize(("ids", "class_code"), [(H100, 0x030200), (AUDIO, 0x040300)])
def test_a_function_says_that_it_is_what_was_asked_for(ids: PciIds, class_code: int) -> None:
    client = Client.of(ids)
    assert client.config(0x00, 2) == client.config(0x2C, 2) == int(ids.vendor, 16)
    assert client.config(0x02, 2) == client.config(0x2E, 2) == int(ids.device, 16)
    assert client.config(0x08, 4) >> 8 == class_code
    assert client.config(0x0E, 1) == 0, "a header of type 0; QEMU adds that there are several functions"


def test_capabilities_by_the_rules_of_pci() -> None:
    client = Client.of(H100)
    assert client.config(0x06, 2) & 0x10, "status: there is a list of capabilities"
    found = {}
    at = client.config(0x34, 1)
    while at:
        assert at % 4 == 0
        found[client.config(at, 1)] = at
        at = client.config(at + 1, 1)
    assert set(found) == {0x01, 0x10}, "power management and PCI Express"
    express = found[0x10]
    assert client.config(express + 2, 2) == 0x0002, "version 2, endpoint"
    assert client.config(express + 4, 4) & 1 << 28, "function level reset"
    assert client.config(0x100, 4) == 0, "no extended capabilities"


def test_only_what_a_driver_may_write_changes_and_a_reset_takes_it_back() -> None:
    client = Client.of(H100)
    before = client.read(CONFIG_REGION, 0, CONFIG_BYTES)
    client.write(CONFIG_REGION, 0, b"\xff" * CONFIG_BYTES)
    after = client.read(CONFIG_REGION, 0, CONFIG_BYTES)
    changed = {place for place in range(CONFIG_BYTES) if before[place] != after[place]}
    assert changed == {0x04, 0x05, 0x3C, 0x64, 0x70, 0x71}
    assert client.config(0x04, 2) == 0x0547
    assert client.config(0x64, 2) & 0x3 == 0x3, "D3hot"
    assert client.config(0x70, 2) & 0x8000 == 0, "the bit that begins a function level reset reads as zero"
    assert client.ask(RESET) == b""
    assert client.read(CONFIG_REGION, 0, CONFIG_BYTES) == before


def test_what_vfio_tells_of_a_pci_device() -> None:
    client = Client.of(H100)
    size, flags, regions, interrupts = struct.unpack("<IIII", client.ask(GET_INFO, bytes(16)))
    assert (size, flags, regions, interrupts) == (16, 0x3, 9, 5)
    sizes = {}
    for region in range(regions):
        answer = client.ask(REGION_INFO, struct.pack("<IIIIQQ", 32, 0, region, 0, 0, 0))
        size, flags, index, _, sizes[region], _ = struct.unpack("<IIIIQQ", answer)
        assert (size, index, flags) == (32, region, 0x3 if sizes[region] else 0)
    assert {region: size for region, size in sizes.items() if size} == {0: BAR_BYTES, 7: CONFIG_BYTES}
    counts = []
    for interrupt in range(interrupts):
        answer = client.ask(IRQ_INFO, struct.pack("<IIII", 16, 0, interrupt, 0))
        size, flags, index, count = struct.unpack("<IIII", answer)
        assert (size, index, flags & 1) == (16, interrupt, 1)
        counts.append(count)
    assert counts == [1, 0, 0, 1, 1], "INTx, no MSI, no MSI-X, error, request"
    assert client.refused(REGION_INFO, struct.pack("<IIIIQQ", 32, 0, 9, 0, 0, 0)) == errno.EINVAL
    assert client.refused(IRQ_INFO, struct.pack("<IIII", 16, 0, 5, 0)) == errno.EINVAL


def test_its_bar_is_inert() -> None:
    client = Client.of(H100)
    client.write(0, 0x100, b"\xff" * 8)
    assert client.read(0, 0x100, 8) == bytes(8)
    assert client.config(0x10, 4) == 0, "memory, 32 bit, not prefetchable"


@pytest.mark.parametrize(("region", "end"), [(0, BAR_BYTES), (CONFIG_REGION, CONFIG_BYTES), (1, 0)])
def test_an_access_beyond_a_region_is_refused(region: int, end: int) -> None:
    client = Client.of(H100)
    assert client.refused(READ, struct.pack("<QII", end - 2 if end else 0, region, 4)) == errno.EINVAL
    assert client.refused(WRITE, struct.pack("<QII", end, region, 1) + b"x") == errno.EINVAL
    if end:
        assert len(client.read(region, end - 4, 4)) == 4


def test_memory_and_interrupts_are_taken_and_never_used() -> None:
    client = Client.of(H100)
    assert client.ask(DMA_MAP, struct.pack("<IIQQQ", 32, 3, 0, 0, 1 << 20)) == b""
    unmapped = struct.pack("<IIQQ", 24, 0, 0, 1 << 20)
    assert client.ask(DMA_UNMAP, unmapped) == unmapped
    assert client.ask(SET_IRQS, struct.pack("<IIIII", 20, 0x24, 0, 0, 1)) == b""


def test_what_it_does_not_know_is_refused_and_it_goes_on() -> None:
    client = Client.of(H100)
    assert client.refused(IO_FDS, bytes(16)) == errno.ENOTSUP
    assert client.refused(99) == errno.ENOTSUP
    assert client.config(0x00, 2) == 0x10DE


def test_no_answer_where_none_is_wanted() -> None:
    client = Client.of(H100)
    posted = message(WRITE, struct.pack("<QII", 0x04, CONFIG_REGION, 2) + b"\x06\x00", flags=0x10)
    assert client.conversation.feed(posted) == b""
    assert client.config(0x04, 2) == 0x0006


def test_however_the_bytes_arrive() -> None:
    asked = b"".join(
        (
            message(VERSION, HELLO, number=1),
            message(GET_INFO, bytes(16), number=2),
            message(READ, struct.pack("<QII", 0, CONFIG_REGION, 64), number=3),
        )
    )
    at_once = Conversation(H100).feed(asked)
    assert [reply.number for reply in Reply.split(at_once)] == [1, 2, 3]
    conversation = Conversation(H100)
    assert b"".join(conversation.feed(bytes((byte,))) for byte in asked) == at_once


@pytest.mark.parametrize(
    "data",
    [
        struct.pack("<HHIII", 1, GET_INFO, 15, 0, 0),
        struct.pack("<HHIII", 1, GET_INFO, 1 << 20, 0, 0),
        message(GET_INFO, bytes(16), flags=0x1),
        message(READ, bytes(8)),
        message(REGION_INFO),
    ],
    ids=["shorter than its header", "too long", "a reply", "half an access", "no region"],
)
def test_what_is_no_message_ends_the_conversation(data: bytes) -> None:
    client = Client.of(H100)
    with pytest.raises(ProtocolError):
        client.conversation.feed(data)


def test_nothing_is_answered_before_the_version() -> None:
    with pytest.raises(ProtocolError, match="before the version"):
        Conversation(H100).feed(message(GET_INFO, bytes(16)))


# --- sockets ----------------------------------------------------------------------------------------------------

FUNCTIONS: Final = (
    PciFunction("gpu", VFIO_USER, "rp1", function=0, ids=H100),
    PciFunction("audio", VFIO_USER, "rp1", function=1, ids=AUDIO),
    PciFunction("edu", "edu", "rp2"),
)


@pytest.fixture
def complaints(tmp_path: Path) -> Iterator[list[str]]:
    """The functions are played while the test runs; afterwards nothing of that is left in this process."""
    descriptors = set(os.listdir("/proc/self/fd"))
    with serving(FUNCTIONS, tmp_path) as complaints:
        yield complaints
    assert "vfio-user" not in {thread.name for thread in threading.enumerate()}
    assert set(os.listdir("/proc/self/fd")) == descriptors


def connected(directory: Path, name: str) -> socket.socket:
    client = socket.socket(socket.AF_UNIX)
    client.settimeout(TIMEOUT_S)
    client.connect(str(directory / f"{name}.sock"))
    return client


def ask(client: socket.socket, command: int, payload: bytes = b"") -> bytes:
    client.sendall(message(command, payload))
    received = b""
    while len(received) < 16 or len(received) < struct.unpack_from("<4xI", received)[0]:
        data = client.recv(65536)
        assert data, "the server hung up"
        received += data
    (reply,) = Reply.split(received)
    assert reply.error == 0
    return reply.payload


def vendor_and_device(client: socket.socket) -> tuple[int, int]:
    vendor, device = struct.unpack_from(
        "<HH", ask(client, READ, struct.pack("<QII", 0, CONFIG_REGION, 4)), 16
    )
    return vendor, device


def test_each_function_has_its_socket(complaints: list[str], tmp_path: Path) -> None:
    assert sorted(os.listdir(tmp_path)) == ["audio.sock", "gpu.sock"]
    with connected(tmp_path, "gpu") as gpu, connected(tmp_path, "audio") as audio:
        for client in (gpu, audio):
            ask(client, VERSION, HELLO)
        assert vendor_and_device(audio) == (0x10DE, 0x22BA)
        assert vendor_and_device(gpu) == (0x10DE, 0x2330)
    assert complaints == []


def test_who_connects_again_meets_a_function_just_switched_on(complaints: list[str], tmp_path: Path) -> None:
    for _ in range(2):
        with connected(tmp_path, "gpu") as gpu:
            ask(gpu, VERSION, HELLO)
            command = ask(gpu, READ, struct.pack("<QII", 4, CONFIG_REGION, 2))[16:]
            assert command == b"\0\0"
            ask(gpu, WRITE, struct.pack("<QII", 4, CONFIG_REGION, 2) + b"\x06\x00")
    assert complaints == []


def test_descriptors_that_come_along_are_closed(complaints: list[str], tmp_path: Path) -> None:
    with connected(tmp_path, "gpu") as gpu:
        ask(gpu, VERSION, HELLO)
        ask(gpu, GET_INFO, bytes(16))
        before = len(os.listdir("/proc/self/fd"))
        ours, theirs = os.pipe()
        mapping = message(DMA_MAP, struct.pack("<IIQQQ", 32, 3, 0, 0, 4096))
        passed = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [theirs]))]
        gpu.sendmsg([mapping], passed)
        assert len(gpu.recv(65536)) == 16
        os.close(theirs)
        # Had the server kept its own, the pipe would still have somebody to write to it.
        assert os.read(ours, 1) == b""
        os.close(ours)
        assert len(os.listdir("/proc/self/fd")) == before
    assert complaints == []


def test_who_keeps_to_no_protocol_is_complained_of_and_the_others_are_served(
    complaints: list[str], tmp_path: Path
) -> None:
    with connected(tmp_path, "gpu") as external, connected(tmp_path, "audio") as audio:
        ask(audio, VERSION, HELLO)
        external.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert external.recv(1) == b""
        assert vendor_and_device(audio) == (0x10DE, 0x22BA)
        (complaint,) = complaints
        assert complaint.startswith("gpu: ")
